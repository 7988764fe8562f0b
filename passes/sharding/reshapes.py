"""Relations of Reshape and its like: both shapes are seen as products of common factors.

    [batch, tokens, 3·heads·each]   →   [batch, tokens, 3, heads, each]       heads may be divided: 3 blocks before, 1 behind
    [tokens, batch, heads·each]     →   [tokens, batch·heads, each]           heads again: 1 block before, ``batch`` behind

Of factors that an axis shares with others, one may be divided. Where several would do, the plan chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.facts import Dim, describe, dims, input_of
from graphc.ir.symbolic_dims import product, quotient
from graphc.passes.sharding.axis_classes import Axis, AxisClasses
from graphc.passes.sharding.ratio import ONE, Ratio

Factor = tuple[Dim, int, int]
"""A common factor: its size, and the axes of the operand and of the result that contain it."""


def relate_reshape(classes: AxisClasses, node: ir.Node) -> None:
    """Relate the axes of the first operand and the result."""
    x, out = input_of(node), node.outputs[0]
    mine, its = _filled(dims(x) or (), dims(out) or ()), _filled(dims(out) or (), dims(x) or ())
    first, last = 0, 0
    while first < min(len(mine), len(its)) and mine[first] == its[first] is not None:
        first += 1
    while last < min(len(mine), len(its)) - first and mine[-1 - last] == its[-1 - last] is not None:
        last += 1
    for axis in range(first):
        classes.join((x, axis), (out, axis))
    for back in range(1, last + 1):
        classes.join((x, len(mine) - back), (out, len(its) - back))
    factors = common_factors(mine[first : len(mine) - last], its[first : len(its) - last])
    if factors is None:
        for value, count in ((x, len(mine)), (out, len(its))):
            for axis in range(first, count - last):
                classes.block((value, axis), f"{describe(node)} cuts it at places that do not follow from the sizes")
        return
    for number, group in enumerate(_groups(factors)):
        _relate_group(classes, node, number, [(size, i + first, j + first) for size, i, j in group])


def _filled(sizes: Sequence[Dim], others: Sequence[Dim]) -> list[Dim]:
    """``sizes`` with the only unknown one as the quotient of the products."""
    if sum(size is None for size in sizes) != 1:
        return list(sizes)
    rest = quotient(product(others), product([size for size in sizes if size is not None]))
    return [rest if size is None else size for size in sizes]


def common_factors(mine: Sequence[Dim], its: Sequence[Dim]) -> list[Factor] | None:
    """The factors of two shapes with equally many elements, in order; None where there are none.

    >>> common_factors([6, "batch", 16], [6, "4*batch", 4])
    [(6, 0, 0), ('batch', 1, 1), (4, 2, 1), (4, 2, 2)]
    """
    left = [(size, axis) for axis, size in enumerate(mine) if size != 1]
    right = [(size, axis) for axis, size in enumerate(its) if size != 1]
    found: list[Factor] = []
    while left and right:
        (a, i), (b, j) = left[0], right[0]
        if a == b is not None:
            found.append((a, i, j))
            left, right = left[1:], right[1:]
        elif (rest := quotient(b, a)) is not None:
            found.append((a, i, j))
            left, right = left[1:], [(rest, j), *right[1:]]
        elif (rest := quotient(a, b)) is not None:
            found.append((b, i, j))
            left, right = [(rest, i), *left[1:]], right[1:]
        else:
            return None
    return None if left or right else found


def _groups(factors: Sequence[Factor]) -> list[list[Factor]]:
    """Factors that follow each other in an axis, together."""
    found: list[list[Factor]] = []
    for factor in factors:
        if found and (factor[1] == found[-1][-1][1] or factor[2] == found[-1][-1][2]):
            found[-1].append(factor)
        else:
            found.append([factor])
    return found


def _relate_group(classes: AxisClasses, node: ir.Node, number: int, group: list[Factor]) -> None:
    x, out = input_of(node), node.outputs[0]
    if len(group) == 1:
        classes.join((x, group[0][1]), (out, group[0][2]))
        return
    fitting = [k for k, (size, _, _) in enumerate(group) if isinstance(size, int) and size % classes.ranks == 0]
    chosen: set[Axis] = set()
    if fitting:
        at = classes.pick((dims(x), dims(out), number), fitting)
        size, i, j = group[at]
        assert isinstance(size, int)
        ends: list[tuple[Axis, Ratio]] = []
        for axis, place in (((x, i), 1), ((out, j), 2)):
            before = math.prod((Ratio.of(f[0]) for f in group[:at] if f[place] == axis[1] and f[0] is not None), start=ONE)
            ends.append((axis, before))
            classes.require(axis, before * Ratio.of(size))
        classes.join(ends[0][0], ends[1][0], ends[0][1] / ends[1][1])
        chosen = {(x, i), (out, j)}
    sizes = [size for size, _, _ in group]
    for value, place in ((x, 1), (out, 2)):
        for axis in {(value, i if place == 1 else j) for _, i, j in group} - chosen:
            reason = "makes it part of another axis" if fitting else _undivided(sizes, classes.ranks)
            classes.block(axis, f"{describe(node)} {reason}")


def _undivided(sizes: Sequence[Dim], ranks: int) -> str:
    first = next((size for size in sizes if isinstance(size, int) and size > 1), 1)
    fitting = ", ".join(str(n) for n in range(2, first + 1) if first % n == 0)
    would = f"; {fitting} would divide the {first}" if fitting else ""
    return f"cuts it into {sizes}, none of which {ranks} divides{would}"
