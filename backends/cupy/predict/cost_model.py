"""Predicts the time of a plan's calls on a GPU, as a range.

The time follows from bytes, operations and the constants in :mod:`.hardware`, each of which has a better and a worse case. The
instructions of generated kernels are counted in their text, by counts that were read from compiled kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.device.planning_device import PlannedDevice
from graphc.backends.cupy.libraries.gemm import PRODUCT, product_of
from graphc.backends.cupy.predict import library_cost
from graphc.backends.cupy.predict.hardware import (
    BETWEEN,
    DEFAULT,
    FINISH,
    GPUS,
    HOST_LINK,
    LAST_BLOCK,
    LATENCY,
    MIN_LAUNCH,
    OVERLAP,
    STEP,
    TICKET,
    Gpu,
    Machine,
    gpu_of,
)
from graphc.backends.cupy.predict.traffic import adds_partials, in_flight, instructions, nbytes, resident_threads, traffic
from graphc.backends.cupy.segment.bind import scratch_layout
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import Control, KernelCall, NodeCall, Segment
from graphc.backends.cupy.updates.bind import bind_update, is_elementwise, launches_of, name_of
from graphc.device import Array
from graphc.ir.facts import dtype_of
from graphc.plan.partition import Plan, make_plan
from graphc.plan.segment_model import segment_model
from graphc.plan.state_rewrites import adapted
from graphc.report.step_profile import checked_by
from graphc.report.step_time import PREDICTIONS, Cost, Prediction

STREAMED = 4 << 20
"""Bytes from which a kernel waits for memory; fewer come from the cache, and the time of a short kernel covers them."""

ISSUE_BOUND = "bound by instructions"
LATENCY_BOUND = "bound by loads in flight"


def predict(model: ir.Model, shapes: Mapping[str, Sequence[int]], gpu: str = DEFAULT) -> Prediction:
    """The cost of a step of a training graph; it allocates nothing and needs no GPU.

    Args:
        gpu: name of a described GPU (:data:`.hardware.GPUS`).

    Raises:
        UsageError: no such GPU is described.
    """
    costs_on = CostModel(gpu_of(gpu))
    device = PlannedDevice()
    backend = CupyBackend(device=device)
    plan = make_plan(adapted(model, backend), shapes, backend)
    costs: list[Cost] = []
    scratch = 0
    for step in plan.steps:
        if step.kind == "segment":
            segment = compile_segment(segment_model(step))
            costs += [costs_on.call(call) for call in _calls(segment)]
            scratch = max(scratch, scratch_of(segment))
        elif step.kind == "check":
            costs.append(costs_on.estimate("libraries", "check of the gradients", library_cost.copied(checked_by(plan))))
        elif step.group is None and step.kind == "kernel":
            values = [v for v in (*step.inputs, *step.outputs) if v is not None]
            costs.append(costs_on.estimate("kernels of nodes", step.name, library_cost.other(values)))
    costs += _updates(plan, device, costs_on)
    costs.insert(0, costs_on.step(costs, sum(nbytes(v) for v in plan.model.graph.inputs)))
    return Prediction(costs_on.gpu.name, costs, scratch)


def scratch_of(segment: Segment) -> int:
    """Bytes of the values that a segment's calls pass to each other."""
    return scratch_layout(segment, {*segment.graph.inputs, *segment.graph.outputs})[2]


def _calls(segment: Segment) -> Iterator[KernelCall | NodeCall]:
    """The calls of a segment; the first branch of an If counts for both."""
    for call in segment.calls:
        if isinstance(call, Control):
            yield from _calls_of(call)
        else:
            yield call


def _calls_of(control: Control) -> Iterator[KernelCall | NodeCall]:
    return itertools.chain.from_iterable(itertools.repeat(list(_calls(control.bodies[0])), control.iterations))


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of calls on one GPU."""

    gpu: Gpu = GPUS[DEFAULT]

    def call(self, call: KernelCall | NodeCall | Control) -> Cost:
        """The cost of one call of a segment; a loop or branch is one call."""
        if isinstance(call, KernelCall):
            return self._kernel(call)
        if isinstance(call, NodeCall):
            return self._node(call)
        costs = [self.call(inner) for inner in _calls_of(call)]
        name = f"{call.node.op_type} {call.node.outputs[0].name}"
        low, high = sum(c.low for c in costs), sum(c.high for c in costs)
        return _cost("control", name, low, high, sum(c.nbytes for c in costs), sum(c.flops for c in costs))

    def update(self, name: str, rows: int, moved: int) -> Cost:
        """The cost of one launch that updates ``rows`` buffers."""
        return self.estimate("updates", f"{name} x{rows}", library_cost.copied(moved))

    def step(self, calls: Sequence[Cost], feeds: int) -> Cost:
        """What a step of ``fit`` costs beside its ``calls``, with ``feeds`` bytes of feeds.

        The next step is queued by then. Only where the calls take less time than Python needs does the GPU wait for it.
        """
        fast, slow = sum(cost.low for cost in calls), sum(cost.high for cost in calls)

        def seconds(machine: Machine) -> float:
            between = machine.of(BETWEEN) + 2 * feeds / machine.memory
            return max(between, machine.of(STEP) - (fast if machine.fast else slow))

        return self._both("host", "feeds, launch and results", seconds, 2 * feeds)

    def estimate(self, centre: str, name: str, estimate: library_cost.Estimate) -> Cost:
        """The cost of a call by its estimate."""
        seconds, moved, flops = estimate
        return self._both(centre, name, seconds, moved, flops)

    def _both(
        self, centre: str, name: str, seconds: Callable[[Machine], float], moved: int = 0, flops: int = 0, note: str = ""
    ) -> Cost:
        low, high = seconds(Machine(self.gpu, fast=True)), seconds(Machine(self.gpu, fast=False))
        return _cost(centre, name, low, high, moved, flops, note)

    def _kernel(self, call: KernelCall) -> Cost:
        source, shape = call.source, call.shape
        moved = traffic(source, call.parts)
        finishes = adds_partials(source)
        columns = call.parts if finishes else max(1, source.columns)
        work = source.rows * columns * instructions(source)
        totals = 0  # bytes that each last block adds up
        if source.finishes:
            totals = sum(source.partial_bytes(call.parts)) // (shape.blocks // shape.splits)
        requested = 0
        if moved > STREAMED and source.traffic and not finishes:
            threads = resident_threads(source, shape, self.gpu.multiprocessors, self.gpu.threads)
            requested = threads * in_flight(source, shape) * min(self.gpu.multiprocessors, shape.blocks)

        def parts(machine: Machine) -> dict[str, float]:
            memory = moved / machine.kernel_memory
            waiting = moved * machine.of(LATENCY) / requested if requested else 0.0
            return {"": memory, LATENCY_BOUND: waiting, ISSUE_BOUND: work / machine.instructions}

        def seconds(machine: Machine) -> float:
            found = parts(machine)
            issued = found.pop(ISSUE_BOUND)
            memory = max(found.values())
            total = max(memory, issued) + machine.of(OVERLAP) * min(memory, issued)
            last = machine.of(TICKET) + totals / machine.of(LAST_BLOCK) if totals else 0.0
            return machine.launched(total, FINISH if finishes else MIN_LAUNCH) + last

        found = parts(Machine(self.gpu, fast=True))
        names = [v.name or "" for v in source.operands[source.reads :]] or [v.name or "" for v in source.operands]
        name = f"{call.name} {names[0] if names else ''}"
        return self._both(_centre(call), name, seconds, moved, note=max(found, key=lambda why: found[why]))

    def _node(self, call: NodeCall) -> Cost:
        node = call.node
        values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None]
        name = f"{node.op_type} {node.outputs[0].name}"
        if PRODUCT in node.meta:
            p = product_of(node)
            size = f"{name} {p.m}x{p.n}x{p.k}"
            return self.estimate("products", size, library_cost.product(p, sum(nbytes(v) for v in values)))
        if call.library is None:
            moved = sum(nbytes(v) for v in values)
            return self._both("on the host", name, lambda m: moved / m.of(HOST_LINK), moved, note="no kernel")
        if call.library.cost == "convolution":
            return self.estimate("convolutions", name, library_cost.convolution(node, values))
        if call.library.cost == "attention":
            return self.estimate("attention", name, library_cost.attention(node, values))
        return self.estimate("libraries", name, library_cost.other(values))


def _cost(centre: str, name: str, low: float, high: float, moved: int, flops: int, note: str = "") -> Cost:
    return Cost(centre, name, (low + high) / 2, moved, flops, note, (high - low) / 2)


def _centre(call: KernelCall) -> str:
    source = call.source
    if not source.traffic:
        return "kernels of nodes"
    if source.columns > 1:
        return "sums over columns" if source.form.strided else "rows"
    return "elements"


def _updates(plan: Plan, device: PlannedDevice, costs_on: CostModel) -> Iterator[Cost]:
    """The launches of all consecutive updates, joined over flat arrays as the trainer does."""
    arrays: dict[str | ir.Value, Array] = {}

    def array(value: ir.Value) -> Array:
        group, index = plan.homes.get(value, (None, 0))
        key = value if group is None else group.buffer(index)
        if key not in arrays:
            size = nbytes(value) if group is None else group.nbytes(index)
            arrays[key] = device.zeros(size).view(dtype_of(value).numpy())
        return arrays[key]

    updates = []
    for group in (step.group for step in plan.steps if step.group is not None):
        node = group.nodes[0]
        if is_elementwise(node):
            updates.append(bind_update(device, node, [None if v is None else array(v) for v in node.inputs]))
        else:
            values = [v for n in group.nodes for v in (*n.inputs, *n.outputs) if v is not None]
            yield costs_on.estimate("updates", group.name, library_cost.other(values))
    for row in launches_of(updates):
        yield costs_on.update(name_of(row[0]), len(row), sum(update.traffic for update in row))


PREDICTIONS.register("cupy", predict, origin=__name__)
