"""Products of a few rows with a matrix that lies in panels of columns, inside compiled loops over time.

Panels lie one behind another, each ``depth`` rows of WIDE_PANEL columns; the last one may have PANEL columns alone.

On matrix tiles (:mod:`graphc.backends.onnxruntime.kernels.products.tiles`) the matrix is split instead, in strips of SIDE
columns. Rows that hold an infinity come out as NaN there.
"""

from __future__ import annotations

import numpy as np

from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.products.panels import multiply_rows
from graphc.backends.onnxruntime.kernels.products.tiles import split_right, square
from graphc.backends.onnxruntime.vectors.functions import (
    LANES,
    PANEL,
    TILE,
    WIDE_PANEL,
    array_of,
    copy_function,
    floats_at,
    tile_function,
    transpose_square,
)
from graphc.backends.onnxruntime.vectors.tiles import PACKED, SIDE, STEP_BYTES, row_product, split_rows

copy_wide = copy_function(WIDE_PANEL // LANES)
wide1, wide2, wide3, wide4, wide5, wide6 = (tile_function(rows, WIDE_PANEL) for rows in range(1, 7))


def padded(columns: int) -> int:
    """Columns of all panels of a matrix."""
    return -(-columns // PANEL) * PANEL


@jit
def pack_transposed(r, packed, start, stop):
    """Write the panels of rᵀ, with zeros behind the last row of r, to packed: directions × padded columns × depth.

    Rows of r are contiguous.
    """
    _, rows, depth = r.shape
    _, columns, _ = packed.shape
    panels = (columns + WIDE_PANEL - 1) // WIDE_PANEL
    for unit in range(start, stop):
        d, first = unit // panels, unit % panels * WIDE_PANEL
        width = min(WIDE_PANEL, columns - first)
        place = packed[d, first].ctypes.data
        panel = array_of(floats_at(place), (depth, width))
        for v in range(0, width, LANES):
            whole = depth // LANES * LANES if first + v + LANES <= rows else 0
            for k in range(0, whole, LANES):
                transpose_square(r[d, first + v, k:].ctypes.data, r.strides[1], place + (k * width + v) * 4, width * 4)
            for n in range(v, v + LANES):
                for k in range(whole, depth):
                    panel[k, n] = r[d, first + n, k] if first + n < rows else 0.0


@jit
def pack(r, packed, start, stop):
    """Write the panels of r, with zeros behind its last column, to packed: directions × padded columns × depth."""
    _, depth, filled = r.shape
    _, columns, _ = packed.shape
    panels = (columns + WIDE_PANEL - 1) // WIDE_PANEL
    for unit in range(start, stop):
        d, first = unit // panels, unit % panels * WIDE_PANEL
        width = min(WIDE_PANEL, columns - first)
        place = packed[d, first].ctypes.data
        taken = min(width, filled - first)
        if taken == WIDE_PANEL:
            copy_wide(r[d, 0, first:].ctypes.data, r.strides[1], place, WIDE_PANEL * 4, depth)
            continue
        panel = array_of(floats_at(place), (depth, width))
        for k in range(depth):
            for v in range(taken):
                panel[k, v] = r[d, k, first + v]
            for v in range(taken, width):
                panel[k, v] = 0.0


@jit
def product(a, lda, b, columns, depth, c, ldc, rows):
    """c = a·b for ``rows`` rows and all columns of the panels; addresses, with the bytes from one row to the next."""
    for first in range(0, columns, WIDE_PANEL):
        of_b, of_c = b + first * depth * 4, c + first * 4
        if columns - first < WIDE_PANEL:
            multiply_rows(a, lda, 4, of_b, PANEL * 4, depth, of_c, ldc, rows)
        else:
            _multiply_wide_rows(a, lda, of_b, depth, of_c, ldc, rows)


@jit
def _multiply_wide_rows(a, lda, b, depth, c, ldc, rows):
    """Multiply by a wide panel in tiles of nearly the same height, since small ones wait for numbers of the panel."""
    left, x, y = rows, a, c
    while left > 0:
        tiles = (left + TILE - 1) // TILE
        height = (left + tiles - 1) // tiles
        if height == 6:
            wide6(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
        elif height == 5:
            wide5(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
        elif height == 4:
            wide4(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
        elif height == 3:
            wide3(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
        elif height == 2:
            wide2(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
        else:
            wide1(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
        x, y, left = x + height * lda, y + height * ldc, left - height


TILED_ROWS, TILED_COLUMNS = 16, SIDE
"""Rows and columns of a product on tiles."""

FEWEST_TILED = 12
"""Rows from which tiles, which always compute TILED_ROWS, are faster."""


def steps_of(depth: int) -> int:
    """Steps of a sum on tiles."""
    return -(-depth // SIDE)


@jit
def split(r, packed, turned, start, stop):
    """Split r, or rᵀ where it is ``turned``, for products on tiles: a strip of a direction for each unit.

    packed: directions × columns, padded to TILED_COLUMNS × floats of a column's steps.
    """
    depth, columns = (r.shape[2], r.shape[1]) if turned else (r.shape[1], r.shape[2])
    row, column = (4, r.strides[1]) if turned else (r.strides[1], 4)
    extra = square()
    strips = packed.shape[1] // SIDE
    for unit in range(start, stop):
        d, first = unit // strips, unit % strips * SIDE
        count = max(0, min(SIDE, columns - first))
        place = packed[d, first].ctypes.data
        if count > 0:
            split_right(r[d].ctypes.data + first * column, row, column, depth, count, place, 0, extra)
        else:
            array_of(floats_at(place), (SIDE * packed.shape[2],))[:] = 0.0


@jit
def product_on_tiles(a, lda, b, columns, depth, c, ldc, rows, scratch):
    """c = a·b as :func:`product`, for a matrix from :func:`split`; ``scratch`` is the address of TILED_ROWS split rows.

    c has room for TILED_ROWS whole rows behind each multiple of them.
    """
    steps = (depth + SIDE - 1) // SIDE
    strip = steps * STEP_BYTES
    for first in range(0, rows, TILED_ROWS):
        count, at = min(TILED_ROWS, rows - first), a + first * lda
        for k in range(steps):
            to = scratch + k * (STEP_BYTES // 2)
            if depth - k * SIDE >= SIDE:
                split_rows(at + k * SIDE * 4, lda, to, PACKED, 1024, count)
                continue
            extra = square()
            numbers = array_of(floats_at(extra), (TILED_ROWS, SIDE))
            for r in range(count):
                source = array_of(floats_at(at + r * lda + k * SIDE * 4), (depth - k * SIDE,))
                for j in range(SIDE):
                    numbers[r, j] = source[j] if j < source.size else np.float32(0)
            split_rows(extra, 4 * SIDE, to, PACKED, 1024, count)
        for n in range(0, columns, TILED_COLUMNS):
            row_product(scratch, b + n // SIDE * strip, steps, c + first * ldc + n * 4, ldc)
