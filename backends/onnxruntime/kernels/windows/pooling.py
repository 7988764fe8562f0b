"""Maxima of pooling windows, and the gradients of those that did not keep their taps (:mod:`.pooling_taps`).

The place of a maximum is found by searching the window, never read from an operand: whatever y holds, it is a tap inside x
or -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, have_spatial_axes
from graphc.backends.onnxruntime.kernels.common.jit import exact, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.backends.onnxruntime.vectors.pooling import (
    LONGEST_STEP,
    MOST_TAPS,
    highest_of_rows,
    highest_of_windows,
    places_in_windows,
)
from graphc.device import Array, Run
from graphc.ir.ops.convolution import Window


def _max_pool_is_native(node: ir.Node) -> bool:
    """Without the places of the maxima; the taps of a row are instructions of the kernel, so they may not be many."""
    if len([v for v in node.outputs if v is not None]) > 1 or not have_spatial_axes(node, (0,), 3):
        return False
    taps, strides = node.attributes["kernel_shape"].as_ints(), node.attributes.get("strides")
    stride = 1 if strides is None else strides.as_ints()[-1]
    return len(taps) <= 3 and stride <= LONGEST_STEP and taps[-1] <= MOST_TAPS and math.prod(taps[:-1]) <= 32


@kernel("onnxruntime", "MaxPool", when=_max_pool_is_native)
def max_pool(k: Binding) -> Run:
    """Maxima of the window's rows first, then of their columns. A window that holds NaN gives NaN, as in PyTorch.

    µs in one and two threads of AVX-512 cores, here and in onnxruntime: 4 × 64 × 111 × 111 by 3 × 3 and stride 2, 340, 170 and
    920, 440; 64 × 6 × 28 × 28 by 2 × 2, 35, 18 and 61, 31; 4 × 64 × 35 × 35 by 13 × 13 and stride 1, 289, 144 and 917, 487.
    Planes of few pixels take longer than there, 16 × 128 × 8 × 8 44 and 24 against 21 and 13, but no start of a segment.
    """
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    window = Window.of(k.attributes, x.shape[2:])
    assert window.begin is not None
    lift = 5 - x.ndim
    source, target = (array.reshape(-1, *[1] * lift, *array.shape[2:]) for array in (x, y))
    taps, dilations, strides = ((*[1] * lift, *of) for of in (window.kernel, window.dilations, window.strides))
    begin = (*[0] * lift, *window.begin)
    size, out = source.shape[1:], target.shape[1:]
    offsets, inside = _rows_under(*zip(taps, strides, dilations, begin, size, out, strict=True))
    parts = max(1, min(k.pool.threads, math.prod(target.shape[:3]), x.size // 4096))
    wide = max(begin[2] + size[2], strides[2] * (out[2] + LANES) + taps[2] * dilations[2]) + 2 * LANES
    lines = on_lines((parts, max(1, min(out[1], 4096 // wide)), wide))
    lines[:] = -np.inf
    loop = _max_pool(taps[0] * taps[1], taps[2], strides[2], dilations[2])
    return k.pool.bind(loop, (source, target, offsets, inside, begin[2], lines), parts)


def _rows_under(layers: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> tuple[Array, Array]:
    """Compute which rows of a volume lie under each row of windows.

    Args:
        layers, rows, columns: for each axis: taps, stride, dilation, padding before, elements of x, and those of y.

    Returns:
        int64 (layers of y · rows of y, taps): where the rows start, in bytes; where one is outside, another of the window
        stands in for it;
        bool (layers of y · rows of y,): whether any is inside.
    """
    under = []
    for taps, stride, dilation, begin, size, out in (layers, rows):
        at = np.arange(out)[:, None] * stride - begin + np.arange(taps) * dilation
        inside = (at >= 0) & (at < size)
        at = np.where(inside, at, np.take_along_axis(at, inside.argmax(axis=1)[:, None], axis=1))
        under.append((at, np.asarray(inside.any(axis=1))))
    (d, some_d), (h, some_h) = under
    places = (d[:, None, :, None] * rows[4] + h[None, :, None, :]) * (4 * columns[4])
    return places.reshape(len(d) * len(h), -1).astype(np.int64), (some_d[:, None] & some_h).reshape(-1)


@specialized
def _max_pool(taps: int, taps_w: int, stride_w: int, dilation_w: int) -> Callable[..., None]:
    of_rows, of_windows = highest_of_rows(taps, exact=False), highest_of_windows(taps_w, stride_w, dilation_w, exact=False)
    any_rows, any_windows = highest_of_rows(taps, exact=True), highest_of_windows(taps_w, stride_w, dilation_w, exact=True)

    @exact
    def max_pool(x, y, offsets, inside, begin_w, lines, start, stop):
        parts, many, wide = lines.shape
        volume, width, rows, columns = 4 * x.shape[1] * x.shape[2] * x.shape[3], x.shape[3], len(offsets), y.shape[3]
        every = y.shape[0] * rows
        for part in range(start, stop):
            at, end = every * part // parts, every * (part + 1) // parts
            line, target = lines[part].ctypes.data, y.ctypes.data + 4 * at * columns
            while at < end:
                first, source = at % rows, x.ctypes.data + at // rows * volume
                count, special = min(many, rows - first, end - at), False
                for r in range(count):
                    if inside[first + r]:
                        into = line + 4 * (r * wide + begin_w)
                        special |= of_rows(source, offsets[first + r].ctypes.data, width, into)
                    else:
                        lines[part, r, begin_w : begin_w + width] = -np.inf
                if special:
                    for r in range(count):
                        if inside[first + r]:
                            any_rows(source, offsets[first + r].ctypes.data, width, line + 4 * (r * wide + begin_w))
                        any_windows(line + 4 * r * wide, target + 4 * r * columns, columns)
                else:
                    for r in range(count):
                        of_windows(line + 4 * r * wide, target + 4 * r * columns, columns)
                target += 4 * count * columns
                at += count

    return max_pool


@kernel("onnxruntime", "graphc::MaxPoolGrad", when=lambda node: have_spatial_axes(node, (0, 1, 2), 3))
def max_pool_grad(k: Binding) -> Run:
    """Each dy goes to the first element of its window that equals the maximum y; where that is NaN, to the last NaN."""
    (dy, x, y), (dx,) = given(k.inputs, 3), given(k.outputs, 1)
    window = Window.of(k.attributes, x.shape[2:])
    assert window.begin is not None
    lift = 5 - x.ndim
    taps, dilations, strides = ((*[1] * lift, *of) for of in (window.kernel, window.dilations, window.strides))
    begin = (*[0] * lift, *window.begin)
    size, out = ((*[1] * lift, *array.shape[2:]) for array in (x, y))
    offsets, inside = _rows_under(*zip(taps, strides, dilations, begin, size, out, strict=True))
    volumes = x.shape[0] * x.shape[1]
    flat = [array.reshape(volumes, -1) for array in (x, dx)]
    rows = [array.reshape(volumes, -1, array.shape[-1]) for array in (dy, y)]
    arguments = (*rows, *flat, offsets // 4, inside, begin[2], size[2])
    if dilations == (1, 1, 1) and strides[2] >= taps[2] >= 8:
        lengths = taps[2], strides[2]
        return k.pool.bind(
            _max_pool_grad_of_long_rows, (*arguments, *lengths), volumes, max(1, 16384 // math.prod(x.shape[2:]))
        )
    parts = max(1, min(k.pool.threads, volumes, y.size // 1024))
    found = on_lines((parts, out[2] + LANES), np.int32)
    lines = on_lines((parts, max(begin[2] + size[2], strides[2] * (out[2] + LANES) + taps[2] * dilations[2]) + 2 * LANES))
    lines[:] = np.nan
    in_vectors = taps[2] <= MOST_TAPS and strides[2] <= LONGEST_STEP
    loop = _max_pool_grad(taps[2], strides[2], dilations[2], int(in_vectors))
    return k.pool.bind(loop, (*arguments, found, lines), parts)


@exact
def _first_of(source, under, column, width, taps, dilation, wanted):
    """Index of the first tap inside x that equals ``wanted``, else -1; of the last that is NaN if ``wanted`` is.

    Args:
        source: of x, flat.
        under: where the window's rows start; what stands in for a row outside x gives no other index.
        column: of the first tap.
        width: of x.
    """
    found = -1
    for start in under:
        for j in range(taps):
            w = column + j * dilation
            if 0 <= w < width:
                value, at = source[start + w], start + w
                if wanted != wanted:
                    found = max(found, at) if value != value else found
                elif value == wanted and (found < 0 or at < found):
                    found = at
    return found


@exact
def _max_pool_grad_of_long_rows(dy, y, x, dx, offsets, inside, begin, width, taps, stride, start, stop):
    """Windows that share no column and have at least a vector's elements in a row: each row is searched in vectors."""
    for volume in range(start, stop):
        source, target = x[volume], dx[volume]
        target[:] = 0.0
        for r in range(y.shape[1]):
            if not inside[r]:
                continue
            for q in range(y.shape[2]):
                left, right = max(q * stride - begin, 0), min(q * stride - begin + taps, width)
                wanted = y[volume, r, q]
                if wanted != wanted:
                    at = _first_of(source, offsets[r], left, width, right - left, 1, wanted)
                    if at >= 0:
                        target[at] += dy[volume, r, q]
                    continue
                for line in offsets[r]:
                    row, first = source[line + left : line + right], np.int32(right - left)
                    for w in range(row.size):
                        place = np.int32(w) if row[w] == wanted else first
                        first = min(first, place)
                    if first < row.size:
                        target[line + left + first] += dy[volume, r, q]
                        break


@specialized
def _max_pool_grad(taps: int, stride: int, dilation: int, in_vectors: int) -> Callable[..., None]:
    """Make the loop for windows of so many columns; a row of windows is searched in vectors, one row of x after the other.

    A row is searched in a line that holds NaN around it, which equals no maximum.
    """
    search = places_in_windows(taps if in_vectors else 1, stride if in_vectors else 1, dilation)

    @exact
    def max_pool_grad(dy, y, x, dx, offsets, inside, begin, width, found, lines, start, stop):
        parts, volumes, columns, rows = found.shape[0], x.shape[0], y.shape[2], offsets.shape[1]
        before = np.uint64(begin)
        for part in range(start, stop):
            at, line = found[part, :columns], lines[part]
            for volume in range(volumes * part // parts, volumes * (part + 1) // parts):
                source, target = x[volume], dx[volume]
                target[:] = 0.0
                for r in range(y.shape[1]):
                    if not inside[r]:
                        continue
                    wanted, slopes, under = y[volume, r], dy[volume, r], offsets[r]
                    at[:] = -1
                    for i in range(rows - 1, -1, -1):  # in reverse, so that the first maximum is the one kept
                        row, corner = source[under[i] : under[i] + width], under[i] - begin
                        # unsigned indices need no test for negative ones, which would prevent vectorisation
                        for w in range(np.uint64(width)):
                            line[before + w] = row[w]
                        if in_vectors:
                            search(line.ctypes.data, wanted.ctypes.data, corner, at.ctypes.data, columns)
                        else:
                            for q in range(columns):
                                for j in range(taps - 1, -1, -1):
                                    tap = q * stride + j * dilation
                                    at[q] = np.int32(corner + tap) if line[tap] == wanted[q] else at[q]
                    for q in range(columns):
                        if wanted[q] != wanted[q]:
                            at[q] = _first_of(source, under, q * stride - begin, width, taps, dilation, wanted[q])
                        if at[q] >= 0:
                            target[at[q]] += slopes[q]

    return max_pool_grad
