"""Moves updates and what depends on a node, and finds the nodes that compute gradients."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.declare import required_declaration
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL
from graphc.ir.subgraphs import captured
from graphc.ir.updates import trains


def refuse_without(nodes: Sequence[ir.Node], name: str, what: str) -> None:
    """Reject optimizers whose update has no operand or attribute ``name``.

    Raises:
        UsageError: ``what`` needs it.
    """
    for node in nodes:
        declaration = required_declaration(node)
        if trains(node) and declaration.place_of(name) is None and name not in declaration.attributes:
            raise UsageError(f"{what} needs {name!r}, which the op {node.op_type!r} of the optimizer does not have")


def move_to_end(graph: ir.Graph, updates: Sequence[ir.Node]) -> None:
    """Move updates and readers of their results to the end, in order: they wait for all gradients."""
    late: set[ir.Node] = set()
    wanted = set(updates)
    for node in graph:
        if node in wanted or any(v is not None and v.producer() in late for v in node.inputs):
            late.add(node)
    order = [node for node in graph if node in late]
    graph.remove(order)
    graph.extend(order)


def sink(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Move everything that depends on ``nodes`` after the last of them, keeping its order."""
    position = {node: k for k, node in enumerate(graph)}
    last = max(nodes, key=lambda n: position[n])
    sources, dependent = set(nodes), set[ir.Node]()
    for node in graph:
        producers = {v.producer() for v in node.inputs if v is not None}
        if not sources.isdisjoint(producers) or not dependent.isdisjoint(producers):
            dependent.add(node)
    moving = [n for n in graph if n in dependent and position[n] < position[last]]
    graph.remove(moving)
    graph.insert_after(last, moving)


def computed_for_gradients(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that compute the loss and the gradients."""
    found: set[ir.Node] = set()
    for node in reversed(graph):
        marked = any(GRADIENT_OF in v.metadata_props or LOSS_TOTAL in v.metadata_props for v in node.outputs)
        if marked or node in found:
            found.add(node)
            values = (*node.inputs, *captured(node))
            found.update(p for v in values if v is not None and (p := v.producer()) is not None)
    return found
