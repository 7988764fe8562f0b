"""Products of a few rows with a matrix that lies in panels of columns, inside compiled loops over time.

Panels lie one behind another, each ``depth`` rows of WIDE_PANEL columns; the last one may have PANEL columns alone.
"""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.kernels.panels import multiply_rows
from graphc.backends.onnxruntime.vectors.functions import (
    LANES,
    PANEL,
    WIDE_PANEL,
    array_of,
    floats_at,
    tile_function,
    transpose_square,
)

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
        panel = array_of(floats_at(packed[d, first].ctypes.data), (depth, width))
        taken = min(width, filled - first)
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
    r = 0
    while rows - r >= 6:
        wide6(a + r * lda, lda, 4, b, WIDE_PANEL * 4, depth, c + r * ldc, ldc)
        r += 6
    left, x, y = rows - r, a + r * lda, c + r * ldc
    if left == 1:
        wide1(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
    elif left == 2:
        wide2(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
    elif left == 3:
        wide3(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
    elif left == 4:
        wide4(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
    elif left == 5:
        wide5(x, lda, 4, b, WIDE_PANEL * 4, depth, y, ldc)
