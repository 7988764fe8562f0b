"""Convolutions of few channels, and of wide windows: sums over taps, with neighbouring windows in the lanes of vectors.

    y[m, q] = Σ over channels c and taps t of w[m, c, t] · x[c, q·stride + t·dilation - pad]

oneDNN keeps channels in the lanes. Of 64 channels to 3, which fill 3 lanes of 16, it reaches 70 to 100 GFLOP/s on cores that do
490; of groups of four channels 81; of a line with 25 taps and more, which its fast kernels refuse, 260.

A thread copies a region of the image of one group with its padding, columns and rows by their remainder modulo the stride, so
that each tap of all windows lies one distance from the result. Results are computed along whole lines of the copy; what lies
between the lines is left out when they are copied to y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.kernels.lines import copy_padded_line, filled, line1
from graphc.backends.onnxruntime.kernels.scratch import on_lines, scratchpad_of
from graphc.backends.onnxruntime.vectors.functions import LANES, array_of, floats_at
from graphc.backends.onnxruntime.vectors.windows import (
    BLOCK,
    MOST_LINES,
    MOST_ROWS,
    MOST_TAPS,
    VECTORS,
    added_products,
    weighted_sums,
)
from graphc.device import Array, Run, in_order
from graphc.ir.ops.convolution import Window

sums1, sums2, sums3, sums4, sums5, sums6 = (weighted_sums(rows) for rows in range(1, 7))

products11, products21, products31, products41 = (added_products(rows, 1) for rows in range(1, 5))
products12, products22, products32, products42 = (added_products(rows, 2) for rows in range(1, 5))
products13, products23, products33, products43 = (added_products(rows, 3) for rows in range(1, 5))
products14, products24, products34, products44 = (added_products(rows, 4) for rows in range(1, 5))
products15, products25, products35, products45 = (added_products(rows, 5) for rows in range(1, 5))

REGION = 48 << 10
"""Most floats of a region, which stays in a core's own cache."""

LINE = 16
"""Floats of a line of the cache; planes are an odd number of lines, so that lines of all channels spread over its sets."""

COPY_TIMES, SINGLE_TIME, RESULT_TIME = {1: 0.6, 2: 1.5, 4: 3.0}, 10.0, 0.5
"""Cycles of copying a number into the region by the stride along lines, for other strides, and of a result out of it."""

WHOLE_SHARE, WIDE_SHARE, GROUP_SHARE = (0.95, 0.55, 0.7) if LANES == 16 else (0.95, 0.6, 0.4)
"""The share of its peak that oneDNN reaches with whole vectors of channels, along wide windows, and in groups of a vector or
less."""

WIDEST = 20 if LANES == 16 else 8
"""The longest span of a line for which oneDNN has fast kernels."""

GRADIENT_SHARE, LONG_SHARE, HALF_SHARE = (0.9, 0.24, 0.3) if LANES == 16 else (0.72, 0.7, 0.1)
"""For weight gradients: the same, for long lines of taps, and what half a vector leaves."""

LONGEST, FARTHEST = 14, 64
"""Taps and span of a line beyond which oneDNN has no fast kernels for weight gradients."""

BLOCKED_TIME = 1.0
"""Cycles of copying a number of an image to or from oneDNN's own layouts."""

FEWEST = 4
"""Fewest channels of an image that oneDNN's weight gradients pad to a vector."""

RATE, CALL_TIME, TOTAL_TIME = 2.0 if LANES == 16 else 1.2, 14, 3
"""Additions of products a cycle, as measured, and cycles of a call that adds them up, and of the sum of a vector."""

MARGIN = 1.15
"""How much faster the estimate must be, which knows nothing of memory."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How results are cut into regions, and how a region lies in memory.

    Attributes:
        rows, columns: results of a region.
        pitch, plane: elements from one line to the next, and of a plane of one remainder of rows and columns.
        time: an estimate for all regions, in cycles of one thread.
    """

    rows: int
    columns: int
    pitch: int
    plane: int
    time: float


def blocks_of(
    samples: int, group: int, channels: int, results: int, out: tuple[int, int], window: Window, threads: int, copies: int = 0
) -> Blocks:
    """The regions that take the least time by an estimate, for a group of ``channels`` and ``results``."""
    (height, width), (stride_h, stride_w) = out, window.strides
    more = [(k - 1) * d // s for k, d, s in zip(window.kernel, window.dilations, window.strides, strict=True)]
    taps = math.prod(window.kernel)
    found = []
    for columns in sorted({-(-width // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)}):
        for rows in sorted({-(-height // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, height)}):
            pitch = columns + more[1]
            plane = (-(-(rows + more[0]) * pitch // LINE) | 1) * LINE
            size = channels * stride_h * stride_w * plane + copies * rows * pitch
            if size > REGION and (rows, columns) != (1, 1):
                continue
            line = (rows - 1) * pitch + columns
            sums = 0.0
            for count, tile in _tiles(results):
                whole = VECTORS[tile] * LANES
                sums += count * -(-line // whole) * whole * taps * channels * _cycles(tile)
            each = sums + COPY_TIMES.get(stride_w, SINGLE_TIME) * size + RESULT_TIME * results * rows * columns
            units = samples * group * -(-height // rows) * -(-width // columns)
            found.append(Blocks(rows, columns, pitch, plane, each * -(-units // threads)))
    return min(found, key=lambda blocks: blocks.time)


def _tiles(results: int) -> list[tuple[int, int]]:
    """Counts and rows of the tiles that compute as many results."""
    tiles = -(-results // MOST_ROWS)
    few, more = results // tiles, results % tiles
    return [(count, rows) for count, rows in ((more, few + 1), (tiles - more, few)) if count]


def _cycles(rows: int) -> float:
    """Cycles for a tap of one window: two additions a cycle, or two loads; one across two lines of the cache counts twice."""
    vectors = VECTORS[rows]
    return max(rows * vectors, (2 if LANES == 16 else 1.5) * vectors + rows + 1) / 2 / (vectors * LANES)


def is_faster(x: Array, w: Array, y: Array, group: int, window: Window, threads: int, *, turned: bool = False) -> bool:
    """Whether :func:`convolve` takes less time than oneDNN, by estimates.

    oneDNN computes whole vectors of results, and of more than a vector of channels. Windows of one pixel are products of
    matrices, and groups of one channel are in :mod:`.depthwise`.

    Args:
        turned: y is the gradient of the operand of a convolution, which oneDNN would compute as such.
    """
    channels, results = w.shape[1], len(w) // group
    if not _is_taken(x, w, y, group, window):
        return False
    wide = channels if (channels < LANES and not turned) or group > 1 else _padded(channels)
    products = len(x) * group * math.prod(y.shape[2:]) * math.prod(window.kernel) * _padded(results) * wide
    share = WIDE_SHARE if window.span[-1] > WIDEST else GROUP_SHARE if group > 1 and results <= LANES else WHOLE_SHARE
    own = blocks_of(len(x), group, channels, results, _size(y), _lifted(window), threads)
    copied = x.size + y.size if wide >= LANES else y.size
    return bool(MARGIN * own.time < (products / (2 * LANES * share) + BLOCKED_TIME * copied) / threads)


def gradient_is_faster(x: Array, w: Array, y: Array, group: int, window: Window, threads: int) -> bool:
    """Whether :func:`weight_gradient` takes less time than oneDNN, by estimates; w and y have the shapes of the gradients."""
    channels, results = w.shape[1], len(w) // group
    if not _is_taken(x, w, y, group, window):
        return False
    share = LONG_SHARE if window.kernel[-1] > LONGEST or window.span[-1] > FARTHEST else GRADIENT_SHARE
    if group > 1 and channels <= LANES:
        share *= 0.8 * (HALF_SHARE if channels < 8 else 1)
    wide = channels if channels < FEWEST or group > 1 else _padded(channels)
    taps, pixels = math.prod(window.kernel), math.prod(y.shape[2:])
    products = len(x) * group * pixels * taps * _padded(results) * wide
    blocks = blocks_of(len(x), group, channels, results, _size(y), _lifted(window), threads, copies=results)
    vectors = ((blocks.rows - 1) * blocks.pitch + blocks.columns + LANES - 1) // LANES
    whole, rest = divmod(taps, MOST_TAPS)
    time = 0.0
    for lines, count in ((MOST_LINES, results // MOST_LINES), (results % MOST_LINES, 1)):
        for several, times in ((MOST_TAPS, whole), (rest, 1)):
            if lines and several:
                loads = lines + several * (2 if LANES == 16 else 1.5)
                each = vectors * max(lines * several, loads) / RATE + CALL_TIME + TOTAL_TIME * lines * several
                time += count * times * each
    copies = COPY_TIMES.get(window.strides[-1], SINGLE_TIME) * channels * math.prod(window.strides) * blocks.plane
    each = channels * time + copies + results * blocks.rows * blocks.pitch
    units = len(x) * group * math.prod(-(-n // b) for n, b in zip(_size(y), (blocks.rows, blocks.columns), strict=True))
    others = products / (2 * LANES * share) + BLOCKED_TIME * (x.size + y.size)
    return bool(MARGIN * each * -(-units // threads) < others / threads)


def _is_taken(x: Array, w: Array, y: Array, group: int, window: Window) -> bool:
    plane = x.ndim in (3, 4) and 0 not in (x.size, w.size, y.size) and window.pads is not None
    return plane and not (group > 1 and w.shape[1] == 1) and max(window.kernel) > 1


def _size(y: Array) -> tuple[int, int]:
    """Height and width."""
    height, width = (1, *y.shape[2:])[-2:]
    return height, width


def _padded(channels: int) -> int:
    return -(-channels // LANES) * LANES


def _lifted(window: Window) -> Window:
    """The window, with a height of one if it has one axis."""
    if len(window.kernel) == 2:
        return window
    begin, end = window.padding
    return Window((1, *window.kernel), (1, *window.strides), (1, *window.dilations), (0, *begin), (0, *end))


@dataclass(frozen=True, slots=True)
class _Regions:
    """The regions of a convolution as arrays for compiled code.

    Attributes:
        numbers: groups, sizes of an image and of its results, strides, padding in front, rows and columns of a region, pitch,
            plane, and the regions down and across.
        offsets: of each channel and tap, in bytes from a window's place in the region.
        size: floats of a region with what is read behind it.
        line: floats from the first window of a region to the one behind the last.
        units: number of regions.
    """

    numbers: Array
    offsets: Array
    size: int
    line: int
    units: int

    @staticmethod
    def of(images: Array, w: Array, results: Array, window: Window, group: int, blocks: Blocks) -> _Regions:
        """Of images and results with two axes of space, and a window of two."""
        size, out, channels = images.shape[2:], results.shape[2:], w.shape[1]
        (stride_h, stride_w), begin = window.strides, window.padding[0]
        taps = np.indices((channels, *window.kernel)).reshape(3, -1)
        steps = [taps[1 + k] * window.dilations[k] for k in (0, 1)]
        phases = (taps[0] * stride_h + steps[0] % stride_h) * stride_w + steps[1] % stride_w
        offsets = 4 * (phases * blocks.plane + steps[0] // stride_h * blocks.pitch + steps[1] // stride_w)
        region = channels * stride_h * stride_w * blocks.plane + BLOCK
        down, across = -(-out[0] // blocks.rows), -(-out[1] // blocks.columns)
        shape = [blocks.rows, blocks.columns, blocks.pitch, blocks.plane, down, across]
        numbers = np.array([group, *size, *out, stride_h, stride_w, *begin, *shape], dtype=np.int64)
        line = (blocks.rows - 1) * blocks.pitch + blocks.columns
        return _Regions(numbers, offsets, region, line, len(images) * group * down * across)


def convolve(pool: Pool, x: Array, w: Array, bias: Array | None, y: Array, window: Window, group: int) -> Run:
    """y = Conv(x, w, bias) over one or two axes of space, for float32."""
    images, results, lifted = _in_plane(x), _in_plane(y), _lifted(window)
    blocks = blocks_of(len(x), group, w.shape[1], len(w) // group, results.shape[2:], lifted, pool.threads)
    regions = _Regions.of(images, w, results, lifted, group, blocks)
    wide = regions.line + BLOCK
    each = -(-4 * (regions.size + len(w) // group * wide) // 128) * 128
    parts = max(1, min(pool.threads, regions.units))
    scratchpad_of(pool).reserve(each * parts)
    sizes = np.array([regions.units, parts, each, 4 * regions.size, wide], dtype=np.int64)
    first = np.zeros(len(w), dtype=np.float32) if bias is None else bias
    weights, cell = w.reshape(len(w), -1), scratchpad_of(pool).cell
    return pool.bind(_convolve, (images, weights, first, results, regions.numbers, sizes, regions.offsets, cell), parts)


def weight_gradient(pool: Pool, x: Array, dy: Array, dw: Array, window: Window, group: int) -> Run:
    """dw of y = Conv(x, w) over one or two axes of space, for float32: each thread's sums over its regions, then their sum."""
    images, slopes, lifted = _in_plane(x), _in_plane(dy), _lifted(window)
    channels, outs = dw.shape[1], len(dw) // group
    blocks = blocks_of(len(x), group, channels, outs, slopes.shape[2:], lifted, pool.threads, copies=outs)
    regions = _Regions.of(images, dw, slopes, lifted, group, blocks)
    wide = -(-(blocks.rows * blocks.pitch + 2 * LANES) // LINE) * LINE
    each = -(-4 * (regions.size + outs * wide) // 128) * 128
    parts = max(1, min(pool.threads, regions.units))
    sums = on_lines((parts, dw.size))
    scratchpad_of(pool).reserve(each * parts)
    sizes = np.array([regions.units, parts, each, 4 * regions.size, wide], dtype=np.int64)
    shapes = np.array([channels, outs, math.prod(window.kernel)], dtype=np.int64)
    arguments = (images, slopes, sums, shapes, regions.numbers, sizes, regions.offsets, scratchpad_of(pool).cell)
    total = pool.bind(_add_parts, (sums, dw.reshape(-1)), dw.size, 16384)
    return in_order([pool.bind(_add_products, arguments, parts), total])


def _in_plane(x: Array) -> Array:
    """N × C × two axes of space."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], 1, x.shape[2])


@jit
def _copy_region(image, numbers, top, left, target):
    """target[phase of row, phase of column, row, column] = image[row · stride + phase + top, …], zero beyond its edges."""
    _, height, width, _, _, stride_h, stride_w, _, _, _, _, pitch, plane, _, _ = numbers
    lines = plane // pitch
    for f in range(stride_h):
        for g in range(stride_w):
            first, last = filled(width, stride_w, g + left, pitch)
            for u in range(lines):
                at, row = target + 4 * ((f * stride_w + g) * plane + u * pitch), u * stride_h + f + top
                end = last if 0 <= row < height else first
                copy_padded_line(image + 4 * (row * width + g + left), first, end, stride_w, at, pitch)
            at = lines * pitch
            line1(image, 0, 0, target + 4 * ((f * stride_w + g) * plane + at), plane - at)


@jit
def _sum_taps(rows, w, w_row, x, offsets, depth, y, y_row, first, last):
    """:func:`weighted_sums` of ``rows`` rows for the windows from ``first`` to ``last``, and some behind."""
    if rows == 1:
        for p in range(first, last, VECTORS[1] * LANES):
            sums1(w, w_row, x + p * 4, offsets, depth, y + p * 4, y_row)
    elif rows == 2:
        for p in range(first, last, VECTORS[2] * LANES):
            sums2(w, w_row, x + p * 4, offsets, depth, y + p * 4, y_row)
    elif rows == 3:
        for p in range(first, last, VECTORS[3] * LANES):
            sums3(w, w_row, x + p * 4, offsets, depth, y + p * 4, y_row)
    elif rows == 4:
        for p in range(first, last, VECTORS[4] * LANES):
            sums4(w, w_row, x + p * 4, offsets, depth, y + p * 4, y_row)
    elif rows == 5:
        for p in range(first, last, VECTORS[5] * LANES):
            sums5(w, w_row, x + p * 4, offsets, depth, y + p * 4, y_row)
    else:
        for p in range(first, last, VECTORS[6] * LANES):
            sums6(w, w_row, x + p * 4, offsets, depth, y + p * 4, y_row)


@jit
def _convolve(x, w, bias, y, numbers, sizes, offsets, cell, start, stop):
    group, _, _, height, width, stride_h, stride_w, begin_h, begin_w, rows, columns, pitch, plane, down, across = numbers
    units, parts, each, of_results, wide = sizes
    channels, outs, depth = x.shape[1] // group, w.shape[0] // group, w.shape[1]
    phases = stride_h * stride_w * plane
    tiles = (outs + 5) // 6
    few, more = outs // tiles, outs % tiles
    for part in range(start, stop):
        region = cell[0] + part * each
        made = region + of_results
        for unit in range(units * part // parts, units * (part + 1) // parts):
            block, plot = unit // (down * across), unit % (down * across)
            n, g = block // group, block % group
            top, left = plot // across * rows, plot % across * columns
            for c in range(channels):
                image, target = x[n, g * channels + c].ctypes.data, region + 4 * c * phases
                _copy_region(image, numbers, top * stride_h - begin_h, left * stride_w - begin_w, target)
            high, across_here = min(rows, height - top), min(columns, width - left)
            length = (high - 1) * pitch + across_here
            for p in range(0, length, BLOCK):
                end, m = min(length, p + BLOCK), 0
                for tile in range(tiles):
                    tall = few + (1 if tile < more else 0)
                    of_w = w[g * outs + m].ctypes.data if depth > 0 else 0
                    _sum_taps(tall, of_w, 4 * depth, region, offsets.ctypes.data, depth, made + 4 * m * wide, 4 * wide, p, end)
                    m += tall
            for m in range(outs):
                first = bias[g * outs + m]
                for u in range(high):
                    source = array_of(floats_at(made + 4 * (m * wide + u * pitch)), (across_here,))
                    row = array_of(floats_at(y[n, g * outs + m, top + u, left:].ctypes.data), (across_here,))
                    for v in range(across_here):
                        row[v] = source[v] + first


@jit
def _add_taps(rows, taps, a, a_row, x, offsets, vectors, sums, sums_row):
    """:func:`added_products` of as many rows and taps."""
    if taps == 5:
        if rows == 4:
            products45(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 3:
            products35(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 2:
            products25(a, a_row, x, offsets, vectors, sums, sums_row)
        else:
            products15(a, a_row, x, offsets, vectors, sums, sums_row)
    elif taps == 4:
        if rows == 4:
            products44(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 3:
            products34(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 2:
            products24(a, a_row, x, offsets, vectors, sums, sums_row)
        else:
            products14(a, a_row, x, offsets, vectors, sums, sums_row)
    elif taps == 3:
        if rows == 4:
            products43(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 3:
            products33(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 2:
            products23(a, a_row, x, offsets, vectors, sums, sums_row)
        else:
            products13(a, a_row, x, offsets, vectors, sums, sums_row)
    elif taps == 2:
        if rows == 4:
            products42(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 3:
            products32(a, a_row, x, offsets, vectors, sums, sums_row)
        elif rows == 2:
            products22(a, a_row, x, offsets, vectors, sums, sums_row)
        else:
            products12(a, a_row, x, offsets, vectors, sums, sums_row)
    elif rows == 4:
        products41(a, a_row, x, offsets, vectors, sums, sums_row)
    elif rows == 3:
        products31(a, a_row, x, offsets, vectors, sums, sums_row)
    elif rows == 2:
        products21(a, a_row, x, offsets, vectors, sums, sums_row)
    else:
        products11(a, a_row, x, offsets, vectors, sums, sums_row)


@jit
def _add_products(x, dy, all_sums, shapes, numbers, sizes, offsets, cell, start, stop):
    group, _, _, height, width, stride_h, stride_w, begin_h, begin_w, rows, columns, pitch, plane, down, across = numbers
    units, parts, each, of_slopes, wide = sizes
    channels, outs, taps = shapes
    phases, per_channel = stride_h * stride_w * plane, channels * taps
    for part in range(start, stop):
        region, sums = cell[0] + part * each, all_sums[part]
        slopes, of_sums = region + of_slopes, sums.ctypes.data
        for k in range(group * outs * per_channel):
            sums[k] = 0.0
        line1(region, 0, 0, region + 4 * channels * phases, BLOCK)  # zeros times what is left there would be NaN
        for unit in range(units * part // parts, units * (part + 1) // parts):
            block, plot = unit // (down * across), unit % (down * across)
            n, g = block // group, block % group
            top, left = plot // across * rows, plot % across * columns
            for c in range(channels):
                image, target = x[n, g * channels + c].ctypes.data, region + 4 * c * phases
                _copy_region(image, numbers, top * stride_h - begin_h, left * stride_w - begin_w, target)
            high, across_here = min(rows, height - top), min(columns, width - left)
            vectors = ((high - 1) * pitch + across_here + LANES - 1) // LANES
            for m in range(outs):
                for u in range(high):
                    source = dy[n, g * outs + m, top + u, left:].ctypes.data
                    line1(source, 0, across_here, slopes + 4 * (m * wide + u * pitch), pitch)
                line1(region, 0, 0, slopes + 4 * (m * wide + high * pitch), LANES)
            for c in range(channels):
                for m in range(0, outs, MOST_LINES):
                    tall = min(MOST_LINES, outs - m)
                    for t in range(0, taps, MOST_TAPS):
                        place = (g * outs + m) * per_channel + c * taps + t
                        _add_taps(
                            tall,
                            min(MOST_TAPS, taps - t),
                            slopes + 4 * m * wide,
                            4 * wide,
                            region,
                            offsets.ctypes.data + 8 * (c * taps + t),
                            vectors,
                            of_sums + 4 * place,
                            4 * per_channel,
                        )


@jit
def _add_parts(parts, total, start, stop):
    for k in range(start, stop):
        whole = np.float32(0)
        for part in range(parts.shape[0]):
            whole += parts[part, k]
        total[k] = whole
