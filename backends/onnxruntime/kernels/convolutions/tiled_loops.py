"""The compiled loops of :mod:`.tiled_convolution`."""

from __future__ import annotations

import numpy as np

from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.products.tiles import HALF, PART, take_near, transpose_tile
from graphc.backends.onnxruntime.vectors.functions import LANES, array_of, floats_at, scratch_function, transpose_square
from graphc.backends.onnxruntime.vectors.tiles import (
    PACKED,
    PIXEL_BYTES,
    SIDE,
    STEP_BYTES,
    configure_tiles,
    join_rows,
    release_tiles,
    split_pairs,
    split_rows,
    spread_rows,
    tile_product,
)

MOST_TAPS, MOST_SAMPLES, WIDE = 25, 16, 16
"""Taps of a window, samples of a group and pixels that are turned at a time, for which threads have scratch."""

HIGHEST = np.finfo(np.float32).max

DEEP = 32
"""Steps of a sum over positions between additions: what they read stays in the cache for the next tap."""

multiply_pixels, multiply_pairs = tile_product("pixels"), tile_product("pairs")
result_square, other_square = scratch_function(SIDE * SIDE), scratch_function(SIDE * SIDE)
beginning = scratch_function(SIDE)
spread1, spread2, spread4, spread8, spread16 = (spread_rows(1 << k) for k in range(5))
join1, join2, join4, join8, join16 = (join_rows(1 << k) for k in range(5))
turned_pixels = scratch_function(WIDE * MOST_SAMPLES * SIDE)
turned_weights = scratch_function(MOST_TAPS * SIDE * SIDE)


@jit
def _clear(address, count):
    numbers = array_of(floats_at(address), (count // 4,))
    for k in range(numbers.size):
        numbers[k] = np.float32(0)


@jit
def split_images(x, sizes, first, count, cell, start, stop):
    """Split a padded row of SIDE channels of a group for each unit."""
    group, rows, columns, begin_h, begin_w, plane, image = sizes[:7]
    before, planes, pairs = sizes[11], sizes[12], sizes[15]
    samples, channels, height, width = x.shape
    buffer = turned_pixels()
    turned = array_of(floats_at(buffer), (WIDE, group, SIDE))
    line, pixel = SIDE * 4, group * PIXEL_BYTES
    for unit in range(start, stop):
        g, square, h = unit // (planes * rows), unit // rows % planes, unit % rows
        to = cell[0] + before + g * image + square * plane + h * columns * pixel
        if unit == count * planes * rows - 1:
            _clear(to + columns * pixel, SIDE * PIXEL_BYTES)
        if h < begin_h or h >= begin_h + height:
            _clear(to, columns * pixel)
            continue
        _clear(to, begin_w * pixel)
        _clear(to + (begin_w + width) * pixel, (columns - begin_w - width) * pixel)
        to += begin_w * pixel
        c = square * SIDE
        for w in range(0, width, WIDE):
            pixels = min(WIDE, width - w)
            for s in range(group):
                n = (first + g) * group + s
                if n < samples and pixels == WIDE and c + SIDE <= channels:
                    for i in range(0, SIDE, LANES):
                        for j in range(0, WIDE, LANES):
                            source = x[n, c + i, h - begin_h, w + j :].ctypes.data
                            transpose_square(source, x.strides[1], turned[j, s, i:].ctypes.data, group * line)
                    continue
                for i in range(SIDE):
                    if n < samples and c + i < channels:
                        source = x[n, c + i, h - begin_h]
                        for j in range(pixels):
                            turned[j, s, i] = source[w + j]
                    else:
                        for j in range(pixels):
                            turned[j, s, i] = np.float32(0)
            if pairs:
                part = 2 * PIXEL_BYTES // 3
                split_pairs(buffer, line, to + w * pixel, 2 * PIXEL_BYTES, part, part // 2, pixels * group // 2)
            else:
                split_rows(buffer, line, to + w * pixel, PIXEL_BYTES, PIXEL_BYTES // 3, pixels * group)


@jit
def split_weights(w, sizes, turned, cell, start, stop):
    """Split SIDE × SIDE weights of all taps for each unit: those of channels by those of results."""
    taps, planes = sizes[7], sizes[12]
    buffer, square = turned_weights(), other_square()
    line = SIDE * 4
    for unit in range(start, stop):
        m, c = unit // planes * SIDE, unit % planes * SIDE
        first, second = (c, m) if turned else (m, c)
        many, long = min(SIDE, w.shape[0] - first), min(SIDE, w.shape[1] - second) * taps
        numbers = array_of(floats_at(buffer), (SIDE * taps, SIDE))
        whole = long // LANES * LANES if many == SIDE else 0
        for r in range(0, many, LANES):
            for k in range(0, whole, LANES):
                source = w[first + r, second].ctypes.data + k * 4
                transpose_square(source, w.strides[0], numbers[k, r:].ctypes.data, line)
        for r in range(many):
            source = array_of(floats_at(w[first + r, second].ctypes.data), (long,))
            for k in range(whole, long):
                numbers[k, r] = source[k]
        for k in range(long):
            for r in range(many, SIDE):
                numbers[k, r] = np.float32(0)
        for k in range(long, SIDE * taps):
            for r in range(SIDE):
                numbers[k, r] = np.float32(0)
        for tap in range(taps):
            to = cell[0] + (unit * taps + tap) * STEP_BYTES
            if turned:
                transpose_tile(buffer + (taps - 1 - tap) * line, taps * line, square)
                split_pairs(square, line, to, PACKED, PART, HALF, SIDE // 2)
            else:
                split_pairs(buffer + tap * line, taps * line, to, PACKED, PART, HALF, SIDE // 2)


@jit
def _spread(group, x, y, row, sample, rows):
    """See :func:`spread_rows`."""
    if group == 1:
        return spread1(x, y, row, sample, rows)
    if group == 2:
        return spread2(x, y, row, sample, rows)
    if group == 4:
        return spread4(x, y, row, sample, rows)
    if group == 8:
        return spread8(x, y, row, sample, rows)
    return spread16(x, y, row, sample, rows)


@jit
def _join(group, x, row, sample, y, rows):
    """See :func:`join_rows`."""
    if group == 1:
        join1(x, row, sample, y, rows)
    elif group == 2:
        join2(x, row, sample, y, rows)
    elif group == 4:
        join4(x, row, sample, y, rows)
    elif group == 8:
        join8(x, row, sample, y, rows)
    else:
        join16(x, row, sample, y, rows)


@jit
def convolve_rows(bias, y, sizes, table, first, count, taken, failed, cell, start, stop):
    """Compute rows of results that no thread has taken yet."""
    group, _, columns, _, _, _, image, _, height, width, strips, before, _, wide, near, _ = sizes
    steps = table.size
    samples, outs = y.shape[0], y.shape[1]
    line, image_bytes = y.strides[1], y.strides[0]
    result, turned, begin = result_square(), other_square(), beginning()
    row, found = array_of(floats_at(begin), (SIDE,)), array_of(floats_at(turned), (SIDE, SIDE))
    for v in range(SIDE):
        row[v] = np.float32(0)
    pixels, unknown = SIDE // group, False
    configure_tiles()
    for nearest in range(0, wide, near):
        while True:
            unit = take_near(taken[nearest // near], start, count * height)
            if unit < 0:
                break
            g, i = unit // height, unit % height
            source = cell[0] + before + g * image + i * columns * group * PIXEL_BYTES
            for strip in range(strips):
                left = strip * pixels
                for m in range(nearest, min(wide, nearest + near)):
                    if bias.size > 0:
                        for v in range(min(SIDE, outs - m * SIDE)):
                            row[v] = bias[m * SIDE + v]
                    weights = cell[0] + m * steps * STEP_BYTES
                    multiply_pixels(
                        source + strip * SIDE * PIXEL_BYTES, weights, steps, table.ctypes.data, begin, 0, result, 4 * SIDE
                    )
                    transpose_tile(result, 4 * SIDE, turned)
                    first_sample, rows = (first + g) * group, min(SIDE, outs - m * SIDE)
                    if first_sample + group <= samples and left + pixels <= width:
                        to = y[first_sample, m * SIDE, i, left:].ctypes.data
                        unknown |= _spread(group, turned, to, line, image_bytes, rows)
                        continue
                    for v in range(min(SIDE, outs - m * SIDE)):
                        for s in range(min(group, samples - (first + g) * group)):
                            target = y[(first + g) * group + s, m * SIDE + v, i]
                            for p in range(min(pixels, width - left)):
                                value = found[v, p * group + s]
                                target[left + p] = value
                                unknown |= not abs(value) <= HIGHEST
    release_tiles()
    if unknown:
        failed[0] = 1


@jit
def split_slopes(dy, sizes, first, count, before, cell, start, stop):
    """Split a row of SIDE channels of a group for each unit."""
    group, height, width, strips = sizes[0], sizes[8], sizes[9], sizes[10]
    samples, outs = dy.shape[0], dy.shape[1]
    buffer, pixels = other_square(), SIDE // group
    square = array_of(floats_at(buffer), (SIDE, SIDE))
    for unit in range(start, stop):
        m, g, i = unit // (count * height), unit // height % count, unit % height
        for strip in range(strips):
            present = min(pixels, width - strip * pixels)
            to = cell[0] + before + (unit * strips + strip) * STEP_BYTES
            if present == pixels and (first + g + 1) * group <= samples and (m + 1) * SIDE <= outs:
                source = dy[(first + g) * group, m * SIDE, i, strip * pixels :].ctypes.data
                _join(group, source, dy.strides[1], dy.strides[0], buffer, SIDE)
                split_rows(buffer, 4 * SIDE, to, PACKED, PART, SIDE)
                continue
            for v in range(SIDE):
                for s in range(group):
                    n = (first + g) * group + s
                    if n < samples and m * SIDE + v < outs:
                        source = dy[n, m * SIDE + v, i]
                        for p in range(present):
                            square[v, p * group + s] = source[strip * pixels + p]
                        for p in range(present, pixels):
                            square[v, p * group + s] = np.float32(0)
                    else:
                        for p in range(pixels):
                            square[v, p * group + s] = np.float32(0)
            split_rows(buffer, 4 * SIDE, to, PACKED, PART, SIDE)


@jit
def multiply_slopes(sizes, table, shifts, count, before, adds, taken, cell, start, stop):
    """Sum a part of the positions for SIDE × SIDE weights of all taps, as long as there are some that nobody has taken."""
    plane, taps, height, strips = sizes[5], sizes[7], sizes[8], sizes[10]
    images, deep, wide, parts = sizes[11], sizes[12], sizes[13], sizes[14]
    blocks, begin = count * height * strips, beginning()
    row = array_of(floats_at(begin), (SIDE,))
    for v in range(SIDE):
        row[v] = np.float32(0)
    configure_tiles()
    while True:
        unit = take_near(taken, start, parts * deep * wide)
        if unit < 0:
            break
        part, m, c = unit // (deep * wide), unit // deep % wide, unit % deep
        low, high = blocks * part // parts, blocks * (part + 1) // parts
        sums = cell[0] + unit * taps * SIDE * SIDE * 4
        if low == high and not adds:
            _clear(sums, taps * SIDE * SIDE * 4)
        for block in range(low, high, DEEP):
            slopes = cell[0] + before + (m * blocks + block) * STEP_BYTES
            for tap in range(taps):
                pixels = cell[0] + images + c * plane + shifts[tap]
                total, steps, places = sums + tap * SIDE * SIDE * 4, min(DEEP, high - block), table[block:].ctypes.data
                if adds or block > low:
                    multiply_pairs(slopes, pixels, steps, places, total, 4 * SIDE, total, 4 * SIDE)
                else:
                    multiply_pairs(slopes, pixels, steps, places, begin, 0, total, 4 * SIDE)
    release_tiles()


@jit
def write_gradient(dw, parts, failed, cell, start, stop):
    """dw[m, c, t] = Σ over parts, for SIDE × SIDE weights of each unit."""
    outs, channels, taps = dw.shape
    deep, wide = (channels + SIDE - 1) // SIDE, (outs + SIDE - 1) // SIDE
    sums = array_of(floats_at(cell[0]), (parts, wide, deep, taps, SIDE, SIDE))
    unknown = False
    for unit in range(start, stop):
        m, c = unit // deep, unit % deep
        for part in range(1, parts):
            total, other = sums[0, m, c], sums[part, m, c]
            for t in range(taps):
                for v in range(SIDE):
                    for u in range(SIDE):
                        total[t, v, u] += other[t, v, u]
        for v in range(min(SIDE, outs - m * SIDE)):
            target = dw[m * SIDE + v]
            for u in range(min(SIDE, channels - c * SIDE)):
                for t in range(taps):
                    value = sums[0, m, c, t, v, u]
                    target[c * SIDE + u, t] = value
                    unknown |= not abs(value) <= HIGHEST
    if unknown:
        failed[0] = 1
