"""3 × 3 convolutions and their gradients with 16 multiplications where the definition has 36.

    y  = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A                 for each tile of 2 × 2 results, which reads 4 × 4 pixels
    dw = Gᵀ [Σ over tiles (A dy Aᵀ) ⊙ (Bᵀ x B)] G
    dx = y of dy and the turned weights

⊙ sums over channels, so it is 16 matrix products; A, B and G add and halve. A block of tiles is transformed, multiplied and
transformed back while it lies in the cache. Inside a block channels lie side by side, one in each lane of a vector: images are
turned while they are copied there. Errors are as large as the definition's in float32 (1e-6 of the largest result and less). An
infinity or NaN spreads over the tiles that read it.

Source: A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural Networks, 2015, F(2 × 2, 3 × 3).
"""

from __future__ import annotations

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import Scratchpad
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import BETWEEN, PLAIN, ConvEpilogue, activate_line, between
from graphc.backends.onnxruntime.kernels.convolutions.winograd_plans import WIDEST, cut_tiles, whole_units
from graphc.backends.onnxruntime.kernels.products.panels import add_rows, multiply_rows
from graphc.backends.onnxruntime.vectors.functions import (
    LANES,
    PANEL,
    array_of,
    floats_at,
    scratch_function,
    transpose_square,
    two_sided_function,
)
from graphc.device import Array, Run, in_order
from graphc.ir.ops.convolution import Window

_BT = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_G = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
_AT = ((1, 1, 1, 0), (0, 1, -1, -1))

NOTHING = 2.0**-20
"""Of the largest of 16 products: what rounding leaves of a result without a summand, mostly. Such a result is 0."""
ROUNDING, SMALL = 2.0**-23, 2.0**-14
"""Of the largest of 16 products: a gradient of a weight below the one is 0, and below the other is summed as the definition
says, which costs little because few are.

Adam divides a gradient by its size. Where a ReLU leaves no summand, it would make a whole step of what rounding leaves, and of
few summands a step of another sign: ten steps of a VGG were off by 1e-3 from float64. With these bounds they are as far off as
with oneDNN's gradients.
"""

_A, _GT = (tuple(zip(*matrix, strict=True)) for matrix in (_AT, _G))
image_tile, weight_tile, slope_tile = (two_sided_function(matrix) for matrix in (_BT, _G, _A))
result_tile, gradient_tile = two_sided_function(_AT, NOTHING), two_sided_function(_GT, ROUNDING, SMALL)
window_of_weights, window_of_gradients = scratch_function(9 * PANEL), scratch_function(9 * LANES)

MOST_SMALL = 1024
"""Places that are summed as the definition says at a time."""
small_places = scratch_function(MOST_SMALL)
moved_slopes = scratch_function(3 * WIDEST)

GAP = 16
"""Floats between the 16 matrices of a block, which would otherwise share the same few sets of the cache."""


def convolve(pool: Pool, scratch: Scratchpad, x: Array, w: Array, epilogue: ConvEpilogue, y: Array, window: Window) -> Run:
    """y = Conv(x, w), and what follows"""
    assert window.begin is not None
    return _bind_convolution(pool, scratch, x, w, epilogue, y, window.begin, turned=False)


def input_gradient(pool: Pool, scratch: Scratchpad, dy: Array, w: Array, dx: Array, window: Window) -> Run:
    """dx of y = Conv(x, w)"""
    assert window.begin is not None
    begin = tuple(2 - b for b in window.begin)
    return _bind_convolution(pool, scratch, dy, w, PLAIN, dx, begin, turned=True)


def _bind_convolution(
    pool: Pool,
    scratch: Scratchpad,
    x: Array,
    w: Array,
    epilogue: ConvEpilogue,
    y: Array,
    begin: tuple[int, ...],
    *,
    turned: bool,
) -> Run:
    """Bind y = Conv(x, w), and what follows.

    Args:
        begin: padding before x.
        turned: w holds, for each channel of x, those of y, and its window is turned by half a turn, as for a data gradient.
    """
    channels, outs = x.shape[1], y.shape[1]
    panels = -(-outs // PANEL)
    cut = cut_tiles(y, pool.threads, panels, 9.0 * channels, PANEL * (1.1 * channels + 6), channels * PANEL)
    weights = panels * 16 * channels * PANEL
    sizes = (
        16 * (cut.tiles * whole_units(channels, LANES) + GAP),
        16 * (cut.tiles * PANEL + GAP),
        cut.most_rows * (2 * cut.wide + 2) * LANES,
    )
    each = whole_units(sum(sizes), 16)
    scratch.reserve(4 * (weights + cut.shares * each))
    geometry, others = cut.geometry(*begin, weights, each), epilogue.others(y)
    arguments = (x, *epilogue.vectors(outs), others, *epilogue.numbers(), y, geometry, scratch.cell)
    return in_order(
        [
            pool.bind(_transform_weights, (w, channels, outs, int(turned), scratch.cell), panels * channels, 64),
            pool.bind(_convolve, arguments, cut.shares),
        ]
    )


def weight_gradient(pool: Pool, scratch: Scratchpad, x: Array, dy: Array, dw: Array, window: Window) -> Run:
    """dw of y = Conv(x, w)"""
    assert window.begin is not None
    channels, outs = x.shape[1], dy.shape[1]
    deep, units = whole_units(channels, PANEL), -(-outs // LANES)
    cut = cut_tiles(dy, pool.threads, units, 9.0 * channels, LANES * (1.1 * deep + 9), deep * LANES, sums=True)
    total = 16 * outs * deep
    sizes = (
        16 * (cut.tiles * deep + GAP),
        16 * (cut.tiles * units * LANES + GAP),
        cut.most_rows * (2 * cut.wide + 2) * LANES,
    )
    each = whole_units(sum(sizes), 16)
    scratch.reserve(4 * (cut.parts * total + cut.shares * each))
    geometry = cut.geometry(*window.begin, total, each)
    return in_order(
        [
            pool.bind(_weight_products, (x, dy, geometry, scratch.cell), cut.shares),
            pool.bind(_weight_gradient, (x, dy, dw, geometry, scratch.cell), outs, max(1, 512 // channels)),
        ]
    )


@jit
def _transform_weights(w, channels, outs, turned, cell, start, stop):
    """u[panel, k, c, lane] = (G w Gᵀ)[k] of channel c and result panel · PANEL + lane."""
    source = window_of_weights()
    buffer = array_of(floats_at(source), (9, PANEL))
    for unit in range(start, stop):
        panel, c = unit // channels, unit % channels
        first = panel * PANEL
        for lane in range(min(PANEL, outs - first)):
            window = w[c, first + lane] if turned else w[first + lane, c]
            for i in range(3):
                for j in range(3):
                    buffer[8 - 3 * i - j if turned else 3 * i + j, lane] = window[i, j]
        for lane in range(max(0, outs - first), PANEL):
            buffer[:, lane] = 0.0
        step = channels * PANEL * 4
        target = cell[0] + (panel * 16 * channels + c) * PANEL * 4
        for half in range(2):
            place = half * LANES * 4
            weight_tile(source + place, 3 * PANEL * 4, PANEL * 4, target + place, 4 * step, step)


@jit
def _copy_row(x, n, c, h, begin, row):
    """row[q, lane] = x[n, c + lane, h, q - begin], 0 outside x."""
    channels, height, width = x.shape[1], x.shape[2], x.shape[3]
    low, high = max(0, begin), min(row.shape[0], width + begin)
    if h < 0 or h >= height or low >= high:
        row[:] = 0.0
        return
    row[:low] = 0.0
    row[high:] = 0.0
    q = low
    if c + LANES <= channels:
        source, line, pixel = x[n, c, h].ctypes.data, height * width * 4, LANES * 4
        while q + LANES <= high:
            transpose_square(source + (q - begin) * 4, line, row.ctypes.data + q * pixel, pixel)
            q += LANES
    for lane in range(LANES):
        if c + lane < channels:
            rest = x[n, c + lane, h]
            for p in range(q, high):
                row[p, lane] = rest[p - begin]
        else:
            for p in range(q, high):
                row[p, lane] = 0.0


@jit
def _transform_images(x, c, first, last, tall, wide, begin_h, begin_w, halo, buffer, target, step, tile):
    """For the rows of tiles ``first`` to ``last``: Bᵀ x B (``halo`` of 2), or A x Aᵀ (0), of LANES channels from c."""
    place, row, pixel, strip = buffer, (2 * wide + 2) * LANES * 4, LANES * 4, first
    while strip < last:
        n, i = strip // tall, strip % tall
        count = min(last - strip, tall - i)
        rows = array_of(floats_at(buffer), (2 * count + halo, 2 * wide + 2, LANES))
        for r in range(2 * count + halo):
            _copy_row(x, n, c, 2 * i + r - begin_h, begin_w, rows[r])
        for s in range(count):
            place = buffer + 2 * s * row
            for _ in range(wide):
                if halo:
                    image_tile(place, row, pixel, target, 4 * step, step)
                else:
                    slope_tile(place, row, pixel, target, 4 * step, step)
                place += 2 * pixel
                target += tile
        strip += count


@jit
def _transform_results(source, step, c, first, last, tall, wide, scale, shift, others, code, alpha, beta, buffer, y):
    """y = Aᵀ p A, and what follows, for LANES channels from c, of the rows of tiles ``first`` to ``last``."""
    row, pixel = 2 * wide * LANES * 4, LANES * 4
    rows = array_of(floats_at(buffer), (2, 2 * wide, LANES))
    height, width, infinity = y.shape[2], y.shape[3], np.float32(np.inf)
    low, high = (alpha, beta) if code == BETWEEN else (-infinity, infinity)
    for strip in range(first, last):
        n, i = strip // tall, strip % tall
        for t in range(wide):
            result_tile(source, 4 * step, step, buffer + 2 * t * pixel, row, pixel)
            source += PANEL * 4
        for r in range(min(2, height - 2 * i)):
            for lane in range(min(LANES, y.shape[1] - c)):
                target, factor, added = y[n, c + lane, 2 * i + r], scale[c + lane], shift[c + lane]
                if others.size > 0:
                    other = others[n, c + lane, 2 * i + r]
                    for q in range(width):
                        target[q] = between(factor * rows[r, q, lane] + added + other[q], low, high)
                else:
                    for q in range(width):
                        target[q] = between(factor * rows[r, q, lane] + added, low, high)
                if code != BETWEEN:
                    activate_line(target, code, alpha, beta)


@jit
def _convolve(x, scale, shift, others, code, alpha, beta, y, geometry, cell, start, stop):
    strips, tall, wide, begin_h, begin_w, weights, each, blocks, parts, ranges = geometry
    channels, outs, total = x.shape[1], y.shape[1], x.shape[0] * tall
    panels = -(-outs // PANEL)
    deep, most = -(-channels // LANES) * LANES, strips * wide
    step, small = (most * deep + GAP) * 4, (most * PANEL + GAP) * 4
    for share in range(start, stop):
        part, own = share // ranges, share % ranges
        v = cell[0] + (weights + share * each) * 4
        p = v + 16 * step
        buffer = p + 16 * small
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            first, last = block * strips, min(total, (block + 1) * strips)
            for c in range(0, channels, LANES):
                _transform_images(x, c, first, last, tall, wide, begin_h, begin_w, 2, buffer, v + c * 4, step, deep * 4)
            for panel in range(panels * own // ranges, panels * (own + 1) // ranges):
                u = cell[0] + panel * 16 * channels * PANEL * 4
                for k in range(16):
                    multiply_rows(
                        v + k * step, deep * 4, 4, u, PANEL * 4, channels, p + k * small, PANEL * 4, (last - first) * wide
                    )
                    u += channels * PANEL * 4
                for half in range(2):
                    c = panel * PANEL + half * LANES
                    if c < outs:
                        place, follows = p + half * LANES * 4, (scale, shift, others, code, alpha, beta)
                        _transform_results(place, small, c, first, last, tall, wide, *follows, buffer, y)


@jit
def _weight_products(x, dy, geometry, cell, start, stop):
    """sums[part, k, m, c] = Σ over the tiles of the part (A dy Aᵀ)[k, m] · (Bᵀ x B)[k, c], for the m of a range"""
    strips, tall, wide, begin_h, begin_w, size, each, blocks, parts, ranges = geometry
    channels, outs, total = x.shape[1], dy.shape[1], dy.shape[0] * tall
    deep, high, most = -(-channels // PANEL) * PANEL, -(-outs // LANES) * LANES, strips * wide
    step, other = (most * deep + GAP) * 4, (most * high + GAP) * 4
    for share in range(start, stop):
        part, own = share // ranges, share % ranges
        units = high // LANES
        low, top = units * own // ranges * LANES, min(outs, units * (own + 1) // ranges * LANES)
        v = cell[0] + (parts * size + share * each) * 4
        z = v + 16 * step
        buffer = z + 16 * other
        begin, end = blocks * part // parts, blocks * (part + 1) // parts
        for block in range(begin, end):
            first, last = block * strips, min(total, (block + 1) * strips)
            tiles = (last - first) * wide
            for c in range(0, deep, LANES):
                _transform_images(x, c, first, last, tall, wide, begin_h, begin_w, 2, buffer, v + c * 4, step, deep * 4)
            for c in range(low, top, LANES):
                _transform_images(dy, c, first, last, tall, wide, 0, 0, 0, buffer, z + c * 4, other, high * 4)
            for k in range(16):
                for c in range(0, deep, PANEL):
                    a, b = z + k * other + low * 4, v + k * step + c * 4
                    sums = cell[0] + (part * size + (k * outs + low) * deep + c) * 4
                    if block == begin:
                        multiply_rows(a, 4, high * 4, b, deep * 4, tiles, sums, deep * 4, top - low)
                    else:
                        add_rows(a, 4, high * 4, b, deep * 4, tiles, sums, deep * 4, top - low)


@jit
def _weight_gradient(x, dy, dw, geometry, cell, start, stop):
    """dw = Gᵀ sums G, of the sums of all parts."""
    begin_h, begin_w, parts = geometry[3], geometry[4], geometry[8]
    outs, channels = dw.shape[0], dw.shape[1]
    deep = -(-channels // PANEL) * PANEL
    sums = array_of(floats_at(cell[0]), (parts, 16, outs, deep))
    place = window_of_gradients()
    buffer = array_of(floats_at(place), (3, 3, LANES))
    small = array_of(floats_at(small_places()), (MOST_SMALL,))
    step = outs * deep * 4
    for m in range(start, stop):
        for part in range(1, parts):
            for k in range(16):
                total, other = sums[0, k, m], sums[part, k, m]
                for c in range(deep):
                    total[c] += other[c]
        count = 0
        for c in range(0, channels, LANES):
            source = cell[0] + (m * deep + c) * 4
            some_small = gradient_tile(source, 4 * step, step, place, 3 * LANES * 4, LANES * 4)
            for lane in range(min(LANES, channels - c)):
                for i in range(3):
                    for j in range(3):
                        dw[m, c + lane, i, j] = buffer[i, j, lane]
            if some_small:
                for lane in range(min(LANES, channels - c)):
                    least = SMALL * _largest(sums, m, c + lane)
                    for tap in range(9):
                        if 0.0 < abs(buffer[tap // 3, tap % 3, lane]) < least:
                            small[count] = 9 * (c + lane) + tap
                            count += 1
            if count > 0 and (count > MOST_SMALL - 9 * LANES or c + LANES >= channels):
                _sum_small(x, dy, m, dw[m], begin_h, begin_w, small[:count])
                count = 0


@jit
def _largest(sums, m, c):
    largest = np.float32(0.0)
    for k in range(16):
        largest = max(largest, abs(sums[0, k, m, c]))
    return largest


@jit
def _sum_small(x, dy, m, dw, begin_h, begin_w, small):
    """Sum each of these places of dw as the definition says: rows of dy, moved under each column of taps, times rows of x."""
    (rows, columns), (height, width) = dy.shape[2:], x.shape[2:]
    taken = 0  # a bit for each column of taps
    for place in small:
        dw[int(place) // 9, int(place) % 9 // 3, int(place) % 3] = 0.0
        taken |= 1 << int(place) % 3
    start, most = moved_slopes(), max(1, WIDEST // width)
    for n in range(dy.shape[0]):
        for p in range(0, rows, most):
            count = min(most, rows - p)
            moved = array_of(floats_at(start), (3, count, width))
            if not _is_any(array_of(floats_at(dy[n, m, p].ctypes.data), (count * columns,))):
                continue
            for j in range(3):
                if not taken >> j & 1:
                    continue
                shift = j - begin_w
                if columns == width > 2:  # one copy of all rows, then zeros where it ran into the next
                    whole = array_of(floats_at(start + j * count * width * 4), (count * width,))
                    source = array_of(floats_at(dy[n, m, p].ctypes.data), (count * width,))
                    first, last = max(0, shift), count * width + min(0, shift)
                    for q in range(first, last):
                        whole[q] = source[q - shift]
                    for r in range(count):
                        for q in range(shift):
                            whole[r * width + q] = 0.0
                        for q in range(shift, 0):
                            whole[(r + 1) * width + q] = 0.0
                    continue
                low, high = max(0, shift), min(width, columns + shift)
                for r in range(count):
                    line, slopes = moved[j, r], dy[n, m, p + r]
                    line[:low] = 0.0
                    line[high:] = 0.0
                    for q in range(low, high):
                        line[q] = slopes[q - shift]
            for place in small:
                c, i, j = int(place) // 9, int(place) % 9 // 3, int(place) % 3
                first, last = max(0, begin_h - i - p), min(count, height + begin_h - i - p)
                if first < last:
                    size = ((last - first) * width,)
                    a = array_of(floats_at(start + (j * count + first) * width * 4), size)
                    b = array_of(floats_at(x[n, c, p + first + i - begin_h].ctypes.data), size)
                    total = np.float32(0.0)
                    for q in range(size[0]):
                        total += a[q] * b[q]
                    dw[c, i, j] += total


@jit
def _is_any(numbers):
    total = np.float32(0.0)
    for number in numbers:
        total += abs(number)
    return total != 0.0
