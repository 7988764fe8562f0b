"""Gradients of If, Loop and Scan: differentiates the bodies, captured weights included.

    If      an If with the same condition, whose branches recompute the branch and differentiate it
    Scan    a reversed Scan over the states at the beginning of each iteration
    Loop    a Loop that counts down and selects those states by its index

The forward node returns those states as further scan outputs. The backward body recomputes everything else that it needs.
Adjoints of carried and captured values are carried backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.control_flow import int_list, is_only_written, max_trip_count, static_trip_count, trip_count
from graphc.ir.facts import Dim, describe, describe_value, dims, input_of, is_float
from graphc.ir.infer import apply
from graphc.ir.subgraphs import captured, finish_body, inline, new_body
from graphc.passes.gradients.reverse_mode import backpropagate, descendants, zeros

Adjoint = ir.Value | None
Typed = tuple[str, ir.TypeProtocol | None, ir.Shape | None]


@gradient("If", selective=True)
def if_(op: Builder, node: ir.Node, *dys: Adjoint, needs: set[ir.Value]) -> Any:
    """y = a if c else b;  each captured value gets the gradient of the branch that ran, zero where that does not read it"""
    outer = captured(node)
    wanted = _wanted(outer, needs)
    if not wanted:
        return ()
    branches = {}
    for name in ("then_branch", "else_branch"):
        graph, inner, _ = new_body(op, [], name=f"{op.scope}/{name}")
        outputs = inline(inner, node.attributes[name].as_graph(), {})
        seeds = [(y, dy) for y, dy in zip(outputs, dys, strict=False) if dy is not None]
        found = backpropagate(inner, list(graph), seeds, wanted)
        finish_body(inner, [found[v] if v in found else zeros(inner, v) for v in wanted])
        branches[name] = graph
    made = op.emit("If", [node.inputs[0]], branches, outputs=len(wanted))
    for value, like in zip(made, wanted, strict=True):
        value.shape = _shape_of(like)
    return (None, *_in_order(outer, dict(zip(wanted, made, strict=True))))


def _wanted(values: Sequence[ir.Value], needs: set[ir.Value]) -> list[ir.Value]:
    return [v for v in values if v in needs and is_float(v)]


def _shape_of(value: ir.Value) -> ir.Shape | None:
    return ir.Shape(value.shape.dims) if value.shape is not None else None


def _in_order(values: Sequence[ir.Value], found: dict[ir.Value, ir.Value]) -> list[Adjoint]:
    return [found.get(v) for v in values]


# Shared by Loop and Scan ------------------------------------------------------------------------------------------------


@dataclass
class _Loop:
    """The parts of a loop node.

    Attributes:
        states: (input of the node, input of the body, output of the body, output of the node) of each carried value.
        fed: the other inputs of the body.
        scanned: (output of the body, adjoint of the node's output) of the scan outputs with an adjoint.
        outer: captured values; ``weights`` are those whose gradient is wanted.
        live: the inputs of the body that a wanted gradient depends on.
    """

    node: ir.Node
    body: ir.Graph
    states: list[tuple[ir.Value, ir.Value, ir.Value, ir.Value]]
    fed: list[ir.Value]
    scanned: list[tuple[int, ir.Value, ir.Value]]
    outer: list[ir.Value]
    weights: list[ir.Value]
    live: set[ir.Value]

    @property
    def carried(self) -> list[tuple[int, tuple[ir.Value, ir.Value, ir.Value, ir.Value]]]:
        """The states that have an adjoint, with their position."""
        return [(k, state) for k, state in enumerate(self.states) if state[1] in self.live]


def _take_apart(node: ir.Node, dys: Sequence[Adjoint], needs: set[ir.Value], first: int, count: int, skip: int) -> _Loop:
    """Describe a loop whose states start at input ``first`` of node and body, and at output ``skip`` of the body."""
    body = node.attributes["body"].as_graph()
    formal = body.inputs[first : first + count]
    states = [
        (a, b, c, d)
        for a, b, c, d in zip(node.inputs[first : first + count], formal, body.outputs[skip:], node.outputs, strict=False)
        if a is not None
    ]
    fed = [v for v in body.inputs if v not in set(formal)]
    outer = captured(node)
    weights = _wanted(outer, needs)
    operands = dict(zip(body.inputs, node.inputs, strict=False))
    given = dict(zip(node.outputs, dys, strict=False))

    def unread(formal: ir.Value, final: ir.Value) -> bool:
        return is_only_written(formal) and given.get(final) is None

    live = {v for v in body.inputs if operands.get(v) in needs and is_float(v)}
    while True:
        reached = descendants(list(body), [*live, *weights])
        more = {b for _, b, c, d in states if c in reached and b not in live and is_float(c) and not unread(b, d)}
        if not more:
            break
        live |= more
    scanned = [
        (k, body.outputs[skip + k], dy)
        for k, dy in enumerate(dys)
        if k >= count and dy is not None and body.outputs[skip + k] in reached
    ]
    return _Loop(node, body, states, fed, scanned, outer, weights, live)


def _step_back(
    inner: Builder,
    loop: _Loop,
    known: dict[ir.Value, ir.Value],
    dstates: Sequence[ir.Value],
    dscanned: Sequence[ir.Value],
    sums: Sequence[ir.Value],
) -> tuple[list[ir.Value], dict[ir.Value, ir.Value]]:
    """Emit one backward iteration: the carried values (adjoints of states, then sums) and the other gradients."""
    before = set(inner.graph)
    outputs = dict(zip(loop.body.outputs, inline(inner, loop.body, known), strict=True))
    seeds = [(outputs[c], dy) for (_, (_, _, c, _)), dy in zip(loop.carried, dstates, strict=True)]
    seeds += [(outputs[c], dy) for (_, c, _), dy in zip(loop.scanned, dscanned, strict=True)]
    sources = [known[v] for v in loop.body.inputs if v in loop.live and v in known]
    nodes = [n for n in inner.graph if n not in before]
    found = backpropagate(inner, nodes, seeds, [*sources, *loop.weights])
    carried = []
    for (_, (_, b, _, _)), dy in zip(loop.carried, dstates, strict=True):
        if is_only_written(b):  # of another shape at first, perhaps
            carried.append(inner.zeros_like(dy))
        else:
            carried.append(found[known[b]] if known[b] in found else inner.zeros_like(known[b]))
    for weight, total in zip(loop.weights, sums, strict=True):
        carried.append(inner.Add(total, found[weight]) if weight in found else total)
    return carried, found


def _initial(op: Builder, loop: _Loop, dys: Sequence[Adjoint]) -> list[ir.Value]:
    """Initial adjoints of the backward loop: those of the final states, and zeros for sums."""
    adjoints = []
    for k, (_, _, _, final) in loop.carried:
        dy = dys[k] if k < len(dys) else None
        adjoints.append(dy if dy is not None else op.zeros_like(final))
    return adjoints + [op.zeros_like(weight) for weight in loop.weights]


def _typed(label: str, value: ir.Value, *, without: int | None = None) -> Typed:
    shape = dims(value)
    if shape is not None and without is not None:
        shape = tuple(d for k, d in enumerate(shape) if k != without % len(shape))
    return label, value.type, ir.Shape(shape) if shape is not None else None


def _saved(op: Builder, loop: _Loop, value: ir.Value, first: int) -> ir.Value:
    """The node's scan output that collects ``value``, an input of the body, over the iterations.

    ``first`` is the first scan output of the body.
    """
    node, body = loop.node, loop.body
    offset = len(body.outputs) - len(node.outputs)
    for k, out in enumerate(body.outputs[first:], first):
        producer = out.producer()
        if producer is not None and producer.op_type == "Identity" and producer.inputs[0] is value:
            return node.outputs[k - offset]
    inner = op.inside(body)
    inner.scope = f"{node.name}/saved"
    body.outputs.append(inner.Identity(value))
    node.resize_outputs(len(node.outputs) + 1)
    node.outputs[-1].name = op.unique(f"{node.name}/saved/{value.name}", value=True)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), 0])
    apply(node)
    return node.outputs[-1]


def _refuse_changing_shapes(loop: _Loop, needs: set[ir.Value]) -> None:
    for initial, formal, _, _ in loop.states:
        if not formal.uses() and (formal not in loop.live or (is_only_written(formal) and initial not in needs)):
            continue
        if not isinstance(formal.type, ir.TensorType):
            raise UnsupportedOpError(
                f"no gradient through {describe(loop.node)}: it carries the sequence {initial.name!r}; "
                "give it a constant trip count, so that 'legalize' can unroll it"
            )
        have, want = dims(formal), dims(initial)
        if have is None or (want is not None and _forgets(have, want)):
            raise UnsupportedOpError(
                f"no gradient through {describe(loop.node)}: the shape of what it carries as {formal.name!r} changes from "
                f"iteration to iteration ({describe_value(initial)} at first); carry a tensor of fixed size, or collect a "
                "scan output"
            )


def _forgets(have: Sequence[Dim], want: Sequence[Dim]) -> bool:
    return len(have) != len(want) or any(h is None and w is not None for h, w in zip(have, want, strict=True))


# Scan -----------------------------------------------------------------------------------------------------------------


@gradient("Scan", selective=True)
def scan(op: Builder, node: ir.Node, *dys: Adjoint, needs: set[ir.Value]) -> Any:
    """sₜ₊₁, yₜ = f(sₜ, xₜ; w);  backwards in t: ∂sₜ, ∂xₜ, ∂w += fᵀ(∂sₜ₊₁, dyₜ), with sₜ from the forward Scan"""
    width = node.attributes["num_scan_inputs"].as_int()
    count = len(node.inputs) - width
    loop = _take_apart(node, dys, needs, 0, count, 0)
    if not loop.live and not loop.weights:
        return ()
    axes, ways = (int_list(node.attributes, f"scan_input_{a}", width) for a in ("axes", "directions"))
    out_axes, out_ways = (
        int_list(node.attributes, f"scan_output_{a}", len(loop.body.outputs) - count) for a in ("axes", "directions")
    )
    begin = _initial(op, loop, dys)
    split = len(loop.carried)
    inputs = [_typed("adjoint", v) for v in begin]
    inputs += [_typed(f"{b.name}", b) for _, b, _, _ in loop.states]
    inputs += [_typed(f"{v.name}", v) for v in loop.fed]
    inputs += [_typed("dy", dy, without=out_axes[k - count]) for k, _, dy in loop.scanned]
    graph, inner, values = new_body(op, inputs, name=f"{op.scope}/body")
    states = dict(zip([b for _, b, _, _ in loop.states], values[len(begin) :], strict=False))
    fed = dict(zip(loop.fed, values[len(begin) + len(states) :], strict=False))
    dscanned = values[len(begin) + len(states) + len(fed) :]
    carried, found = _step_back(inner, loop, {**states, **fed}, values[:split], dscanned, values[split : len(begin)])
    moving = [v for v in loop.fed if v in loop.live and fed[v] in found]
    finish_body(inner, [*carried, *(found[fed[v]] for v in moving)])

    operands: list[tuple[ir.Value, ir.Value, int, int]] = []  # input of the body, its source, axis, direction
    for _, b, _, _ in loop.states:
        if states[b].uses():
            operands.append((states[b], _saved(op, loop, b, count), 0, 1))
    for k, v in enumerate(loop.fed):
        operands.append((fed[v], input_of(node, count + k), axes[k], 1 - ways[k]))
    for (k, _, dy), value in zip(loop.scanned, dscanned, strict=True):
        operands.append((value, dy, out_axes[k - count], 1 - out_ways[k - count]))
    used = [entry for entry in operands if entry[0].uses()] or operands[:1]
    graph.inputs[:] = [*values[: len(begin)], *(entry[0] for entry in used)]
    where = [loop.fed.index(v) for v in moving]
    made = op.emit(
        "Scan",
        [*begin, *(entry[1] for entry in used)],
        {
            "body": graph,
            "num_scan_inputs": len(used),
            "scan_input_axes": [entry[2] for entry in used],
            "scan_input_directions": [entry[3] for entry in used],
            **({"scan_output_axes": [axes[k] for k in where]} if where else {}),
            **({"scan_output_directions": [1 - ways[k] for k in where]} if where else {}),
        },
        outputs=len(begin) + len(moving),
    )
    return _results(loop, made, count, dict(zip(where, made[len(begin) :], strict=True)))


def _results(loop: _Loop, made: Sequence[ir.Value], skip: int, others: dict[int, ir.Value]) -> tuple[Adjoint, ...]:
    """Return the rule's gradients: states, then the node's other inputs, then captured values."""
    by_input: list[Adjoint] = [None] * len(loop.node.inputs)
    states = {id(state[1]): value for (_, state), value in zip(loop.carried, made, strict=False)}
    offset = 0 if "num_scan_inputs" in loop.node.attributes else 2
    for k, (_, b, _, _) in enumerate(loop.states):
        by_input[offset + k] = states.get(id(b))
    for k, value in others.items():
        by_input[skip + k] = value
    split = len(loop.carried)
    weights = dict(zip(loop.weights, made[split : split + len(loop.weights)], strict=True))
    return (*by_input, *_in_order(loop.outer, weights))


# Loop -----------------------------------------------------------------------------------------------------------------


@gradient("Loop", selective=True)
def loop_(op: Builder, node: ir.Node, *dys: Adjoint, needs: set[ir.Value]) -> Any:
    """sₜ₊₁, yₜ = f(t, sₜ; w);  for t = T-1 … 0: ∂sₜ, ∂w += fᵀ(∂sₜ₊₁, dyₜ), with sₜ from the forward Loop"""
    count = len(node.inputs) - 2
    loop = _take_apart(node, dys, needs, 2, count, 1)
    if not loop.live and not loop.weights:
        return ()
    _refuse_changing_shapes(loop, needs)
    body = loop.body
    begin = _initial(op, loop, dys)
    split = len(loop.carried)
    inputs: list[Typed] = [
        ("iteration", ir.TensorType(ir.DataType.INT64), ir.Shape([])),
        ("continue", ir.TensorType(ir.DataType.BOOL), ir.Shape([])),
        *(_typed("adjoint", v) for v in begin),
    ]
    graph, inner, values = new_body(op, inputs, name=f"{op.scope}/body")
    length = _length(op, loop, count)
    index = inner.Sub(length, inner.Add(values[0], np.int64(1)))
    picks = {
        b: _pick(op, inner, loop, b, index, count)
        for _, b, _, _ in loop.states
        if b.uses() or (b in loop.live and not is_only_written(b))
    }
    known = {**picks, body.inputs[0]: index, body.inputs[1]: inner.const(True)}
    dscanned = [inner.Gather(dy, index, axis=0) for _, _, dy in loop.scanned]
    carried, _ = _step_back(inner, loop, known, values[2 : 2 + split], dscanned, values[2 + split :])
    finish_body(inner, [values[1], *carried])
    made = op.emit("Loop", [length, np.bool_(True), *begin], {"body": graph}, outputs=len(begin))
    for value, like in zip(made, begin, strict=True):
        value.shape = _shape_of(like)
    return _results(loop, made, 0, {})


def _length(op: Builder, loop: _Loop, count: int) -> ir.Value:
    """The number of iterations that ran, as a scalar."""
    known = static_trip_count(loop.node)
    if known is not None:
        return op.const(np.int64(known))
    before, op.before = op.before, _after(loop.node)
    counted = _saved(op, loop, loop.body.inputs[0], count + 1)
    length = op.Squeeze(op.Shape(counted), [0])
    op.before = before
    return length  # type: ignore[no-any-return]


def _pick(op: Builder, inner: Builder, loop: _Loop, value: ir.Value, index: ir.Value, count: int) -> ir.Value:
    """``value`` at iteration ``index``."""
    saved = _saved(op, loop, value, count + 1)
    most = max_trip_count(loop.node.inputs)
    if trip_count(loop.node.inputs, loop.body) is None and isinstance(most, int):
        # The loop may end early: saved states go into a tensor of the largest size, which a plan can allocate.
        before, op.before = op.before, _after(loop.node)
        where = op.Unsqueeze(op.Range(np.int64(0), op.Squeeze(op.Shape(saved, end=1), [0]), np.int64(1)), [1])
        size = op.Concat([most], op.Shape(saved, start=1), axis=0)
        shape = dims(saved)
        if shape is not None and all(isinstance(d, int) for d in shape[1:]):
            size = op.const(np.array([most, *shape[1:]], dtype=np.int64))
        empty = op.Expand(op.const(np.zeros((), saved.dtype.numpy() if saved.dtype is not None else None)), size)
        saved = op.ScatterND(empty, where, saved)
        op.before = before
    picked = inner.Gather(saved, index, axis=0)
    picked.shape = _shape_of(value)
    return picked  # type: ignore[no-any-return]


def _after(node: ir.Node) -> ir.Node | None:
    """The next node after ``node`` in its graph."""
    assert isinstance(node.graph, ir.Graph)
    order = list(node.graph)
    place = order.index(node) + 1
    return order[place] if place < len(order) else None
