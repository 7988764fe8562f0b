"""The weight gradient of a convolution without oneDNN: columns of windows, a sample at a time, and products over panels."""

from __future__ import annotations

import numpy as np

from graphc.backend import Binding
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.products.panels import GAP, copy_to_panels, multiply_panels, panels_bytes
from graphc.backends.onnxruntime.vectors.functions import PANEL
from graphc.device import Array, Run, in_order
from graphc.ir.ops.convolution import Window


def weight_gradient(k: Binding, x: Array, dw: Array, dy: Array) -> Run:
    """Each thread sums over its own samples: im2col of one sample in cache, then a matrix product."""
    window, group = Window.of(k.attributes, x.shape[2:], dw.shape[2:]), int(k.attributes.get("group", 1))
    assert window.begin is not None
    lift = [1] * (4 - x.ndim)  # one spatial axis is treated as two with a height of one
    samples, channels = x.shape[:2]
    height, width = lift + list(x.shape[2:])
    rows, columns = lift + list(dy.shape[2:])
    taps = [*lift, *window.kernel]
    per_group, outs, positions = channels // group, dw.shape[0] // group, rows * columns
    patch = per_group * taps[0] * taps[1]
    parts = min(k.pool.threads, samples)
    patches = np.zeros((parts, patch, positions), dtype=np.float32)
    panels = np.empty((parts, panels_bytes(positions, patch) // 4), dtype=np.float32)
    edges = np.empty((parts, outs, PANEL), dtype=np.float32)
    sums = np.empty((parts, group, outs, patch), dtype=np.float32)
    geometry = np.array(
        [*taps, *lift, *window.strides, *lift, *window.dilations, *(0 for _ in lift), *window.begin], dtype=np.int64
    )
    arguments = (
        x.reshape(samples, group, per_group, height, width),
        dy.reshape(samples, group, outs, positions),
        np.array([rows, columns], dtype=np.int64),
        np.array(geometry, dtype=np.int64),
        patches,
        panels,
        edges,
        sums,
    )
    flat_sums, flat = sums.reshape(parts, -1), dw.reshape(-1)
    return in_order([k.pool.bind(_accumulate, arguments, parts), k.pool.bind(_add_parts, (flat_sums, flat), flat.size, 16384)])


@jit
def _accumulate(x, dy, out, geometry, patches, panels, edges, sums, start, stop):
    """Each part sums the gradient over its own samples."""
    parts, outs, patch, positions = sums.shape[0], dy.shape[2], patches.shape[1], patches.shape[2]
    samples, groups = x.shape[0], x.shape[1]
    step = (positions * PANEL + GAP) * 4
    for part in range(start, stop):
        sums[part] = 0.0
        for n in range(samples * part // parts, samples * (part + 1) // parts):
            for g in range(groups):
                _unfold(x[n, g], out, geometry, patches[part])
                a, b, c = dy[n, g].ctypes.data, panels[part].ctypes.data, sums[part, g].ctypes.data
                copy_to_panels(patches[part].ctypes.data, 4, 4 * positions, positions, patch, b)
                edge = edges[part].ctypes.data
                multiply_panels(a, 4 * positions, 4, outs, b, step, positions, c, 4 * patch, patch, True, edge)


@jit
def _unfold(x, out, geometry, patches):
    """patches[c, tap, position] = x[c] under that tap of the window at that position, 0 in the padding."""
    taps_h, taps_w, stride_h, stride_w, dilation_h, dilation_w, begin_h, begin_w = geometry
    channels, height, width = x.shape
    rows, columns = out[0], out[1]
    row = 0
    for c in range(channels):
        for i in range(taps_h):
            for j in range(taps_w):
                shift = j * dilation_w - begin_w
                first = min(columns, max(0, -(shift // stride_w)))
                last = max(first, min(columns, (width - 1 - shift) // stride_w + 1))
                target = patches[row]
                for r in range(rows):
                    h = r * stride_h + i * dilation_h - begin_h
                    base = r * columns
                    if h < 0 or h >= height:
                        target[base : base + columns] = 0.0
                        continue
                    target[base : base + first] = 0.0
                    target[base + last : base + columns] = 0.0
                    if stride_w == 1:
                        for q in range(first, last):
                            target[base + q] = x[c, h, q + shift]
                    else:
                        for q in range(first, last):
                            target[base + q] = x[c, h, q * stride_w + shift]
                row += 1


@jit
def _add_parts(parts, total, start, stop):
    target = total[start:stop]
    for p in range(parts.shape[0]):
        source = parts[p, start:stop]
        for k in range(target.size):
            target[k] = source[k] + (target[k] if p > 0 else np.float32(0.0))
