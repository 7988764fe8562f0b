"""Handles subgraphs of ``If``, ``Loop``, ``Scan`` and ``SequenceMap``: captured values and copies.

A body sees every value of the graphs around it. Such a **captured** value is an operand of the node that owns the body,
although no input list holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import FLOATS, constant

if TYPE_CHECKING:
    from graphc.ir.builder import Builder

CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""The standard ops with bodies."""


def bodies(node: ir.Node) -> Sequence[ir.Graph]:
    """The subgraphs that are attributes of ``node``."""
    found: list[ir.Graph] = []
    for attr in node.attributes.data.values():  # of the plain dict: every walk over a graph comes here for every node
        kind = attr.type
        if kind is ir.AttributeType.GRAPH and not attr.is_ref():
            found.append(attr.as_graph())
        elif kind is ir.AttributeType.GRAPHS and not attr.is_ref():
            found += attr.as_graphs()
    return found


def reachable_bodies(node: ir.Node) -> Sequence[ir.Graph]:
    """The bodies of ``node`` that can run: of an If with a known condition, one of the two."""
    decided = constant(node.inputs[0]) if node.op_type == "If" and node.domain == "" else None
    if decided is None:
        return bodies(node)
    return [node.attributes["then_branch" if bool(np.all(decided)) else "else_branch"].as_graph()]


def captured(node: ir.Node) -> list[ir.Value]:
    """The outer values that the bodies of ``node`` read, at any depth, each once, in order of first use."""
    found: dict[ir.Value, None] = {}
    for body in bodies(node):
        own = {*body.inputs, *body.initializers.values(), *(v for inner in body for v in inner.outputs)}
        read = [v for inner in body for v in (*inner.inputs, *captured(inner))]
        found.update((v, None) for v in (*read, *body.outputs) if v is not None and v not in own)
    return list(found)


def reads(node: ir.Node) -> list[ir.Value]:
    """The values that ``node`` and its bodies read."""
    return [v for v in (*node.inputs, *captured(node)) if v is not None]


def sources(node: ir.Node) -> list[ir.Node]:
    """The nodes that produce what ``node`` and its bodies read, each once."""
    return list(dict.fromkeys(p for v in reads(node) if (p := v.producer()) is not None))


def replace_reads(node: ir.Node, by: Mapping[ir.Value, ir.Value]) -> None:
    """Make ``node`` and its bodies read other values."""
    for index, value in enumerate(node.inputs):
        if value is not None and value in by:
            node.replace_input_with(index, by[value])
    for body in bodies(node):
        for inner in body:
            replace_reads(inner, by)
        for k, value in enumerate(list(body.outputs)):
            if value in by:
                body.outputs[k] = by[value]


def body_initializers(graph: ir.Graph) -> list[tuple[ir.Graph, ir.Value, str]]:
    """The initializers of bodies, at any depth, each with its body and its name in the whole graph."""
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


def body_constants(graph: ir.Graph) -> list[tuple[ir.Node, str]]:
    """The float ``Constant`` nodes of bodies, at any depth, each with its name in the whole graph.

    A model as it was loaded and a clone of it give the same names.
    """
    inside = [node for body in graph.subgraphs() for node in body]
    given = [v.name for v in (*graph.inputs, *graph.initializers.values())]
    given += [v.name for node in graph.all_nodes() for v in node.outputs]
    given += [v.name for body in graph.subgraphs() for v in (*body.inputs, *body.initializers.values())]
    times = Counter(given)
    taken = {*given, *(name for _, _, name in body_initializers(graph))}
    found = []
    for node in inside:
        tensor = ir.convenience.get_const_tensor(node.outputs[0]) if node.op_type == "Constant" else None
        if tensor is None or tensor.dtype not in FLOATS or node.domain not in ("", "ai.onnx"):
            continue
        name = node.outputs[0].name or "constant"
        fresh, k = name, 0
        while times[name] > 1 and fresh in taken:
            k += 1
            fresh = f"{name}.{k}"
        taken.add(fresh)
        found.append((node, fresh))
    return found


def inline(op: Builder, body: ir.Graph, known: Mapping[ir.Value, ir.Value]) -> list[ir.Value]:
    """Emit the nodes of ``body`` through ``op`` and return the new values of its outputs.

    Args:
        known: value for each input of the body; captured values stay unless listed too.
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
    """Copy ``body`` under unique names, for a node that ``op`` will emit next."""
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
    """Make ``outputs`` the outputs of the body; a node of its own produces each, as runtimes require."""
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
    """Remove the nodes of a body that do not contribute to its outputs."""
    for node in reversed(list(graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            remove_with_bodies(graph, node)


def remove_with_bodies(graph: ir.Graph, node: ir.Node) -> None:
    """Remove ``node`` from ``graph``; the values that its bodies capture lose these uses too."""
    release_bodies(node)
    graph.remove(node, safe=True)


def release_bodies(node: ir.Node) -> None:
    """Take from a node that is to be removed what its bodies read: a value lists their nodes among its users."""
    for body in bodies(node):
        for inner in body:
            release_bodies(inner)
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
        body.outputs.clear()
