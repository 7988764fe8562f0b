"""The arithmetic of reductions, the same for every transport: rows of one slice, one row per rank, become one row.

Low-precision floats (bfloat16, float16) are accumulated in float32 and rounded once. ``tree`` adds by :func:`tree_pairs`, so
that the sum has the same bits as the same tree evaluated in one process. ``adasum`` (Maleki et al. 2020, "Scaling Distributed
Training with Adaptive Summation") combines two gradients so that orthogonal ones are added and parallel ones averaged:

    adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

per tensor, over the same tree. The paper defines it for a power of two of ranks; the tree is what we take for any number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Parts: TypeAlias = "Sequence[tuple[int, int]]"

LOW = frozenset(map(np.dtype, ("float16", ml_dtypes.bfloat16)))
"""Dtypes whose sums are accumulated in float32."""

_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
_BLOCK = 1 << 14  # elements of a dot product taken to float64 at a time


def even_parts(elements: int, size: int, multiple: int = 1) -> list[tuple[int, int]]:
    """``elements`` cut into ``size`` equal consecutive parts, multiples of ``multiple``; the last ones may be shorter.

    >>> even_parts(10, 4, 2)
    [(0, 4), (4, 8), (8, 10), (10, 10)]
    """
    units = -(-elements // multiple)
    length = -(-units // size) * multiple
    return [(min(r * length, elements), min((r + 1) * length, elements)) for r in range(size)]


def tree_pairs(count: int) -> list[tuple[int, int]]:
    """The fixed binary tree over ``count`` rows as steps ``(into, other)``: row ``into`` += row ``other``, in this order.

    ``count`` rows are the sum of the first 2^k and of the rest, 2^k being the largest power of two below ``count``. So
    aligned blocks of 2^k consecutive rows are subtrees: S micro-shards on N workers, both powers of two, give one tree.

    >>> tree_pairs(5)
    [(0, 1), (2, 3), (0, 2), (0, 4)]
    """
    steps: list[tuple[int, int]] = []
    distance = 1
    while distance < count:
        steps.extend((row, row + distance) for row in range(0, count - distance, 2 * distance))
        distance *= 2
    return steps


def combine(rows: Sequence[Array], op: str, out: Array, wide: Array | None = None) -> None:
    """Reduce ``rows`` (any op but adasum) into ``out``, which may be one of them only if that is the first; rows may be spoilt.

    Args:
        rows: in rank order, each like ``out``.
        wide: float32 memory of ``len(rows) * out.size`` elements, used where ``out`` is of a low precision (else allocated).
    """
    if out.dtype in LOW:
        count = out.size
        memory = np.empty(len(rows) * count, np.float32) if wide is None else wide
        widened = [memory[k * count : (k + 1) * count] for k in range(len(rows))]
        for target, row in zip(widened, rows, strict=True):
            widen(row, target)
        combine(widened, op, widened[0])
        out[...] = widened[0]
        return
    if op == "tree":
        for into, other in tree_pairs(len(rows)):
            np.add(rows[into], rows[other], out=rows[into])
        if rows[0] is not out:
            out[...] = rows[0]
        return
    function = _UFUNCS[op]
    if len(rows) == 1:
        out[...] = rows[0]
    else:
        function(rows[0], rows[1], out=out)
        for row in rows[2:]:
            function(out, row, out=out)
    if op == "mean":
        np.divide(out, len(rows), out=out)


def widen(source: Array, target: Array) -> None:
    """Copy into float32; bfloat16 is the upper half of a float32, and shifting is several times as fast as a cast."""
    if source.dtype == ml_dtypes.bfloat16:
        np.left_shift(source.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
    else:
        target[...] = source


def adasum_rows(
    rows: Sequence[Array], cuts: Sequence[tuple[int, int, int]], tensors: int, add_up: Callable[[Array], None]
) -> None:
    """Combine ``rows`` by adasum into ``rows[0]``, in place.

    Args:
        rows: this worker's part of every rank's array, float32 or float64.
        cuts: ``(tensor, start, stop)`` of the tensors in the part; see :func:`cuts_of`.
        tensors: how many tensors the whole array holds.
        add_up: sums a float64 array over all workers in place, so that dot products are over whole tensors.
    """
    steps = tree_pairs(len(rows))
    for level in _levels(steps):
        products = np.zeros((len(level), tensors, 3))
        for k, (into, other) in enumerate(level):
            for tensor, start, stop in cuts:
                products[k, tensor] += _products(rows[into][start:stop], rows[other][start:stop])
        add_up(products.reshape(-1))
        for k, (into, other) in enumerate(level):
            for tensor, start, stop in cuts:
                dot, left, right = products[k, tensor]
                a, b = rows[into][start:stop], rows[other][start:stop]
                np.multiply(a, _coefficient(dot, left), out=a)
                np.multiply(b, _coefficient(dot, right), out=b)
                np.add(a, b, out=a)


def cuts_of(lengths: Sequence[int], part: tuple[int, int]) -> list[tuple[int, int, int]]:
    """``(tensor, start, stop)`` of consecutive tensors of ``lengths`` inside ``part``, counted from its start."""
    cuts = []
    begin = 0
    for tensor, length in enumerate(lengths):
        start, stop = max(begin, part[0]), min(begin + length, part[1])
        if start < stop:
            cuts.append((tensor, start - part[0], stop - part[0]))
        begin += length
    return cuts


def _levels(steps: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Steps of one distance, which do not depend on each other, side by side: their dot products travel together."""
    levels: dict[int, list[tuple[int, int]]] = {}
    for into, other in steps:
        levels.setdefault(other - into, []).append((into, other))
    return list(levels.values())


def _products(a: Array, b: Array) -> tuple[float, float, float]:
    """a·b, a·a and b·b in float64."""
    dot = left = right = 0.0
    for start in range(0, a.size, _BLOCK):
        x, y = a[start : start + _BLOCK].astype(np.float64), b[start : start + _BLOCK].astype(np.float64)
        dot, left, right = dot + float(x @ y), left + float(x @ x), right + float(y @ y)
    return dot, left, right


def _coefficient(dot: float, square: float) -> float:
    """What a gradient of squared norm ``square`` counts; one that is zero leaves the other as it is."""
    return float(1.0 - dot / (2.0 * square)) if square > 0.0 else 1.0
