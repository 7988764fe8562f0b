"""Takes out of Loops what they carry without need.

    before  Loop (k, c, w, t, s) { t = s·w;  s = t + 1 } → (w, t, s), of which only s is read
    after   Loop (k, c, s) { s = s·w + 1 } → s, where w is read from outside

Exporters of Paddle and TensorFlow carry every value that a loop reads or assigns. A gradient keeps the carried values
of every iteration, of a weight as many copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.control_flow import in_front_of
from graphc.ir.subgraphs import bodies, prune, reads

_FIRST = 2
"""Inputs of a Loop and of its body before those that are carried."""


def carry_less(graph: ir.Graph) -> None:
    """Take from the Loops of ``graph``, and of their bodies, carried values that do not change or that nothing reads."""
    for node in list(graph):
        for body in bodies(node):
            carry_less(body)
        if node.op_type == "Loop" and node.domain == "" and all(v is not None for v in node.inputs[_FIRST:]):
            _read_from_outside(node)
            _keep(graph, node, _needed(node))


def _read_from_outside(node: ir.Node) -> None:
    """Make the body, and what follows the Loop, read the operands that no iteration changes."""
    body = node.attributes["body"].as_graph()
    for operand, formal, result, final in _carried(node):
        elsewhere = formal.is_graph_output() and (result is not formal or sum(v is formal for v in body.outputs) > 1)
        if in_front_of(result, {"Identity"}) is formal and not elsewhere and not final.is_graph_output():
            for user, index in list(formal.uses()):
                user.replace_input_with(index, operand)
            final.replace_all_uses_with(operand)


def _carried(node: ir.Node) -> Sequence[tuple[ir.Value, ir.Value, ir.Value, ir.Value]]:
    """(input of the node, input of the body, output of the body, output of the node) of each carried value."""
    body = node.attributes["body"].as_graph()
    operands = [v for v in node.inputs[_FIRST:] if v is not None]
    return list(zip(operands, body.inputs[_FIRST:], body.outputs[1:], node.outputs, strict=False))


def _needed(node: ir.Node) -> list[int]:
    """The carried values that the condition, a scan output or what follows the Loop depends on."""
    body, states = node.attributes["body"].as_graph(), _carried(node)
    place = {formal: k for k, (_, formal, _, _) in enumerate(states)}
    found = {k for k, (*_, final) in enumerate(states) if final.uses() or final.is_graph_output()}
    waiting = [body.outputs[0], *body.outputs[1 + len(states) :], *(states[k][2] for k in found)]
    seen = set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if value in place and place[value] not in found:
            found.add(place[value])
            waiting.append(states[place[value]][2])
        elif producer is not None and producer.graph is body:
            waiting += reads(producer)
    return sorted(found)


def _keep(graph: ir.Graph, node: ir.Node, kept: list[int]) -> None:
    """Put a Loop in place of ``node`` that carries only some of its values."""
    states = _carried(node)
    if len(kept) == len(states):
        return
    body = node.attributes["body"].as_graph()
    outputs = [*(node.outputs[k] for k in kept), *node.outputs[len(states) :]]
    results = [body.outputs[0], *(states[k][2] for k in kept), *body.outputs[1 + len(states) :]]
    body.outputs[:] = results
    prune(body)
    body.inputs[:] = [*body.inputs[:_FIRST], *(states[k][1] for k in kept)]
    operands = [*node.inputs[:_FIRST], *(states[k][0] for k in kept)]
    made = ir.Node("", "Loop", operands, [ir.AttrGraph("body", body)], num_outputs=len(outputs), name=node.name)
    made.metadata_props.update(node.metadata_props)
    graph.insert_before(node, made)
    for old, new in zip(outputs, made.outputs, strict=True):
        name, old.name = old.name, None
        new.name, new.type, new.shape = name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
