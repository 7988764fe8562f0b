"""The costs of one training step on a GPU that need not be there: times from its model, memory from a planning device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphc.backend import PLANNERS
from graphc.compiler import Program, collection_paused
from graphc.ir.names import STAGE_SHARES
from graphc.mesh import Mesh
from graphc.planner.costs import (
    POINTS,
    Compile,
    Line,
    ModelCosts,
    Plans,
    StageCosts,
    TensorCosts,
    largest,
    memory_costs,
    messages_of,
    possible,
    recomputing_program,
    stage_bytes,
)
from graphc.planner.scaling import BACKWARD
from graphc.report.memory import feed_shapes, memory_of, memory_of_plan
from graphc.report.step_time import PREDICTIONS

NOTES = (
    "a stage of a pipeline takes its share of the time of the whole model, without what more launches cost",
    "a rank of a tensor axis takes as much of the work as it has of the parameters, and holds whole activations",
)
"""What is not modelled of divided models on a GPU."""


@collection_paused()
def on_gpu(make: Compile, gpu: str, stages: Sequence[int], tensors: Sequence[int]) -> ModelCosts:
    """The costs on a described GPU.

    Args:
        gpu: ``a100``, ``h100``, …
        stages, tensors: as for :func:`.costs.on_host`.
    """
    program = make(backend="cupy")
    predictions = [PREDICTIONS["cupy"](program.model, feed_shapes(program.model, batch), gpu) for batch in POINTS]
    updates = [sum(c.seconds for c in p.costs if c.centre == "updates") for p in predictions]
    micro = Line.through(*(p.seconds - u for p, u in zip(predictions, updates, strict=True)))
    moved = max((c.nbytes / c.seconds for c in predictions[0].costs if c.centre == "updates" and c.seconds), default=1e12)
    engine = PLANNERS["cupy"]()

    def timed(stage: StageCosts, share: float) -> StageCosts:
        return replace(
            stage,
            forward=micro.times((1 - BACKWARD) * share),
            backward=micro.times(BACKWARD * share),
            update=updates[0] * stage.optimizer / max(1, whole.optimizer) if whole.optimizer else updates[0] * share,
            sums=3 * stage.gradients / moved,
        )

    whole = _memory(program)
    alone = timed(whole, 1.0)
    again = recomputing_program(make, "cupy")
    recomputed = None
    if again is not None:
        held = timed(_memory(again), 1.0)
        recomputed = replace(held, backward=micro)  # the forward pass once more
    pipes, divided = dict[int, tuple[StageCosts, ...]](), dict[int, TensorCosts]()
    for count in stages:
        found = possible(make, backend="cupy", mesh=Mesh(pipe=count), accumulate=count)
        if found is None:
            continue
        shares = [float(share) for share in found.model.metadata_props[STAGE_SHARES].split(",")]
        plans = Plans.stages(found.model, engine)
        inside = [replace(whole.rest, each=whole.rest.each * share) for share in shares]
        pipes[count] = tuple(
            timed(replace(stage_bytes(plans, place), rest=rest), share)
            for place, (share, rest) in enumerate(zip(shares, inside, strict=True))
        )
    for ranks in tensors:
        found = possible(make, backend="cupy", mesh=Mesh(tensor=ranks))
        if found is None:
            continue
        plans = Plans.whole(found.model, engine, Mesh(tensor=ranks))
        part = replace(memory_costs(*(memory_of_plan(plan) for plan in plans.ranks[0])), rest=whole.rest)
        divided[ranks] = TensorCosts(timed(part, part.parameters / max(1, whole.parameters)), *messages_of(plans))
    return ModelCosts(predictions[0].machine, alone, recomputed, pipes, largest(program.model), divided, NOTES)


def _memory(program: Program) -> StageCosts:
    return memory_costs(*(memory_of(program.model, feed_shapes(program.model, batch), backend="cupy") for batch in POINTS))
