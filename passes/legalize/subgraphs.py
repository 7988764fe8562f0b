"""Prepares the bodies of If, Loop, Scan and SequenceMap: unique names, and weights in the main graph.

before  Loop { w = initializer; y = MatMul(s, w) }        after  w = initializer;  Loop { y = MatMul(s, w) }
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims
from graphc.ir.opset_adapters import until
from graphc.ir.subgraphs import (
    body_constants,
    body_initializers,
    copy_body,
    finish_body,
    inline,
    new_body,
    reachable_bodies,
)


def name_constants(graph: ir.Graph) -> list[ir.Node]:
    """Give the float ``Constant`` nodes of bodies names that are unique in the whole graph, and return the nodes."""
    found = body_constants(graph)
    for node, name in found:
        node.outputs[0].name = name
    return [node for node, _ in found]


def hoist_initializers(graph: ir.Graph) -> None:
    """Move the initializers of bodies to the graph, so that they can train; the bodies capture them."""
    for body, value, name in body_initializers(graph):
        for k, result in enumerate(body.outputs):
            if result is value:  # a body returns values of its own nodes only
                node = ir.node("Identity", [value])
                (body.outputs[k],) = node.outputs
                node.outputs[0].name, node.outputs[0].type = f"{name}/result.{k}", value.type
                body.append(node)
        del body.initializers[value.name or ""]
        value.name = name
        graph.register_initializer(value)


def name_inputs(graph: ir.Graph) -> None:
    """Rename the inputs of bodies so that they shadow no outer value."""
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    taken |= {v.name for node in graph.all_nodes() for v in node.outputs}
    for body in graph.subgraphs():
        for k, value in enumerate(body.inputs):
            name, count = value.name or f"{body.name or 'body'}.input.{k}", 0
            fresh = name
            while fresh in taken:
                count += 1
                fresh = f"{name}.{count}"
            value.name = fresh
            taken.add(fresh)


def decided_branch(
    op: Builder, node: ir.Node, rank: Callable[[ir.Value], int | None] = lambda _: None
) -> list[ir.Value] | None:
    """The outputs of an If whose branch is known: by its condition, or since only one has the rank that its readers take.

    Exporters write a squeeze of an axis that may be longer than 1 as an If of both cases.

    Args:
        rank: the rank that the readers of an output take; None where they do not say.
    """
    branches = reachable_bodies(node)
    if len(branches) == 1:
        return inline(op, branches[0], {})
    for k, out in enumerate(node.outputs):
        found = [dims(branch.outputs[k]) for branch in branches]
        ranks = [None if f is None else len(f) for f in found]
        if None not in ranks and ranks[0] != ranks[1] and (wanted := rank(out)) in ranks:
            return inline(op, branches[ranks.index(wanted)], {})
    return None


def scalar_counts(op: Builder, node: ir.Node) -> None:
    """Make a Loop's trip count and condition scalars, and the body's inputs for them; files hold them as one element, too."""
    body = node.attributes["body"].as_graph()
    for k, dtype in enumerate((ir.DataType.INT64, ir.DataType.BOOL)):
        value, formal = node.inputs[k] if k < len(node.inputs) else None, body.inputs[k]
        if value is not None and dims(value) == (1,):
            node.replace_input_with(k, op.Squeeze(value, [0]))
        if dims(formal) == (1,):
            formal.type, formal.shape, users = ir.TensorType(dtype), ir.Shape([]), list(formal.uses())
            returned = [j for j, out in enumerate(body.outputs) if j and out is formal]
            if users or returned:
                inner = op.inside(body)
                inner.before = body[0] if len(body) else None
                row = inner.Unsqueeze(formal, [0])
                for user, index in users:
                    user.replace_input_with(index, row)
                for j in returned:
                    body.outputs[j] = row


def scalar_results(op: Builder, node: ir.Node) -> None:
    """Make the condition that a Loop's converted body returns a scalar, and give a carried number its initial shape.

    Files hold a number as a scalar or as one element. A body that takes one and returns the other would change its shape.
    """
    body = node.attributes["body"].as_graph()
    inner = op.inside(body)
    if dims(body.outputs[0]) == (1,):
        body.outputs[0] = inner.Squeeze(body.outputs[0], [0])
    for k, (operand, final) in enumerate(zip(node.inputs[2:], node.outputs, strict=False), 1):
        shapes = dims(operand) if operand is not None else None, dims(body.outputs[k])
        if not final.uses() and not final.is_graph_output() and shapes in (((), (1,)), ((1,), ())):
            reshape = inner.Squeeze if shapes[0] == () else inner.Unsqueeze
            body.outputs[k] = reshape(body.outputs[k], [0])


def scalar_branches(op: Builder, node: ir.Node) -> None:
    """Make an output of an If, which is a scalar of one branch and one element of the other, a scalar of both.

    Where readers say which of them they take, :func:`decided_branch` has taken that branch.
    """
    branches = reachable_bodies(node)
    for k, out in enumerate(node.outputs):
        shapes = [dims(branch.outputs[k]) for branch in branches]
        if set(shapes) == {(), (1,)} and not out.is_graph_output():
            branch = branches[shapes.index((1,))]
            branch.outputs[k] = op.inside(branch).Squeeze(branch.outputs[k], [0])


@until(9, "Scan")
def batched_scan(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Rewrite the Scan of opset 8, which runs over each sample of a batch, as a Scan over samples of a Scan over time.

    Raises:
        UnsupportedOpError: the sequences of a batch differ in length.
    """
    if node.inputs[0] is not None:
        raise UnsupportedOpError(f"{describe(node)} has sequence_lens, which later opsets lack; export with opset 9 or newer")
    operands = [v for v in node.inputs[1:] if v is not None]
    width = node.attributes["num_scan_inputs"].as_int()
    ways = node.attributes["directions"].as_ints() if "directions" in node.attributes else [0] * width
    samples = [(f"{v.name}.sample", v.type, ir.Shape(dims(v)[1:]) if v.shape is not None else None) for v in operands]  # type: ignore[index]
    graph, inner, values = new_body(op, samples, name=f"{node.name}/samples")
    body = copy_body(inner, node.attributes["body"].as_graph(), {})
    attributes = {"body": body, "num_scan_inputs": width, "scan_input_directions": list(ways)}
    finish_body(inner, inner.emit("Scan", values, attributes, outputs=len(node.outputs)))
    return op.emit("Scan", operands, {"body": graph, "num_scan_inputs": len(operands)}, outputs=len(node.outputs))
