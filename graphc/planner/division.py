"""The ways to divide a job over devices that graphc runs: mesh, strategy, schedule, micro-batches, recomputation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphc import parallel
from graphc.errors import UsageError
from graphc.mesh import Mesh
from graphc.options import CompileOptions
from graphc.pipe.tables import PipeSchedule
from graphc.planner.costs import ModelCosts

MOST_MICRO_BATCHES = 64
"""The most micro-batches of a step that are considered, for each rank of a pipeline."""

SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
"""Schedules with one stage a rank; ``interleaved`` has several."""


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide the job.

    Attributes:
        mesh: with nodes, ZeRO divides the state inside a node, and gradients are reduced inside the nodes first.
        zero: stage of ZeRO; 0: ``mirrored``.
        micro_batches: of each worker and step.
        samples: of a micro-batch.
        schedule: of a pipeline.
    """

    mesh: Mesh
    zero: int
    micro_batches: int
    samples: int
    recompute: bool = False
    schedule: str = "1f1b"

    @property
    def strategy(self) -> str:
        return f"zero:stage={self.zero}" if self.zero else "mirrored"

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 without a pipeline."""
        return PipeSchedule.parse(self.schedule).stages_on(self.mesh.pipe) if self.mesh.pipe > 1 else 1

    def options(self) -> dict[str, Any]:
        """The options of ``graphc train`` that carry it out."""
        found: dict[str, Any] = {
            "workers": self.mesh.size,
            "mesh": str(self.mesh),
            "batch-size": self.mesh.replicas * self.micro_batches * self.samples,
            "accumulate": self.micro_batches,
            "strategy": self.strategy,
        }
        if self.mesh.pipe > 1:
            found["schedule"] = self.schedule
        if self.mesh.node > 1 and not self.zero:
            found["allreduce"] = "hierarchical"
        if self.recompute:
            found["recompute"] = "all"
        return found


def divisions(costs: ModelCosts, node: int, devices: int, batch: int) -> Iterator[Division]:
    """All that graphc runs, with ``node`` devices in a node and ``batch`` samples a step."""
    for pipe, tensor in itertools.product((1, *costs.pipes), (1, *costs.tensors)):
        data, rest = divmod(devices, pipe * tensor)
        if rest or batch % data:
            continue
        share = batch // data
        counts = [m for m in range(1, min(share, MOST_MICRO_BATCHES * pipe) + 1) if share % m == 0 and m >= (pipe > 1) * pipe]
        flat = Mesh(data=data, pipe=pipe, tensor=tensor)
        nodes = _with_nodes(flat, node)
        divided = [(nodes or flat, 0)]
        if data > 1:
            divided += [(mesh, zero) for mesh in (flat, nodes) if mesh is not None and mesh.data > 1 for zero in (1, 2, 3)]
        for (mesh, zero), recompute in itertools.product(divided, (False, True)):
            if (recompute and costs.recomputed is None) or refusal(pipe, tensor, zero, recompute):
                continue
            for count, schedule in itertools.product(counts, _schedules(costs, pipe)):
                if schedule.startswith("interleaved") and count % pipe:
                    continue  # it goes in rounds of as many micro-batches as there are ranks
                yield Division(mesh, zero, count, share // count, recompute, schedule)


def _schedules(costs: ModelCosts, pipe: int) -> Sequence[str]:
    if pipe == 1:
        return SCHEDULES[:1]
    return [*SCHEDULES, *(f"interleaved:stages={count}" for count in costs.pipes if count > pipe and count % pipe == 0)]


def _with_nodes(mesh: Mesh, node: int) -> Mesh | None:
    """The mesh with nodes of ``node`` devices; None: the replicas lie in one node, or do not fill nodes evenly."""
    layers = mesh.pipe * mesh.tensor
    if mesh.size <= node or node % layers or mesh.size % node or node == layers:
        return None
    return mesh.split(node)


@functools.cache
def refusal(pipe: int, tensor: int, zero: int, recompute: bool) -> str:
    """Why graphc does not run such a combination; empty where it does."""
    options = CompileOptions(strategy=f"zero:stage={zero}" if zero else "mirrored", recompute="all" if recompute else None)
    mesh = Mesh(data=2, pipe=pipe, tensor=tensor)
    try:
        parallel.check_tensor(options, mesh)
        parallel.check_mesh(options, mesh)
    except UsageError as error:
        return str(error)
    return ""


def refused(costs: ModelCosts) -> list[str]:
    """Why combinations of what is considered are left out, each reason once."""
    found: dict[str, None] = {}
    axes = itertools.product((1, *sorted(costs.pipes)[:1]), (1, *sorted(costs.tensors)[:1]))
    for pipe, tensor in axes:
        for zero, recompute in itertools.product(range(4), (False, True)):
            reason = refusal(pipe, tensor, zero, recompute)
            if reason and not (zero and recompute):
                found[reason] = None
    return list(found)
