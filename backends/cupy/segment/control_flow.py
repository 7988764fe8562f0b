"""If, Loop and Scan on the device: each body is a segment, bound once per known iteration.

Scan, Loop of known length   each iteration reads its slices and the previous states in place; everything only queues
Loop until a condition       the host reads the condition after each iteration, so such a segment cannot be captured
If                           the host reads the condition, then queues the branch
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.cupy.device.protocol import Device
from graphc.backends.cupy.segment.program import Control, trip_count
from graphc.backends.fusion.graph_queries import results
from graphc.device import Array, Run
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dtype_of, required, shape_of, static_dims
from graphc.ir.subgraphs import bodies, captured
from graphc.plan.segment_model import segment_model
from graphc.plan.steps import PlanStep

BindBody: TypeAlias = "Callable[..., Run]"
"""Binds a segment to arrays by name: the constructor of :class:`.bind.BoundSegment`, with scratch memory of its own."""


def body_models(node: ir.Node) -> list[onnx.ModelProto] | None:
    """The bodies as segments, with captured values as inputs after their own; None if a size depends on data."""
    found = list(bodies(node))
    values = [v for body in found for v in (*body.inputs, *(o for n in body for o in results(n)))]
    if any(v.dtype is None or static_dims(v) is None for v in (*values, *results(node))):
        return None
    if node.op_type == "Loop" and trip_count(node) is None and len(node.outputs) > len(node.inputs) - 2:
        return None  # the length of its stacked outputs is unknown
    if node.op_type == "Scan" and any(a for way in ("input", "output") for a in _listed(node, f"scan_{way}_axes")):
        return None
    return [_model(node, body) for body in found]


def _model(node: ir.Node, body: ir.Graph) -> onnx.ModelProto:
    op = Builder(required(node.graph)).inside(body)
    taken: set[ir.Value] = set()
    for k, value in enumerate(body.outputs):
        producer = value.producer()
        if producer is None or producer.graph is not body or value in taken or producer.op_type == "Constant":
            value = body.outputs[k] = op.Identity(value)
        taken.add(value)
    outer = [v for v in captured(node) if constant(v) is None]
    inner = [n for n in body if n.op_type != "Constant" or n.domain]
    return segment_model(PlanStep("segment", node.name or node.op_type, inner, [*body.inputs, *outer], list(body.outputs)))


@dataclass(slots=True)
class _Binder:
    """Binds the bodies of one node.

    Attributes:
        captures: the values that bodies read from outside, by name.
        constants: arrays of constants, which all iterations share.
    """

    call: Control
    device: Device
    bind: BindBody
    captures: Mapping[str, Array]
    constants: dict[ir.Value, Array]

    def body(self, inputs: Sequence[Array], outputs: Sequence[Array], which: int = 0) -> Run:
        segment = self.call.bodies[which]
        names = [v.name or "" for v in segment.graph.inputs]
        feeds = {**dict(zip(names, inputs, strict=False)), **{k: v for k, v in self.captures.items() if k in names}}
        results_ = dict(zip((v.name or "" for v in segment.graph.outputs), outputs, strict=True))
        return self.bind(segment, feeds, results_, constants=self.constants)

    def like(self, value: ir.Value) -> Array:
        """Allocate memory for a value."""
        dtype, shape = np.dtype(dtype_of(value).numpy()), shape_of(value)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.device.empty(nbytes).view(dtype).reshape(shape)


def bind(call: Control, device: Device, array: Callable[[ir.Value], Array], bind_body: BindBody) -> Run:
    """Bind a node with bodies.

    Args:
        array: the memory of an operand or result.
    """
    node = call.node
    inputs = [None if v is None else array(v) for v in node.inputs]
    outputs = [array(v) if v in results(node) else None for v in node.outputs]
    captures = {v.name or "": array(v) for v in captured(node) if constant(v) is None}
    binder = _Binder(call, device, bind_body, captures, {})
    if node.op_type == "If":
        return _branches(binder, inputs, outputs)
    if node.op_type == "Loop" and trip_count(node) is None:
        return _until(binder, inputs, outputs)
    return _iterations(binder, inputs, outputs)


def _branches(b: _Binder, inputs: Sequence[Array | None], outputs: Sequence[Array | None]) -> Run:
    condition, fetch = required(inputs[0]), b.device.fetch
    targets = [_target(b, k, outputs) for k in range(len(b.call.bodies[0].graph.outputs))]
    branches = {name: b.body([], targets, k) for k, name in enumerate(_branch_names(b.call.node))}
    then, other = branches["then_branch"], branches["else_branch"]

    def run() -> None:
        (then if fetch(condition).reshape(-1)[0] else other)()

    return run


def _branch_names(node: ir.Node) -> list[str]:
    return [name for name, attr in node.attributes.items() if attr.type == ir.AttributeType.GRAPH]


def _target(b: _Binder, k: int, outputs: Sequence[Array | None], of: int | None = None) -> Array:
    """The memory of output ``k`` of the node, or unused memory if that output is absent."""
    found = outputs[k] if k < len(outputs) else None
    return found if found is not None else b.like(b.call.bodies[0].graph.outputs[k if of is None else of])


def _iterations(b: _Binder, inputs: Sequence[Array | None], outputs: Sequence[Array | None]) -> Run:
    """Bind every iteration to its slices; states alternate between two buffers, and the last iteration writes the results."""
    node = b.call.node
    loop = node.op_type == "Loop"
    width = 0 if loop else node.attributes["num_scan_inputs"].as_int()
    first, sliced = (2, []) if loop else (0, list(inputs[len(inputs) - width :]))
    start = list(inputs[first : len(inputs) - width])
    count = required(trip_count(node)) if loop else shape_of(node.inputs[-1])[0]
    if not count:
        return _all([b.device.bind_copy(y, x) for x, y in zip(start, outputs, strict=False) if x is not None and y is not None])
    skip = 1 if loop else 0  # a Loop's body begins with its condition
    made = b.call.bodies[0].graph.outputs[skip:]
    ends = [_target(b, k, outputs, skip + k) for k in range(len(start))]
    places = [[b.like(v) for v in made[: len(start)]] for _ in range(min(2, count - 1))]
    condition = [b.device.put(np.array(True)), b.like(b.call.bodies[0].graph.outputs[0])] if loop else []
    ways = [_listed(node, f"scan_{way}_directions") for way in ("input", "output")]
    stacked = [outputs[k] if k < len(outputs) else None for k in range(len(start), len(made))]
    runs, states = [], [x for x in start if x is not None]
    for t in range(count):
        to = ends if t == count - 1 else places[t % 2]
        head = [b.device.put(np.array(t, dtype=np.int64)), condition[0]] if loop else []
        read = [_slice(x, t, count, ways[0], k) for k, x in enumerate(sliced)]
        written = [
            b.like(made[len(start) + k]) if y is None else _slice(y, t, count, ways[1], k) for k, y in enumerate(stacked)
        ]
        runs.append(b.body([*head, *states, *read], [*condition[1:], *to, *written]))
        states = to
    return _all(runs)


def _listed(node: ir.Node, name: str) -> Sequence[int]:
    return node.attributes[name].as_ints() if name in node.attributes else ()


def _slice(array: Array | None, t: int, count: int, ways: Sequence[int], k: int) -> Array:
    at = count - 1 - t if k < len(ways) and ways[k] else t
    array = required(array)
    return array[at : at + 1].reshape(array.shape[1:])


def _until(b: _Binder, inputs: Sequence[Array | None], outputs: Sequence[Array | None]) -> Run:
    """Bind a loop whose condition the host reads after every iteration."""
    limit, condition, *start = inputs
    states = [x for x in start if x is not None]
    graph = b.call.bodies[0].graph
    ends = [_target(b, k, outputs, k + 1) for k in range(len(states))]
    places = [[b.like(v) for v in graph.outputs[1:]] for _ in range(2)]
    goes_on, number = b.like(graph.outputs[0]), b.device.put(np.array(0, dtype=np.int64))
    true = b.device.put(np.array(True))
    ways = [([number, true, *before], [goes_on, *after]) for before, after in ((states, places[0]), (places[0], places[1]))]
    first, odd = (b.body(*way) for way in ways)
    even = b.body([number, true, *places[1]], [goes_on, *places[0]])
    fetch, copy = b.device.fetch, b.device.copy

    def run() -> None:
        most = None if limit is None else int(fetch(limit).reshape(-1)[0])
        on = condition is None or bool(fetch(condition).reshape(-1)[0])
        done = 0
        for body in _in_turn(first, odd, even):
            if not on or (most is not None and done >= most):
                break
            copy(number, np.array(done, dtype=np.int64))
            body()
            on, done = bool(fetch(goes_on).reshape(-1)[0]), done + 1
        for end, state in zip(ends, states if not done else places[(done - 1) % 2], strict=True):
            copy(end, state)

    return run


def _in_turn(first: Run, odd: Run, even: Run) -> Iterator[Run]:
    return itertools.chain([first], itertools.cycle([odd, even]))


def _all(runs: Sequence[Run]) -> Run:
    def run() -> None:
        for part in runs:
            part()

    return run
