"""Replacing ``graphc`` ops by their decompositions; used by the ``decompose`` pass and by every plan."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir import DOMAIN
from graphc.ir.bodies import bodies
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of, decompose_node
from graphc.ir.facts import describe


def decompose_graph(graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> bool:
    """Replace each ``graphc`` node for which ``keep(node)`` is false; outputs keep their names.

    In bodies every one is replaced, for what runs a body knows standard ops only.
    """
    changed = _decompose(Builder(graph), graph, keep)
    if not any(n.domain == DOMAIN for n in graph.all_nodes()):
        graph.opset_imports.pop(DOMAIN, None)
    return changed


def is_decomposed(graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> bool:
    """Whether :func:`decompose_graph` has nothing left to do."""
    inner = (n for node in graph for body in bodies(node) for n in body.all_nodes())
    return not any(n.domain == DOMAIN and not keep(n) for n in graph) and not any(n.domain == DOMAIN for n in inner)


def _decompose(op: Builder, graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> bool:
    changed = False
    while pending := [n for n in graph if n.domain == DOMAIN and not keep(n)]:
        for node in pending:
            declaration = declaration_of(node)
            if declaration is None or declaration.decompose is None:
                raise UnsupportedOpError(f"{node.domain}.{node.op_type} has no decomposition: {describe(node)}")
            op.before, op.scope = node, node.name or node.op_type
            for out, new in zip(node.outputs, decompose_node(op, node), strict=False):
                if new is not None:
                    _replace(graph, op, out, new)
            graph.remove(node, safe=True)
        changed = True
    for node in graph:
        for body in bodies(node):
            if any(n.domain == DOMAIN for n in body.all_nodes()):
                changed |= _decompose(op.inside(body), body, lambda _: False)
    return changed


def _replace(graph: ir.Graph, op: Builder, old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` stand for ``old`` everywhere. A graph output keeps its name, for that is how a caller finds it."""
    if old.is_graph_output():
        name, metadata = old.name, dict(old.metadata_props)
        if new.producer() is None or new.is_graph_output():
            (new,) = op.emit("Identity", [new])
        old.name = op.unique(f"{name}.replaced", value=True)
        new.name = name
        new.metadata_props.update(metadata)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
