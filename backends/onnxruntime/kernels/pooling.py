"""Maxima, averages along an axis, and gradients of pooling, one channel of a sample at a time: dx stays in cache while windows
add up.

The place of a maximum is found by searching the window, never read from an operand: whatever y holds, it is a tap inside x
or -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.arrays import given, have_spatial_axes
from graphc.backends.onnxruntime.kernels.jit import exact, jit, specialized
from graphc.backends.onnxruntime.kernels.scratch import on_lines
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.backends.onnxruntime.vectors.pooling import highest_of_rows, highest_of_windows
from graphc.device import Array, Run
from graphc.ir.facts import required, shape_of_result, static_dims
from graphc.ir.ops.convolution import Window
from graphc.ir.ops.pooling import averaging_matrix

Geometry: TypeAlias = "tuple[Array, Array]"


def _planes(array: Array) -> Array:
    """View N × C × spatial as planes × height × width; one spatial axis gets a height of one."""
    height = 1 if array.ndim == 3 else array.shape[2]
    return array.reshape(-1, height, array.shape[-1])


def _geometry(window: Window, size: Sequence[int], out: Sequence[int]) -> Geometry:
    """Compute where the windows lie.

    Returns:
        rows, int64 (taps, out): the row of x under each tap of each window, -1 in the padding;
        columns, int64 (taps, 3): for each tap the column of x under window 0, and the first and last + 1 window for which
        the tap is inside x.
    """
    assert window.begin is not None
    lift = [1] * (2 - len(size))
    taps, strides, dilations = [*lift, *window.kernel], [*lift, *window.strides], [*lift, *window.dilations]
    begin = [*[0] * len(lift), *window.begin]
    (height, width), (rows, columns) = [*lift, *size], [*lift, *out]
    under = np.arange(taps[0])[:, None] * dilations[0] - begin[0] + np.arange(rows)[None, :] * strides[0]
    shift = np.arange(taps[1]) * dilations[1] - begin[1]
    first = np.clip(-(shift // strides[1]), 0, columns)
    last = np.clip((width - 1 - shift) // strides[1] + 1, first, columns)
    inside = np.where((under >= 0) & (under < height), under, -1)
    return inside.astype(np.int64), np.stack([shift, first, last], axis=1).astype(np.int64)


def _max_pool_is_native(node: ir.Node) -> bool:
    """Without the places of the maxima; the taps of a row are instructions of the kernel, so they may not be many."""
    if len([v for v in node.outputs if v is not None]) > 1 or not have_spatial_axes(node, (0,), 3):
        return False
    taps, strides = node.attributes["kernel_shape"].as_ints(), node.attributes.get("strides")
    stride = 1 if strides is None else strides.as_ints()[-1]
    return len(taps) <= 3 and stride <= 4 and taps[-1] <= 16 and math.prod(taps[:-1]) <= 32


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
    if _lie_apart(window, x.shape[2:], y.shape[2:]):
        deep = [array.reshape(-1, *[1] * (5 - array.ndim), *array.shape[2:]) for array in (dy, x, y, dx)]
        parts = max(1, min(k.pool.threads, len(deep[0]), y.size // 1024))
        found = on_lines((parts, y.shape[-1]), np.int32)
        return k.pool.bind(_grad_of_windows_apart(*[1] * (5 - x.ndim), *window.kernel), (*deep, found), parts)
    if x.ndim == 5:
        numbers = np.array([window.kernel, window.strides, window.dilations, window.begin], dtype=np.int64)
        volumes = [array.reshape(-1, *array.shape[2:]) for array in (dy, x, y, dx)]
        return k.pool.bind(
            _max_pool_grad_of_volumes, (*volumes, numbers), len(volumes[0]), max(1, 4096 // math.prod(y.shape[2:]))
        )
    lift = (1,) * (4 - x.ndim)
    begin = (*(0,) * len(lift), *window.begin)
    taps, strides, dilations = (*lift, *window.kernel), (*lift, *window.strides), (*lift, *window.dilations)
    planes = x.shape[0] * x.shape[1]
    if dilations == (1, 1) and strides[1] >= taps[1] >= 8:
        numbers = np.array([taps, strides, begin], dtype=np.int64)
        arrays = [_planes(array) for array in (dy, x, y, dx)]
        return k.pool.bind(_max_pool_grad_of_long_rows, (*arrays, numbers), planes, max(1, 16384 // math.prod(x.shape[2:])))
    parts = max(1, min(k.pool.threads, planes, y.size // 1024))
    found = on_lines((parts, y.shape[-1]), np.int32)
    images, slopes = _planes(x), _planes(dx)
    flat = images.reshape(planes, -1), slopes.reshape(planes, -1)
    arguments = (_planes(dy), images, *flat, _planes(y), *begin, found)
    pool, loop = k.pool, _max_pool_grad(*taps, *strides, *dilations)
    return pool.bind(loop, arguments, parts)


def _lie_apart(window: Window, size: Sequence[int], out: Sequence[int]) -> bool:
    """Whether no two windows share an element, none reaches over the edge of x, and vectors pay: rows are long, taps few."""
    inside = all(taps * count <= length for taps, count, length in zip(window.kernel, out, size, strict=True))
    pays = len(size) == 3 or (out[-1] >= 16 and window.kernel[-1] <= 2)
    alone = window.strides == window.kernel and {*window.dilations} == {1} and {*(window.begin or ())} == {0}
    return alone and inside and pays


@specialized
def _grad_of_windows_apart(taps_d: int, taps_h: int, taps_w: int) -> Callable[..., None]:
    """Make the loop for windows that lie apart: each element of dx is dy of its window or 0, so that rows are vectors."""

    @exact
    def max_pool_grad(dy, x, y, dx, found, start, stop):
        parts, planes, (depth, height, width) = found.shape[0], x.shape[0], x.shape[1:]
        layers, rows, columns = y.shape[1], y.shape[2], y.shape[3]
        whole = layers * taps_d == depth and rows * taps_h == height and columns * taps_w == width
        for part in range(start, stop):
            at = found[part, : y.shape[-1]]
            for plane in range(planes * part // parts, planes * (part + 1) // parts):
                source, target = x[plane], dx[plane]
                if not whole:
                    target[:] = 0.0
                for p in range(layers):
                    for r in range(rows):
                        wanted, slopes, missing = y[plane, p, r], dy[plane, p, r], 0
                        for q in range(columns):
                            value, place = wanted[q], np.int32(-1)
                            for tap in range(taps_d * taps_h * taps_w - 1, -1, -1):  # the first maximum is the one kept
                                i, j, k = tap // (taps_h * taps_w), tap // taps_w % taps_h, tap % taps_w
                                equal = source[p * taps_d + i, r * taps_h + j, q * taps_w + k] == value
                                place = np.int32(tap) if equal else place
                            at[q] = place
                            missing += place < 0
                        if missing > 0:
                            for q in range(columns):
                                for tap in range(taps_d * taps_h * taps_w):
                                    i, j, k = tap // (taps_h * taps_w), tap // taps_w % taps_h, tap % taps_w
                                    value = source[p * taps_d + i, r * taps_h + j, q * taps_w + k]
                                    if value != value and wanted[q] != wanted[q]:
                                        at[q] = tap
                        for i in range(taps_d):
                            for j in range(taps_h):
                                row, tap = target[p * taps_d + i, r * taps_h + j], np.int32((i * taps_h + j) * taps_w)
                                for q in range(columns):
                                    for k in range(taps_w):
                                        row[q * taps_w + k] = slopes[q] if at[q] == tap + k else np.float32(0.0)

    return max_pool_grad


@exact
def _clipped(x, wanted, row, column, taps_h, taps_w, dilation_h, dilation_w):
    """Index of the first tap inside x that equals ``wanted``, else -1."""
    for i in range(taps_h):
        for j in range(taps_w):
            h, w = row + i * dilation_h, column + j * dilation_w
            if 0 <= h < x.shape[0] and 0 <= w < x.shape[1] and x[h, w] == wanted:
                return h * x.shape[1] + w
    return -1


@exact
def _last_nan(x, row, column, taps_h, taps_w, dilation_h, dilation_w):
    """Index of the last tap inside x that is NaN, else -1."""
    found = -1
    for i in range(taps_h):
        for j in range(taps_w):
            h, w = row + i * dilation_h, column + j * dilation_w
            if 0 <= h < x.shape[0] and 0 <= w < x.shape[1] and x[h, w] != x[h, w]:
                found = h * x.shape[1] + w
    return found


@exact
def _max_pool_grad_of_volumes(dy, x, y, dx, numbers, start, stop):
    taps, strides, dilations, begin = numbers[0], numbers[1], numbers[2], numbers[3]
    depth, height, width = x.shape[1:]
    for volume in range(start, stop):
        source, target = x[volume], dx[volume]
        target[:] = 0.0
        for p in range(y.shape[1]):
            for r in range(y.shape[2]):
                for q in range(y.shape[3]):
                    wanted = y[volume, p, r, q]
                    at_d, at_h, at_w = -1, 0, 0
                    for i in range(taps[0]):
                        d = p * strides[0] - begin[0] + i * dilations[0]
                        if not 0 <= d < depth:
                            continue
                        for j in range(taps[1]):
                            h = r * strides[1] - begin[1] + j * dilations[1]
                            if not 0 <= h < height:
                                continue
                            for k in range(taps[2]):
                                w = q * strides[2] - begin[2] + k * dilations[2]
                                if not 0 <= w < width:
                                    continue
                                value = source[d, h, w]
                                if (value == wanted and at_d < 0) or (value != value and wanted != wanted):
                                    at_d, at_h, at_w = d, h, w
                    if at_d >= 0:
                        target[at_d, at_h, at_w] += dy[volume, p, r, q]


@exact
def _max_pool_grad_of_long_rows(dy, x, y, dx, numbers, start, stop):
    """Windows that share no column and have at least a vector's elements in a row: each row is searched in vectors."""
    (taps_h, taps_w), (stride_h, stride_w), (begin_h, begin_w) = numbers[0], numbers[1], numbers[2]
    height, width = x.shape[1:]
    for plane in range(start, stop):
        source, target = x[plane], dx[plane]
        target[:] = 0.0
        for r in range(y.shape[1]):
            top, bottom = max(r * stride_h - begin_h, 0), min(r * stride_h - begin_h + taps_h, height)
            for q in range(y.shape[2]):
                left, right = max(q * stride_w - begin_w, 0), min(q * stride_w - begin_w + taps_w, width)
                wanted = y[plane, r, q]
                if wanted != wanted:
                    at = _last_nan(source, top, left, bottom - top, right - left, 1, 1)
                    if at >= 0:
                        target[at // width, at % width] += dy[plane, r, q]
                    continue
                for h in range(top, bottom):
                    row, first = source[h, left:right], np.int32(right - left)
                    for w in range(row.size):
                        place = np.int32(w) if row[w] == wanted else first
                        first = min(first, place)
                    if first < row.size:
                        target[h, left + first] += dy[plane, r, q]
                        break


@specialized
def _max_pool_grad(
    taps_h: int, taps_w: int, stride_h: int, stride_w: int, dilation_h: int, dilation_w: int
) -> Callable[..., None]:
    """Make the loop for one window; its sizes are constants, so that taps are unrolled and windows are searched in vectors."""

    @exact
    def max_pool_grad(dy, x, flat_x, flat_dx, y, begin_h, begin_w, found, start, stop):
        parts, planes, height, width = found.shape[0], x.shape[0], x.shape[1], x.shape[2]
        first = np.uint64(min(y.shape[2], -(-begin_w // stride_w)))  # from this window on, no tap lies before x
        after = (width - 1 - (taps_w - 1) * dilation_w + begin_w) // stride_w + 1  # before this window, no tap lies after x
        last = np.uint64(max(np.int64(first), min(y.shape[2], after)))
        for part in range(start, stop):
            at = found[part, : y.shape[-1]]
            for plane in range(planes * part // parts, planes * (part + 1) // parts):
                source, target = flat_x[plane], flat_dx[plane]
                target[:] = 0.0
                for r in range(y.shape[1]):
                    wanted, slopes, row = y[plane, r], dy[plane, r], r * stride_h - begin_h
                    whole = row >= 0 and row + (taps_h - 1) * dilation_h < height
                    for q in range(np.int64(first) if whole else at.size):
                        at[q] = _clipped(
                            x[plane], wanted[q], row, q * stride_w - begin_w, taps_h, taps_w, dilation_h, dilation_w
                        )
                    for q in range(np.int64(last) if whole else at.size, at.size):
                        at[q] = _clipped(
                            x[plane], wanted[q], row, q * stride_w - begin_w, taps_h, taps_w, dilation_h, dilation_w
                        )
                    # unsigned indices need no test for negative ones, which would prevent vectorisation
                    for step in range(last - first if whole else np.uint64(0)):
                        q = first + step
                        corner = np.uint64(row * width - begin_w + np.int64(q) * stride_w)
                        value, place = wanted[q], corner
                        for i in range(taps_h - 1, -1, -1):  # in reverse, so that the first maximum is the one kept
                            for j in range(taps_w - 1, -1, -1):
                                tap = corner + np.uint64(i * dilation_h) * np.uint64(width) + np.uint64(j * dilation_w)
                                place = tap if source[tap] == value else place
                        at[q] = np.int32(place)
                    for q in range(at.size):
                        if wanted[q] != wanted[q]:
                            at[q] = _last_nan(x[plane], row, q * stride_w - begin_w, taps_h, taps_w, dilation_h, dilation_w)
                        if at[q] >= 0:
                            target[at[q]] += slopes[q]

    return max_pool_grad


def _left(node: ir.Node, size: Sequence[int]) -> list[tuple[int | None, int, int]]:
    """The axes of a pool's window that :func:`_folded` leaves; native loops need at most two."""
    window = Window.of({name: attribute.value for name, attribute in node.attributes.items()}, tuple(size))
    return _folded(window, size, size)


def _folded(window: Window, size: Sequence[int], out: Sequence[int]) -> list[tuple[int | None, int, int]]:
    """(axis of the window, elements of x, elements of y) of what is left as rows and columns of a plane.

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
    """x and y as planes × height × width, and (rows, columns, stride, share of a row, share of a column) of the windows."""
    window = Window.of(attributes, x.shape[2:])
    left = _folded(window, x.shape[2:], y.shape[2:]) or [(None, 1, 1)]
    begin, end = window.padding

    def of(numbers: Sequence[int], otherwise: int) -> tuple[int, ...]:
        return tuple(otherwise if axis is None else numbers[axis] for axis, _, _ in left)

    window = Window(of(window.kernel, 1), of(window.strides, 1), of(window.dilations, 1), of(begin, 0), of(end, 0))
    size, out = [n for _, n, _ in left], [n for _, _, n in left]
    shares = [np.ones(1, dtype=np.float32)]
    for axis in range(len(left)):
        matrix = averaging_matrix(window, axis, bool(attributes.get("count_include_pad")), size[axis], out[axis])
        shares.append(np.asarray(matrix.max(axis=1), dtype=np.float32))
    geometry = (*_geometry(window, size, out), window.strides[-1], *shares[-2:])
    planes = [array.reshape(-1, *[1, *lengths][-2:]) for array, lengths in ((x, size), (y, out))]
    return planes[0], planes[1], geometry


def _average_is_native(node: ir.Node) -> bool:
    """Not along both axes of an image: onnxruntime has vectors there, and takes a fifth to a half of the time."""
    if not have_spatial_axes(node, (0,), 3):
        return False
    size = required(static_dims(required(node.inputs[0])))[2:]
    left = _left(node, size)
    return len(left) <= 2 and (len(size) == 3 or len([axis for axis, _, _ in left if axis is not None]) <= 1)


@kernel("onnxruntime", "AveragePool", when=_average_is_native)
def average_pool(k: Binding) -> Run:
    """Sums of the window's rows first, then of their columns: onnxruntime adds tap by tap of each window."""
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    source, target, geometry = _averages(k.attributes, x, y)
    parts = max(1, min(k.pool.threads, target.shape[0] * target.shape[1], x.size // 16384))
    lines = on_lines((parts, source.shape[2]))
    return k.pool.bind(_average_pool, (source, *geometry, target, lines), parts)


@jit
def _average_pool(x, rows, columns, stride, row_share, column_share, y, lines, start, stop):
    parts, height = lines.shape[0], y.shape[1]
    every = y.shape[0] * height
    for part in range(start, stop):
        line = lines[part, : x.shape[2]]
        for row in range(every * part // parts, every * (part + 1) // parts):
            plane, r = row // height, row % height
            line[:] = 0.0
            for i in range(rows.shape[0]):
                if rows[i, r] >= 0:
                    source = x[plane, rows[i, r]]
                    for w in range(line.size):
                        line[w] += source[w]
            means = y[plane, r]
            means[:] = 0.0
            for j in range(columns.shape[0]):
                shift, first, last = columns[j]
                taps, target = line[shift + first * stride :], means[first:last]
                if stride == 1:
                    for q in range(target.size):
                        target[q] += taps[q]
                else:
                    for q in range(target.size):
                        target[q] += taps[q * stride]
            for q in range(means.size):
                means[q] *= row_share[r] * column_share[q]


def _average_grad_is_native(node: ir.Node) -> bool:
    size = shape_of_result(node.inputs[1])
    known = [] if size is None else [d for d in size.dims if isinstance(d, int)]
    return (
        have_spatial_axes(node, (0,), 3) and size is not None and len(known) == len(size) and len(_left(node, known[2:])) <= 2
    )


@kernel("onnxruntime", "graphc::AveragePoolGrad", when=_average_grad_is_native)
def average_pool_grad(k: Binding) -> Run:
    """Each dy is divided equally over its window: along a line of memory first, which is then added to the window's rows."""
    (dy,), (dx,) = given(k.inputs, 1), given(k.outputs, 1)
    target, source, geometry = _averages(k.attributes, dx, dy)
    parts = max(1, min(k.pool.threads, len(target), dx.size // 16384))
    lines = on_lines((parts, target.shape[2]))
    return k.pool.bind(_average_pool_grad, (source, *geometry, target, lines), parts)


@jit
def _average_pool_grad(dy, rows, columns, stride, row_share, column_share, dx, lines, start, stop):
    planes, parts = dx.shape[0], lines.shape[0]
    for part in range(start, stop):
        line = lines[part, : dx.shape[2]]
        for plane in range(planes * part // parts, planes * (part + 1) // parts):
            dx[plane] = 0.0
            for r in range(rows.shape[1]):
                line[:] = 0.0
                for j in range(columns.shape[0]):
                    shift, first, last = columns[j]
                    target = line[shift + first * stride :]
                    slopes, shares = dy[plane, r, first:last], column_share[first:last]
                    if stride == 1:
                        for q in range(slopes.size):
                            target[q] += slopes[q] * (row_share[r] * shares[q])
                    else:
                        for q in range(slopes.size):
                            target[q * stride] += slopes[q] * (row_share[r] * shares[q])
                for i in range(rows.shape[0]):
                    if rows[i, r] >= 0:
                        target = dx[plane, rows[i, r]]
                        for w in range(line.size):
                            target[w] += line[w]
