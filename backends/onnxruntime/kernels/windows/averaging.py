"""Averages over pooling windows and their gradients: sums of the window's rows first, then of neighbours in the row that is
left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, have_spatial_axes
from graphc.backends.onnxruntime.kernels.common.jit import jit, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.vectors.averaging import (
    spread_over_windows,
    sum_of_rows,
    sums_of_windows,
    sums_over_windows,
)
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.backends.onnxruntime.vectors.pooling import LONGEST_STEP, MOST_TAPS, copied_bytes
from graphc.device import Array, Run
from graphc.ir.facts import shape_of_result
from graphc.ir.ops.convolution import Window


def geometry(window: Window, size: Sequence[int], out: Sequence[int]) -> tuple[Array, Array]:
    """Compute where the windows lie in planes of rows, those of all layers where there are layers.

    Returns:
        rows, int64 (taps, out): the row of x under each tap of each window, -1 in the padding;
        columns, int64 (taps, 3): for each tap the column of x under window 0, and the first and last + 1 window for which
        the tap is inside x.
    """
    assert window.begin is not None
    lift = [1] * (3 - len(size))
    taps, strides, dilations = [*lift, *window.kernel], [*lift, *window.strides], [*lift, *window.dilations]
    begin = [*[0] * len(lift), *window.begin]
    (*lengths, width), (*counts, columns) = [*lift, *size], [*lift, *out]
    under = []
    for axis, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        at = np.arange(taps[axis])[:, None] * dilations[axis] - begin[axis] + np.arange(count)[None, :] * strides[axis]
        under.append(np.where((at >= 0) & (at < length), at, -1))
    layers, rows = under[0][:, None, :, None], under[1][None, :, None, :]
    inside = np.where((layers >= 0) & (rows >= 0), layers * lengths[1] + rows, -1).reshape(taps[0] * taps[1], -1)
    shift = np.arange(taps[2]) * dilations[2] - begin[2]
    first = np.clip(-(shift // strides[2]), 0, columns)
    last = np.clip((width - 1 - shift) // strides[2] + 1, first, columns)
    return inside.astype(np.int64), np.stack([shift, first, last], axis=1).astype(np.int64)


def _folded(window: Window, size: Sequence[int], out: Sequence[int]) -> list[tuple[int | None, int, int]]:
    """(axis of the window, elements of x, elements of y) of what is left as layers, rows and columns.

    A window passes over an axis along which it has one tap, step 1 and no padding. Such axes in front of all others belong
    to the planes; neighbours of them are one axis, whose place in the window is None.
    """
    left: list[tuple[int | None, int, int]] = []
    begin, end = window.padding
    for axis, (before, after) in enumerate(zip(size, out, strict=True)):
        if (window.kernel[axis], window.strides[axis], begin[axis], end[axis]) != (1, 1, 0, 0):
            left.append((axis, before, after))
        elif left and left[-1][0] is None:
            left[-1] = (None, left[-1][1] * before, left[-1][2] * after)
        elif left:
            left.append((None, before, after))
    return left


def _averages(attributes: Mapping[str, Any], x: Array, y: Array) -> tuple[Array, Array, tuple[Any, ...]]:
    """x and y as planes × rows × width, and (rows, columns, stride, share of a row, share of a column) of the windows."""
    window = Window.of(attributes, x.shape[2:])
    left = _folded(window, x.shape[2:], y.shape[2:]) or [(None, 1, 1)]
    begin, end = window.padding

    def of(numbers: Sequence[int], otherwise: int) -> tuple[int, ...]:
        return tuple(otherwise if axis is None else numbers[axis] for axis, _, _ in left)

    window = Window(of(window.kernel, 1), of(window.strides, 1), of(window.dilations, 1), of(begin, 0), of(end, 0))
    size, out = [n for _, n, _ in left], [n for _, _, n in left]
    shares = [np.ones(1)] * (3 - len(left))
    for axis in range(len(left)):
        shares.append(_shares(window, axis, bool(attributes.get("count_include_pad")), size[axis], out[axis]))
    of_rows, of_columns = np.outer(shares[0], shares[1]).reshape(-1), shares[2]
    places = (*geometry(window, size, out), window.strides[-1], *(s.astype(np.float32) for s in (of_rows, of_columns)))
    planes = [array.reshape(-1, math.prod(lengths[:-1]), lengths[-1]) for array, lengths in ((x, size), (y, out))]
    return planes[0], planes[1], places


def _shares(window: Window, axis: int, include_pad: bool, size: int, out: int) -> Array:
    """What each window of an axis multiplies its sum with; :func:`~graphc.ir.ops.pooling.averaging_matrix` without a matrix."""
    begin, end = window.padding
    taps = np.arange(window.kernel[axis]) * window.dilations[axis]
    covered = np.arange(out)[:, None] * window.strides[axis] - begin[axis] + taps
    inside = (covered >= 0) & (covered < size)
    counted = covered < size + end[axis] if include_pad else inside
    return np.asarray(inside.any(axis=1) / np.maximum(counted.sum(axis=1), 1))


@kernel("onnxruntime", "AveragePool", when=lambda node: have_spatial_axes(node, (0,), 3))
def average_pool(k: Binding) -> Run:
    """Sums of the window's rows first, then of their columns: onnxruntime adds tap by tap of each window.

    Milliseconds in two threads of AVX-512 cores, here and in onnxruntime: 8 × 32 × 56 × 56 by 2 × 2, 0.07 and 0.36, by
    5 × 5 and stride 1, 0.22 and 0.57; 2 × 16 × 16 × 32 × 32 by 3 × 3 × 3 and stride 1, 0.12 and 20.
    """
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    source, target, (rows, columns, stride, of_rows, of_columns) = _averages(k.attributes, x, y)
    width, taps = source.shape[2], len(columns)
    begin, dilation = -int(columns[0, 0]), _dilation(columns)
    offsets, counts = _rows_inside(rows.T, width)
    weights = np.repeat(of_rows[:, None], len(rows), axis=1)
    wide = max(begin + width, stride * (target.shape[2] + LANES) + taps * dilation) + 2 * LANES
    parts = max(1, min(k.pool.threads, target.shape[0] * target.shape[1], x.size // 16384))
    in_vectors = taps <= MOST_TAPS and stride <= LONGEST_STEP
    lines = on_lines((parts, _many(target.shape[1], wide) if in_vectors else 1, wide))
    lines[:] = 0.0
    arguments = (source, offsets, weights, counts, begin, of_columns, target, lines)
    if in_vectors:
        return k.pool.bind(_average_pool(taps, stride, dilation), arguments, parts)
    return k.pool.bind(_average_pool_of_long_windows, (*arguments, columns, stride), parts)


def _many(rows: int, wide: int) -> int:
    """Rows of a plane that are added up before any is read again, which would wait for its stores: those of some pages."""
    return max(1, min(rows, 1024 // wide))


def _dilation(columns: Array) -> int:
    """Of windows by where their columns lie (:func:`_geometry`)."""
    return int(columns[1, 0] - columns[0, 0]) if len(columns) > 1 else 1


def _rows_inside(rows: Array, width: int) -> tuple[Array, Array]:
    """For each list of rows, of which -1 is none: their places in bytes, and how many there are."""
    order = np.argsort(rows < 0, axis=1, kind="stable")
    return 4 * width * np.take_along_axis(rows, order, axis=1), (rows >= 0).sum(axis=1)


_sum_of_rows = sum_of_rows()


@specialized
def _average_pool(taps: int, stride: int, dilation: int) -> Callable[..., None]:
    of_windows = sums_of_windows(taps, stride, dilation, weighted=True)

    @jit
    def average_pool(x, offsets, weights, counts, begin, shares, y, lines, start, stop):
        (parts, many, wide), rows, columns, width = lines.shape, y.shape[1], y.shape[2], x.shape[2]
        every, plane = y.shape[0] * rows, 4 * x.shape[1] * width
        for part in range(start, stop):
            line, at, end = lines[part].ctypes.data, every * part // parts, every * (part + 1) // parts
            while at < end:
                source, first, target = x.ctypes.data + at // rows * plane, at % rows, y.ctypes.data + 4 * at * columns
                count = min(many, rows - first, end - at)
                for k in range(count):
                    r, into = first + k, line + 4 * (k * wide + begin)
                    _sum_of_rows(source, offsets[r].ctypes.data, weights[r].ctypes.data, counts[r], width, into)
                for k in range(count):
                    of_windows(line + 4 * k * wide, shares.ctypes.data, target + 4 * k * columns, columns)
                at += count

    return average_pool


@jit
def _average_pool_of_long_windows(x, offsets, weights, counts, begin, shares, y, lines, columns, stride, start, stop):
    parts, rows, width = lines.shape[0], y.shape[1], x.shape[2]
    every = y.shape[0] * rows
    for part in range(start, stop):
        line = lines[part, 0, :width]
        for at in range(every * part // parts, every * (part + 1) // parts):
            plane, r = at // rows, at % rows
            source = x[plane].ctypes.data
            _sum_of_rows(source, offsets[r].ctypes.data, weights[r].ctypes.data, counts[r], width, line.ctypes.data)
            means = y[plane, r]
            means[:] = 0.0
            for shift, first, last in columns:
                taps, target = line[shift + first * stride :], means[first:last]
                if stride == 1:
                    for q in range(target.size):
                        target[q] += taps[q]
                else:
                    for q in range(target.size):
                        target[q] += taps[q * stride]
            for q in range(means.size):
                means[q] *= shares[q]


def _average_grad_is_native(node: ir.Node) -> bool:
    size = shape_of_result(node.inputs[1])
    return have_spatial_axes(node, (0,), 3) and size is not None and all(isinstance(d, int) for d in size.dims)


@kernel("onnxruntime", "graphc::AveragePoolGrad", when=_average_grad_is_native)
def average_pool_grad(k: Binding) -> Run:
    """Each dy is divided equally over its window: a row of dx is the sum of the rows of dy over it, spread out.

    Two threads of Zen 4 cores take 0.12 ms for 8 × 64 × 56 × 56 by 2 × 2; as sums in a line of memory it was 0.42.
    """
    (dy,), (dx,) = given(k.inputs, 1), given(k.outputs, 1)
    target, source, (rows, columns, stride, of_rows, of_columns) = _averages(k.attributes, dx, dy)
    above = _rows_over(rows, target.shape[1])
    offsets, counts = _rows_inside(above, source.shape[2])
    weights = np.take_along_axis(of_rows[above], np.argsort(above < 0, axis=1, kind="stable"), axis=1)
    (width, height), (reach, taps) = (source.shape[2], target.shape[1]), (columns[-1, 0] - columns[0, 0], len(columns))
    parts = max(1, min(k.pool.threads, target.shape[0] * height, dx.size // 16384))
    begin = -int(columns[0, 0])
    if begin == 0 and taps <= stride <= LONGEST_STEP and _dilation(columns) == 1:
        copies = _copies(offsets, weights, counts)
        arguments = (source, offsets, weights, counts, copies, of_columns, target)
        return k.pool.bind(_average_pool_grad_of_disjoint(taps, stride), (*arguments, parts), parts)
    in_vectors = taps <= MOST_TAPS
    if stride > 1 and in_vectors and stride <= LONGEST_STEP and _dilation(columns) == 1:
        ahead, reached = -(-((taps - 1) // stride) // LANES) * LANES, begin + target.shape[2]
        wide = ahead + max(width, -(-reached // stride)) + 2 * LANES
        many = _many(height, wide)
        lines, sums = on_lines((parts, many, wide)), on_lines((parts, many, reached))
        lines[:] = 0.0
        steps = (source, offsets, weights, counts, begin, ahead, of_columns, target, lines, sums)
        return k.pool.bind(_average_pool_grad_of_steps(taps, stride), steps, parts)
    wide = int(max(reach + stride * width, begin + target.shape[2] + reach) + 2 * LANES)
    if stride == 1 and in_vectors:
        lines = on_lines((parts, _many(height, wide), wide))
        lines[:] = 0.0
        next_to = (source, offsets, weights, counts, begin, int(reach), of_columns, target, lines)
        return k.pool.bind(_average_pool_grad_of_neighbours(taps, _dilation(columns)), next_to, parts)
    lines, sums = on_lines((parts, wide)), on_lines((parts, width))
    lines[:] = 0.0
    spread = (source, offsets, weights, counts, begin, int(reach), stride, of_columns, target, lines, sums, taps)
    return k.pool.bind(_average_pool_grad(taps if in_vectors else 0, _dilation(columns)), spread, parts)


def _copies(offsets: Array, weights: Array, counts: Array) -> Array:
    """How many rows of dx from each one on are the same sum of rows of dy."""
    same = (offsets[1:] == offsets[:-1]).all(axis=1) & (weights[1:] == weights[:-1]).all(axis=1) & (counts[1:] == counts[:-1])
    found = np.ones(len(offsets), dtype=np.int64)
    for r in range(len(same) - 1, -1, -1):
        found[r] += found[r + 1] * same[r]
    return found


@specialized
def _average_pool_grad_of_disjoint(taps: int, stride: int) -> Callable[..., None]:
    """Make the loop for windows that share no column: what a row of windows gives is written straight to its rows of dx."""
    spread = spread_over_windows(taps, stride)

    @jit
    def average_pool_grad_of_disjoint(dy, offsets, weights, counts, copies, shares, dx, parts, start, stop):
        rows, columns, width = dx.shape[1], dx.shape[2], dy.shape[2]
        every, plane = dx.shape[0] * rows, 4 * dy.shape[1] * width
        for part in range(start, stop):
            at, end = every * part // parts, every * (part + 1) // parts
            r, source = at % rows, dy.ctypes.data + at // rows * plane
            while at < end:
                target, number = dx.ctypes.data + 4 * at * columns, min(copies[r], end - at)
                row, weight = offsets[r].ctypes.data, weights[r].ctypes.data
                spread(source, row, weight, counts[r], shares.ctypes.data, width, target, columns, 4 * columns, number)
                at, r = at + number, r + number
                if r == rows:
                    r, source = 0, source + plane

    return average_pool_grad_of_disjoint


@specialized
def _average_pool_grad_of_steps(taps: int, stride: int) -> Callable[..., None]:
    """Make the loop for windows more than one column apart."""
    over_windows, copy = sums_over_windows(taps, stride), copied_bytes()

    @jit
    def average_pool_grad_of_steps(dy, offsets, weights, counts, begin, ahead, shares, dx, lines, sums, start, stop):
        (parts, many, _), rows, columns, width = lines.shape, dx.shape[1], dx.shape[2], dy.shape[2]
        every, plane = dx.shape[0] * rows, 4 * dy.shape[1] * width
        for part in range(start, stop):
            at, end = every * part // parts, every * (part + 1) // parts
            while at < end:
                first, target = at % rows, dx.ctypes.data + 4 * at * columns
                count = min(many, rows - first, end - at)
                held, source = lines[part], dy.ctypes.data + at // rows * plane
                _add_and_scale(source, offsets, weights, counts, first, shares, held, ahead, width, count)
                for k in range(count):
                    over_windows(held[k, ahead:].ctypes.data, sums[part, k].ctypes.data, begin + columns)
                for k in range(count):
                    copy(sums[part, k, begin:].ctypes.data, 4 * columns, target + 4 * k * columns)
                at += count

    return average_pool_grad_of_steps


@specialized
def _average_pool_grad_of_neighbours(taps: int, dilation: int) -> Callable[..., None]:
    """Make the loop for windows one column apart."""
    of_windows = sums_of_windows(taps, 1, dilation, weighted=False)

    @jit
    def average_pool_grad_of_neighbours(dy, offsets, weights, counts, begin, reach, shares, dx, lines, start, stop):
        (parts, many, wide), rows, columns, width = lines.shape, dx.shape[1], dx.shape[2], dy.shape[2]
        every, plane = dx.shape[0] * rows, 4 * dy.shape[1] * width
        for part in range(start, stop):
            line, at, end = lines[part].ctypes.data + 4 * begin, every * part // parts, every * (part + 1) // parts
            while at < end:
                first, target = at % rows, dx.ctypes.data + 4 * at * columns
                count = min(many, rows - first, end - at)
                held, source = lines[part], dy.ctypes.data + at // rows * plane
                _add_and_scale(source, offsets, weights, counts, first, shares, held, reach, width, count)
                for k in range(count):
                    of_windows(line + 4 * k * wide, 0, target + 4 * k * columns, columns)
                at += count

    return average_pool_grad_of_neighbours


@jit
def _add_and_scale(source, offsets, weights, counts, first, shares, held, begin, width, count):
    """held[k, begin + q] = shares[q] · the sum of the rows of ``source`` over row first + k of dx, for ``count`` rows."""
    for k in range(count):
        r, into = first + k, held[k, begin:].ctypes.data
        _sum_of_rows(source, offsets[r].ctypes.data, weights[r].ctypes.data, counts[r], width, into)
    for k in range(count):
        row = held[k, begin : begin + width]
        for q in range(width):
            row[q] *= shares[q]


def _rows_over(rows: Array, height: int) -> Array:
    """The rows of windows that hold each row of x, in order, filled up with -1.

    Args:
        rows: the row of x under each tap of each row of windows (:func:`_geometry`).
        height: rows of x.
    """
    _, windows = np.nonzero(rows >= 0)
    held = rows[rows >= 0]
    order = np.lexsort((windows, held))
    held, windows = held[order], windows[order]
    counts = np.bincount(held, minlength=height)
    found = np.full((height, max(1, counts.max(initial=0))), -1, dtype=np.int64)
    found[held, np.arange(len(held)) - np.repeat(np.cumsum(counts) - counts, counts)] = windows
    return found


@specialized
def _average_pool_grad(most: int, dilation: int) -> Callable[..., None]:
    """Make the loop for ``most`` taps of a row, or for any number if that is 0."""
    of_windows = sums_of_windows(max(1, most), 1, dilation, weighted=False)

    @jit
    def average_pool_grad(dy, offsets, weights, counts, begin, reach, stride, shares, dx, lines, sums, taps, start, stop):
        parts, rows, columns, width = lines.shape[0], dx.shape[1], dx.shape[2], dy.shape[2]
        every, plane = dx.shape[0] * rows, 4 * dy.shape[1] * width
        for part in range(start, stop):
            line, total = lines[part], sums[part]
            for at in range(every * part // parts, every * (part + 1) // parts):
                source, r = dy.ctypes.data + at // rows * plane, at % rows
                _sum_of_rows(source, offsets[r].ctypes.data, weights[r].ctypes.data, counts[r], width, total.ctypes.data)
                spread = line[reach:]
                for q in range(width):
                    spread[q * stride] = total[q] * shares[q]
                if most:
                    of_windows(line.ctypes.data + 4 * begin, 0, dx.ctypes.data + 4 * at * columns, columns)
                else:
                    slopes = dx[at // rows, r]
                    slopes[:] = 0.0
                    for j in range(taps):
                        moved = line[begin + j * dilation :]
                        for w in range(columns):
                            slopes[w] += moved[w]

    return average_pool_grad
