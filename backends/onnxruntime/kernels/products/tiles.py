"""Float32 products on the matrix tiles of AMX, which multiply bfloat16 sixteen times as fast as AVX-512 does float32.

A float32 number is the sum of three of bfloat16. Of the nine products of two numbers' parts the three smallest are left out:
they are below 2⁻²⁴ of the whole. The other six, summed in float32, are as exact as products of float32: of 1024 products of
numbers within ±1 the largest error is 5e-6, and 3e-5 in a loop of fused multiply-adds. Numbers and results below 10⁻³¹ lose
digits, and those below 10⁻³⁸ count as zero. Where a number of an operand is not finite or beyond 10¹⁷, another kernel computes
the product again: the parts of an infinite number are not numbers, and parts of a product that overflows have both signs.

Splitting takes time, 0.4 ns a number, so small sides are left to other kernels. One thread reaches 240 to 280 GFLOP/s where
oneDNN has 120 to 160 with AVX-512, and 115 to 140 where oneDNN has 100, beside another system on the same core.

Source: G. Henry, P. Tang, A. Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations", ARITH 2019, https://arxiv.org/abs/1904.06376.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from graphc.backend import Pool
from graphc.backends.host.processor import has_matrix_tiles
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines, scratchpad_of
from graphc.backends.onnxruntime.vectors.functions import LANES, array_of, floats_at, scratch_function, transpose_square
from graphc.backends.onnxruntime.vectors.tiles import (
    PACKED,
    SIDE,
    STEP_BYTES,
    configure_tiles,
    release_tiles,
    split_pairs,
    split_rows,
    take_next,
    tile_product,
)
from graphc.device import Array, Run

DEPTH, BLOCK, CHUNK = 512, 512, 256
"""Most of the sums in a piece, rows or columns of the operand that stays in the cache, and columns that pass by at a time."""


BLOCK_TIME, STEP_TIME, SPLIT_TIME, REGION_TIME, PLAIN_TIME = 150, 149, 0.4, 4000, 2 / 150
"""Nanoseconds of a square of the result, of each of its steps, of splitting a number, of waking the threads, and of a
multiplication with AVX-512."""

LARGEST_SHARE = 0.65
"""Of the time of other kernels that a product may take here to be worth it.

Where another system's threads run on the same cores, products on tiles take 2.1 times as long at worst, and others 1.4 times.
With 0.75 (and as much more for convolutions), ResNet-18, a U-Net, GPT, ViT and BERT were no faster on such a host.
"""

PART, HALF = STEP_BYTES // 3, STEP_BYTES // 6
"""Bytes of a step's numbers in one part, and of half of them."""

multiply_packed = tile_product("packed")

square, result, beginning = scratch_function(SIDE * SIDE), scratch_function(SIDE * SIDE), scratch_function(SIDE)


def is_better_on_tiles(pool: Pool, result: tuple[int, ...], depth: int, others: float | None = None) -> bool:
    """Whether this processor multiplies faster on tiles: products of count × rows × columns, with sums of ``depth`` terms.

    Args:
        others: nanoseconds that other kernels take in one thread, if not those of a product.
    """
    count, rows, columns = result
    if not has_matrix_tiles() or pool.bf16_products:
        return False
    tall, wide, steps = (-(-side // SIDE) for side in (rows, columns, depth))
    stays, passes = sorted((tall, wide))
    pieces = -(-depth // DEPTH)
    blocks = tall * wide * (steps * STEP_TIME + pieces * BLOCK_TIME)
    held = stays * (1 + (pool.threads - 1) / count)
    splits = (held + passes * -(-stays * SIDE // BLOCK)) * steps * SIDE * SIDE * SPLIT_TIME
    regions = pieces * REGION_TIME
    plain = rows * columns * depth * PLAIN_TIME * count if others is None else others
    return count * (blocks + splits) / pool.threads + regions < LARGEST_SHARE * plain / pool.threads


def product_on_tiles(
    pool: Pool, a: Array, b: Array, c: Array, bias: Array | None, otherwise: Callable[[], Run], *, summed: bool = False
) -> Run:
    """c = a·b + bias for float32 matrices, or for as many of each behind a first axis; or c = Σ a·b over that axis.

    Of each piece of the sums, a thread splits one operand, in blocks. Then it takes rows of the other, or columns, splits and
    multiplies them, and takes the next. All threads split the same block: reading what another core has written takes longer.

    Args:
        a, b: with contiguous rows or columns.
        c: with contiguous rows.
        bias: for single matrices.
        otherwise: makes what computes the product where a number is not finite or too large.
        summed: c is one matrix, the sum of the products.
    """
    a, b, c = (x if x.ndim == 3 else x[None] for x in (a, b, c))
    count, rows, columns = c.shape
    depth, rows_stay = a.shape[2], rows < columns
    stays = rows if rows_stay else columns
    chunk = SIDE
    if rows_stay:  # rows of c are written along
        chunk = min(CHUNK, max(SIDE, count * columns // (8 * pool.threads) // SIDE * SIDE))
    piece = -(-depth // -(-depth // DEPTH) // SIDE) * SIDE  # of the sums
    each = max(1, DEPTH // piece) if summed else 1  # pieces of products that are summed at a time
    starts = itertools.product(range(0, len(a) if summed else 1, each), range(0, depth, piece))
    (batch_a, _, column_a), (batch_b, row_b, _) = a.strides, b.strides
    pieces = np.array(
        [
            (n * batch_a + k * column_a, n * batch_b + k * row_b, min(each, len(a) - n), min(piece, depth - k), n + k > 0)
            for n, k in starts
        ],
        dtype=np.int64,
    )
    strip = each * piece // SIDE * STEP_BYTES
    held = -(-min(stays, BLOCK) // SIDE) * strip
    room = held + chunk // SIDE * strip
    scratch = scratchpad_of(pool)
    scratch.reserve(pool.threads * room)
    places = [x for m in (a, b, c) for x in (m.ctypes.data, *m.strides)]
    table = np.array([*places, count, rows, columns, held, room, chunk, int(rows_stay), 0], dtype=np.int64)
    row = np.empty((0,), dtype=np.float32) if bias is None else bias.reshape(-1)
    taken = counters(pool, len(pieces), -(-stays // BLOCK))
    runs = [
        pool.bind(_multiply, (row, table, which, counts, scratch.cell), pool.threads)
        for which, counts in zip(pieces, taken, strict=True)
    ]
    again: list[Run] = []

    def go(held: tuple[Array, ...] = (a, b, c)) -> None:
        taken.fill(0)
        for run in runs:
            run()
        if table[-1]:
            table[-1] = 0
            if not again:
                again.append(otherwise())
            again[0]()

    return go


@jit
def split_left(x, row, column, rows, depth, y, strip, square):
    """The strips of SIDE rows of a left operand, of ``depth`` columns, ``row`` and ``column`` bytes apart.

    ``strip`` is the bytes from a strip to the next, ``square`` the address of SIDE × SIDE floats of scratch. Returns what
    ``split_rows`` does.
    """
    large = False
    for m in range(0, rows, SIDE):
        for k in range(0, depth, SIDE):
            to = y + m // SIDE * strip + k // SIDE * STEP_BYTES
            at = x + m * row + k * column
            if rows - m < SIDE or depth - k < SIDE or (row != 4 and column != 4):
                _copy_square(at, row, column, min(SIDE, rows - m), min(SIDE, depth - k), square)
                large |= split_rows(square, 4 * SIDE, to, PACKED, PART, SIDE)
            elif column == 4:
                large |= split_rows(at, row, to, PACKED, PART, SIDE)
            else:
                transpose_tile(at, column, square)
                large |= split_rows(square, 4 * SIDE, to, PACKED, PART, SIDE)
    return large


@jit
def split_right(x, row, column, depth, columns, y, strip, square):
    """The strips of SIDE columns of a right operand, of ``depth`` rows, ``row`` and ``column`` bytes apart."""
    large = False
    for n in range(0, columns, SIDE):
        for k in range(0, depth, SIDE):
            to = y + n // SIDE * strip + k // SIDE * STEP_BYTES
            at = x + k * row + n * column
            if columns - n < SIDE or depth - k < SIDE or (row != 4 and column != 4):
                _copy_square(at, row, column, min(SIDE, depth - k), min(SIDE, columns - n), square)
                large |= split_pairs(square, 4 * SIDE, to, PACKED, PART, HALF, SIDE // 2)
            elif column == 4:
                large |= split_pairs(at, row, to, PACKED, PART, HALF, SIDE // 2)
            else:
                transpose_tile(at, column, square)
                large |= split_pairs(square, 4 * SIDE, to, PACKED, PART, HALF, SIDE // 2)
    return large


@jit
def transpose_tile(x, x_row, square):
    """square = xᵀ for SIDE × SIDE floats at an address; ``x_row`` is the bytes from one row to the next."""
    for i in range(0, SIDE, LANES):
        for j in range(0, SIDE, LANES):
            transpose_square(x + i * x_row + j * 4, x_row, square + j * 4 * SIDE + i * 4, 4 * SIDE)


@jit
def _copy_square(x, row, column, rows, columns, square):
    """A part of a matrix, with zeros behind its last row and column."""
    y = array_of(floats_at(square), (SIDE, SIDE))
    for r in range(SIDE):
        for n in range(SIDE):
            y[r, n] = np.float32(0)
    for r in range(rows):
        for n in range(columns):
            y[r, n] = array_of(floats_at(x + r * row + n * column), (1,))[0]


@jit
def _write_edge(square, c, row, rows, columns, adds):
    """c = square, or c += square, for the rows and columns that c has."""
    x = array_of(floats_at(square), (SIDE, SIDE))
    for r in range(rows):
        y = array_of(floats_at(c + r * row), (columns,))
        for n in range(columns):
            y[n] = x[r, n] + (y[n] if adds else np.float32(0))


def counters(pool: Pool, *shape: int) -> Array:
    """Of units that are taken, one for each thread, on cache lines of their own; for :func:`take_near`."""
    return on_lines((*shape, pool.threads, 1), np.int64)


@jit
def take_near(taken, thread, units):
    """A unit that no thread has taken yet, of this one's share or else of another's; -1: none is left.

    A thread keeps to what it computes in other kernels, too, and one that runs slowly, on a core that others use, delays none.
    """
    threads = taken.shape[0]
    for turn in range(threads):
        owner = (thread + turn) % threads
        unit = units * owner // threads + take_next(taken[owner].ctypes.data)
        if unit < units * (owner + 1) // threads:
            return unit
    return -1


@jit
def _multiply(bias, table, piece, taken, cell, start, stop):
    """Multiply a piece: where it begins in a and b, how many products it sums, the terms of each, whether it adds to c."""
    first_a, a_batch, a_row, a_column, first_b, b_batch, b_row, b_column, first_c, c_batch, c_row = table[:11]
    number, rows, columns, held, room, chunk, rows_stay = table[12:19]
    shift_a, shift_b, summed, depth, adds = piece
    steps = summed * ((depth + SIDE - 1) // SIDE)
    strip = steps * STEP_BYTES
    stays, passes = (rows, columns) if rows_stay else (columns, rows)
    chunks = (passes + chunk - 1) // chunk
    units, begin = number * chunks, beginning()
    extra, of_square = square(), result()
    row = array_of(floats_at(begin), (SIDE,))
    for n in range(SIDE):
        row[n] = np.float32(0)
    configure_tiles()
    large = False
    for thread in range(start, stop):
        block = cell[0] + thread * room
        strips = block + held
        for first in range(0, stays, BLOCK):
            kept, size = -1, min(BLOCK, stays - first)
            while True:
                unit = take_near(taken[first // BLOCK], thread, units)
                if unit < 0:
                    break
                n, p = unit // chunks, unit % chunks * chunk
                of_a, of_b = first_a + n * a_batch + shift_a, first_b + n * b_batch + shift_b
                count = min(chunk, passes - p)
                for s in range(summed):
                    at_a, at_b, to = of_a + s * a_batch, of_b + s * b_batch, s * (strip // summed)
                    if rows_stay:
                        if kept < 0 or (n != kept and a_batch != 0):
                            large |= split_left(at_a + first * a_row, a_row, a_column, size, depth, block + to, strip, extra)
                        large |= split_right(at_b + p * b_column, b_row, b_column, depth, count, strips + to, strip, extra)
                    else:
                        if kept < 0 or (n != kept and b_batch != 0):
                            large |= split_right(
                                at_b + first * b_column, b_row, b_column, depth, size, block + to, strip, extra
                            )
                        large |= split_left(at_a + p * a_row, a_row, a_column, count, depth, strips + to, strip, extra)
                kept = n
                for s in range(0, size, SIDE):
                    for r in range(0, count, SIDE):
                        i, j = (first + s, p + r) if rows_stay else (p + r, first + s)
                        height, width = min(SIDE, rows - i), min(SIDE, columns - j)
                        if not adds and bias.size > 0:
                            for v in range(width):
                                row[v] = bias[j + v]
                        one, other = block + s // SIDE * strip, strips + r // SIDE * strip
                        left, right = (one, other) if rows_stay else (other, one)
                        at_c = first_c + n * c_batch + i * c_row + j * 4
                        if height < SIDE or width < SIDE:
                            multiply_packed(left, right, steps, begin, begin, 0, of_square, 4 * SIDE)
                            _write_edge(of_square, at_c, c_row, height, width, adds)
                        elif adds:
                            multiply_packed(left, right, steps, begin, at_c, c_row, at_c, c_row)
                        else:
                            multiply_packed(left, right, steps, begin, begin, 0, at_c, c_row)
    release_tiles()
    if large:
        table[-1] = 1
