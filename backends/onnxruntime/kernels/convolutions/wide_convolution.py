"""Convolutions of float64, which onnxruntime and oneDNN lack on a CPU: products of matrices over pieces of unfolded images.

    cols[k, p] = x[c, place of p + tap]  for k = (c, tap), zero in the padding
    y = W·cols,  dx = fold(Wᵀ·dy),  dw = dy·colsᵀ

A piece has up to DEPTH rows k and CHUNK places p, and stays in the cache. Threads share pieces; in the gradient of x, where
pieces add to the same numbers, they share channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.products.wide_products import GAP, VECTOR, filled, multiply
from graphc.device import Array, Run, in_order
from graphc.ir.ops.convolution import Window

CHUNK, DEPTH = 128, 128
"""Places and rows of a piece."""


class _Geometry:
    """A convolution of float64 arrays as kernels see it: three spatial axes, of which some have one element."""

    def __init__(self, attributes: Mapping[str, Any], x: Array, w: Array, y: Array) -> None:
        window, lift = Window.of(attributes, x.shape[2:], w.shape[2:]), [1] * (5 - x.ndim)
        begin, _ = window.padding
        self.group = int(attributes.get("group") or 1)
        self.places = math.prod(y.shape[2:])
        # sizes of x and of y, taps, steps, distances of taps, padding in front: three of each
        self.numbers = np.array(
            [
                *(*lift, *x.shape[2:]),
                *(*lift, *y.shape[2:]),
                *(*lift, *window.kernel),
                *(*lift, *window.strides),
                *(*lift, *window.dilations),
                *(*(0 for _ in lift), *begin),
            ],
            dtype=np.int64,
        )
        self.x = x.reshape(len(x), self.group, x.shape[1] // self.group, -1)
        self.y = y.reshape(len(y), self.group, y.shape[1] // self.group, -1)
        self.w = w.reshape(self.group, w.shape[0] // self.group, -1)


def _scratch(pool: Pool, parts: int, *sizes: int) -> list[Array]:
    """For each size, as many float64 numbers for each part."""
    each = [-(-size // 8) * 8 for size in sizes]
    memory = scratchpad_of(pool).take(8 * parts * sum(each)).view(np.float64)
    starts = np.cumsum([0, *(parts * size for size in each)])
    return [memory[a:b].reshape(parts, -1) for a, b in itertools.pairwise(starts)]


def convolve(pool: Pool, attributes: Mapping[str, Any], x: Array, w: Array, bias: Array | None, y: Array) -> Run:
    """y = Conv(x, w) + bias"""
    g = _Geometry(attributes, x, w, y)
    chunks = -(-g.places // CHUNK)
    total = g.x.shape[0] * g.group * chunks
    parts = min(pool.threads, total)
    columns, sums = _scratch(pool, parts, DEPTH * filled(CHUNK), g.y.shape[2] * filled(CHUNK))
    row = np.zeros((g.group, g.y.shape[2])) if bias is None else bias.reshape(g.group, -1)
    return pool.bind(_convolve, (g.x, g.w, row, g.y, g.numbers, columns, sums), parts)


def input_gradient(pool: Pool, attributes: Mapping[str, Any], dy: Array, w: Array, dx: Array, bias: Array | None = None) -> Run:
    """dx of y = Conv(x, w), + bias"""
    g = _Geometry(attributes, dx, w, dy)
    channels = g.x.shape[2]
    blocks = min(channels, max(1, -(-pool.threads // (len(g.x) * g.group))))
    parts = min(pool.threads, len(g.x) * g.group * blocks)
    columns, slopes = _scratch(pool, parts, DEPTH * filled(CHUNK), g.y.shape[2] * filled(CHUNK))
    row = np.zeros((g.group, channels)) if bias is None else bias.reshape(g.group, -1)
    arguments = (g.y, g.w, row, g.x, g.numbers, columns, slopes, np.int64(blocks))
    return pool.bind(_input_gradient, arguments, parts)


def weight_gradient(pool: Pool, attributes: Mapping[str, Any], x: Array, dy: Array, dw: Array) -> Run:
    """dw of y = Conv(x, w)"""
    g = _Geometry(attributes, x, dw, dy)
    parts = min(pool.threads, len(g.x) * -(-g.places // CHUNK))
    rows = g.w.shape[2]
    columns, slopes, sums = _scratch(
        pool, parts, DEPTH * filled(CHUNK), CHUNK * filled(g.y.shape[2]), g.group * rows * filled(g.y.shape[2])
    )
    run = pool.bind(_weight_gradient, (g.x, g.y, g.numbers, columns, slopes, sums, np.int64(rows)), parts)
    arguments = sums, g.w, np.int64(rows)
    return in_order([run, pool.bind(_add_sums, arguments, g.group * g.w.shape[1], max(1, 4096 // rows))])


@jit
def _tap(numbers, k):
    """Of row k: its channel, taps in front and above, distance to the left, and the places of a line where it lies inside."""
    out_w, size_w, step_w = numbers[5], numbers[2], numbers[11]
    taps_d, taps_h, taps_w = numbers[6:9]
    t = k % (taps_d * taps_h * taps_w)
    shift = t % taps_w * numbers[14] - numbers[17]
    low = max(0, -(shift // step_w))
    high = max(low, min(out_w, (size_w - 1 - shift) // step_w + 1))
    return k // (taps_d * taps_h * taps_w), t // (taps_h * taps_w), t // taps_w % taps_h, shift, low, high


@jit
def _line(numbers, i, j, p):
    """Where the line of x begins that lies under taps (i, j) of place p; -1 in the padding."""
    size_d, size_h, size_w, _, out_h, out_w = numbers[:6]
    d = p // (out_h * out_w) * numbers[9] + i * numbers[12] - numbers[15]
    h = p // out_w % out_h * numbers[10] + j * numbers[13] - numbers[16]
    return (d * size_h + h) * size_w if 0 <= d < size_d and 0 <= h < size_h else -1


@jit
def _unfold(x, numbers, first, last, start, stop, columns):
    """columns[k - first, p - start] = x under tap k of place p, zero in the padding and behind the last place."""
    out_w, step_w = numbers[5], numbers[11]
    width = (stop - start + VECTOR - 1) // VECTOR * VECTOR + GAP
    for k in range(first, last):
        c, i, j, shift, low, high = _tap(numbers, k)
        p, base = start, (k - first) * width
        while p < stop:
            q = p % out_w
            until, line, to = min(out_w, q + stop - p), _line(numbers, i, j, p), base + p - start - q
            inside = min(max(low, q), until) if line >= 0 else until
            outside = max(min(high, until), inside)
            for v in range(q, inside):
                columns[to + v] = 0.0
            if step_w == 1:
                for v in range(inside, outside):
                    columns[to + v] = x[c, line + shift + v]
            else:
                for v in range(inside, outside):
                    columns[to + v] = x[c, line + shift + v * step_w]
            for v in range(outside, until):
                columns[to + v] = 0.0
            p += until - q
        for v in range(stop - start, width - GAP):
            columns[base + v] = 0.0


@jit
def _fold(x, numbers, first, last, start, stop, columns):
    """Adds columns[k - first, p - start] to x under tap k of place p."""
    out_w, step_w = numbers[5], numbers[11]
    width = (stop - start + VECTOR - 1) // VECTOR * VECTOR + GAP
    for k in range(first, last):
        c, i, j, shift, low, high = _tap(numbers, k)
        p, base = start, (k - first) * width
        while p < stop:
            q = p % out_w
            until, line, source = min(out_w, q + stop - p), _line(numbers, i, j, p), base + p - start - q
            if line >= 0 and step_w == 1:
                for v in range(max(low, q), min(high, until)):
                    x[c, line + shift + v] += columns[source + v]
            elif line >= 0:
                for v in range(max(low, q), min(high, until)):
                    x[c, line + shift + v * step_w] += columns[source + v]
            p += until - q


@jit
def _convolve(x, w, bias, y, numbers, columns, sums, start, stop):
    parts, rows, places = columns.shape[0], w.shape[2], y.shape[3]
    results, chunks = y.shape[2], (y.shape[3] + CHUNK - 1) // CHUNK
    total = x.shape[0] * x.shape[1] * chunks
    for part in range(start, stop):
        b, c = columns[part].ctypes.data, sums[part].ctypes.data
        for item in range(total * part // parts, total * (part + 1) // parts):
            n, g, first = item // chunks // x.shape[1], item // chunks % x.shape[1], item % chunks * CHUNK
            last = min(places, first + CHUNK)
            width = (last - first + VECTOR - 1) // VECTOR * VECTOR + GAP
            for k in range(0, rows, DEPTH):
                depth = min(DEPTH, rows - k)
                _unfold(x[n, g], numbers, k, k + depth, first, last, columns[part])
                a = w[g].ctypes.data + k * 8
                multiply(a, rows * 8, 8, results, b, width * 8, depth, c, width * 8, width - GAP, k > 0)
            for m in range(results):
                more = bias[g, m]
                for p in range(first, last):
                    y[n, g, m, p] = sums[part, m * width + p - first] + more


@jit
def _input_gradient(dy, w, bias, dx, numbers, columns, slopes, blocks, start, stop):
    parts, rows, places = columns.shape[0], w.shape[2], dy.shape[3]
    results, channels, groups = dy.shape[2], dx.shape[2], dx.shape[1]
    taps, total = rows // channels, dx.shape[0] * groups * blocks
    for part in range(start, stop):
        c, b = columns[part].ctypes.data, slopes[part].ctypes.data
        for item in range(total * part // parts, total * (part + 1) // parts):
            n, g, block = item // blocks // groups, item // blocks % groups, item % blocks
            begin, end = channels * block // blocks, channels * (block + 1) // blocks
            for channel in range(begin, end):
                for p in range(dx.shape[3]):
                    dx[n, g, channel, p] = bias[g, channel]
            each = max(1, DEPTH // taps)
            for first in range(0, places, CHUNK):
                last = min(places, first + CHUNK)
                width = (last - first + VECTOR - 1) // VECTOR * VECTOR + GAP
                for m in range(results):
                    for p in range(first, last):
                        slopes[part, m * width + p - first] = dy[n, g, m, p]
                    for p in range(last - first, width - GAP):
                        slopes[part, m * width + p] = 0.0
                for channel in range(begin, end, each):
                    k, until = channel * taps, min(end, channel + each) * taps
                    for upper in range(k, until, DEPTH):
                        high = min(until, upper + DEPTH)
                        a = w[g].ctypes.data + upper * 8
                        multiply(a, 8, rows * 8, high - upper, b, width * 8, results, c, width * 8, width - GAP, False)
                        _fold(dx[n, g], numbers, upper, high, first, last, columns[part])


@jit
def _weight_gradient(x, dy, numbers, columns, slopes, sums, rows, start, stop):
    """Each part sums over its own places, into (rows × results) numbers for each group."""
    parts, places, results, groups = columns.shape[0], dy.shape[3], dy.shape[2], dy.shape[1]
    chunks = (places + CHUNK - 1) // CHUNK
    total, wide = x.shape[0] * chunks, (results + VECTOR - 1) // VECTOR * VECTOR + GAP
    for part in range(start, stop):
        a, b = columns[part].ctypes.data, slopes[part].ctypes.data
        for k in range(groups * rows * wide):
            sums[part, k] = 0.0
        for item in range(total * part // parts, total * (part + 1) // parts):
            n, first = item // chunks, item % chunks * CHUNK
            last = min(places, first + CHUNK)
            count = last - first
            width = (count + VECTOR - 1) // VECTOR * VECTOR + GAP
            for g in range(groups):
                for m in range(results):
                    for p in range(count):
                        slopes[part, p * wide + m] = dy[n, g, m, first + p]
                for m in range(results, wide - GAP):
                    for p in range(count):
                        slopes[part, p * wide + m] = 0.0
                for k in range(0, rows, DEPTH):
                    depth = min(DEPTH, rows - k)
                    _unfold(x[n, g], numbers, k, k + depth, first, last, columns[part])
                    c = sums[part].ctypes.data + (g * rows + k) * wide * 8
                    multiply(a, width * 8, 8, depth, b, wide * 8, count, c, wide * 8, wide - GAP, True)


@jit
def _add_sums(sums, dw, rows, start, stop):
    results = dw.shape[1]
    wide = (results + VECTOR - 1) // VECTOR * VECTOR + GAP
    for item in range(start, stop):
        g, m = item // results, item % results
        for k in range(rows):
            total = 0.0
            for part in range(sums.shape[0]):
                total += sums[part, (g * rows + k) * wide + m]
            dw[g, m, k] = total
