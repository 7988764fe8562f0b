"""Defines the mesh: named axes over the workers. A collective's ``group`` is an axis, or several: ``"node+data"``."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from graphc.errors import UsageError, counted, nearest

AXES = ("node", "data", "pipe", "tensor")
"""The axes in rank order: the last one varies fastest."""

REPLICAS = "node+data"
"""The group of the workers that share a batch."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of workers along each axis; ``Mesh(data=2)`` is two replicas that average their gradients.

    The worker at the coordinates (n, d, p, t) has rank ((n · data + d) · pipe + p) · tensor + t: neighbours share the layers
    of a model. A group is an axis, or several joined by ``+``: it connects the workers whose other coordinates are equal.

    >>> Mesh(data=2, tensor=2).groups("data")
    [(0, 2), (1, 3)]

    Attributes:
        data: replicas of a node, each with its own share of the batch.
        pipe: pipeline stages.
        tensor: shards of one layer.
        node: nodes, such as machines, each with ``data`` replicas; gradients are then reduced inside the nodes first.

    Raises:
        UsageError: an axis that is not a positive integer.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    node: int = 1

    def __post_init__(self) -> None:
        for name, extent in self.axes.items():
            if isinstance(extent, bool) or not isinstance(extent, int) or extent < 1:
                raise UsageError(f"mesh axis {name!r} must be a whole number of at least 1, not {extent!r}")

    @property
    def axes(self) -> dict[str, int]:
        """Axis name → extent, in rank order (the last axis varies fastest)."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def size(self) -> int:
        """The number of workers."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """The number of shares of a batch."""
        return self.node * self.data

    def canonical(self, group: str) -> str:
        """The group without axes of one worker, so that two names of the same ranks are one."""
        names = self._names(group)
        return "+".join(name for name in names if self.axes[name] > 1) or names[-1]

    def split(self, per_node: int) -> Mesh:
        """The mesh with its data axis divided among nodes of ``per_node`` workers; as it is where one node holds all workers.

        Raises:
            UsageError: the number of workers of a node does not fit the axes.
        """
        if self.node == 1 and self.size <= per_node:
            return self
        layers = self.pipe * self.tensor
        own, rest = divmod(per_node, layers)
        if self.node > 1 and self.size != self.node * per_node:
            raise UsageError(
                f"the mesh {self} has nodes of {self.size // self.node} workers, and per_node={per_node} asks for others;"
                " leave one of the two out"
            )
        if rest or not own or self.replicas % own:
            fitting = [n * layers for n in range(1, self.replicas + 1) if self.replicas % n == 0]
            raise UsageError(
                f"nodes of {counted(per_node, 'worker')} do not divide the mesh {self}; {', '.join(map(str, fitting))} would"
            )
        return replace(self, node=self.replicas // own, data=own)

    def extent(self, group: str) -> int:
        """The number of workers in each group ``group``, such as ``"tensor"`` or ``"data+pipe"``."""
        axes = self.axes
        return math.prod(axes[name] for name in self._names(group))

    def coordinate(self, group: str, rank: int) -> int:
        """The place of ``rank`` in its group."""
        found = 0
        for name in self._names(group):
            found = found * self.axes[name] + self._coordinates(rank)[name]
        return found

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of ``rank``, in the order of their coordinates."""
        names, own = self._names(group), self._coordinates(rank)
        return tuple(
            self._rank({**own, **dict(zip(names, place, strict=True))})
            for place in itertools.product(*(range(self.axes[name]) for name in names))
        )

    def groups(self, group: str) -> list[tuple[int, ...]]:
        """The ranks of each group ``group``; together they are all workers."""
        return sorted({self.members(group, rank) for rank in range(self.size)})

    def _names(self, group: str) -> list[str]:
        """The axes of ``group`` in rank order.

        Raises:
            UsageError: an unknown axis, or one given twice.
        """
        names = group.split("+")
        for name in names:
            if name not in self.axes:
                known = ", ".join(self.axes)
                raise UsageError(
                    f"unknown mesh axis {name!r}{nearest(name, self.axes)} in group {group!r}; the axes are {known}"
                )
        if len(set(names)) < len(names):
            raise UsageError(f"the group {group!r} names an axis twice")
        return [name for name in self.axes if name in names]

    def _coordinates(self, rank: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, extent in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, extent)
        return found

    def _rank(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for name, extent in self.axes.items():
            rank = rank * extent + coordinates[name]
        return rank

    def check(self, workers: int) -> None:
        """Raise UsageError unless the mesh has exactly ``workers`` workers."""
        if self.size != workers:
            raise UsageError(
                f"the mesh {self} needs {counted(self.size, 'worker')}, and the world has {workers}; "
                f"start {self.size} with 'graphc launch -n {self.size}' or change the mesh to {self._fitting(workers)}"
            )

    def _fitting(self, workers: int) -> str:
        """What a mesh like this one for ``workers`` may be: its layers with more or fewer replicas, or sizes of one axis."""
        replicas, rest = divmod(workers, self.pipe * self.tensor)
        if replicas and not rest:
            return str(replace(self, node=1, data=replicas))
        for name in ("tensor", "pipe"):
            others = self.pipe * self.tensor // self.axes[name]
            if self.axes[name] > 1 and workers % others == 0:
                each = workers // others
                sizes = ", ".join(str(n) for n in range(1, each + 1) if each % n == 0)
                return f"one with {name}={sizes}, which divide the workers beside the other axes"
        return f"data={workers}"

    def refuse(self, *axes: str) -> None:
        """Raise UsageError if one of ``axes``, which the caller does not support, is larger than 1."""
        for name in axes:
            if self.axes[name] > 1:
                raise UsageError(f"mesh axis {name}={self.axes[name]} is not supported yet; leave it at 1")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse the text form, ``"data=2"`` or ``"data=2,pipe=1"``.

        Raises:
            UsageError: unknown axis, an axis given twice, or an extent that is not an integer.
        """
        known = AXES
        extents: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name not in known:
                raise UsageError(f"unknown mesh axis {name!r}{nearest(name, known)}; the axes are {', '.join(known)}")
            if name in extents:
                raise UsageError(f"mesh axis {name!r} is given twice in {text!r}")
            if not equals or not value.isdecimal():
                raise UsageError(f"cannot read the mesh axis {part!r}: write {name}=N with a whole number N")
            extents[name] = int(value)
        if not extents:
            raise UsageError("the mesh is empty; write for example data=2")
        return cls(**extents)

    def __str__(self) -> str:
        return ",".join(f"{name}={extent}" for name, extent in self.axes.items() if name == "data" or extent > 1)


ALONE = Mesh()
"""One worker."""
