"""What passes between the gradients and their updates share."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.declare import declaration_of, is_update, place_of
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL
from graphc.ir.subgraphs import captured


def updates_of(graph: ir.Graph) -> list[ir.Node]:
    """All update nodes, in node order."""
    return [node for node in graph if is_update(node)]


def is_reduced(node: ir.Node) -> bool:
    """Whether input 1 of the update (a gradient, a statistic) is reduced over the ranks."""
    declaration = declaration_of(node)
    return declaration is not None and 1 in declaration.reduces


def trains(node: ir.Node) -> bool:
    """Whether the node is the update of an optimizer: it takes a gradient, with a learning rate."""
    return is_reduced(node) and place_of(node, "lr") is not None


def move_to_end(graph: ir.Graph, updates: Sequence[ir.Node]) -> None:
    """Updates, and what reads their results, behind everything else, in their order: they wait for all gradients."""
    late: set[ir.Node] = set()
    wanted = set(updates)
    for node in graph:
        if node in wanted or any(v is not None and v.producer() in late for v in node.inputs):
            late.add(node)
    order = [node for node in graph if node in late]
    graph.remove(order)
    graph.extend(order)


def computed_for_gradients(graph: ir.Graph) -> set[ir.Node]:
    """The nodes from which the loss and the gradients are computed."""
    found: set[ir.Node] = set()
    for node in reversed(graph):
        marked = any(GRADIENT_OF in v.metadata_props or LOSS_TOTAL in v.metadata_props for v in node.outputs)
        if marked or node in found:
            found.add(node)
            values = (*node.inputs, *captured(node))
            found.update(p for v in values if v is not None and (p := v.producer()) is not None)
    return found
