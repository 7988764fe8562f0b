"""Convolutions with one-pixel windows: products in groups, and the gradient of the weights, Σ dy·xᵀ over the samples.

    dw[m, c] = Σ over samples n and pixels p of dy[n, m, p] · x[n, c, p]

Both operands are contiguous along the sums. One is copied, transposed, into panels (:mod:`..products.panels`), some hundred
pixels at a time; rows of the other pass by in place. A plan says which one, and what a thread computes: its own rows or columns
of the result, or a sum over its own pixels, which are added up at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.kernels.onednn.primitives import MatmulPrimitive
from graphc.backends.onnxruntime.kernels.products.panels import DEPTH, GAP, add_rows, multiply_rows
from graphc.backends.onnxruntime.vectors.functions import LANES, PANEL, TILE, array_of, floats_at, transpose_square
from graphc.device import Array, Run, in_order
from graphc.ir.ops.convolution import Window

WIDE, TALL = 512, 192
"""Columns that are copied into panels at once, and rows that pass by one panel before the next."""

COPY_TIME, RESULT_TIME, SUM_TIME, TURN_TIME = 0.4, 0.8, 0.3, 3.3
"""Cycles of copying a number into panels, of adding to a number of the result once, and of adding up a number of a thread's
sums, in their order or turned. Fitted to 34 shapes of ResNet-50, MobileNetV2 and RegNetY on Zen 5 cores, in one and two threads
and with AVX2: plans chosen so take 1.03 of the time of the best."""

WORTH = 1 << 18
"""Multiplications that are worth waking a thread."""

LARGEST = 1 << 22
"""Most numbers in the sums of all threads, which are memory that nothing else needs."""


def reads_single_pixels(window: Window) -> bool:
    """Whether each window is one pixel, and every pixel a window."""
    return all(n == 1 for n in (*window.kernel, *window.strides)) and window.pads is not None and not any(window.pads)


def grouped_products(pool: Pool, x: Array, w: Array, y: Array, group: int, *, turned: bool = False) -> Run:
    """y = Conv(x, w) for groups of channels and windows of one pixel, or its gradient dx from dy if ``turned``.

    As many products of matrices as samples and groups: oneDNN's convolution takes five times as long.
    """
    lib = library()
    assert lib is not None
    weights = w.reshape(1, group, len(w) // group, w.shape[1])
    images, results = (a.reshape(len(a), group, a.shape[1] // group, -1) for a in (x, y))
    return MatmulPrimitive(lib, weights.swapaxes(2, 3) if turned else weights, images, results, None, pool=pool).runner()


@dataclass(frozen=True, slots=True)
class SumPlan:
    """How a result of ``rows`` × ``columns``, sums over ``samples`` × ``pixels``, is computed.

    Attributes:
        turned: the rows are x's channels, and the result is the transpose of dw.
        parts: first and last row, column and piece of each thread's part; parts differ in one of the three.
        pieces: sample, first pixel and number of pixels of each run of pixels; those of a chunk follow one another.
        time: an estimate, in cycles.
    """

    turned: bool
    rows: int
    columns: int
    parts: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[int, int, int], ...]
    time: float

    @property
    def sums(self) -> int:
        """Sums for each number of the result."""
        return len({part[4:] for part in self.parts})


def plan_of(samples: int, outputs: int, channels: int, pixels: int, threads: int) -> SumPlan:
    """The plan that takes the least time by an estimate."""
    return min(plans_of(samples, outputs, channels, pixels, threads), key=lambda plan: plan.time)


def plans_of(samples: int, outputs: int, channels: int, pixels: int, threads: int) -> list[SumPlan]:
    """All plans: each operand copied into panels, and rows, columns or pixels cut into parts."""
    pieces = tuple((n, p, min(DEPTH, pixels - p)) for n in range(samples) for p in range(0, pixels, DEPTH))
    shapes = (False, outputs, channels), (True, channels, outputs)
    return [plan for shape in shapes for plan in _plans(*shape, pieces, threads)]


def _plans(turned: bool, rows: int, columns: int, pieces: tuple[tuple[int, int, int], ...], threads: int) -> Iterator[SumPlan]:
    everything = (0, rows, 0, columns, 0, len(pieces))
    for axis, unit in ((0, TILE), (2, PANEL), (4, 1)):
        cuts = _cuts(everything[axis + 1], threads, unit)
        parts = tuple((*everything[:axis], *cut, *everything[axis + 2 :]) for cut in itertools.pairwise(cuts))
        time = max(_time(part, pieces) for part in parts)
        sums = len(parts) if axis == 4 else 1
        if sums * rows * columns > LARGEST and sums > 1:
            continue
        if turned or sums > 1:
            time += sums * rows * columns * (TURN_TIME if turned else SUM_TIME) / threads
        yield SumPlan(turned, rows, columns, parts, pieces, time)


def _cuts(total: int, parts: int, unit: int) -> list[int]:
    units = -(-total // unit)
    return sorted({min(total, units * k // parts * unit) for k in range(parts + 1)})


def _time(part: Sequence[int], pieces: Sequence[tuple[int, int, int]]) -> float:
    top, bottom, left, right, first, last = part
    pixels = sum(count for _, _, count in pieces[first:last])
    tiles, panels = -(-(bottom - top) // TILE), -(-(right - left) // PANEL)
    products = tiles * TILE * panels * PANEL / (2 * LANES)
    results = -(-pixels // DEPTH) * (bottom - top) * (right - left)
    return pixels * (products + COPY_TIME * (right - left)) + RESULT_TIME * results


def is_faster(x: Array, dw: Array, dy: Array) -> bool:
    """Whether there are pixels enough for whole vectors of them, as oneDNN needs fewer."""
    return 0 not in (x.size, dy.size) and x.size // (x.shape[0] * x.shape[1]) >= LANES


def weight_gradient(pool: Pool, x: Array, dy: Array, dw: Array) -> Run:
    """dw from x and dy: M × C, N × C × pixels and N × M × pixels, of float32, contiguous."""
    products = len(x) * x.shape[2] * dw.size
    plan = plan_of(len(x), dw.shape[0], dw.shape[1], x.shape[2], max(1, min(pool.threads, products // WORTH)))
    a, b = (x, dy) if plan.turned else (dy, x)
    direct = not plan.turned and plan.sums == 1 and plan.columns % PANEL == 0
    scratch = scratchpad_of(pool)
    width = -(-plan.columns // PANEL) * PANEL
    panels = 4 * (WIDE // PANEL) * (DEPTH * PANEL + GAP)
    of_sums = panels * len(plan.parts)
    each = 4 * plan.rows * width + 4 * GAP
    scratch.reserve(of_sums + (0 if direct else each * plan.sums))
    chunks = [(*part, k if plan.sums > 1 else 0) for k, part in enumerate(plan.parts)]
    numbers = np.array([panels, of_sums, each, 4 * width, int(direct)], dtype=np.int64)
    pieces, parts = np.array(plan.pieces, dtype=np.int64), np.array(chunks, dtype=np.int64)
    multiply = pool.bind(_sum_products, (a, b, dw, numbers, pieces, parts, scratch.cell), len(parts))
    if direct:
        return multiply
    found = np.array([of_sums, each, 4 * width, plan.sums, int(plan.turned)], dtype=np.int64)
    blocks = -(-len(dw) // LANES)
    finish = pool.bind(_finish, (dw, found, scratch.cell), blocks, max(1, 16384 // (LANES * dw.shape[1] * plan.sums)))
    return in_order([multiply, finish])


@jit
def _turn_into_panels(b, row, depth, width, packed, panel):
    """packed[p, k, v] = b[p·PANEL + v, k], for the vectors that b's rows reach; panels are ``panel`` bytes apart."""
    for n in range(0, width, LANES):
        to = packed + n // PANEL * panel + n % PANEL * 4
        square = 0
        if width - n >= LANES:
            for k in range(0, depth - LANES + 1, LANES):
                transpose_square(b + n * row + k * 4, row, to + k * PANEL * 4, PANEL * 4)
                square = k + LANES
            if square < depth and depth >= LANES:  # the last square meets the one before
                k = depth - LANES
                transpose_square(b + n * row + k * 4, row, to + k * PANEL * 4, PANEL * 4)
                square = depth
        for k in range(square, depth):
            y = array_of(floats_at(to + k * PANEL * 4), (LANES,))
            for v in range(LANES):
                if n + v < width:
                    y[v] = array_of(floats_at(b + (n + v) * row + k * 4), (1,))[0]
                else:
                    y[v] = np.float32(0)


@jit
def _sum_products(a, b, c, numbers, pieces, parts, cell, start, stop):
    panels, of_sums, each, c_row, direct = numbers
    if direct == 1:
        c_row = c.strides[0]
    for t in range(start, stop):
        top, bottom, left, right, first, last, number = parts[t]
        packed = cell[0] + t * panels
        result = c.ctypes.data if direct == 1 else cell[0] + of_sums + number * each
        at = first
        while at < last:
            end, depth = at, 0  # a chunk: pieces of DEPTH pixels in all
            while end < last and depth + pieces[end, 2] <= DEPTH:
                depth += pieces[end, 2]
                end += 1
            panel = (depth * PANEL + GAP) * 4
            for n in range(left, right, WIDE):
                width, k = min(WIDE, right - n), 0
                for piece in range(at, end):
                    sample, pixel, count = pieces[piece]
                    source = b[sample, n, pixel:].ctypes.data
                    _turn_into_panels(source, b.strides[1], count, width, packed + k * PANEL * 4, panel)
                    k += count
                for m in range(top, bottom, TALL):
                    for p in range(0, width, PANEL):
                        for r in range(m, min(bottom, m + TALL), TILE):
                            rows, k = min(TILE, bottom - r), 0
                            z = result + r * c_row + (n + p) * 4
                            for piece in range(at, end):
                                sample, pixel, count = pieces[piece]
                                source = a[sample, r, pixel:].ctypes.data
                                y = packed + p // PANEL * panel + k * PANEL * 4
                                if piece == first:
                                    multiply_rows(source, a.strides[1], 4, y, PANEL * 4, count, z, c_row, rows)
                                else:
                                    add_rows(source, a.strides[1], 4, y, PANEL * 4, count, z, c_row, rows)
                                k += count
            at = end


@jit
def _finish(dw, numbers, cell, start, stop):
    """Add up the sums of all threads, and turn them if they are turned; a block of rows of dw at a time."""
    of_sums, each, line, sums, turned = numbers
    for block in range(start, stop):
        first, last = block * LANES, min(dw.shape[0], block * LANES + LANES)
        for part in range(sums):
            base = cell[0] + of_sums + part * each
            if turned == 1:
                for c in range(dw.shape[1]):
                    found = array_of(floats_at(base + c * line + first * 4), (LANES,))
                    for m in range(first, last):
                        dw[m, c] = found[m - first] + (dw[m, c] if part > 0 else np.float32(0))
            else:
                for m in range(first, last):
                    found = array_of(floats_at(base + m * line), (dw.shape[1],))
                    for c in range(dw.shape[1]):
                        dw[m, c] = found[c] + (dw[m, c] if part > 0 else np.float32(0))
