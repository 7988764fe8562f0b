"""Values whose shapes depend on data: their producers and readers run in one step, since no buffer can be planned for them.

    before   segment: NonZero, Gather │ kernel: Gemm │ segment: … │ kernel: loss │ segment: … │ segment: ScatterElements
    after    segment: all of them                                                             │ start, wait, update

A boolean mask makes such values (``x[mask]``), and a graph network that adds its loops to the edges that it is fed. Gradients
read what the forward pass computed, so mostly everything between the first of them and the last is part of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphc.errors import DataDependentShapeError
from graphc.ir.facts import describe, static_dims
from graphc.plan.steps import PlanStep

_COMPUTE = ("segment", "kernel")


def is_unknown(value: ir.Value) -> bool:
    """Whether no shape is known before the value is computed; unused optional outputs have no type."""
    return value.dtype is not None and (static_dims(value) is None or not isinstance(value.type, ir.TensorType))


def join_unknown_sizes(steps: Sequence[PlanStep], home: Mapping[ir.Node, int]) -> list[PlanStep]:
    """Join the steps between the first and the last that such a value concerns; a span stays as it is where that cannot be.

    It cannot where a collective, or another step that does not only compute, gives something to the steps that follow it.

    Args:
        home: node → its step.
    """
    spans = _spans(steps, home)
    joined: list[PlanStep] = []
    behind = 0
    for first, last in spans:
        inside = steps[first : last + 1]
        compute = [step for step in inside if step.kind in _COMPUTE]
        others = [step for step in inside if step.kind not in _COMPUTE]
        joined.extend(steps[behind:first])
        joined.extend([_one(compute), *others] if _may_join(compute, others) else inside)
        behind = last + 1
    return [*joined, *steps[behind:]]


def _spans(steps: Sequence[PlanStep], home: Mapping[ir.Node, int]) -> list[tuple[int, int]]:
    """First and last step of each range that must be one, in order and apart from each other."""
    found: list[tuple[int, int]] = []
    for k, step in enumerate(steps):
        if step.kind not in _COMPUTE:
            continue
        users = [home.get(u, k) for node in step.nodes for v in node.outputs if is_unknown(v) for u in v.consumers()]
        last = max(users, default=k)
        if last == k:
            continue
        if found and found[-1][1] >= k:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((k, last))
    return found


def _may_join(compute: Sequence[PlanStep], others: Sequence[PlanStep]) -> bool:
    made = {value for step in others for node in step.nodes for value in node.outputs}
    alike = len({(step.once, step.task) for step in compute}) == 1
    return alike and not any(v in made for step in compute for node in step.nodes for v in node.inputs)


def _one(compute: Sequence[PlanStep]) -> PlanStep:
    last = compute[-1]
    return PlanStep("segment", last.name, [node for step in compute for node in step.nodes], once=last.once, task=last.task)


def refuse_unknown_sizes(steps: Sequence[PlanStep]) -> None:
    """Refuse values that cross steps with a shape that depends on data.

    Raises:
        DataDependentShapeError: a value that crosses steps, or is an output, has no shape before it is computed.
    """
    for step in steps:
        for value in step.outputs:
            if is_unknown(value):
                producer = value.producer()
                where = describe(producer) if producer is not None else ""
                looped = producer is not None and producer.op_type == "Loop"
                advice = "give the Loop a constant trip count" if looped else "keep all elements, and weigh them by 0 or 1"
                raise DataDependentShapeError(
                    f"the shape of {value.name!r} depends on data, which a plan cannot hold: {where}; {advice}"
                )
