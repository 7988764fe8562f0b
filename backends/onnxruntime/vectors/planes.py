"""Windows of single planes for compiled kernels, with neighbouring windows in the lanes of vectors and no copies.

Planes are addresses, and lines lie ``line`` bytes apart. ``sizes``: height and width of the plane that is read. ``top``: its
line, possibly before the first, that the first window reads; ``begin``: the padding before its columns. ``zeros``: the address
of as many zeros as it has columns.
"""

from __future__ import annotations

from typing import Any

from graphc.backends.onnxruntime.vectors.deferred import Deferred

_INTRINSICS = "graphc.backends.onnxruntime.vectors.plane_intrinsics"
"""The module that makes them; it imports Numba."""


def plane_windows(taps: int, step: int, rows: int) -> Any:
    """``f(x, line, zeros, sizes, top, begin, w, w_step, y, y_line, count, columns, follows, other)`` for compiled code:
    y[r, q] = between(scale · Σ w[i, j] · x[r·step + i, q·step + j] + shift + other[r, q], low, high) for square windows of
    ``taps``, for ``count`` rows of at most ``rows``.

    Weights lie ``w_step`` bytes apart. follows: scale, shift, low and high. other: the address of a residual that lies as y
    does; 0: there is none.
    """
    return Deferred(_INTRINSICS, "plane_windows", taps, step, rows)


def plane_products(taps: int, step: int, rows: int) -> Any:
    """``f(x, line, zeros, sizes, top, begin, dy, dy_line, columns, sums)`` for compiled code: adds Σ dy[r, q] ·
    x[r·step + i, q·step + j] over ``rows`` rows to the vector of sums of each tap, whose lanes are to be added up.
    """
    return Deferred(_INTRINSICS, "plane_products", taps, step, rows)


def plane_slopes(taps: int, odd_h: int, odd_w: int, rows: int) -> Any:
    """``f(dy, line, zeros, sizes, top, begin, w, dx, dx_line, count, columns)`` for compiled code: of y as
    :func:`plane_windows` makes it with steps of two, the gradient of ``count`` rows of x, the first one even, of at most
    2 · ``rows``.

    odd_h, odd_w: whether the padding in front is odd. top: half of the first row and of the padding before it, each rounded
    down; begin: half of the padding before the columns. columns: of x.
    """
    return Deferred(_INTRINSICS, "plane_slopes", taps, odd_h, odd_w, rows)
