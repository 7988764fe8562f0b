"""Checks that every value has a source, and sorts nodes topologically."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from graphc.errors import ModelError


@contextlib.contextmanager
def silent_reader(name: str = "onnx_ir.serde", level: int = logging.ERROR) -> Iterator[None]:
    """Silence a logger below ``level``: by default of ``onnx_ir`` about values without a source, which the reader checks or
    supplies.
    """
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def sort_and_link(graph: ir.Graph) -> None:
    """Check that every value has a source, and sort the nodes topologically.

    Raises:
        ModelError: a node reads a value that nothing produces, or the graph has a cycle.
    """
    _check_links(graph, set())
    try:
        graph.sort()
    except ValueError:
        raise ModelError(f"the graph has a cycle: {' → '.join(_cycle(graph))}") from None


def check_whole(graph: ir.Graph) -> None:
    """Check that a graph can be written and read again: every value has a source, in front of it, and a name of its own.

    Raises:
        ModelError: with the first value that has not.
    """
    _check_links(graph, set())
    names = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    made: set[ir.Value] = set()
    for node in graph:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if value is not None and producer is not None and producer.graph is graph and value not in made:
                raise ModelError(f"node {node.name or node.op_type!r} reads {value.name!r} before it is produced")
        for value in node.outputs:
            if value.name and value.name in names:
                raise ModelError(f"two values are called {value.name!r}")
            names.add(value.name)
        made.update(node.outputs)


def _check_links(graph: ir.Graph, outer: set[ir.Value]) -> None:
    known = outer | set(graph.inputs) | set(graph.initializers.values())
    known.update(v for node in graph for v in node.outputs)
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise ModelError(f"node {node.name or node.op_type!r} reads {value.name!r}, which nothing produces")
        for attr in node.attributes.values():
            for inner in _graphs_of(attr):
                _check_links(inner, known)
    for value in graph.outputs:
        if value not in known:
            raise ModelError(f"nothing produces the graph output {value.name!r}")


def _graphs_of(attr: ir.Attr) -> Iterable[ir.Graph]:
    if attr.type == ir.AttributeType.GRAPH:
        return [attr.as_graph()]
    return attr.as_graphs() if attr.type == ir.AttributeType.GRAPHS else ()


def _cycle(graph: ir.Graph) -> list[str]:
    """Names of the nodes of one cycle."""
    done: set[ir.Node] = set()
    for start in graph:
        path: list[ir.Node] = []
        node: ir.Node | None = start
        while node is not None and node not in done and node not in path:
            path.append(node)
            later = [v.producer() for v in node.inputs if v is not None and v.producer() is not None]
            node = next((n for n in later if n not in done), None)
        if node in path and node is not None:
            return [n.name or n.op_type for n in [*path[path.index(node) :], node]][::-1]
        done.update(path[-1:])
    return ["(not found)"]
