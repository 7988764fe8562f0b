"""Measures or models what one training step of a model costs on one device: seconds and bytes, as a line over the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.compiler import Program
from graphc.ir.facts import nbytes_of
from graphc.ir.names import STAGE_SHARES
from graphc.mesh import Mesh
from graphc.pipe.tables import PipeSchedule
from graphc.plan.group_places import group_of
from graphc.plan.partition import make_plan
from graphc.report.memory import MemoryReport, feed_shapes, memory_of
from graphc.report.pipe_memory import memory_of_tables, table_of
from graphc.report.step_time import PREDICTIONS
from graphc.training.trainer import Trainer

POINTS = (1, 4)
"""Batches at which steps are measured; between and beyond them a line is drawn."""

Compile = Callable[..., Program]
"""Compiles the model with further options of :func:`graphc.compile`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A value over the batch: ``fixed + each · batch``."""

    fixed: float
    each: float

    def at(self, batch: float) -> float:
        return self.fixed + self.each * batch

    @classmethod
    def through(cls, low: float, high: float) -> Line:
        """The line through values at both of :data:`POINTS`, which neither falls nor begins below 0."""
        each = max(0.0, (high - low) / (POINTS[1] - POINTS[0]))
        return cls(max(0.0, low - each * POINTS[0]), each)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One rank of a pipeline, or the only one.

    Attributes:
        share: its part of the time of a micro-batch.
        parameters, gradients, optimizer: bytes; ``optimizer`` counts masters too.
        rest: other bytes over the samples of a micro-batch, with ``held`` micro-batches in flight.
        stash: bytes of each micro-batch in flight, in ``rest`` too.
    """

    share: float
    parameters: int
    gradients: int
    optimizer: int
    rest: Line
    stash: Line = Line(0.0, 0.0)
    held: int = 0

    def scaled(self, part: StageCosts, whole: StageCosts) -> StageCosts:
        """The costs if each is divided as ``part`` is of ``whole``; ``share`` stays, as the part of a divided whole."""

        def by(one: float, all_: float) -> float:
            return one / all_ if all_ else 1.0

        rest = by(part.rest.each, whole.rest.each)
        return replace(
            self,
            parameters=round(self.parameters * by(part.parameters, whole.parameters)),
            gradients=round(self.gradients * by(part.gradients, whole.gradients)),
            optimizer=round(self.optimizer * by(part.optimizer, whole.optimizer)),
            rest=Line(self.rest.fixed, self.rest.each * rest),
            stash=Line(self.stash.fixed, self.stash.each * rest),
        )


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """One rank of a tensor axis.

    Attributes:
        stage: its memory; ``share`` is its part of the time of the whole model.
        messages: AllReduces over the axis for each micro-batch.
        exchanged: their bytes over the samples of a micro-batch.
    """

    stage: StageCosts
    messages: int
    exchanged: Line


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of a model on one kind of device.

    Attributes:
        machine: the device.
        micro: seconds of forward and backward pass over the samples of a micro-batch.
        update: seconds of all updates.
        alone: the whole model on one rank.
        recomputed: the same if all activations are computed again; None: not possible.
        pipes: ranks of a pipeline → the costs of each; only where pipelines run.
        largest: bytes of the largest parameter.
        tensors: ranks of a tensor axis → the costs of each.
    """

    machine: str
    micro: Line
    update: float
    alone: StageCosts
    recomputed: StageCosts | None
    pipes: Mapping[int, tuple[StageCosts, ...]]
    largest: int
    tensors: Mapping[int, TensorCosts] = field(default_factory=dict)


def on_gpu(make: Compile, gpu: str) -> ModelCosts:
    """Model the costs on a GPU: times from the cost model, memory from plans."""
    program = make(backend="cupy")
    predictions = [PREDICTIONS["cupy"](program.model, feed_shapes(program.model, b), gpu) for b in POINTS]
    updates = [sum(c.seconds for c in p.costs if c.centre == "updates") for p in predictions]
    micro = Line.through(*(p.seconds - u for p, u in zip(predictions, updates, strict=True)))
    again = make(backend="cupy", recompute="all")
    return ModelCosts(
        predictions[0].machine,
        micro,
        updates[0],
        _alone(program.model, "cupy"),
        _alone(again.model, "cupy"),
        {},
        _largest(program.model),
    )


def on_this_machine(make: Compile, backend: str, pipes: tuple[int, ...], tensors: tuple[int, ...] = ()) -> ModelCosts:
    """Measure steps on this machine's processor, with one thread for each worker; memory comes from plans.

    Args:
        pipes: numbers of ranks of a pipeline to consider; those that the model cannot be cut into are left out.
        tensors: numbers of ranks of a tensor axis, likewise.
    """
    from graphc.errors import UsageError

    program = make(backend=backend)
    micro = Line.through(*(_measured(program, batch) for batch in POINTS))
    found = {}
    for ranks in pipes:
        try:
            model = make(backend=backend, mesh=Mesh(pipe=ranks), accumulate=ranks).model
        except UsageError:
            continue
        shares = [float(share) for share in model.metadata_props[STAGE_SHARES].split(",")]
        found[ranks] = tuple(_of_pipe(model, ranks, shares, backend))
    again = make(backend=backend, recompute="all")
    alone, recomputed = _alone(program.model, backend), _alone(again.model, backend)
    divided = {}
    for ranks in tensors:
        try:
            divided[ranks] = _of_tensor(make(backend=backend, mesh=Mesh(tensor=ranks)).model, ranks, backend, alone)
        except UsageError:
            continue
    return ModelCosts("this machine", micro, 0.0, alone, recomputed, found, _largest(program.model), divided)


def _of_pipe(model: ir.Model, ranks: int, shares: Sequence[float], backend: str) -> Iterator[StageCosts]:
    """What each rank needs with 1F1B, and for each micro-batch in flight: more of them are in flight with GPipe."""
    tables = table_of(model), PipeSchedule("gpipe").table(ranks, 2 * ranks)
    reports = [memory_of_tables(model, feed_shapes(model, batch), tables, backend=backend) for batch in POINTS]
    few, many = ([report[k] for report in reports] for k in range(2))
    for rank, share in enumerate(shares):
        held = ranks - rank
        stash = [(b[rank].total - a[rank].total) / (2 * ranks - held) for a, b in zip(few, many, strict=True)]
        yield replace(_stage(share, few[0][rank], few[1][rank]), stash=Line.through(*stash), held=held)


def _of_tensor(model: ir.Model, ranks: int, backend: str, alone: StageCosts) -> TensorCosts:
    """Memory of a plan for one rank. Its work shrinks as its weights do: most of it is products with them."""
    mesh, nbytes, messages = Mesh(tensor=ranks), list[int](), 0
    for batch in POINTS:
        plan = make_plan(model, feed_shapes(model, batch), mesh=mesh)
        sums = [node for node in plan.model.graph if node.op_type == "AllReduceStart" and group_of(node) == "tensor"]
        nbytes.append(sum(nbytes_of(value) for node in sums for value in node.outputs))
        messages = len(sums)
    reports = [memory_of(model, feed_shapes(model, batch), backend=backend, mesh=mesh) for batch in POINTS]
    stage = _stage(reports[0].parameters / max(1, alone.parameters), *reports)
    return TensorCosts(stage, messages, Line.through(*nbytes))


def _measured(program: Program, batch: int) -> float:
    """The shortest of three steps, in seconds."""
    feeds: dict[str, Any] = {}
    shapes = feed_shapes(program.model, batch)
    with Trainer(program, threads=1) as trainer:
        for value in program.model.graph.inputs:
            dtype = value.dtype.numpy() if value.dtype is not None else np.float32
            feeds[value.name or ""] = np.zeros(shapes[value.name or ""], dtype)
        trainer.step(feeds)  # compiles
        times = []
        for _ in range(3):
            start = time.perf_counter()
            trainer.step(feeds)
            times.append(time.perf_counter() - start)
    return min(times)


def _alone(model: ir.Model, backend: str) -> StageCosts:
    low, high = (memory_of(model, feed_shapes(model, batch), backend=backend) for batch in POINTS)
    return _stage(1.0, low, high)


def _stage(share: float, low: MemoryReport, high: MemoryReport) -> StageCosts:
    def rest(report: MemoryReport) -> float:
        state = report.parameters + report.masters + report.gradients + report.optimizer
        return report.total + report.context - state

    line = Line.through(rest(low), rest(high))
    return StageCosts(share, low.parameters, low.gradients, low.masters + low.optimizer, line)


def _largest(model: ir.Model) -> int:
    return max((nbytes_of(v) for v in model.graph.initializers.values()), default=0)
