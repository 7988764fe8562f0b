"""A plan that does not fit into the memory of a device: how much it needs, and what would make it fit.

Everything is allocated when a plan is bound, so a lack of memory shows before anything has run. What helps is found by planning
the same graph for other shapes, or transformed, with no device (:func:`graphc.memory.predicted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import onnx_ir as ir

from graphc.backend import PLANNERS, Planner
from graphc.errors import DeviceMemoryError, GraphcError
from graphc.ir.declare import SHARD, is_update
from graphc.memory import DeviceSide, Memory, has_recomputation, memory_of_plan, predicted
from graphc.phases import is_accumulation
from graphc.pipeline import PASSES, Context
from graphc.plan import Plan

NAMES = {"scratch": "values inside segments", "workspace": "libraries", "bound": "constants and temporaries"}
"""What the kinds of memory are called that do not say it themselves."""


@dataclass(frozen=True, slots=True)
class Case:
    """What did not fit.

    Attributes:
        model: the training graph.
        shapes: of the feeds of one plan.
        batched: the feeds whose first axis is the batch.
        world_size, rank: of the worker.
        available: bytes that were free before any of it was allocated.
    """

    model: ir.Model
    shapes: Mapping[str, Sequence[int]]
    batched: Sequence[str]
    world_size: int
    rank: int
    available: int

    def memory(self, planner: Planner, model: ir.Model | None = None, batch: int | None = None) -> Memory:
        """The memory of the plan, of another graph, or for another batch."""
        shapes = {n: [batch, *s[1:]] if batch is not None and n in self.batched else s for n, s in self.shapes.items()}
        return predicted(model or self.model, shapes, planner, world_size=self.world_size, rank=self.rank)

    @property
    def batch(self) -> int:
        return int(self.shapes[self.batched[0]][0]) if self.batched else 1


def explain(case: Case, plan: Plan, backend: str, error: DeviceMemoryError) -> DeviceMemoryError:
    """``error`` with what the plan needs and what helps."""
    make = PLANNERS.get(backend)
    if make is None:
        least = memory_of_plan(plan, DeviceSide).total
        return DeviceMemoryError(
            error.wanted,
            error.available,
            f"the GPU's memory is too small: the plan needs at least {size(least)}, {size(case.available)} are available;"
            " a smaller batch, accumulate or recompute need less",
        )
    now = case.memory(make())
    parts = {k: v for k, v in asdict(now).items() if k not in ("host", "pinned", "context") and v > 0}
    largest = sorted(parts, key=lambda k: -parts[k])[:3]
    detail = ", ".join(f"{NAMES.get(name, name.replace('_', ' '))} {parts[name] / 2**20:,.1f} MiB" for name in largest)
    hints = [hint for find in (_smaller_batch, _recompute, _zero) for hint in find(case, now, make)]
    helps = "; ".join(hints) if hints else "nothing that graphc knows of: take a larger GPU"
    return DeviceMemoryError(
        now.total,
        case.available,
        f"the GPU's memory is too small: the plan needs {size(now.total)} ({detail}), {size(case.available)} are available."
        f" What helps: {helps}",
    )


def explain_state(model: ir.Model, available: int) -> DeviceMemoryError:
    """Parameters and optimizer state alone do not fit."""
    held = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    return DeviceMemoryError(
        held,
        available,
        f"the GPU's memory is too small: parameters and optimizer state take {size(held)}, {size(available)} are available."
        " What helps: more workers with strategy='zero:stage=3', or offload=true, which keeps optimizer state on the host",
    )


def size(nbytes: int) -> str:
    """Bytes for people, and exactly."""
    return f"{nbytes / 2**30:.2f} GiB ({nbytes:,} bytes)" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB ({nbytes:,} bytes)"


def _verdict(case: Case, total: int) -> str:
    return f"needs {size(total)}" + ("" if total <= case.available else ", which is still too much")


def _smaller_batch(case: Case, now: Memory, make: Callable[[], Planner]) -> Iterator[str]:
    """The largest batch that fits, of a line through two batches, tried and lowered until it does."""
    if case.batch < 2:
        return
    half = case.batch // 2
    try:
        at_half = case.memory(make(), batch=half).total
    except GraphcError:
        return  # the graph is for one batch only
    slope = (now.total - at_half) / (case.batch - half)
    fits = min(case.batch - 1, math.floor(half + (case.available - at_half) / slope)) if slope > 0 else 0
    while fits >= 1 and (total := case.memory(make(), batch=fits).total) > case.available:
        fits = min(fits - 1, int(fits * 0.95))
    if fits < 1:
        yield f"no smaller batch fits by itself ({half} samples need {size(at_half)})"
        return
    yield f"a batch of {fits} on each worker in place of {case.batch} {_verdict(case, total)}"
    if not any(is_accumulation(node) for node in case.model.graph):
        steps = next(k for k in range(2, case.batch + 1) if -(-case.batch // k) <= fits)
        yield f"accumulate={steps} does that without changing the step"


def _recompute(case: Case, now: Memory, make: Callable[[], Planner]) -> Iterator[str]:
    if has_recomputation(case.model):
        return
    copy = case.model.clone()
    try:
        PASSES["recompute"].function(copy, Context(), mode="all", batch=case.batch)
        found = case.memory(make(), copy)
    except GraphcError:
        return
    if found.total < 0.98 * now.total:
        yield f"recompute='all' {_verdict(case, found.total)}"


def _zero(case: Case, now: Memory, make: Callable[[], Planner]) -> Iterator[str]:
    """By formula: what is divided among N workers leaves a part of 1/N on each."""
    if any(node.attributes.get_string(SHARD, "") for node in case.model.graph if is_update(node)):
        return
    workers = max(case.world_size, 2)
    divided = {1: now.optimizer + now.masters, 2: now.optimizer + now.masters + now.gradients}
    for stage, part in divided.items():
        total = now.total - part + part // workers
        if total <= case.available or stage == 2:
            if part > 0.02 * now.total:
                yield f"strategy='zero:stage={stage}' on {workers} workers {_verdict(case, total)}"
            return
