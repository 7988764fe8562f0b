"""Matrix products of float64, and of many narrow matrices, over copies of pieces of b and, where its rows are not contiguous,
of a.

A linear layer of 256 by 256 with its gradients, 1024 rows: 1.5 ms in two threads of Zen 5 cores, onnxruntime 4.0, PyTorch 3.1
to 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.products.panels import parts_of_product
from graphc.backends.onnxruntime.vectors.functions import LANES, array_of, doubles_at, floats_at, tile_function
from graphc.device import Array, Run

VECTOR = LANES // 2
"""Numbers in a vector; rows that ``multiply`` reads and writes are filled up to whole vectors."""
_MOST = 4 if LANES == 16 else 2
DEPTH, WIDE, TALL = 128, 128, 96
"""Length of a piece of the sums, and the columns of b and rows of a that are copied at once."""
GAP = 8
"""Numbers between rows of a copy, which would otherwise share the same few sets of the cache."""


def filled(count: int) -> int:
    """The length of a row of ``count`` numbers of a copy."""
    return -(-count // VECTOR) * VECTOR + GAP


def product(pool: Pool, a: Array, b: Array, c: Array, bias: Array | None = None) -> Run:
    """c = a·b + bias for as many matrices each (N × rows × depth, N × depth × columns); those of a and b may lie as they like.

    ``bias`` holds a number for each column.
    """
    count, rows, columns = c.shape
    each = parts_of_product(rows, columns, -(-pool.threads // count))
    parts = np.array([(n, *part) for n in range(count) for part in each], dtype=np.int64)
    workers = min(pool.threads, len(parts))
    size, sizes = c.dtype.itemsize, (DEPTH * filled(WIDE), TALL * filled(DEPTH), TALL * filled(WIDE))
    scratch = scratchpad_of(pool).take(size * workers * sum(sizes)).view(c.dtype).reshape(workers, -1)
    places = [number for x in (a, b) for number in (x.ctypes.data, *x.strides)]
    table = np.array([*places, a.shape[2]], dtype=np.int64)
    row = np.empty(0, dtype=c.dtype) if bias is None else bias.reshape(-1)
    return pool.bind(_product_of(size), (c, row, table, parts, scratch), workers, held=(a, b))


def _rows_of_tiles(columns: int, size: int) -> Any:
    """Make the product for one panel of ``columns`` numbers of ``size`` bytes."""
    set1, set4, set6 = (tile_function(rows, columns, wide=size == 8) for rows in (1, 4, 6))
    add1, add4, add6 = (tile_function(rows, columns, adds=True, wide=size == 8) for rows in (1, 4, 6))

    @jit
    def rows_of_tiles(a, a_row, a_step, rows, b, b_row, depth, c, c_row, adds):
        r = 0
        while rows - r >= 6:
            if adds:
                add6(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row)
            else:
                set6(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row)
            r += 6
        if rows - r >= 4:
            if adds:
                add4(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row)
            else:
                set4(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row)
            r += 4
        while r < rows:
            if adds:
                add1(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row)
            else:
                set1(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row)
            r += 1

    return rows_of_tiles


def _multiplier(size: int) -> Any:
    """Make ``multiply`` for numbers of ``size`` bytes."""
    vector = 4 * LANES // size
    most = _MOST * vector
    narrow, wide = _rows_of_tiles(vector, size), _rows_of_tiles(most, size)

    @jit
    def multiply(a, a_row, a_step, rows, b, b_row, depth, c, c_row, columns, adds):
        """c = a·b, or c += a·b, for whole vectors of ``columns``; addresses and bytes as in ``tile_function``."""
        n = 0
        while columns - n >= most:
            wide(a, a_row, a_step, rows, b + n * size, b_row, depth, c + n * size, c_row, adds)
            n += most
        while n < columns:
            narrow(a, a_row, a_step, rows, b + n * size, b_row, depth, c + n * size, c_row, adds)
            n += vector

    return multiply


multiply = _multiplier(8)
"""For float64."""


@specialized
def _product_of(size: int) -> Callable[..., None]:
    """Make the loop for numbers of ``size`` bytes."""
    vector, numbers_at = 4 * LANES // size, doubles_at if size == 8 else floats_at
    product_of_tiles = multiply if size == 8 else _multiplier(size)

    @jit
    def copy(x, row, column, rows, columns, y, width):
        """y[r·width + n] = x[r, n] for numbers at an address, ``row`` and ``column`` bytes apart."""
        if column == size:
            for r in range(rows):
                line = array_of(numbers_at(x + r * row), (columns,))
                for n in range(columns):
                    y[r * width + n] = line[n]
            return
        for n in range(columns):
            for r in range(rows):
                y[r * width + n] = array_of(numbers_at(x + r * row + n * column), (1,))[0]

    @jit
    def loop(c, bias, table, parts, scratch, start, stop):
        of_a, a_each, a_row, a_step, of_b, b_each, b_row, b_step, length = table
        workers, width, across = scratch.shape[0], WIDE + GAP, DEPTH + GAP
        for worker in range(start, stop):
            pieces = scratch[worker, : DEPTH * width]
            copies = scratch[worker, DEPTH * width : DEPTH * width + TALL * across]
            edge = scratch[worker, DEPTH * width + TALL * across :]
            b, e = pieces.ctypes.data, edge.ctypes.data
            for item in range(len(parts) * worker // workers, len(parts) * (worker + 1) // workers):
                matrix, top, bottom, left, right = parts[item]
                target = c[matrix]
                if bias.size > 0:
                    for r in range(top, bottom):
                        for n in range(left, right):
                            target[r, n] = bias[n]
                for n in range(left, right, WIDE):
                    columns = min(WIDE, right - n)
                    whole = columns // vector * vector
                    for k in range(0, length, DEPTH):
                        depth = min(DEPTH, length - k)
                        adds = k > 0 or bias.size > 0
                        copy(of_b + matrix * b_each + k * b_row + n * b_step, b_row, b_step, depth, columns, pieces, width)
                        for r in range(depth):
                            for v in range(columns, (columns + vector - 1) // vector * vector):
                                pieces[r * width + v] = 0.0
                        for m in range(top, bottom, TALL):
                            height = min(TALL, bottom - m)
                            a, row = of_a + matrix * a_each + m * a_row + k * a_step, a_row
                            if a_step != size:
                                copy(a, a_row, a_step, height, depth, copies, across)
                                a, row = copies.ctypes.data, across * size
                            z, y, line = target[m].ctypes.data + n * size, b + whole * size, width * size
                            product_of_tiles(a, row, size, height, b, line, depth, z, target.strides[0], whole, adds)
                            if whole < columns:
                                product_of_tiles(a, row, size, height, y, line, depth, e, vector * size, vector, False)
                                for r in range(height):
                                    for v in range(columns - whole):
                                        x = edge[r * vector + v]
                                        target[m + r, n + whole + v] = x + (target[m + r, n + whole + v] if adds else 0.0)

    return loop
