"""Measures or models what one training step of a model costs on one device: seconds and bytes, as a line over the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.compiler import Program
from graphc.ir.facts import nbytes_of
from graphc.ir.names import STAGE_SHARES
from graphc.mesh import Mesh
from graphc.report.memory import MemoryReport, feed_shapes, memory_of
from graphc.report.pipe_memory import memory_of_stages
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
        rest: other bytes over the samples of a micro-batch, as many micro-batches as 1F1B has in flight.
    """

    share: float
    parameters: int
    gradients: int
    optimizer: int
    rest: Line


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
    """

    machine: str
    micro: Line
    update: float
    alone: StageCosts
    recomputed: StageCosts | None
    pipes: Mapping[int, tuple[StageCosts, ...]]
    largest: int


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


def on_this_machine(make: Compile, backend: str, pipes: tuple[int, ...]) -> ModelCosts:
    """Measure steps on this machine's processor, with one thread for each worker; memory comes from plans.

    Args:
        pipes: numbers of ranks of a pipeline to consider; those that the model cannot be cut into are left out.
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
        reports = [memory_of_stages(model, feed_shapes(model, batch), backend=backend) for batch in POINTS]
        found[ranks] = tuple(_stage(s, low, high) for s, low, high in zip(shares, *reports, strict=True))
    again = make(backend=backend, recompute="all")
    alone, recomputed = _alone(program.model, backend), _alone(again.model, backend)
    return ModelCosts("this machine", micro, 0.0, alone, recomputed, found, _largest(program.model))


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
