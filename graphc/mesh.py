"""Defines the mesh: named axes over the workers. A collective's ``group`` is the name of an axis."""

from __future__ import annotations

from dataclasses import dataclass, fields

from graphc.errors import UsageError, counted, nearest


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of workers along each axis; ``Mesh(data=2)`` is two replicas that average their gradients.

    Attributes:
        data: replicas, each with its own share of the batch.
        pipe: pipeline stages; only 1 is supported.
        tensor: shards of one layer; only 1 is supported.

    Raises:
        UsageError: an axis that is not a positive integer, or one other than ``data`` above 1.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, extent in self.axes.items():
            if isinstance(extent, bool) or not isinstance(extent, int) or extent < 1:
                raise UsageError(f"mesh axis {name!r} must be a whole number of at least 1, not {extent!r}")
            if name != "data" and extent > 1:
                raise UsageError(f"mesh axis {name}={extent} is not supported yet; only the data axis can be larger than 1")

    @property
    def axes(self) -> dict[str, int]:
        """Axis name → extent, in rank order (the last axis varies fastest)."""
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.data * self.pipe * self.tensor

    def check(self, workers: int) -> None:
        """Raise UsageError unless the mesh has exactly ``workers`` workers."""
        if self.size != workers:
            raise UsageError(
                f"the mesh {self} needs {counted(self.size, 'worker')}, and the world has {workers}; "
                f"start {self.size} with 'graphc launch -n {self.size}' or change the mesh to data={workers}"
            )

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse the text form, ``"data=2"`` or ``"data=2,pipe=1"``.

        Raises:
            UsageError: unknown axis, an axis given twice, or an extent that is not an integer.
        """
        known = [axis.name for axis in fields(cls)]
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
