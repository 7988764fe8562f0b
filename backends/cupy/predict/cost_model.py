"""Predicts the time of a plan's calls on an H200.

The time follows from bytes, operations and the rates in :mod:`.hardware`. The instructions of generated kernels are counted in
their text, by counts that were read from compiled kernels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.device.planning_device import PlannedDevice
from graphc.backends.cupy.libraries.cudnn_convolution import INPUT, convolution_of
from graphc.backends.cupy.libraries.gemm import PRODUCT, product_of
from graphc.backends.cupy.predict.hardware import (
    ATTENTION,
    ATTENTION_GRADIENT,
    CACHED,
    CONVOLUTION,
    CONVOLUTION_MEMORY,
    GEMM,
    HOST_LINK,
    INSTRUCTIONS,
    KERNEL_MEMORY,
    LAUNCH,
    MIN_LAUNCH,
    NAME,
    NARROW_CONVOLUTION,
    SECTOR,
    STEM_CONVOLUTION,
    WIDE_GEMM,
    WIDE_GEMM_SIZE,
)
from graphc.backends.cupy.segment.bind import scratch_layout
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import Control, KernelCall, NodeCall, Segment
from graphc.backends.cupy.updates.bind import bind_update, is_elementwise, launches_of, name_of
from graphc.backends.fusion.kernel_source import Access, KernelSource
from graphc.backends.fusion.op_kernels import OP_KERNELS
from graphc.device import Array
from graphc.ir.facts import dtype_of, shape_of, size_of
from graphc.plan.partition import Plan, make_plan
from graphc.plan.segment_model import segment_model
from graphc.plan.state_rewrites import adapted
from graphc.report.step_time import PREDICTIONS, Cost, Prediction

RANDOM = {"philox_words": 60 / 4, "philox_word": 75}
"""Instructions per random word: one of a block of four, where multiplications count twice, or a single one."""

COSTLY = {
    r"\b(?:exp|log)f?\(": 12,
    r"\btanhf\(": 24,
    r"\berff\(": 24,
    r" / ": 9,
    r"sqrtf?\(": 8,
    r"add_exponential": 7,
    **{rf"{name}\(": count for kernel in OP_KERNELS.values() for name, count in kernel.instructions.items()},
}
"""C text that takes more than one instruction → their number, as read from compiled kernels."""


def predict(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> Prediction:
    """The cost of a step of a training graph; it allocates nothing and needs no GPU."""
    device = PlannedDevice()
    backend = CupyBackend(device=device)
    plan = make_plan(adapted(model, backend), shapes, backend)
    costs: list[Cost] = []
    scratch = 0
    for step in plan.steps:
        if step.kind == "segment":
            segment = compile_segment(segment_model(step))
            costs += [cost_of(call) for call in _calls(segment)]
            scratch = max(scratch, scratch_of(segment))
        elif step.group is None and step.kind == "kernel":
            costs.append(_moved("kernels of nodes", step.name, [*step.inputs, *step.outputs]))
    costs += _updates(plan, device)
    return Prediction(NAME, costs, scratch)


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


def call_cost(call: KernelCall | NodeCall | Control) -> Cost:
    """The cost of one call of a segment; a loop or branch is one call."""
    if not isinstance(call, Control):
        return cost_of(call)
    costs = [cost_of(inner) for inner in _calls_of(call)]
    name = f"{call.node.op_type} {call.node.outputs[0].name}"
    return Cost("control", name, sum(c.seconds for c in costs), sum(c.nbytes for c in costs), sum(c.flops for c in costs))


def cost_of(call: KernelCall | NodeCall) -> Cost:
    """The cost of one call."""
    return _kernel(call) if isinstance(call, KernelCall) else _node(call)


def _kernel(call: KernelCall) -> Cost:
    source = call.source
    nbytes = traffic(source, call.parts)
    columns = call.parts if _adds_partials(source) else max(1, source.columns)
    work = source.rows * columns * _instructions(source)
    seconds, note = nbytes / KERNEL_MEMORY, ""
    if work / INSTRUCTIONS > seconds:
        seconds, note = work / INSTRUCTIONS, "bound by instructions"
    form = source.form
    centre = "elements"
    if not source.traffic:
        centre = "kernels of nodes"
    elif source.columns > 1:
        centre = "sums over columns" if form.strided else "rows"
    names = [v.name or "" for v in source.operands[source.reads :]] or [v.name or "" for v in source.operands]
    return Cost(centre, f"{call.name} {names[0] if names else ''}", max(MIN_LAUNCH, LAUNCH + seconds), nbytes, 0, note)


def traffic(source: KernelSource, parts: int = 1) -> int:
    """Bytes that a kernel moves between memory and its threads.

    Repeated reads by several loops over the columns count once if the rows in progress stay in the cache. So do overlapping
    reads
    of one loop in the same order, such as those of a window: neighbours hit each other's lines.
    """
    if not source.traffic:
        return source.moved or sum(nbytes(v) for v in source.operands)
    total = sum(source.partial_bytes(parts))
    seen: dict[tuple[ir.Value, object], int] = {}
    walked: dict[tuple[ir.Value, int, tuple[str, ...]], int] = {}
    for access in source.traffic:
        again = seen.get((access.value, access.offset), 0)
        moved = _moved_by(access, source)
        if again and moved * min(1.0, 264 / max(1, source.rows)) < CACHED:
            moved //= 4  # from the cache
        order = tuple(dict.fromkeys(variable.name for variable, _ in access.offset.variables()))
        before = walked.get((access.value, access.loop, order), 0)
        if before and not again:
            moved = min(moved, max(0, nbytes(access.value) - before))
        walked[access.value, access.loop, order] = before + moved
        seen[access.value, access.offset] = again + 1
        total += moved
    return total


def _moved_by(access: Access, source: KernelSource) -> int:
    itemsize = int(access.value.dtype.itemsize) if access.value.dtype is not None else 4
    walked = source.rows * (max(1, source.columns) if access.inner else 1)
    distinct, found = 1, 1
    steps: dict[str, int] = {}
    for variable, coefficient in access.offset.variables():
        if variable.name not in steps and variable.name[0] in "rc":
            distinct *= variable.size
        elif variable.name not in steps:
            found *= variable.size  # an index that was read from memory
        steps[variable.name] = min(abs(coefficient) or 1, steps.get(variable.name, 1 << 30))
    if not any(name[0] == "r" for name in steps):
        distinct *= found
    distinct = min(walked, distinct, size_of(access.value))
    if distinct <= 1 << 10:
        return distinct * itemsize
    wanted = source.form.variable
    near = wanted is None or steps.get(wanted.name) in (1, None) or wanted.size == source.form.vector
    looped = any(step == 1 and name[0] in "rc" for name, step in steps.items())
    if not looped:  # scattered elements
        return min(distinct * SECTOR, nbytes(access.value))
    return distinct * itemsize * (1 if near else 4)  # the rest of a line is usually in the cache, for other threads


def _adds_partials(source: KernelSource) -> bool:
    """Whether this is the second half of a divided sum, which adds up the partial totals."""
    return "PARTS" in source.body


def _instructions(source: KernelSource) -> float:
    """Estimated instructions per element; a value shared by a vector is computed once."""
    form = source.form
    drawn = set(re.findall(r"(philox_words?)\b(.*?)\)[;, ]", source.body))  # equal draws are shared
    total = float(sum(RANDOM[name] for name, _ in drawn))
    varying = {form.variable.name} if form.variable is not None else set()
    for line in source.body.splitlines():
        found = re.match(r"const \w+ (\w+) = (.*);|(s\d+)(?:\[v\])? = (.*);|(add_exponential.*)", line)
        if found is None or line.startswith("const Pack"):
            continue
        text = found[2] or found[4] or found[5]
        count = 1 + sum(many * len(re.findall(pattern, text)) for pattern, many in COSTLY.items())
        varies = not varying or ".at[v]" in text or not varying.isdisjoint(re.findall(r"\w+", text)) or found[2] is None
        if varies and found[1]:
            varying.add(found[1])
        total += count if varies or form.vector == 1 else count / form.vector
    return total


def _node(call: NodeCall) -> Cost:
    node = call.node
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None]
    name = f"{node.op_type} {node.outputs[0].name}"
    if PRODUCT in node.meta:
        return _product(node, name, sum(nbytes(v) for v in values))
    if call.library is None:
        moved = sum(nbytes(v) for v in values)
        return Cost("on the host", name, moved / HOST_LINK, moved, 0, "no kernel")
    rule = RULES.get(call.library.cost)
    return _moved("libraries", name, values) if rule is None else rule(node, name, values)


def _product(node: ir.Node, name: str, moved: int) -> Cost:
    p = product_of(node)
    rate = GEMM[p.dtype]
    if p.dtype.itemsize == 2 and max(p.m, p.n, p.k) > WIDE_GEMM_SIZE and min(p.m, p.n, p.k) >= 512:
        rate = WIDE_GEMM
    seconds = max(p.flops / rate, moved / KERNEL_MEMORY)
    return Cost("products", f"{name} {p.m}x{p.n}x{p.k}", max(MIN_LAUNCH, LAUNCH + seconds), moved, p.flops)


def _convolution(node: ir.Node, name: str, values: Sequence[ir.Value]) -> Cost:
    found = convolution_of(node)
    moved = sum(nbytes(v) for v in values)
    if found.kind != INPUT and found.skips:  # a strided window of one pixel skips the pixels between
        x = values[0]
        moved -= nbytes(x) - nbytes(x) * int(np.prod(found.y.dims[2:])) // int(np.prod(found.x.dims[2:]))
    channels, _, *positions = found.w.dims[1], *found.y.dims[1:]
    flops = 2 * found.y.dims[0] * int(np.prod(positions)) * int(np.prod(found.w.dims))
    rate = STEM_CONVOLUTION if channels <= 4 else NARROW_CONVOLUTION if channels < 64 else CONVOLUTION
    return Cost("convolutions", name, LAUNCH + max(flops / rate, moved / CONVOLUTION_MEMORY), moved, flops)


def _attention(node: ir.Node, name: str, values: Sequence[ir.Value]) -> Cost:
    gradient = node.op_type.endswith("Grad")
    axes = node.attributes["layout"].as_string().split(",")[0]
    q, k = (node.inputs[1], node.inputs[2]) if gradient else (node.inputs[0], node.inputs[1])
    sizes = dict(zip(axes, shape_of(q), strict=True))
    keys = dict(zip(node.attributes["layout"].as_string().split(",")[1], shape_of(k), strict=True)).get("t", 1)
    flops = 4 * sizes.get("b", 1) * sizes.get("h", 1) * sizes.get("t", 1) * keys * sizes.get("d", 1)
    flops = (5 * flops // 2 if gradient else flops) // (2 if node.attributes.get_int("causal", 0) else 1)
    moved = sum(nbytes(v) for v in dict.fromkeys(values))
    seconds = max(flops / (ATTENTION_GRADIENT if gradient else ATTENTION), moved / KERNEL_MEMORY)
    return Cost("attention", name, LAUNCH + seconds, moved, flops)


RULES = {"convolution": _convolution, "attention": _attention}
"""Kind of library call → its cost function; any other call costs its bytes."""


def _updates(plan: Plan, device: PlannedDevice) -> Iterator[Cost]:
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
            yield _moved("updates", group.name, [v for n in group.nodes for v in (*n.inputs, *n.outputs) if v is not None])
    for row in launches_of(updates):
        yield update_cost(name_of(row[0]), len(row), sum(update.traffic for update in row))


def update_cost(name: str, rows: int, moved: int) -> Cost:
    """The cost of one launch that updates ``rows`` buffers."""
    return Cost("updates", f"{name} x{rows}", max(MIN_LAUNCH, LAUNCH + moved / KERNEL_MEMORY), moved)


def _moved(centre: str, name: str, values: Sequence[ir.Value]) -> Cost:
    moved = sum(nbytes(v) for v in values)
    return Cost(centre, name, max(MIN_LAUNCH, LAUNCH + moved / KERNEL_MEMORY), moved)


def nbytes(value: ir.Value) -> int:
    """Bytes of a value with a static shape."""
    return int(size_of(value) * dtype_of(value).itemsize)


PREDICTIONS.register("cupy", predict, origin=__name__)
