"""Sums over the taps of windows for compiled kernels, with neighbouring windows in the lanes of vectors."""

from __future__ import annotations

from typing import Any

from graphc.backends.onnxruntime.vectors.deferred import Deferred
from graphc.backends.onnxruntime.vectors.functions import LANES

_INTRINSICS = "graphc.backends.onnxruntime.vectors.window_intrinsics"
"""The module that makes them; it imports Numba."""

MOST_ROWS = 6
"""Most results of a window that :func:`weighted_sums` computes at once."""

VECTORS = (0, 8, 6, 4, 4, 3, 3) if LANES == 16 else (0, 8, 4, 4, 3, 2, 2)
"""Vectors of windows by the number of results: as many sums as hide the latency of an addition and stay in registers."""

BLOCK = 24 * LANES
"""Windows of a block: a multiple of every width."""


def weighted_sums(rows: int) -> Any:
    """A function ``f(w, w_row, x, offsets, depth, y, y_row)`` for compiled code: for each of ``rows`` rows
    y[v] = Σ w[k] · x[offsets[k] + v] for k below ``depth``, which is 1 or more.

    w, x, y and offsets are addresses; ``w_row`` and ``y_row`` are the bytes from one row to the next, and offsets are bytes as
    well. v goes through ``VECTORS[rows]`` vectors.
    """
    return Deferred(_INTRINSICS, "weighted_sums", rows, VECTORS[rows])


def padded_line(step: int) -> Any:
    """A function ``f(x, first, last, y, count)`` for compiled code: y[v] = x[v · step] for v from ``first`` to below ``last``,
    else 0, for ``count`` floats, and zeros behind them up to a whole vector.

    x and y are addresses; ``step`` is a power of two.
    """
    return Deferred(_INTRINSICS, "padded_line", step)


MOST_LINES, MOST_TAPS = (4, 5) if LANES == 16 else (3, 3)
"""Most lines and taps of :func:`added_products`, whose sums stay in registers."""


def added_products(rows: int, taps: int) -> Any:
    """A function ``f(a, a_row, x, offsets, vectors, sums, sums_row)`` for compiled code: for ``rows`` rows and ``taps`` taps,
    sums[r, t] += Σ a[r, v] · x[offsets[t] + v], v going through ``vectors`` vectors, one or more.

    a, x, offsets and sums are addresses; ``a_row`` and ``sums_row`` are the bytes from one row to the next, and offsets are
    bytes as well.
    """
    return Deferred(_INTRINSICS, "added_products", rows, taps)


def banded_product(rows: int) -> Any:
    """A function ``f(x, x_row, w, depth, y, y_row, count)`` for compiled code: for each of ``rows`` rows a vector
    y[v] = Σ x[k] · w[k, v] for k below ``depth``, of which the first ``count`` are stored.

    x, w and y are addresses; ``x_row`` and ``y_row`` are the bytes from one row to the next. Each k of w has a vector.
    """
    return Deferred(_INTRINSICS, "banded_product", rows)
