"""Products of a few rows with a matrix that lies in panels of columns, inside compiled loops over time."""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.vectors.functions import PANEL, tile_function

tile1, tile2, tile3, tile4, tile5, tile6 = (tile_function(rows) for rows in range(1, 7))


def panels_of(columns: int) -> int:
    """Number of panels of a matrix."""
    return -(-columns // PANEL)


@jit
def pack_transposed(r, packed, start, stop):
    """packed[d, p, k, v] = r[d, p·PANEL + v, k], zero behind the last row of r: panels of rᵀ"""
    _, rows, depth = r.shape
    panels = packed.shape[1]
    for unit in range(start, stop):
        d, p = unit // panels, unit % panels
        for v in range(PANEL):
            n = p * PANEL + v
            for k in range(depth):
                packed[d, p, k, v] = r[d, n, k] if n < rows else 0.0


@jit
def pack(r, packed, start, stop):
    """packed[d, p, k, v] = r[d, k, p·PANEL + v], zero behind the last column of r: panels of r"""
    _, depth, columns = r.shape
    panels = packed.shape[1]
    for unit in range(start, stop):
        d, p = unit // panels, unit % panels
        first = p * PANEL
        width = min(PANEL, columns - first)
        for k in range(depth):
            for v in range(width):
                packed[d, p, k, v] = r[d, k, first + v]
            for v in range(width, PANEL):
                packed[d, p, k, v] = 0.0


@jit
def product(a, lda, b, panels, depth, c, ldc, rows):
    """c = a·b for ``rows`` rows; addresses, with the bytes from one row to the next."""
    for p in range(panels):
        of_b, of_c = b + p * depth * PANEL * 4, c + p * PANEL * 4
        r = 0
        while rows - r >= 6:
            tile6(a + r * lda, lda, 4, of_b, PANEL * 4, depth, of_c + r * ldc, ldc)
            r += 6
        left, x, y = rows - r, a + r * lda, of_c + r * ldc
        if left == 1:
            tile1(x, lda, 4, of_b, PANEL * 4, depth, y, ldc)
        elif left == 2:
            tile2(x, lda, 4, of_b, PANEL * 4, depth, y, ldc)
        elif left == 3:
            tile3(x, lda, 4, of_b, PANEL * 4, depth, y, ldc)
        elif left == 4:
            tile4(x, lda, 4, of_b, PANEL * 4, depth, y, ldc)
        elif left == 5:
            tile5(x, lda, 4, of_b, PANEL * 4, depth, y, ldc)
