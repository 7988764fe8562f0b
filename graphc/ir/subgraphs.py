"""Subgraphs: what ``If``, ``Loop``, ``Scan`` and ``SequenceMap`` read from outside, copies of them, and their types.

A body sees every value of the graphs around it. Such a **captured** value is an operand of the node that owns the body,
although it stands in no input list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import Dim, constant, dims

if TYPE_CHECKING:
    from graphc.ir.builder import Builder

CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""The standard ops with bodies."""

Types = tuple[ir.TypeProtocol | None, ir.Shape | None]


def bodies(node: ir.Node) -> Sequence[ir.Graph]:
    """The subgraphs that are attributes of ``node``."""
    found: list[ir.Graph] = []
    for attr in node.attributes.values():
        kind = attr.type
        if kind is ir.AttributeType.GRAPH and not attr.is_ref():
            found.append(attr.as_graph())
        elif kind is ir.AttributeType.GRAPHS and not attr.is_ref():
            found += attr.as_graphs()
    return found


def captured(node: ir.Node) -> list[ir.Value]:
    """The outer values that the bodies of ``node`` read, at any depth, each once, in the order of reading."""
    found: dict[ir.Value, None] = {}
    for body in bodies(node):
        own = {*body.inputs, *body.initializers.values(), *(v for inner in body for v in inner.outputs)}
        read = [v for inner in body for v in (*inner.inputs, *captured(inner))]
        found.update((v, None) for v in (*read, *body.outputs) if v is not None and v not in own)
    return list(found)


def body_initializers(graph: ir.Graph) -> list[tuple[ir.Graph, ir.Value, str]]:
    """The initializers of bodies, at any depth, each with its body and the name it has as one of the whole graph."""
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    taken |= {v.name for node in graph.all_nodes() for v in node.outputs}
    found = []
    for body in graph.subgraphs():
        for name, value in body.initializers.items():
            if value.is_graph_input():
                continue
            fresh, k = name, 0
            while fresh in taken:
                k += 1
                fresh = f"{name}.{k}"
            taken.add(fresh)
            found.append((body, value, fresh))
    return found


def inline(op: Builder, body: ir.Graph, known: Mapping[ir.Value, ir.Value]) -> list[ir.Value]:
    """Emit the nodes of ``body`` through ``op`` and return what stands for its outputs.

    Args:
        known: what stands for each input of the body; captured values stay unless they are listed as well.
    """
    meant = dict(known)
    for value in body.initializers.values():
        if value not in meant and value.const_value is not None:
            meant[value] = op.const(value.const_value.numpy())
    for node in body:
        tensor = constant(node.outputs[0]) if node.op_type == "Constant" and node.domain == "" else None
        if tensor is not None:
            meant[node.outputs[0]] = op.const(np.asarray(tensor))
            continue
        made = op.repeat(
            node,
            [meant.get(v, v) if v is not None else None for v in node.inputs],
            {name: _copied(op, attr, meant) for name, attr in node.attributes.items()},
        )
        meant.update(zip(node.outputs, made, strict=True))
    return [meant.get(v, v) for v in body.outputs]


def _copied(op: Builder, attr: ir.Attr, known: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    if attr.type == ir.AttributeType.GRAPH:
        return ir.Attr(attr.name, attr.type, copy_body(op, attr.as_graph(), known))
    if attr.type == ir.AttributeType.GRAPHS:
        return ir.Attr(attr.name, attr.type, [copy_body(op, body, known) for body in attr.as_graphs()])
    return attr


def copy_body(op: Builder, body: ir.Graph, known: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    """A copy of ``body`` with names of its own, for a node that ``op`` is about to emit."""
    graph, inner, inputs = new_body(op, [(v.name or "input", v.type, v.shape) for v in body.inputs], name=body.name)
    outputs = inline(inner, body, {**known, **dict(zip(body.inputs, inputs, strict=True))})
    finish_body(inner, outputs)
    return graph


def new_body(
    op: Builder, inputs: Sequence[tuple[str, ir.TypeProtocol | None, ir.Shape | None]], *, name: str | None = None
) -> tuple[ir.Graph, Builder, list[ir.Value]]:
    """An empty body with typed inputs, a builder for it, and its inputs."""
    values = [
        ir.Value(name=op.unique(label, value=True), type=type_, shape=ir.Shape(shape.dims) if shape is not None else None)
        for label, type_, shape in inputs
    ]
    graph = ir.Graph(values, [], nodes=[], name=op.unique(name or "body"))
    return graph, op.inside(graph), values


def finish_body(op: Builder, outputs: Sequence[ir.Value]) -> None:
    """Make ``outputs`` the outputs of the body; each becomes the result of a node of its own, as runtimes demand."""
    graph = op.graph
    taken: set[ir.Value] = set()
    for value in outputs:
        producer = value.producer()
        if producer is None or producer.graph is not graph or value in taken or producer.op_type == "Constant":
            value = op.Identity(value)
        taken.add(value)
        graph.outputs.append(value)
    prune(graph)


def prune(graph: ir.Graph) -> None:
    """Remove the nodes of a body that none of its outputs depends on."""
    for node in reversed(list(graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)


# Types ---------------------------------------------------------------------------------------------------------------


def infer_control(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    propagate: Callable[[ir.Graph], None],
) -> list[Types]:
    """Types of the outputs of a node with bodies, whose own values are typed anew on the way.

    Args:
        propagate: infers every value of a body from its inputs and from what it captures.
    """

    def run(body: ir.Graph) -> None:
        for node in body:
            if node.op_type != "Constant":
                for out in node.outputs:
                    out.shape = None
        propagate(body)

    if op_type == "If":
        return _infer_if(attributes, run)
    body = attributes["body"].as_graph()
    type_body_inputs(op_type, inputs, attributes)
    if op_type == "Loop":
        return _infer_loop(inputs, body, run)
    run(body)
    if op_type == "SequenceMap":
        return [(ir.SequenceType(v.type) if v.type is not None else None, None) for v in body.outputs]
    return _infer_scan(inputs, attributes, body)


def type_body_inputs(op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> None:
    """Give the inputs of a body the types of the operands that they stand for."""
    if op_type == "If":
        return
    formal = attributes["body"].as_graph().inputs
    pairs: list[tuple[ir.Value, ir.Value | None, int | None]]
    if op_type == "Loop":
        for value, dtype in zip(formal, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([])
        pairs = [(f, v, None) for f, v in zip(formal[2:], inputs[2:], strict=False)]
    elif op_type == "Scan":
        count = attributes["num_scan_inputs"].as_int()
        first = len(formal) - count
        axes = int_list(attributes, "scan_input_axes", count)
        pairs = [(f, v, None if k < first else axes[k - first]) for k, (f, v) in enumerate(zip(formal, inputs, strict=False))]
    else:
        pairs = [(f, v, None) for f, v in zip(formal, inputs, strict=False)]
    for value, operand, axis in pairs:
        if operand is None or operand.type is None:
            continue
        found = dims(operand)
        if op_type == "SequenceMap" and isinstance(operand.type, ir.SequenceType):
            value.type, value.shape = operand.type.elem_type, None
            continue
        value.type = operand.type
        if axis is not None and found is not None:
            found = tuple(d for k, d in enumerate(found) if k != axis % len(found))
        value.shape = ir.Shape(found) if found is not None else None


def int_list(attributes: Mapping[str, ir.Attr], name: str, count: int) -> list[int]:
    """An attribute of ``Scan`` that holds one number per operand; zeros when it is left out."""
    return list(attributes[name].as_ints()) if name in attributes else [0] * count


def _infer_if(attributes: Mapping[str, ir.Attr], run: Callable[[ir.Graph], None]) -> list[Types]:
    branches = [attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for branch in branches:
        run(branch)
    found: list[Types] = []
    for a, b in zip(*(branch.outputs for branch in branches), strict=True):
        found.append((a.type if a.type is not None else b.type, _common(a.shape, b.shape)))
    return found


def _common(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """What two shapes have in common: sizes that differ become unknown."""
    if a is None or b is None or len(a) != len(b):
        return None
    return ir.Shape([x if _same(x, y) else None for x, y in zip(_plain(a), _plain(b), strict=True)])


def _plain(shape: ir.Shape) -> list[Dim]:
    return [d if isinstance(d, int) else d.value for d in shape.dims]


def _same(a: Dim, b: Dim) -> bool:
    return a is not None and a == b


def _infer_loop(inputs: Sequence[ir.Value | None], body: ir.Graph, run: Callable[[ir.Graph], None]) -> list[Types]:
    carried = len(body.inputs) - 2
    for _ in range(3):  # a size that an iteration changes is unknown in the next
        run(body)
        stable = True
        for value, result in zip(body.inputs[2:], body.outputs[1 : carried + 1], strict=True):
            if not isinstance(value.type, ir.TensorType) or value.shape is None:
                continue
            common = _common(value.shape, result.shape)
            if common is None or _plain(common) != _plain(value.shape):
                value.shape, stable = common, False
        if stable:
            break
    found: list[Types] = [(v.type, v.shape) for v in body.inputs[2:]]
    count = trip_count(inputs, body)
    for value in body.outputs[carried + 1 :]:
        shape = ir.Shape([count, *_plain(value.shape)]) if value.shape is not None else None
        found.append((value.type, shape))
    return found


def trip_count(inputs: Sequence[ir.Value | None], body: ir.Graph) -> Dim:
    """How often a ``Loop`` runs: a number or a symbol, or None when that depends on data."""
    if always_continues(inputs, body):
        return bound(inputs)
    return _counted(inputs, body) if not inputs or inputs[0] is None else None


def _counted(inputs: Sequence[ir.Value | None], body: ir.Graph) -> Dim:
    """The trip count of ``while k < n``, where k grows by one in each iteration: the form of a loop that exporters write."""
    end = _behind(body.outputs[0], {"Identity"})
    test = end.producer() if end is not None else None
    first = inputs[1].producer() if len(inputs) > 1 and inputs[1] is not None else None
    if test is None or test.op_type != "Less" or first is None or first.op_type != "Less":
        return None
    counter, limit = _behind(test.inputs[0], {"Identity"}), test.inputs[1]
    place = next((k for k, out in enumerate(body.outputs[1:]) if _behind(out, {"Identity"}) is counter), None)
    if counter is None or place is None or first.inputs[1] is not limit or place + 2 >= len(inputs):
        return None
    step, start = counter.producer(), inputs[2 + place]
    if step is None or step.op_type != "Add" or first.inputs[0] is not start or body.inputs[2 + place] not in step.inputs:
        return None
    other = next((v for v in step.inputs if v is not body.inputs[2 + place]), None)
    one = constant(_behind(other, {"Identity", "CastLike", "Cast"}))
    lowest, most = _single(start), _single(limit)
    if one is None or int(one.reshape(-1)[0]) != 1:
        return None
    if isinstance(lowest, int) and isinstance(most, int):
        return max(0, most - lowest)
    return most if lowest == 0 else None


def _behind(value: ir.Value | None, ops: set[str]) -> ir.Value | None:
    """The value that ``value`` is a copy of, through nodes of type ``ops``."""
    while value is not None and (producer := value.producer()) is not None and producer.op_type in ops:
        value = producer.inputs[0]
    return value


def bound(inputs: Sequence[ir.Value | None]) -> Dim:
    """The largest number of iterations of a ``Loop`` as far as it is known before it runs."""
    limit = _single(inputs[0]) if inputs else None
    return None if isinstance(limit, int) and limit < 0 else limit


def _single(value: ir.Value | None) -> Dim:
    """What an integer scalar holds, as far as it is known."""
    from graphc.ir.symbolic_dims import held

    found = held(value)
    return found[0] if found is not None and len(found) == 1 else None


def always_continues(inputs: Sequence[ir.Value | None], body: ir.Graph) -> bool:
    """Whether the condition of a ``Loop`` is true before it and stays so."""
    first = inputs[1] if len(inputs) > 1 else None
    known = constant(first)
    if first is not None and (known is None or not bool(np.all(known))):
        return False
    value = _behind(body.outputs[0], {"Identity"})
    last = constant(value)
    return value is body.inputs[1] or (last is not None and bool(np.all(last)))


def _infer_scan(inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr], body: ir.Graph) -> list[Types]:
    count = attributes["num_scan_inputs"].as_int()
    states = len(inputs) - count
    axes = int_list(attributes, "scan_input_axes", count)
    length: Dim = None
    for value, axis in zip(inputs[states:], axes, strict=True):
        found = dims(value) if value is not None else None
        size = found[axis] if found is not None else None
        length = size if length is None or isinstance(size, int) else length
    found_types: list[Types] = []
    for formal, result in zip(body.inputs[:states], body.outputs[:states], strict=True):
        found_types.append((result.type, result.shape if formal.shape is None else formal.shape))
    out_axes = int_list(attributes, "scan_output_axes", len(body.outputs) - states)
    for value, axis in zip(body.outputs[states:], out_axes, strict=True):
        sizes: list[Any] | None = None
        if value.shape is not None:
            sizes = _plain(value.shape)
            sizes.insert(axis % (len(sizes) + 1), length)
        found_types.append((value.type, ir.Shape(sizes) if sizes is not None else None))
    return found_types
