"""Maxima of pooling windows for compiled kernels: those of rows first, then of neighbours in the row that is left."""

from __future__ import annotations

from typing import Any

from graphc.backends.onnxruntime.vectors.deferred import Deferred

_INTRINSICS = "graphc.backends.onnxruntime.vectors.pooling_intrinsics"
"""The module that makes them; it imports Numba."""

MOST_TAPS, LONGEST_STEP, WINDOW_TAPS = 16, 4, 64
"""Taps of a row, strides, and taps of a window that are worth instructions of a kernel's own."""


def highest_of_rows(rows: int, *, exact: bool) -> Any:
    """A function ``f(x, offsets, width, y)`` for compiled code: the maxima of ``rows`` rows of ``width`` floats, column by
    column; whether any number is not finite, if not ``exact``.

    ``offsets`` is the address of the rows' places behind x in bytes. Writes whole vectors, -∞ behind the last maximum.
    ``exact``: NaN gives NaN; else only finite numbers give what they should.
    """
    return Deferred(_INTRINSICS, "highest_of_rows", rows, exact)


def highest_of_windows(taps: int, stride: int, dilation: int, *, exact: bool) -> Any:
    """A function ``f(x, y, count)`` for compiled code: y[q] = the maximum of x[q·stride + tap·dilation].

    Reads whole vectors of x. ``exact``: NaN gives NaN.
    """
    return Deferred(_INTRINSICS, "highest_of_windows", taps, stride, dilation, exact)


def places_in_windows(taps: int, stride: int, dilation: int) -> Any:
    """A function ``f(x, wanted, first, at, count)`` for compiled code: at[q] = the first of the places
    first + q·stride + tap·dilation where x, which begins at ``first``, holds wanted[q]; at[q] stays where there is none.

    Places are int32. Reads whole vectors of x, and reads and writes whole vectors of at.
    """
    return Deferred(_INTRINSICS, "places_in_windows", taps, stride, dilation)


def copied_row() -> Any:
    """A function ``f(x, width, y)`` for compiled code: y = x, ``width`` floats; whether any number is not finite.

    Writes whole vectors, NaN behind the last number.
    """
    return Deferred(_INTRINSICS, "copied_row")


def copied_bytes() -> Any:
    """A function ``f(x, count, y)`` for compiled code: y = x, ``count`` bytes."""
    return Deferred(_INTRINSICS, "copied_bytes")


def highest_taps(rows: int, taps: int, stride: int) -> Any:
    """A function ``f(x, offsets, y, at, count)`` for compiled code: y[q] = the highest of the row[q·stride + tap] of ``rows``
    rows, and at[q], a byte, = the number of the first such tap, from 1 on in the order of rows and taps.

    ``offsets`` is the address of the rows' places behind x in bytes. NaN in x is no maximum; where all are NaN, y is -∞ and at
    0. Reads whole vectors of x.
    """
    return Deferred(_INTRINSICS, "highest_taps", rows, taps, stride)


def sums_at_taps(rows: int, taps: int, stride: int) -> Any:
    """A function ``f(at, values, offsets, numbers, line, count)`` for compiled code: line[e] = the sum of the values[q] of
    ``rows`` rows of windows for which e = q·stride + tap and at[q], a byte, = the row's number + tap.

    ``offsets`` is the address of the places of the rows behind at, and behind values in floats; ``numbers`` that of the rows'
    numbers. Writes the places of ``count`` windows. Reads whole vectors, from that many windows before on as share places
    with one.
    """
    return Deferred(_INTRINSICS, "sums_at_taps", rows, taps, stride)
