"""Orders a reduction's loops as its operands lie in memory.

A kernel loops over dimensions as the graph has them, which need not be the order in memory. GroupNormalization sums over
[batch, group, channels of the group × pixels] of an image that lies with its channels last:

    x[batch, pixel, group, channel]        offset = 1048576·c0 + 64·(c2 mod 16384) + 8·r1 + c2 ÷ 16384

There, neighbouring columns are 64 elements apart. Dimension 2 is cut into two loops, of 8 channels and of 16384 pixels, and the
channels become the inner loop: a thread then takes 8 neighbours at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from graphc.backends.fusion.indexing import Linear, Quotient, Term, Variable
from graphc.backends.fusion.kernel_source import KernelSource, KernelSpec, LoopPart, loop_variables, whole_dimensions
from graphc.ir.facts import size_of

MOST_PARTS = 4
"""Most loops of a dimension: each costs a division for every vector of elements."""


def ordered(
    spec: KernelSpec, source: KernelSource, source_of: Callable[[tuple[LoopPart, ...]], KernelSource]
) -> tuple[LoopPart, ...]:
    """Sort the loops of a reduction by how far apart their elements lie in memory, the farthest outermost.

    Returns:
        Empty if one loop a dimension, in the graph's order, reads as many neighbours.

    Args:
        source: the kernel with one loop a dimension.
        source_of: generates the kernel with other loops.
    """
    if not spec.axes:
        return ()
    plain = whole_dimensions(spec)
    loops = _cut(spec, source)
    accesses = sorted(_large(source if loops == plain else source_of(loops)), key=lambda pair: -pair[1])
    variables = dict(zip(loops, loop_variables(spec, loops), strict=True))
    steps: dict[Variable, int] = {}
    for offset, _ in accesses:  # of the largest array that has the variable
        for term, factor in offset.terms:
            if isinstance(term, Variable):
                steps.setdefault(term, abs(factor))
    found = tuple(sorted(loops, key=lambda part: -steps.get(variables[part], part.step)))
    return found if _neighbours(spec, found, accesses) > _neighbours(spec, plain, list(_large(source))) else ()


def _cut(spec: KernelSpec, source: KernelSource) -> tuple[LoopPart, ...]:
    """The dimensions, cut where the large arrays are."""
    plain = whole_dimensions(spec)
    cuts: dict[Variable, set[int]] = {variable: set() for variable in loop_variables(spec, plain)}
    for offset, _ in _large(source):
        for term, _ in offset.terms:
            variable, _, at = _cuts_of(term)
            if variable in cuts:
                cuts[variable] |= at
    found: list[LoopPart] = []
    for part, at in zip(plain, cuts.values(), strict=True):
        steps = [1, *sorted(by for by in at if 1 < by < part.size), part.size]
        if len(steps) - 1 > MOST_PARTS or any(more % fewer for fewer, more in itertools.pairwise(steps)):
            steps = [1, part.size]
        found += [LoopPart(part.dimension, more // fewer, fewer) for fewer, more in reversed(list(itertools.pairwise(steps)))]
    return tuple(found)


def rows_are_neighbours(source: KernelSource, rows: Variable | None, columns: Variable | None) -> bool | None:
    """Whether neighbouring rows, not columns, are neighbours in most of what a reduction reads; None if neither are.

    Args:
        rows, columns: the innermost variable of each.
    """
    found = dict.fromkeys(("rows", "columns"), 0)
    for offset, nbytes in _large(source):
        for along, variable in (("rows", rows), ("columns", columns)):
            if variable is not None and dict(offset.terms).get(variable) == 1:
                found[along] += nbytes
    return None if found["rows"] == found["columns"] else found["rows"] > found["columns"]


def _neighbours(spec: KernelSpec, loops: Sequence[LoopPart], accesses: Sequence[tuple[Linear, int]]) -> int:
    """Bytes of the arrays in which the innermost rows or columns are neighbours."""
    inner = {
        part.dimension in spec.axes: variable
        for part, variable in zip(loops, loop_variables(spec, loops), strict=True)
        if part.size > 1
    }
    return sum(n for offset, n in accesses if any(term in inner.values() and factor == 1 for term, factor in offset.terms))


def _large(source: KernelSource) -> Iterator[tuple[Linear, int]]:
    """(offset, bytes of the array) of what the kernel reads or writes in its loops over columns: what is as large as it."""
    for access in source.traffic:
        if access.inner and 2 * size_of(access.value) >= source.rows * source.columns and access.value.dtype is not None:
            yield access.offset, size_of(access.value) * max(1, int(access.value.dtype.itemsize))


def _cuts_of(term: Term) -> tuple[Variable | None, int, set[int]]:
    """The single variable in a term or None, how much of it one step of the term is, and where the term cuts it."""
    if isinstance(term, Variable):
        return term, 1, set()
    if len(term.of.terms) != 1 or term.of.terms[0][1] != 1 or term.of.constant:
        return None, 1, set()
    variable, step, at = _cuts_of(term.of.terms[0][0])
    if isinstance(term, Quotient):
        return variable, step * term.by, at | {step * term.by}
    return variable, step, at | {step * term.by}
