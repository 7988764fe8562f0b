"""The costs of one training step of a model on one device: seconds and bytes, as lines over the samples of a micro-batch.

One plan for each division of the model gives both: its buffers the memory, as ``inspect --memory`` reports it, and its steps
the time, by the cost model of the device. Equal steps of all plans are timed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from graphc.backend import Backend, make_backend
from graphc.compiler import Program, collection_paused
from graphc.errors import UsageError
from graphc.ir.facts import nbytes_of
from graphc.mesh import Mesh
from graphc.pipe.split import MICRO
from graphc.plan.group_places import group_of
from graphc.plan.partition import Plan, make_plan
from graphc.plan.state_rewrites import adapted
from graphc.plan.steps import PlanStep
from graphc.planner.scaling import BACKWARD
from graphc.report.memory import MemoryReport, feed_shapes, has_recomputation, memory_of_plan
from graphc.report.pipe_memory import memory_in_flight, stage_plans
from graphc.report.step_profile import StepTimes, checked_by

POINTS = (1, 4)
"""Samples of a micro-batch for which plans are made; between and beyond them a line is drawn."""

Compile = Callable[..., Program]
"""Compiles the model with further options of :func:`graphc.compile`."""

Timing = Callable[[Iterable[PlanStep], Backend], StepTimes]
"""The steps of all plans, and their backend → the cost model."""


@dataclass(frozen=True, slots=True)
class Line:
    """A value over the samples of a micro-batch: ``fixed + each · samples``."""

    fixed: float
    each: float

    def at(self, samples: float) -> float:
        return self.fixed + self.each * samples

    @classmethod
    def through(cls, low: float, high: float) -> Line:
        """The line through values at both of :data:`POINTS`, which neither falls nor begins below 0."""
        each = max(0.0, (high - low) / (POINTS[1] - POINTS[0]))
        return cls(max(0.0, low - each * POINTS[0]), each)

    def times(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.each * factor)


NOTHING = Line(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage of a pipeline, or the whole model.

    Attributes:
        forward, backward: seconds of a micro-batch.
        parameters, gradients, optimizer: bytes; ``optimizer`` counts masters too.
        rest: other bytes, however many micro-batches are in flight.
        stash: bytes of each micro-batch in flight.
        results, adjoints: bytes that a micro-batch sends to later stages, and back to earlier ones.
        shared: bytes that stages send each other once a step: parameters with readers on several stages, and their gradients.
        update: seconds of the updates and of the check for NaN.
        sums: seconds in which the gradients of one of several micro-batches are added to those before.
    """

    forward: Line
    backward: Line
    parameters: int
    gradients: int
    optimizer: int
    rest: Line
    stash: Line = NOTHING
    results: Line = NOTHING
    adjoints: Line = NOTHING
    shared: int = 0
    update: float = 0.0
    sums: float = 0.0

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def scaled(self, part: StageCosts, whole: StageCosts) -> StageCosts:
        """The costs if each is divided as ``part`` is of ``whole``."""

        def by(one: float, all_: float) -> float:
            return one / all_ if all_ else 1.0

        rest, state = by(part.rest.each, whole.rest.each), by(part.state, whole.state)
        forward, backward = (by(a.at(1), b.at(1)) for a, b in zip(_times(part), _times(whole), strict=True))
        return replace(
            self,
            forward=self.forward.times(forward),
            backward=self.backward.times(backward),
            parameters=round(self.parameters * by(part.parameters, whole.parameters)),
            gradients=round(self.gradients * by(part.gradients, whole.gradients)),
            optimizer=round(self.optimizer * by(part.optimizer, whole.optimizer)),
            rest=Line(self.rest.fixed, self.rest.each * rest),
            stash=self.stash.times(rest),
            shared=round(self.shared * state),
            update=self.update * state,
            sums=self.sums * state,
        )


def _times(stage: StageCosts) -> tuple[Line, Line]:
    return stage.forward, stage.backward


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """One rank of a tensor axis.

    Attributes:
        stage: its costs, without what it exchanges.
        messages: AllReduces over the axis for each micro-batch.
        exchanged: their bytes.
    """

    stage: StageCosts
    messages: int
    exchanged: Line


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of a model on one kind of device.

    Attributes:
        machine: the device.
        alone: the whole model on one rank.
        recomputed: the same if all activations are computed again; None: not possible.
        pipes: number of stages → the costs of each.
        largest: bytes of the largest parameter.
        tensors: ranks of a tensor axis → the costs of each.
        notes: what the model leaves out on such a device.
    """

    machine: str
    alone: StageCosts
    recomputed: StageCosts | None
    pipes: Mapping[int, tuple[StageCosts, ...]]
    largest: int
    tensors: Mapping[int, TensorCosts] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of a model for both of :data:`POINTS`: of each rank of a pipeline, or of the only one."""

    ranks: Sequence[tuple[Plan, Plan]]

    @classmethod
    def whole(cls, model: ir.Model, engine: Backend, mesh: Mesh | None = None) -> Plans:
        model = adapted(model, engine)
        low, high = (make_plan(model, feed_shapes(model, batch), engine, mesh=mesh or Mesh()) for batch in POINTS)
        return cls([(low, high)])

    @classmethod
    def stages(cls, model: ir.Model, engine: Backend) -> Plans:
        model = adapted(model, engine)
        low, high = (stage_plans(model, feed_shapes(model, batch), engine) for batch in POINTS)
        return cls(list(zip(low, high, strict=True)))

    @property
    def steps(self) -> Iterable[PlanStep]:
        return (step for pair in self.ranks for plan in pair for step in plan.steps)


@collection_paused()
def on_host(make: Compile, backend: str, stages: Sequence[int], tensors: Sequence[int], timing: Timing) -> ModelCosts:
    """The costs on a processor, with one thread for each worker.

    Args:
        stages: numbers of pipeline stages to consider; those that the model cannot be cut into are left out.
        tensors: numbers of ranks of a tensor axis, likewise.
        timing: makes the cost model for all plans.
    """
    engine = make_backend(backend, threads=1, spin=False)
    try:
        program = make(backend=backend)
        alone = Plans.whole(program.model, engine)
        again = recomputing_program(make, backend)
        recomputing = Plans.whole(again.model, engine) if again is not None else None
        piped, divided = dict[int, Plans](), dict[int, Plans]()
        for count in stages:
            found = possible(make, backend=backend, mesh=Mesh(pipe=count), accumulate=count)
            if found is not None:
                piped[count] = Plans.stages(found.model, engine)
        for ranks in tensors:
            found = possible(make, backend=backend, mesh=Mesh(tensor=ranks))
            if found is not None:
                divided[ranks] = Plans.whole(found.model, engine, Mesh(tensor=ranks))
        everything = (alone, recomputing, *piped.values(), *divided.values())
        times = timing((step for plans in everything if plans is not None for step in plans.steps), engine)
    finally:
        engine.close()
    whole = _whole(alone, times)
    recomputed = None if recomputing is None else _recomputed(_whole(recomputing, times), whole)
    return ModelCosts(
        times.machine,
        whole,
        recomputed,
        {count: tuple(_stage(plans, place, times) for place in range(count)) for count, plans in piped.items()},
        largest(program.model),
        {ranks: TensorCosts(_whole(plans, times), *messages_of(plans)) for ranks, plans in divided.items()},
    )


def recomputing_program(make: Compile, backend: str) -> Program | None:
    """The program if all activations are computed again; None if that is not possible, or would save nothing."""
    found = possible(make, backend=backend, recompute="all")
    return found if found is not None and has_recomputation(found.model) else None


def possible(make: Compile, **options: object) -> Program | None:
    """The program; None if the model cannot be divided so."""
    try:
        return make(**options)
    except UsageError:
        return None


def _whole(plans: Plans, times: StepTimes) -> StageCosts:
    """The backward pass takes :data:`BACKWARD` of the time."""
    ((low, high),) = plans.ranks
    micro = Line.through(*(sum(times.seconds(s) for s in plan.steps if s.kind not in AT_END) for plan in (low, high)))
    found = memory_costs(memory_of_plan(low), memory_of_plan(high))
    return _with_updates(replace(found, forward=micro.times(1 - BACKWARD), backward=micro.times(BACKWARD)), low, times)


def _recomputed(again: StageCosts, whole: StageCosts) -> StageCosts:
    """What takes longer than the forward pass of ``whole`` belongs to the backward pass."""
    fixed = again.forward.fixed + again.backward.fixed - whole.forward.fixed
    each = again.forward.each + again.backward.each - whole.forward.each
    backward = Line(max(0.0, fixed), max(0.0, each))
    return replace(again, forward=whole.forward, backward=backward)


AT_END = ("update", "check")
"""Kinds of plan steps that run once a step."""


def _with_updates(stage: StageCosts, plan: Plan, times: StepTimes) -> StageCosts:
    update = sum(times.seconds(step) for step in plan.steps if step.kind == "update")
    update += checked_by(plan) / times.bytes_per_second
    return replace(stage, update=update, sums=3 * stage.gradients / times.bytes_per_second)


def messages_of(plans: Plans) -> tuple[int, Line]:
    """AllReduces over the tensor axis for each micro-batch, and their bytes."""
    nbytes, messages = list[int](), 0
    for plan in plans.ranks[0]:
        sums = [step for step in plan.steps if step.kind == "start" and group_of(step.nodes[0]) == "tensor"]
        nbytes.append(sum(nbytes_of(value) for step in sums for value in step.nodes[0].outputs))
        messages = len(sums)
    return messages, Line.through(*nbytes)


def stage_bytes(plans: Plans, place: int) -> StageCosts:
    """Stage ``place`` of plans with one stage a rank: its memory and its messages."""
    pair = plans.ranks[place]
    none, one = ([memory_in_flight(plan, place, {place: slots}) for plan in pair] for slots in range(2))

    def sent(plan: Plan, kind: str) -> int:
        edges = [edge for edge in plan.edges if edge.sender == place and edge.source.kind == kind]
        return sum(nbytes_of(v) for edge in edges for v in edge.values)

    once = [e for e in pair[0].edges if place in (e.sender, e.receiver) and e.source.kind not in MICRO]
    return replace(
        memory_costs(*none),
        stash=Line.through(*(b.total - a.total for a, b in zip(none, one, strict=True))),
        results=Line.through(*(sent(plan, "F") for plan in pair)),
        adjoints=Line.through(*(sent(plan, "B") for plan in pair)),
        shared=sum(nbytes_of(v) for edge in once for v in edge.values),
    )


def _stage(plans: Plans, place: int, times: StepTimes) -> StageCosts:
    pair = plans.ranks[place]

    def seconds(kinds: str) -> Line:
        counted = ([s for s in p.steps if s.task is not None and s.task.kind in kinds and s.kind not in SUMMED] for p in pair)
        return Line.through(*(sum(map(times.seconds, steps)) for steps in counted))

    found = replace(stage_bytes(plans, place), forward=seconds("F"), backward=seconds("BW"))
    return _with_updates(found, pair[0], times)


SUMMED = ("accumulate",)
"""Kinds of plan steps that are counted as :attr:`StageCosts.sums`."""


def memory_costs(low: MemoryReport, high: MemoryReport) -> StageCosts:
    def rest(report: MemoryReport) -> float:
        state = report.parameters + report.masters + report.gradients + report.optimizer
        return report.total + report.context - state

    optimizer = low.masters + low.optimizer
    return StageCosts(NOTHING, NOTHING, low.parameters, low.gradients, optimizer, Line.through(rest(low), rest(high)))


def largest(model: ir.Model) -> int:
    """Bytes of the largest parameter."""
    return max((nbytes_of(v) for v in model.graph.initializers.values()), default=0)
