"""Products on AMX's matrix tiles for compiled kernels. Operands are addresses.

A processor that has no tiles runs none of these functions (:func:`graphc.backends.host.processor.has_matrix_tiles`).
"""

from __future__ import annotations

from typing import Any

from graphc.backends.onnxruntime.vectors.deferred import Deferred

_INTRINSICS = "graphc.backends.onnxruntime.vectors.tile_intrinsics"
"""The module that makes them; it imports Numba."""

SIDE = 32
"""Rows and columns of a result, and the length of the sums, that one step of a product on tiles has."""

STEP_BYTES = 3 * 2 * SIDE * SIDE
"""Bytes that a step reads of each operand: a square of numbers, as three parts of two bytes."""

configure_tiles = Deferred(_INTRINSICS, "configure_tiles")
"""``f()`` for compiled code: gives this thread tiles of 16 rows of 64 bytes, until :data:`release_tiles`."""

release_tiles = Deferred(_INTRINSICS, "release_tiles")
"""``f()`` for compiled code: this thread's tiles are not saved any more when the system runs another."""

split_rows = Deferred(_INTRINSICS, "split_rows")
"""``f(x, x_row, y, y_row, part, rows)`` for compiled code: the parts of ``rows`` rows of 32 floats, as rows of 32 half words.

``x_row`` and ``y_row`` are the bytes from one row to the next, ``part`` those from the lowest part of a row to the middle one.
Returns whether any number is not finite, or so large (1e17) that products may not be.
"""

split_pairs = Deferred(_INTRINSICS, "split_pairs")
"""``f(x, x_row, y, y_row, part, half, pairs)`` for compiled code: the parts of pairs of rows of 32 floats.

As :data:`split_rows`, but the two numbers of a column lie side by side, and the last 16 columns lie ``half`` bytes behind the
first.
"""

PACKED, PIXEL_BYTES = 64, 192
"""Bytes of a row of a tile where the steps of an operand lie one behind another, and of a row with all its parts."""


def tile_product(kind: str) -> Any:
    """A function ``f(a, b, steps, table, start, start_row, c, c_row)`` for compiled code: 32 × 32 floats c = start + a·b.

    ``_row`` is the bytes from one row to the next, 0 where all rows of ``start`` are the same. There are 1 or more steps. The
    left operand of a step is 32 rows from :data:`split_rows`, the right one 16 pairs from :data:`split_pairs`. Both are
    ``"packed"``, STEP_BYTES for each step, the two tiles of a part side by side; or left ones are ``"pixels"``, rows of
    PIXEL_BYTES; or right ones are ``"pairs"`` of twice as many. The table says where these lie behind a or b, in bytes, for
    each step.
    """
    return Deferred(_INTRINSICS, "tile_product", kind)


row_product = Deferred(_INTRINSICS, "row_product")
"""``f(a, b, steps, c, c_row)`` for compiled code: c = a·b for 16 rows and 32 columns, ``c_row`` bytes from row to row.

A step's left operand are three parts of 16 rows, 1024 bytes each. Its right one is ``"packed"``.
"""


def spread_rows(group: int) -> Any:
    """A function ``f(x, y, y_row, y_sample, rows)`` for compiled code: rows of SIDE floats of x to ``group`` places of y each,
    number by number in turn; whether any is not finite.

    ``y_row`` and ``y_sample`` are the bytes from one row to the next and from one place to the next.
    """
    return Deferred(_INTRINSICS, "spread_rows", group)


def join_rows(group: int) -> Any:
    """A function ``f(x, x_row, x_sample, y, rows)`` for compiled code: rows of SIDE floats of y from ``group`` places of x.

    :func:`spread_rows` would spread them to these places.
    """
    return Deferred(_INTRINSICS, "join_rows", group)


take_next = Deferred(_INTRINSICS, "take_next")
"""``f(address)`` for compiled code: the whole number there, which becomes one more; threads find different ones."""
