"""GridSample: images and volumes at computed places, a block of places at a time for all channels."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import exact, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.device import Run
from graphc.ir.facts import static_dims

BLOCK = 256
"""Places whose elements and weights are computed before the channels read them: as many as stay in the first cache."""

PADDINGS = ("zeros", "border", "reflection")


def _is_linear_or_nearest(node: ir.Node) -> bool:
    shapes = [static_dims(v) if v is not None else None for v in node.inputs[:2]]
    if any(shape is None or 0 in shape or len(shape) not in (4, 5) for shape in shapes):
        return False
    return node.attributes.get_string("mode", "linear") != "cubic"


@kernel("onnxruntime", "GridSample", when=_is_linear_or_nearest)
def grid_sample(k: Binding) -> Run:
    """Sums of the neighbours of each place, or the nearest. A place that is NaN gives NaN.

    Milliseconds in two threads of AVX-512 cores, here and in onnxruntime: 2 × 16 × 48 × 48 by lines, 0.08 and 0.9.
    """
    (x, grid), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    sizes, axes = x.shape[2:], x.ndim - 2
    linear = str(k.attributes.get("mode") or "linear") != "nearest"
    padding = PADDINGS.index(str(k.attributes.get("padding_mode") or "zeros"))
    flat = x.reshape(*x.shape[:2], -1)
    places = grid.reshape(len(grid), -1, axes)
    count = places.shape[1]
    parts = max(1, min(k.pool.threads, len(x) * -(-count // BLOCK), y.size // 4096))
    taps = 2**axes if linear else 1
    elements, weights = on_lines((parts, taps, BLOCK), np.int64), on_lines((parts, taps, BLOCK))
    lengths = np.array(sizes[::-1], dtype=np.int64)  # a place is (x, y) or (x, y, z)
    steps = np.array([math.prod(sizes[axis + 1 :]) for axis in reversed(range(axes))], dtype=np.int64)
    loop = _grid_sample(axes, int(linear), padding, int(bool(k.attributes.get("align_corners"))))
    return k.pool.bind(loop, (flat, places, lengths, steps, y.reshape(*flat.shape[:2], count), elements, weights), parts)


@exact
def _place(value, size, padding, corners):
    """Where a number from -1 to 1 lies along an axis, as PyTorch has it."""
    length = np.float32(size)
    if corners:
        at = (value + np.float32(1)) / np.float32(2) * (length - np.float32(1))
    else:
        at = ((value + np.float32(1)) * length - np.float32(1)) / np.float32(2)
    if padding == 2:
        low, span = (np.float32(0), length - np.float32(1)) if corners else (np.float32(-0.5), length)
        if span == 0:
            at = np.float32(0)
        else:
            at = abs(at - low)
            turns = np.floor(at / span)  # a whole number, which an integer might not hold
            rest = at - turns * span
            at = (rest if turns % 2 == 0 else span - rest) + low
    if padding != 0:
        at = min(max(at, np.float32(0)), length - np.float32(1)) if at == at else at
    return np.float32(at)


@specialized
def _grid_sample(axes: int, linear: int, padding: int, corners: int) -> Callable[..., None]:
    taps = 2**axes if linear else 1

    @exact
    def grid_sample(x, grid, sizes, steps, y, elements, weights, start, stop):
        parts, channels, places = elements.shape[0], x.shape[1], grid.shape[1]
        blocks = (places + BLOCK - 1) // BLOCK
        every = x.shape[0] * blocks
        for part in range(start, stop):
            element, weight = elements[part], weights[part]
            for unit in range(every * part // parts, every * (part + 1) // parts):
                n, first = unit // blocks, unit % blocks * BLOCK
                count = min(BLOCK, places - first)
                element[:] = 0
                weight[:] = 1.0
                for axis in range(axes):
                    size, step = sizes[axis], steps[axis]
                    for p in range(count):
                        at = _place(grid[n, first + p, axis], size, padding, corners)
                        if at != at:
                            for tap in range(taps):
                                weight[tap, p] = np.float32(np.nan)
                            continue
                        if not linear:
                            at = np.float32(round(at))
                        at = min(max(at, np.float32(-2)), np.float32(size + 1))  # beyond, nothing is read
                        low = math.floor(at)
                        share = at - np.float32(low)
                        for tap in range(taps):
                            above = (tap >> axis) & 1
                            index = np.int64(low) + above
                            part_of = share if above else np.float32(1) - share
                            if index < 0 or index >= size:
                                part_of, index = np.float32(0), 0
                            element[tap, p] += index * step
                            weight[tap, p] *= part_of
                for channel in range(channels):
                    source, target = x[n, channel], y[n, channel, first : first + count]
                    for p in range(np.uint64(count)):
                        total = weight[0, p] * source[np.uint64(element[0, p])]
                        for tap in range(1, taps):
                            total += weight[tap, p] * source[np.uint64(element[tap, p])]
                        target[p] = total

    return grid_sample
