"""Explains why a plan exceeds a device's memory, and suggests options that fit.

Binding a plan allocates everything, so a lack of memory shows before the first step. To find advice, the same graph is planned
for other shapes, or transformed, without a device (:func:`graphc.report.memory.predicted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphc.backend import PLANNERS, Planner
from graphc.errors import DeviceMemoryError, GraphcError
from graphc.ir.declare import SHARD, is_update
from graphc.ir.ops.accumulation import is_accumulation
from graphc.mesh import ALONE, Mesh
from graphc.plan.partition import Plan
from graphc.plan.state_rewrites import adapted
from graphc.report.memory import BESIDE, DeviceSide, has_recomputation, memory_of_plan, predicted
from graphc.runtime.state import State

if TYPE_CHECKING:
    from graphc.compiler import Program

NAMES = {"scratch": "values inside segments", "workspace": "libraries", "bound": "constants and temporaries"}
"""Kind of memory → its name in messages, if it differs from the field's name."""

TRIES = 8
"""Maximum number of batch sizes to try: planning one takes seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan that did not fit.

    Attributes:
        model: the training or evaluation graph.
        shapes: shapes of the feeds of one plan (of one micro-batch if a step has several).
        batched: the feeds whose first axis is the batch.
        mesh, rank: the axes of the workers, and the worker's place.
        available: free bytes before the plan's first allocation.
        program: compiled again with other options to find what helps.
    """

    model: ir.Model
    shapes: Mapping[str, Sequence[int]]
    batched: Sequence[str]
    mesh: Mesh
    rank: int
    available: int
    program: Program

    def memory(
        self, planner: Planner, model: ir.Model | None = None, batch: int | None = None, mesh: Mesh | None = None
    ) -> int:
        """Bytes on the device for this plan, or for another graph, batch or mesh."""
        shapes = {n: [batch, *s[1:]] if batch is not None and n in self.batched else s for n, s in self.shapes.items()}
        mesh = mesh or self.mesh
        return predicted(model or self.model, shapes, planner, mesh=mesh, rank=min(self.rank, mesh.size - 1)).total

    @property
    def batch(self) -> int:
        return int(self.shapes[self.batched[0]][0]) if self.batched else 1

    @property
    def trains(self) -> bool:
        return any(is_update(node) for node in self.model.graph)

    def remade(self, **options: object) -> ir.Model | None:
        """Compile the training graph with other options; None if that is impossible."""
        if not self.trains:
            return None
        try:
            return self.program.recompile(**options).model
        except GraphcError:
            return None


def explain(case: Case, plan: Plan, backend: str, error: DeviceMemoryError) -> DeviceMemoryError:
    """Add to ``error`` the plan's memory and the advice."""
    make = PLANNERS.get(backend)
    if make is None:
        least = memory_of_plan(plan, DeviceSide).total
        return DeviceMemoryError(
            error.wanted,
            error.available,
            f"the GPU's memory is too small: the plan needs at least {size(least)}, {size(case.available)} are available;"
            " a smaller batch, accumulate or recompute need less",
        )
    now = predicted(case.model, case.shapes, make(), mesh=case.mesh, rank=case.rank)
    parts = {k: v for k, v in asdict(now).items() if k not in BESIDE and v > 0}
    largest = sorted(parts, key=lambda k: -parts[k])[:3]
    detail = ", ".join(f"{NAMES.get(name, name.replace('_', ' '))} {parts[name] / 2**20:,.1f} MiB" for name in largest)
    hints = [hint for find in (_smaller_batch, _recompute, _zero) for hint in find(case, now.total, make)]
    enough, short = ("; ".join(text for text, fits in hints if fits is wanted) for wanted in (True, False))
    helps = f" What helps: {enough}." if enough else ""
    helps += f" Not enough by itself: {short}." if short else ""
    return DeviceMemoryError(
        now.total,
        case.available,
        f"the GPU's memory is too small: the plan needs {size(now.total)} ({detail}), {size(case.available)} are available."
        + (helps or " Nothing that graphc knows of helps: take a larger GPU"),
    )


def explain_state(program: Program, available: int, backend: str) -> DeviceMemoryError:
    """Make the error for a ``program`` whose parameters and optimizer state alone do not fit."""
    model = program.model
    make = PLANNERS.get(backend)
    held = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    helps = ["more workers with strategy='zero:stage=3'", "offload=true, which keeps optimizer state on the host"]
    if make is not None:
        held = _held(model, make(), 1)
        case = Case(model, {}, (), ALONE, 0, available, program)
        helps = list(filter(None, (_zero_state(case, make), _offload(case, make))))
    return DeviceMemoryError(
        held,
        available,
        f"the GPU's memory is too small: parameters and optimizer state take {size(held)}, {size(available)} are available."
        + (f" What helps: {'; '.join(helps)}" if helps else " Nothing that graphc knows of helps: take a larger GPU"),
    )


def _held(model: ir.Model, planner: Planner, workers: int) -> int:
    """Bytes of one worker's state on the device plus its largest sharded tensor, which is whole for a moment."""
    state = State(adapted(model, planner), 0, workers, planner.memory)
    for name in sorted(state.shards, key=lambda name: -state.initial(name).nbytes)[:1]:
        planner.memory.zeros(state.initial(name).nbytes)
    return planner.memory.allocated


def _zero_state(case: Case, make: Callable[[], Planner]) -> str:
    model = case.remade(strategy="zero:stage=3", mesh=None)
    if model is None:
        return ""
    for workers in (2, 4, 8, 16, 32, 64):
        held = _held(model, make(), workers)
        if held <= case.available:
            return f"strategy='zero:stage=3' keeps {size(held)} on each of {workers} workers"
    return ""


def _offload(case: Case, make: Callable[[], Planner]) -> str:
    model = case.remade(strategy="zero:stage=1,offload=true")
    held = None if model is None else _held(model, make(), 1)
    if held is None or held > case.available:
        return ""
    return f"strategy='zero:stage=1,offload=true' keeps {size(held)} on the GPU, and optimizer state on the host"


def size(nbytes: int) -> str:
    """Format bytes in a readable unit and exactly."""
    return f"{nbytes / 2**30:.2f} GiB ({nbytes:,} bytes)" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB ({nbytes:,} bytes)"


Hints = Iterator[tuple[str, bool]]
"""Return (advice with the bytes it needs, whether they are available)."""


def _smaller_batch(case: Case, now: int, make: Callable[[], Planner]) -> Hints:
    """Suggest the largest batch that fits, and micro-batches for the same batch."""
    found = {case.batch: now}
    fits = _largest(case, found, make)
    if fits is None:
        return
    done = next((node.attributes["steps"].as_int() for node in case.model.graph if is_accumulation(node)), 1)
    kind = "micro-batch" if done > 1 else "batch"
    if not fits:
        least = min(found)
        yield f"a {kind} of {least} needs {size(found[least])}", False
        return
    yield f"a {kind} of {fits} on each worker in place of {case.batch} needs {size(found[fits])}", True
    whole = case.batch * done
    for part in sorted({max(1, fits // divisor) for divisor in (1, 2, 4)}, reverse=True):  # accumulated gradients count too
        steps = next(k for k in range(1, whole + 1) if whole % k == 0 and whole // k <= part)
        remade = case.remade(accumulate=steps)
        total = None if remade is None else case.memory(make(), remade, batch=whole // steps)
        if total is not None and total <= case.available:
            yield f"accumulate={steps} does that without changing the step, in {size(total)}", True
            return


def _largest(case: Case, found: dict[int, int], make: Callable[[], Planner]) -> int | None:
    """Find the largest batch that fits by repeated linear interpolation; 0 if none fits. Records tries in ``found``.

    Returns None if the graph has a fixed batch.
    """
    fits, least = 0, case.batch  # the largest batch that fits, the smallest that does not
    guess = case.batch // 2
    for _ in range(TRIES):
        if least - fits <= 1:
            break
        try:
            found[guess] = case.memory(make(), batch=guess)
        except GraphcError:
            return None
        if found[guess] <= case.available:
            fits = guess
        else:
            least = guess
        low, high = (fits, least) if fits else sorted(found)[:2]
        slope = (found[high] - found[low]) / (high - low)
        wanted = math.floor(low + (case.available - found[low]) / slope) if slope > 0 else 0
        guess = min(max(wanted, fits + 1), least - 1)
    return fits


def _recompute(case: Case, now: int, make: Callable[[], Planner]) -> Hints:
    text = f"all,batch={case.batch}"
    remade = None if has_recomputation(case.model) else case.remade(recompute=text)
    if remade is not None and (total := case.memory(make(), remade)) < 0.98 * now:
        yield f"recompute={text!r} needs {size(total)}", total <= case.available


def _zero(case: Case, now: int, make: Callable[[], Planner]) -> Hints:
    """Suggest the first stage that fits, else the last."""
    if any(node.attributes.get_string(SHARD, "") for node in case.model.graph if is_update(node)):
        return
    workers = max(case.mesh.size, 2)
    for stage in (1, 2, 3):
        remade = case.remade(strategy=f"zero:stage={stage}", mesh=None)
        if remade is None:
            return
        total = case.memory(make(), remade, mesh=Mesh(data=workers))
        if total <= case.available or (stage == 3 and total < 0.98 * now):
            yield f"strategy='zero:stage={stage}' on {workers} workers needs {size(total)} on each", total <= case.available
            return
