"""Classes of axes that have to be sharded together, or not at all.

The relations of the ops (:mod:`graphc.passes.sharding.relations`) join the axis of an operand with that of the result that it
becomes, and the two axes over which a product sums. A class is the set of axes so connected: the hidden axis of an MLP with the
columns of the first weight, its bias, the activations and the rows of the second weight; the heads of an attention.

An axis may hold several blocks, each of which is divided: of a fused projection to queries, keys and values (``blocks=3``) a
rank has a part of each. A class knows the blocks of its axes relative to one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import onnx_ir as ir

Axis: TypeAlias = tuple[ir.Value, int]
"""A value and the index of one of its axes."""


@dataclass(frozen=True, slots=True)
class AxisShard:
    """How a value is divided: axis ``axis``, seen as ``[blocks, ranks, rest]``, of which a rank has ``[:, rank, :]``."""

    axis: int
    blocks: int


class AxisClasses:
    """A union-find over axes, with the ratio of their blocks and the reasons why some cannot be sharded."""

    def __init__(self) -> None:
        self._parent: dict[Axis, tuple[Axis, Fraction]] = {}
        self._blocked: dict[Axis, str] = {}

    def find(self, axis: Axis) -> tuple[Axis, Fraction]:
        """The representative of the class of ``axis``, and the blocks of ``axis`` in multiples of its blocks."""
        parent, ratio = self._parent.setdefault(axis, (axis, Fraction(1)))
        if parent == axis:
            return axis, Fraction(1)
        root, above = self.find(parent)
        self._parent[axis] = root, ratio * above
        return root, ratio * above

    def join(self, first: Axis, second: Axis, ratio: int = 1) -> None:
        """AxisShard both or neither; ``first`` has ``ratio`` times as many blocks as ``second``."""
        (a, of_first), (b, of_second) = self.find(first), self.find(second)
        if a == b:
            if of_first != ratio * of_second:
                self.block(first, f"{first[0].name!r} is cut in two ways")
            return
        # blocks(first) = of_first * blocks(a) = ratio * blocks(second) = ratio * of_second * blocks(b)
        self._parent[a] = b, ratio * of_second / of_first
        reason = self._blocked.pop(a, "")
        if reason:
            self._blocked.setdefault(b, reason)

    def block(self, axis: Axis, reason: str) -> None:
        """Keep the class of ``axis`` whole."""
        self._blocked.setdefault(self.find(axis)[0], reason)

    def reason(self, axis: Axis) -> str:
        """Why the class of ``axis`` is kept whole; empty where it may be sharded."""
        return self._blocked.get(self.find(axis)[0], "")

    def members(self, axis: Axis) -> dict[Axis, int] | None:
        """The axes of the class → their blocks; None where these are not whole numbers."""
        root, _ = self.find(axis)
        found = {other: weight for other in list(self._parent) for top, weight in [self.find(other)] if top == root}
        least = min(found.values())
        blocks = {other: weight / least for other, weight in found.items()}
        if any(value.denominator != 1 for value in blocks.values()):
            return None
        return {other: int(value) for other, value in blocks.items()}
