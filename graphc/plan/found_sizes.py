"""Splits a graph at the shapes that depend on its feeds' contents, so that a plan knows every shape.

    before  Gather(x, NonZero(mask)) of a model whose ``mask`` is fed      NonZero: [1, ?]
    after   part that is computed first, of the feeds alone:  found = NonZero(mask)
            part that is planned, by the shape of ``found`` too:  Gather(x, found)

A mask that is fed and a graph network that adds loops to the edges that it is fed make such shapes. What depends on weights
stays in the planned part (:mod:`graphc.plan.dynamic_shapes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from graphc.ir.facts import constant
from graphc.ir.serialize import to_proto

_FINDING = frozenset({"NonZero", "Compress", "Unique"})
"""Ops whose results have shapes that depend on what they read."""


@dataclass(frozen=True, slots=True)
class FoundSizes:
    """A graph in two parts.

    Attributes:
        first: computes the values that the second part takes as inputs besides the feeds.
        feeds: the names that it reads.
        planned: the second part.
    """

    first: onnx.ModelProto
    feeds: tuple[str, ...]
    planned: ir.Model


def split_at_found_sizes(model: ir.Model) -> FoundSizes | None:
    """The two parts of ``model``, which stays as it is; None: no shape depends on the contents of feeds alone."""
    if not any(_finds(node) for node in model.graph):
        return None
    planned = model.clone()
    graph = planned.graph
    from_feeds = _from_feeds(graph)
    found = [out for node in graph if _finds(node) and node in from_feeds for out in node.outputs if out.uses()]
    if not found:
        return None
    first, feeds = _first_part(model, [value.name or "" for value in found])
    for k, value in enumerate(found):
        new = ir.Value(name=value.name, shape=_sized(value, k), type=value.type)
        value.name = f"{value.name}.computed"
        value.replace_all_uses_with(new)
        graph.inputs.append(new)
    _remove_unused([node for node in graph if node in from_feeds], graph)
    return FoundSizes(first, feeds, planned)


def _finds(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _FINDING


def _from_feeds(graph: ir.Graph) -> set[ir.Node]:
    """The nodes of standard ops, without bodies, that depend on feeds and constants alone."""
    known: set[ir.Node] = set()
    for node in graph:
        operands = [v for v in node.inputs if v is not None]
        plain = node.domain == "" and not any(a.type in _BODIES for a in node.attributes.values())
        if plain and node.op_type not in _DRAWS and all(_is_known(v, known) for v in operands):
            known.add(node)
    return known


_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

_DRAWS = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"})


def _is_known(value: ir.Value, known: set[ir.Node]) -> bool:
    producer = value.producer()
    if producer is not None:
        return producer in known
    return constant(value) is not None if value.is_initializer() else value.is_graph_input()


def _first_part(model: ir.Model, names: list[str]) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The graph of what is computed first, and the feeds that it reads."""
    part = model.clone()
    graph = part.graph
    made = {v.name: v for node in graph for v in node.outputs}
    graph.outputs.clear()
    graph.outputs.extend(made[name] for name in names)
    _remove_unused(graph, graph)
    for value in [v for v in graph.inputs if not v.uses()]:
        graph.inputs.remove(value)
    for name in [name for name, v in graph.initializers.items() if not v.uses()]:
        del graph.initializers[name]
    return to_proto(part), tuple(v.name or "" for v in graph.inputs)


def _sized(value: ir.Value, place: int) -> ir.Shape | None:
    """The shape, with a symbol of its own for each unknown size."""
    if value.shape is None:
        return None
    dims = [d if isinstance(d, int) else f"graphc_found_{place}_{k}" for k, d in enumerate(value.shape.dims)]
    return ir.Shape(dims)


def _remove_unused(nodes: Iterable[ir.Node], graph: ir.Graph) -> None:
    """Remove those of ``nodes``, in their order, whose results nobody uses any more."""
    for node in reversed(list(nodes)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
