"""Convolutions of few channels, and of wide windows: sums over taps, with neighbouring windows in the lanes of vectors.

    y[m, q] = Σ over channels c and taps t of w[m, c, t] · x[c, q·stride + t·dilation - pad]

oneDNN keeps channels in the lanes. Of 64 channels to 3, which fill 3 lanes of 16, it reaches 70 to 100 GFLOP/s on cores that do
490; of groups of four channels 81; of a line with 25 taps and more, which its fast kernels refuse, 260.

A thread copies a region of the image of one group with its padding, columns and rows by their remainder modulo the stride, so
that each tap of all windows lies one distance from the result. Results are computed along whole lines of the copy; what lies
between the lines is left out when they are copied to y. Of a volume, the layers that windows of one depth read are copied, each
as an image of its own.
"""

from __future__ import annotations

import math

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.lines import copy_padded_line, filled, line1
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.convolutions.direct_plans import (
    LINE,
    RegionArrays,
    are_results_apart,
    blocks_of,
    lifted,
    size_of,
    threads_for,
)
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import BETWEEN, ConvEpilogue, activate_line, between
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


def convolve(pool: Pool, x: Array, w: Array, epilogue: ConvEpilogue, y: Array, window: Window, group: int) -> Run:
    """y = Conv(x, w), and what follows, over one to three axes of space, for float32."""
    images, results, window = _in_space(x), _in_space(y), lifted(window)
    threads = threads_for(y, w, pool.threads)
    blocks = blocks_of(len(x), group, w.shape[1], len(w) // group, size_of(y), window, threads)
    regions = RegionArrays.of(images, w, results, window, group, blocks)
    wide = regions.line + BLOCK
    each = -(-4 * (regions.size + len(w) // group * wide) // 128) * 128
    parts = max(1, min(threads, regions.units))
    scratchpad_of(pool).reserve(each * parts)
    sizes = np.array([regions.units, parts, each, 4 * regions.size, wide], dtype=np.int64)
    weights, cell = w.reshape(len(w), -1), scratchpad_of(pool).cell
    follows = (*epilogue.vectors(len(w)), epilogue.others(results), *epilogue.numbers())
    arguments = (images, weights, *follows, results, regions.cuts, regions.copies, sizes, regions.offsets, cell)
    return pool.bind(_convolve, arguments, parts)


def weight_gradient(pool: Pool, x: Array, dy: Array, dw: Array, window: Window, group: int) -> Run:
    """dw of y = Conv(x, w), as :func:`convolve`.

    Each thread adds up products over its regions, and the sums of all threads are added up; or, where those would take much
    memory, each computes the gradients of its results over all regions.
    """
    images, slopes, window = _in_space(x), _in_space(dy), lifted(window)
    channels, outs, threads = dw.shape[1], len(dw) // group, threads_for(dy, dw, pool.threads)
    blocks = blocks_of(len(x), group, channels, outs, size_of(dy), window, threads, copies=outs)
    regions = RegionArrays.of(images, dw, slopes, window, group, blocks)
    wide = -(-(blocks.rows * blocks.pitch + 2 * LANES) // LINE) * LINE
    each = -(-4 * (regions.size + outs * wide) // 128) * 128
    apart = are_results_apart(dw, group, threads)
    parts = max(1, min(threads, outs // MOST_LINES if apart else regions.units))
    of_sums, line = each * parts, 0 if apart else -(-4 * dw.size // 128) * 128
    scratchpad_of(pool).reserve(of_sums + line * parts)
    sizes = np.array([regions.units, parts, each, 4 * regions.size, wide, of_sums, line], dtype=np.int64)
    shapes = np.array([channels, outs, math.prod(window.kernel), int(apart)], dtype=np.int64)
    flat, cell = dw.reshape(-1), scratchpad_of(pool).cell
    arguments = (images, slopes, flat, shapes, regions.cuts, regions.copies, sizes, regions.offsets, cell)
    run = pool.bind(_add_products, arguments, parts)
    return run if apart else in_order([run, pool.bind(_add_parts, (flat, sizes, cell), dw.size, 16384)])


def _in_space(x: Array) -> Array:
    """N × C × three axes of space."""
    return x.reshape(*x.shape[:2], *(1,) * (5 - x.ndim), *x.shape[2:])


@jit
def _copy_regions(x, n, first, channels, z, copies, top, left, region):
    """Copy the layers of ``channels`` channels that windows at depth ``z`` read."""
    depth, _, _, stride_d, stride_h, stride_w, begin_d, begin_h, begin_w, _, plane, layers, step = copies
    for c in range(channels):
        for k in range(layers):
            at, target = z * stride_d + k * step - begin_d, region + 4 * (c * layers + k) * stride_h * stride_w * plane
            inside = 0 <= at < depth
            image = x[n, first + c, at if inside else 0].ctypes.data
            _copy_region(image, inside, copies, top * stride_h - begin_h, left * stride_w - begin_w, target)


@jit
def _copy_region(image, inside, copies, top, left, target):
    """target[phase of row, phase of column, row, column] = image[row · stride + phase + top, …], zero beyond its edges.

    Zeros only, if not ``inside``.
    """
    _, height, width, _, stride_h, stride_w, _, _, _, pitch, plane, _, _ = copies
    lines = plane // pitch
    for f in range(stride_h):
        for g in range(stride_w):
            first, last = filled(width, stride_w, g + left, pitch)
            for u in range(lines):
                at, row = target + 4 * ((f * stride_w + g) * plane + u * pitch), u * stride_h + f + top
                end = last if inside and 0 <= row < height else first
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
def _convolve(x, w, scale, shift, others, code, alpha, beta, y, cuts, copies, sizes, offsets, cell, start, stop):
    group, deep, height, width, rows, columns, pitch, down, across = cuts
    units, parts, each, of_results, wide = sizes
    channels, outs, depth = x.shape[1] // group, w.shape[0] // group, w.shape[1]
    tiles = (outs + MOST_ROWS - 1) // MOST_ROWS
    few, more, infinity = outs // tiles, outs % tiles, np.float32(np.inf)
    least, most = (alpha, beta) if code == BETWEEN else (-infinity, infinity)
    for part in range(start, stop):
        region = cell[0] + part * each
        made = region + of_results
        for unit in range(units * part // parts, units * (part + 1) // parts):
            block, plot = unit // (down * across), unit % (down * across)
            n, g, z = block // (group * deep), block // deep % group, block % deep
            top, left = plot // across * rows, plot % across * columns
            _copy_regions(x, n, g * channels, channels, z, copies, top, left, region)
            high, across_here = min(rows, height - top), min(columns, width - left)
            length = (high - 1) * pitch + across_here
            for p in range(0, length, BLOCK):
                end, m = min(length, p + BLOCK), 0
                for tile in range(tiles):
                    tall = few + (1 if tile < more else 0)
                    of_w = w[g * outs + m].ctypes.data
                    _sum_taps(tall, of_w, 4 * depth, region, offsets.ctypes.data, depth, made + 4 * m * wide, 4 * wide, p, end)
                    m += tall
            for m in range(outs):
                factor, added = scale[g * outs + m], shift[g * outs + m]
                for u in range(high):
                    source = array_of(floats_at(made + 4 * (m * wide + u * pitch)), (across_here,))
                    row = array_of(floats_at(y[n, g * outs + m, z, top + u, left:].ctypes.data), (across_here,))
                    if others.size > 0:
                        other = array_of(floats_at(others[n, g * outs + m, z, top + u, left:].ctypes.data), (across_here,))
                        for v in range(across_here):
                            row[v] = between(factor * source[v] + added + other[v], least, most)
                    else:
                        for v in range(across_here):
                            row[v] = between(factor * source[v] + added, least, most)
                    if code != BETWEEN:
                        activate_line(row, code, alpha, beta)


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
def _add_products(x, dy, dw, shapes, cuts, copies, sizes, offsets, cell, start, stop):
    group, deep, height, width, rows, columns, pitch, down, across = cuts
    units, parts, each, of_slopes, wide, behind_regions, line = sizes
    channels, outs, taps, apart = shapes
    _, _, _, _, stride_h, stride_w, _, _, _, _, plane, layers, _ = copies
    per_channel, behind = channels * taps, 4 * channels * layers * stride_h * stride_w * plane
    for part in range(start, stop):
        region = cell[0] + part * each
        slopes, of_sums = region + of_slopes, dw.ctypes.data if apart == 1 else cell[0] + behind_regions + part * line
        sums = array_of(floats_at(of_sums), (dw.size,))
        least, most, first, last = 0, outs, units * part // parts, units * (part + 1) // parts
        if apart == 1:
            tiles = (outs + MOST_LINES - 1) // MOST_LINES
            least, most = tiles * part // parts * MOST_LINES, min(outs, tiles * (part + 1) // parts * MOST_LINES)
            first, last = 0, units
        for k in range(least * per_channel, (group - 1) * outs * per_channel + most * per_channel):
            sums[k] = 0.0
        line1(region, 0, 0, region + behind, BLOCK)  # zeros times what is left there would be NaN
        for unit in range(first, last):
            block, plot = unit // (down * across), unit % (down * across)
            n, g, z = block // (group * deep), block // deep % group, block % deep
            top, left = plot // across * rows, plot % across * columns
            _copy_regions(x, n, g * channels, channels, z, copies, top, left, region)
            high, across_here = min(rows, height - top), min(columns, width - left)
            vectors = ((high - 1) * pitch + across_here + LANES - 1) // LANES
            for m in range(least, most):
                for u in range(high):
                    source = dy[n, g * outs + m, z, top + u, left:].ctypes.data
                    line1(source, 0, across_here, slopes + 4 * (m * wide + u * pitch), pitch)
                line1(region, 0, 0, slopes + 4 * (m * wide + high * pitch), LANES)
            for c in range(channels):
                for m in range(least, most, MOST_LINES):
                    tall = min(MOST_LINES, most - m)
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
def _add_parts(dw, sizes, cell, start, stop):
    parts, behind_regions, line = sizes[1], sizes[5], sizes[6]
    total = dw[start:stop]
    for part in range(parts):
        sums = array_of(floats_at(cell[0] + behind_regions + part * line + 4 * start), (stop - start,))
        for k in range(total.size):
            total[k] = sums[k] + (total[k] if part > 0 else np.float32(0))
