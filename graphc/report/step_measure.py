"""Measures distinct steps of plans on this machine, each alone on arrays of its own."""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import onnx
import onnx_ir as ir

import graphc
from graphc.backend import Backend
from graphc.device import Array, Run
from graphc.errors import GraphcError
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.facts import constant, dtype_of, static_dims
from graphc.plan.segment_model import segment_model
from graphc.plan.steps import PlanStep
from graphc.report.step_profile import COMPUTES, Measured, StepProfile, Work, work_of

Clock = Callable[[], float]

RUNS = 3
"""Runs of a step that are timed, after one that is not; the shortest counts."""

LONG = 0.2
"""Seconds of a run from which one is enough."""

SIDE = 768
"""Rows and columns of the product that gives the rate of operations."""

COPIED = 1 << 23
"""Elements of each array of the sum that gives the rate of memory."""


def profile_steps(
    steps: Iterable[PlanStep],
    engine: Backend,
    *,
    threads: int,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> StepProfile:
    """Measure each distinct step once, those first that take most time together, until ``seconds`` are over.

    With one thread on the host, times are the processor's, so that other programs do not count.

    Args:
        steps: of any plans for the backend.
        threads: those that ``engine`` was made with.
        seconds: limit for all measurements; a run that has begun ends. What is left is modelled from what was measured.
        say: called with a line of progress.
    """
    clock = time.process_time if threads == 1 and engine.memory.on_host else time.perf_counter
    end = clock() + seconds
    found = StepProfile(about_machine(engine), engine.name, threads, *_rates(engine, clock))
    counts: Counter[str] = Counter()
    firsts: dict[str, tuple[Work, PlanStep]] = {}
    for step in steps:
        if step.kind in COMPUTES:
            work = work_of(step)
            counts[work.key] += 1
            firsts.setdefault(work.key, (work, step))
    order = sorted(firsts.values(), key=lambda pair: (-counts[pair[0].key] * found.base(pair[0]), pair[0].key))
    for work, step in order:
        if clock() >= end:
            break
        taken = time_step(step, engine, clock)
        if taken is not None:
            found.steps[work.key] = Measured(work, taken)
    say(f"measured {len(found.steps)} of {len(order)} distinct steps of plans ({counts.total()} in all) on this machine")
    return found


def time_step(step: PlanStep, engine: Backend, clock: Clock = time.perf_counter) -> float | None:
    """The shortest of a few runs, in seconds; None where the backend cannot run the step alone."""
    arrays: dict[ir.Value, Array] = {}

    def array(value: ir.Value) -> Array:
        if value not in arrays:
            arrays[value] = _array(engine, value)
        return arrays[value]

    try:
        if step.kind == "segment":
            inputs = {v.name or "": array(v) for v in step.inputs}
            run = engine.bind_segment(segment_model(step), inputs, {v.name or "": array(v) for v in step.outputs})
        else:
            (node,) = step.nodes
            operands = [None if v is None else array(v) for v in node.inputs]
            run = engine.bind_kernel(node, operands, [array(v) for v in node.outputs], {})
        engine.settle()
        return _shortest(run, engine, clock)
    except (GraphcError, MemoryError):
        return None


def _array(engine: Backend, value: ir.Value) -> Array:
    """Zeros, which are in range as indices; constants have their values."""
    known = constant(value)
    shape, dtype = static_dims(value), np.dtype(dtype_of(value).numpy())
    if known is not None:
        shape, dtype = known.shape, known.dtype
    if shape is None:
        raise MemoryError
    found = engine.memory.zeros(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    if known is not None:
        engine.memory.copy(found, np.ascontiguousarray(known).reshape(shape))
    return found


def _shortest(run: Run, engine: Backend, clock: Clock) -> float:
    taken = []
    for _ in range(1 + RUNS):
        start = clock()
        run()
        engine.memory.synchronize()
        taken.append(clock() - start)
        if taken[-1] > LONG:
            break
    return max(min(taken[1:] or taken), 1e-9)


def _rates(engine: Backend, clock: Clock) -> tuple[float, float]:
    """Bytes and operations a second, of a large sum and a large product."""
    added = _time_of(engine, clock, "Add", (COPIED,))
    multiplied = _time_of(engine, clock, "MatMul", (SIDE, SIDE))
    return 3 * 4 * COPIED / added, 2 * SIDE**3 / multiplied


def _time_of(engine: Backend, clock: Clock, op_type: str, shape: tuple[int, ...]) -> float:
    floats = onnx.TensorProto.FLOAT
    values = [onnx.helper.make_tensor_value_info(name, floats, shape) for name in "abc"]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op_type, ["a", "b"], ["c"])], "rate", values[:2], values[2:])
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    a, b, c = (engine.memory.zeros(math.prod(shape) * 4).view(np.float32).reshape(shape) for _ in range(3))
    model = onnx.ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=opsets)
    run = engine.bind_segment(model, {"a": a, "b": b}, {"c": c})
    engine.settle()
    return _shortest(run, engine, clock)


def about_machine(engine: Backend) -> dict[str, str]:
    """The processor or device, and the versions of what runs on it."""
    name = getattr(engine.memory, "name", "") or _processor()
    return {
        "name": name,
        "system": f"{platform.system()} {platform.machine()}",
        "graphc": graphc.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
    }


def _processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
