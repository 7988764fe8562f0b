"""Sums of pooling windows for compiled kernels: those of rows first, then of neighbours in the row that is left."""

from __future__ import annotations

from typing import Any

from graphc.backends.onnxruntime.vectors.deferred import Deferred

_INTRINSICS = "graphc.backends.onnxruntime.vectors.averaging_intrinsics"
"""The module that makes them; it imports Numba."""


def sums_over_windows(taps: int, stride: int) -> Any:
    """A function ``f(values, line, count)`` for compiled code: line[e] = the sum of the values[q] for which e = q·stride + tap,
    for ``count`` places e.

    Reads whole vectors, from that many windows before the first on as share places with one.
    """
    return Deferred(_INTRINSICS, "sums_over_windows", taps, stride)


def spread_over_windows(taps: int, stride: int) -> Any:
    """A function ``f(x, offsets, weights, count, shares, width, y, columns, y_row, copies)`` for compiled code:
    y[e] = shares[q] · Σ weight · row[q], of ``count`` rows of ``width`` floats, for e = q·stride + tap; 0 in the gaps.

    ``taps`` is at most ``stride``. Writes ``copies`` rows of ``columns`` floats, ``y_row`` bytes from one to the next; other
    operands as of :func:`sum_of_rows`.
    """
    return Deferred(_INTRINSICS, "spread_over_windows", taps, stride)


def sum_of_rows() -> Any:
    """A function ``f(x, offsets, weights, count, width, y)`` for compiled code: y = Σ weight · row, of ``count`` rows of
    ``width`` floats.

    ``offsets`` is the address of the rows' places behind x in bytes, ``weights`` that of a float for each.
    """
    return Deferred(_INTRINSICS, "sum_of_rows")


def sums_of_windows(taps: int, stride: int, dilation: int, *, weighted: bool) -> Any:
    """A function ``f(x, weights, y, count)`` for compiled code: y[q] = Σ x[q·stride + tap·dilation], times weights[q] if
    ``weighted``.

    Reads whole vectors of x.
    """
    return Deferred(_INTRINSICS, "sums_of_windows", taps, stride, dilation, weighted)
