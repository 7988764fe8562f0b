"""Classes of axes that have to be sharded together, or not at all.

The relations of the ops (:mod:`graphc.passes.sharding.relations`) join the axis of an operand with that of the result that it
becomes, and the two axes over which a product sums. A class is the set of axes so connected: the hidden axis of an MLP with the
columns of the first weight, its bias, the activations and the rows of the second weight; the heads of an attention.

An axis may hold several blocks, each of which is divided: of a fused projection to queries, keys and values (``blocks=3``) a
rank has a part of each, and of an axis that merges batch and heads (``blocks=batch``), a part of the heads of every sample. A
class knows the blocks of its axes relative to one another.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import onnx_ir as ir

from graphc.passes.sharding.ratio import ONE, Ratio

Axis: TypeAlias = tuple[ir.Value, int]
"""A value and the index of one of its axes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AxisShard:
    """How a value is divided: axis ``axis``, seen as ``[blocks, ranks, each]``, of which a rank has ``[:, rank, :]``.

    Attributes:
        blocks, each: None for one of the two: it follows from the size of the axis.
    """

    axis: int
    blocks: int | None
    each: int | None


class AxisClasses:
    """A union-find over axes, with the ratio of their blocks and the reasons why some cannot be sharded.

    Args:
        ranks: among which axes are to be divided.
        picks: which alternative to take where an op offers several, by :meth:`pick`'s key; otherwise the first.
    """

    def __init__(self, ranks: int, picks: Mapping[Hashable, int] | None = None) -> None:
        self.ranks = ranks
        self.offered: dict[Hashable, int] = {}
        self._picks = dict(picks or {})
        self._parent: dict[Axis, tuple[Axis, Ratio]] = {}
        self._members: dict[Axis, list[Axis]] = {}
        self._blocked: dict[Axis, str] = {}
        self._units: dict[Axis, list[Ratio]] = {}

    def find(self, axis: Axis) -> tuple[Axis, Ratio]:
        """The representative of the class of ``axis``, and the blocks of ``axis`` in multiples of its blocks."""
        found = self._parent.get(axis)
        if found is None:
            self._parent[axis] = axis, ONE
            self._members[axis] = [axis]
            return axis, ONE
        parent, ratio = found
        if parent == axis:
            return axis, ONE
        root, above = self.find(parent)
        self._parent[axis] = root, ratio * above
        return root, ratio * above

    def join(self, first: Axis, second: Axis, ratio: Ratio = ONE) -> None:
        """Shard both or neither; ``first`` has ``ratio`` times as many blocks as ``second``."""
        (a, of_first), (b, of_second) = self.find(first), self.find(second)
        if a == b:
            if of_first != ratio * of_second:
                self.block(first, f"{first[0].name!r} is cut in two ways")
            return
        # blocks(first) = of_first * blocks(a) = ratio * blocks(second) = ratio * of_second * blocks(b)
        step = ratio * of_second / of_first
        if len(self._members[a]) > len(self._members[b]):
            a, b, step = b, a, ONE / step
        self._parent[a] = b, step
        self._members[b] += self._members.pop(a)
        reason = self._blocked.pop(a, "")
        if reason:
            self._blocked.setdefault(b, reason)

    def block(self, axis: Axis, reason: str) -> None:
        """Keep the class of ``axis`` whole."""
        self._blocked.setdefault(self.find(axis)[0], reason)

    def require(self, axis: Axis, units: Ratio) -> None:
        """Let every shard of ``axis`` consist of whole ones of its ``units`` equal parts."""
        self._units.setdefault(axis, []).append(units)

    def pick(self, key: Hashable, alternatives: Sequence[T]) -> T:
        """One of several ways to relate the axes of a node; nodes of equal ``key`` take the same."""
        self.offered[key] = max(len(alternatives), self.offered.get(key, 0))
        return alternatives[min(self._picks.get(key, 0), len(alternatives) - 1)]

    def reason(self, axis: Axis) -> str:
        """Why the class of ``axis`` is kept whole; empty where it may be sharded."""
        return self._blocked.get(self.find(axis)[0], "")

    def units(self, axis: Axis) -> Sequence[Ratio]:
        """What :meth:`require` was told of ``axis`` itself."""
        return self._units.get(axis, ())

    def members(self, axis: Axis) -> dict[Axis, Ratio] | None:
        """The axes of the class → their blocks; None where these are not whole numbers."""
        root, _ = self.find(axis)
        found = {other: self.find(other)[1] for other in self._members[root]}
        least = Ratio.least(found.values())
        blocks = {other: weight / least for other, weight in found.items()}
        return blocks if all(weight.whole for weight in blocks.values()) else None
