"""Replaces ``graphc`` ops by their decompositions, for the ``decompose`` pass and for plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import CUSTOM, declaration_of, decompose_node
from graphc.ir.facts import describe
from graphc.ir.names import marks_of
from graphc.ir.subgraphs import bodies, remove_with_bodies


def decompose_graph(graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> bool:
    """Replace each ``graphc`` and custom node unless ``keep(node)`` is true; outputs keep their names.

    All such nodes in bodies are replaced, because backends run bodies with standard ops only.

    Raises:
        UnsupportedOpError: a node without a decomposition, or one whose decomposition needs an unknown shape.
    """
    changed = _decompose(Builder(graph), graph, keep)
    used = {n.domain for n in graph.all_nodes()}
    for domain in {DOMAIN, *(name.partition("::")[0] for name in CUSTOM)} - used:
        graph.opset_imports.pop(domain, None)
    return changed


def is_decomposed(graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> bool:
    """Whether :func:`decompose_graph` would change nothing."""
    inner = (n for node in graph for body in bodies(node) for n in body.all_nodes())
    return not any(_is_composite(n) and not keep(n) for n in graph) and not any(_is_composite(n) for n in inner)


def replace_nodes(op: Builder, graph: ir.Graph, parts: Mapping[str, Callable[[Builder, ir.Node], Sequence[Any]]]) -> None:
    """Replace standard nodes of ``graph`` and its bodies by what their op emits; outputs keep their names."""
    for node in list(graph):
        for body in bodies(node):
            replace_nodes(op.inside(body), body, parts)
        if node.domain == "" and node.op_type in parts:
            op.before, op.scope = node, node.name or node.op_type
            replace_node(op, node, parts[node.op_type](op, node))


def replace_node(op: Builder, node: ir.Node, values: Sequence[Any]) -> None:
    """Replace the outputs of a node by ``values`` and remove it from ``op``'s graph; outputs keep their names."""
    for old, new in zip(node.outputs, values, strict=False):
        if new is not None and (old.uses() or old.is_graph_output()):
            _replace(op.graph, op, old, new)
    remove_with_bodies(op.graph, node)


def _is_composite(node: ir.Node) -> bool:
    return node.domain == DOMAIN or declaration_of(node) is not None


def _decompose(op: Builder, graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> bool:
    changed = False
    while pending := [n for n in graph if _is_composite(n) and not keep(n)]:
        for node in pending:
            declaration = declaration_of(node)
            if declaration is None or declaration.decompose is None:
                raise UnsupportedOpError(f"{node.domain}.{node.op_type} has no decomposition: {describe(node)}")
            op.before, op.scope, op.marks = node, node.name or node.op_type, marks_of(node)
            try:
                values = decompose_node(op, node)
            except UnsupportedOpError as error:
                raise UnsupportedOpError(f"{error}\n  in the decomposition of {describe(node)}") from None
            for out, new in zip(node.outputs, values, strict=False):
                if new is not None:
                    _replace(graph, op, out, new)
            remove_with_bodies(graph, node)
        op.marks = {}
        changed = True
    for node in graph:
        for body in bodies(node):
            if any(_is_composite(n) for n in body.all_nodes()):
                changed |= _decompose(op.inside(body), body, lambda _: False)
    return changed


def _replace(graph: ir.Graph, op: Builder, old: ir.Value, new: ir.Value) -> None:
    """Replace ``old`` by ``new`` everywhere. A graph output keeps its name, because callers find it by name."""
    if old.is_graph_output():
        name, metadata = old.name, dict(old.metadata_props)
        if new.producer() is None or new.is_graph_output():
            (new,) = op.emit("Identity", [new])
        old.name = op.unique(f"{name}.replaced", value=True)
        new.name = name
        new.metadata_props.update(metadata)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
