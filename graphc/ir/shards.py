"""Initializers of which each rank of a group holds a part.

In the graph such an initializer has the shape of a part. Its metadata say how the whole is divided; the whole initial value is
kept beside the first part, and is no part of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import array_of, state_updates

CUT, WHOLE = "graphc.cut", "graphc.whole"
"""Keys of an initializer: metadata for the cut as text, ``meta`` for the whole initial tensor."""

PARTIAL = "graphc.partial"
"""Metadata of a parameter that is whole on every rank: the group whose ranks each compute a part of the sum of its gradient."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is divided among the ranks of ``group``: axis ``axis`` is [blocks, ranks, rest], a rank has [:, rank, :]."""

    group: str
    axis: int
    blocks: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.group}:axis={self.axis},blocks={self.blocks},ranks={self.ranks}"

    @staticmethod
    def parse(text: str) -> Cut:
        """Parse the text form."""
        group, _, rest = text.partition(":")
        values = dict(pair.split("=") for pair in rest.split(","))
        return Cut(group, *(int(values[key]) for key in ("axis", "blocks", "ranks")))

    def _seen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size = shape[self.axis] // (self.blocks * self.ranks)
        return (*shape[: self.axis], self.blocks, self.ranks, size, *shape[self.axis + 1 :])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole, for that of a part."""
        return (*part[: self.axis], part[self.axis] * self.ranks, *part[self.axis + 1 :])

    def part(self, whole: Array, rank: int) -> Array:
        """What ``rank`` has of ``whole``."""
        found: Array = whole.reshape(self._seen(whole.shape)).take(rank, axis=self.axis + 1)
        return found.reshape(*whole.shape[: self.axis], -1, *whole.shape[self.axis + 1 :])

    def join(self, parts: Array) -> Array:
        """The whole, from parts stacked in the order of the ranks."""
        shape = self.whole_shape(parts.shape[1:])
        seen = self._seen(shape)
        stacked = parts.reshape(self.ranks, *seen[: self.axis + 1], *seen[self.axis + 2 :])
        return np.moveaxis(stacked, 0, self.axis + 1).reshape(shape)


def cut_initializer(value: ir.Value, group: str, axis: int, blocks: int, ranks: int) -> None:
    """Make ``value`` a part of what it is."""
    cut, whole = Cut(group, axis, blocks, ranks), array_of(value)
    first = np.ascontiguousarray(cut.part(whole, 0))
    value.metadata_props[CUT] = str(cut)
    value.meta[WHOLE] = value.const_value
    value.const_value = ir.Tensor(first, name=value.name)
    value.shape = ir.Shape(first.shape)


def cut_alike(copy: ir.Value, source: ir.Value) -> None:
    """Note that ``copy``, whose initial value is that of ``source`` in another type, is divided as ``source`` is."""
    text, whole = source.metadata_props.get(CUT), source.meta.get(WHOLE)
    if text is not None and whole is not None:
        copy.metadata_props[CUT] = text
        copy.meta[WHOLE] = ir.Tensor(np.asarray(whole.numpy()).astype(array_of(copy).dtype), name=copy.name)


def cut_of(value: ir.Value) -> Cut | None:
    """How an initializer is divided; None: it is whole."""
    text = value.metadata_props.get(CUT)
    return Cut.parse(text) if text is not None else None


def whole_initial(value: ir.Value) -> Array:
    """The whole initial value of a divided initializer.

    Raises:
        ModelError: the graph was read from a file, which holds the part of one rank.
    """
    tensor = value.meta.get(WHOLE)
    if tensor is None:
        raise ModelError(f"{value.name!r} is divided among ranks, and a file holds one part; compile the model again")
    return np.asarray(tensor.numpy())


def cuts_of(graph: ir.Graph) -> dict[str, Cut]:
    """Divided initializers: parameters, and the states of their updates that have one element per element of theirs."""
    found = {name: cut for name, value in graph.initializers.items() if (cut := cut_of(value)) is not None}
    following: dict[ir.Value, Cut] = {}
    for node, state, successor in state_updates(graph):
        owners = [v for v in node.inputs if v is not None and v.shape == state.shape]
        cut = next((c for v in owners if (c := found.get(v.name or "") or following.get(v)) is not None), None)
        if cut is not None:
            found.setdefault(state.name or "", cut)
            following[successor] = cut
    return found
