"""Replaces ``ai.onnx.preview.training.Gradient`` by a backward subgraph.

    before   c = Add(a, b);  dc_da = Gradient(a; xs=[a], y=c)
    after    c = Add(a, b);  dc_da = the adjoint of a copy of ``c`` with respect to a copy of ``a``

The operator names a part of the graph: from the values ``xs`` and ``zs`` to ``y``. Its operands replace ``xs``
and ``zs``, and the results are the derivatives with respect to ``xs``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import ModelError, nearest
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import describe
from graphc.ir.ops.own_gradients import OWN_GRADIENTS
from graphc.ir.subgraphs import copy_body
from graphc.passes.gradients.reverse_mode import ancestors, differentiate

DOMAIN_TRAINING = "ai.onnx.preview.training"


def is_gradient(node: ir.Node) -> bool:
    return node.op_type == "Gradient" and node.domain == DOMAIN_TRAINING


def named_by(node: ir.Node) -> list[str]:
    """The values that a Gradient node names."""
    names = [node.attributes["y"].as_string()] if "y" in node.attributes else []
    return [*names, *(name for key in ("xs", "zs") if key in node.attributes for name in node.attributes[key].as_strings())]


def put_gradients_last(graph: ir.Graph) -> None:
    """Move every Gradient node after the value that it differentiates, because only an attribute names that value.

    Raises:
        ModelError: the attribute names no value, or one that depends on the gradient itself.
    """
    for node in [n for n in graph if is_gradient(n)]:
        target = _named(graph, node, node.attributes["y"].as_string())
        wanted = ancestors(graph, [target])
        if any(out in wanted for out in node.outputs):
            raise ModelError(f"{target.name!r} depends on its own gradient: {describe(node)}")
        late = list(itertools.dropwhile(lambda n, node=node: n is not node, graph))[1:]  # type: ignore[misc]
        for other in late:
            if any(out in wanted for out in other.outputs):
                graph.remove(other)
                graph.insert_before(node, other)


def derivatives(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Emit the backward subgraph of a Gradient node before it; one value per output.

    Raises:
        ModelError: an attribute names no value of the graph, or the operands are too few or too many.
    """
    graph = op.graph
    names = {key: list(node.attributes[key].as_strings()) if key in node.attributes else [] for key in ("xs", "zs")}
    inputs = [v for v in node.inputs if v is not None]
    if len(inputs) != len(names["xs"]) + len(names["zs"]):
        raise ModelError(f"Gradient takes one input for each name in xs and zs: {describe(node)}")
    target = _named(graph, node, node.attributes["y"].as_string())
    places = [_named(graph, node, name) for name in (*names["xs"], *names["zs"])]
    # copies, so that an x that depends on another x is still an independent variable
    meant = {place: op.Identity(value) for place, value in zip(places, inputs, strict=True)}
    sources = [meant[place] for place in places[: len(names["xs"])]]
    wanted = ancestors(graph, [target])
    for other in list(itertools.takewhile(lambda n: n is not node, graph)):
        if all(out in meant or out not in wanted for out in other.outputs) or not any(v in meant for v in other.inputs):
            continue
        if other.op_type in OWN_GRADIENTS and other.domain == DOMAIN:
            continue  # the stand-in for an adjoint depends on no value
        attributes = {
            name: ir.Attr(name, attr.type, copy_body(op, attr.as_graph(), meant))
            if attr.type == ir.AttributeType.GRAPH
            else attr
            for name, attr in other.attributes.items()
        }
        operands = [meant.get(v, v) if v is not None else None for v in other.inputs]
        copies = op.emit(other.op_type, operands, attributes, domain=other.domain, outputs=len(other.outputs))
        for out, copied in zip(other.outputs, copies, strict=True):
            if copied.shape is None and places == inputs:  # what a file says of an element of a sequence, for example
                copied.shape = out.shape
            meant.setdefault(out, copied)
    last = graph[-1]
    found = differentiate(graph, [meant.get(target, target)], sources)
    for made in list(itertools.takewhile(lambda n: n is not last, reversed(graph)))[::-1]:
        graph.remove(made)
        graph.insert_before(node, made)
    return [found[source] if source in found else op.zeros_like(source) for source in sources]


def _named(graph: ir.Graph, node: ir.Node, name: str) -> ir.Value:
    values = {v.name: v for v in [*graph.inputs, *graph.initializers.values(), *(o for n in graph for o in n.outputs)]}
    if name not in values:
        raise ModelError(
            f"Gradient names {name!r}, which is not a value of the graph{nearest(name, filter(None, values))}: {describe(node)}"
        )
    return values[name]
