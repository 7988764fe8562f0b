"""The parts of divided state that this rank holds: cutting whole tensors, and putting them together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.errors import UsageError
from graphc.ir.shards import CUT, Cut, cuts_of, whole_initial

Array = np.ndarray[Any, np.dtype[Any]]


class Parts:
    """The divided initializers of a training graph (:mod:`graphc.ir.shards`).

    Args:
        groups: the communicators of the mesh; None where nothing runs: the parts of the first rank.

    Attributes:
        cuts: how each divided initializer is divided, by name.
    """

    def __init__(self, graph: ir.Graph, groups: Groups | None) -> None:
        self.cuts: dict[str, Cut] = cuts_of(graph)
        self._values, self._groups = graph.initializers, groups

    def __contains__(self, name: str) -> bool:
        return name in self.cuts

    def replicas(self, world: Communicator) -> Communicator:
        """The communicator of the ranks that divide the same state among them by ZeRO."""
        return self._groups.of("data") if self._groups is not None else world

    def mine(self, name: str, whole: Array) -> Array:
        """This rank's part of a whole tensor."""
        groups, cut = self._groups, self.cuts[name]
        place = groups.mesh.coordinate(cut.group, groups.world.rank) if groups is not None else 0
        return np.ascontiguousarray(cut.part(whole, place))

    def initial(self, name: str, part: Array) -> Array:
        """The whole initial value; ``part`` is that of every rank where they are alike, as of optimizer state."""
        if CUT in self._values[name].metadata_props:
            return whole_initial(self._values[name])
        return self.cuts[name].join(np.stack([part] * self.cuts[name].ranks))

    def gather(self, name: str, part: Array) -> Array:
        """The whole tensor; every rank of the group calls it, with its ``part`` in host memory.

        Raises:
            UsageError: nothing connects the ranks.
        """
        if self._groups is None:
            raise UsageError(f"state {name!r} is divided among the ranks, which nothing connects here")
        cut, comm = self.cuts[name], self._groups.of(self.cuts[name].group)
        parts = np.empty((cut.ranks, *part.shape), part.dtype)
        parts[comm.rank] = part
        comm.wait(comm.start(parts.reshape(-1), "sum", f"state/{name}", kind="all_gather", overlap=False))
        return np.ascontiguousarray(cut.join(parts))
