"""Splits a graph at the shapes that depend on its feeds' contents, so that a plan knows every shape.

    before  Gather(x, NonZero(mask)) of a model whose ``mask`` is fed      NonZero: [1, ?]
    after   part that is computed first, of the feeds alone:  found = NonZero(mask)
            part that is planned, by the shape of ``found`` too:  Gather(x, found)

    before  ConstantOfShape(ReduceMax(graph) + 1), one row for each graph of a batch
    after   part that is computed first:  count = ReduceMax(graph) + 1
            part that is planned, for each value of ``count``:  ConstantOfShape(count)

Masks that are fed, graph networks that add loops to their edges or pool the nodes of each graph, and layers that cut a batch to
its longest sample make such shapes. What depends on weights stays in the planned part (:mod:`graphc.plan.dynamic_shapes`).
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from graphc.device import Array
from graphc.ir import DOMAIN, OPSET
from graphc.ir.declare import OPS
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import constant, dims
from graphc.ir.onnx_inference import schema_of
from graphc.ir.serialize import to_proto

_FINDING = frozenset({"NonZero", "Compress", "Unique"})
"""Ops whose results have shapes that depend on what they read."""

_DECIDING = frozenset({"shape", "repeats", "starts", "ends", "pads", "k", "depth", "start", "limit", "delta", "sizes", "split"})
"""Operands whose values decide the shape of a result, by the names that the declarations of ops give them."""


@dataclass(frozen=True, slots=True)
class FoundSizes:
    """A graph in two parts.

    Attributes:
        first: computes the values that the second part takes as inputs besides the feeds.
        feeds: the names that it reads.
        planned: the second part.
        constants: those of its inputs whose values a plan is for, not only their shapes.
    """

    first: onnx.ModelProto
    feeds: tuple[str, ...]
    planned: ir.Model
    constants: frozenset[str]

    def bound(self, found: Mapping[str, Array]) -> ir.Model:
        """The second part for what was found."""
        if not self.constants:
            return self.planned
        model = self.planned.clone()
        for value in [v for v in model.graph.inputs if v.name in self.constants]:
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(found[value.name or ""], name=value.name)
            value.shape = ir.Shape(found[value.name or ""].shape)
            model.graph.initializers[value.name or ""] = value
        return model


def split_at_found_sizes(model: ir.Model) -> FoundSizes | None:
    """The two parts of ``model``, which stays as it is; None: no shape depends on the contents of feeds alone."""
    found, constants = _cut(model.graph)
    if not found and not constants:
        return None
    planned = model.clone()
    graph = planned.graph
    made = {v.name: v for node in graph for v in node.outputs}
    cut = [made[v.name] for v in (*found, *constants)]
    for k, value in enumerate(cut):
        new = ir.Value(name=value.name, shape=_sized(value, k), type=value.type)
        value.name = f"{value.name}.computed"
        value.replace_all_uses_with(new)
        graph.inputs.append(new)
    _remove_unused(_from_feeds(graph)[0], graph)
    new_inputs = graph.inputs[len(model.graph.inputs) :]
    for value in [v for v in new_inputs if not v.uses()]:  # only what is computed first read it
        graph.inputs.remove(value)
    names = [v.name or "" for v in new_inputs if v.uses()]
    first, feeds = _first_part(model, names)
    return FoundSizes(first, feeds, planned, frozenset(v.name or "" for v in constants) & set(names))


def _cut(graph: ir.Graph) -> tuple[list[ir.Value], list[ir.Value]]:
    """The values whose shapes depend on the contents of feeds alone, and the numbers that decide other shapes."""
    from_feeds, read = _from_feeds(graph)
    found = [out for node in from_feeds if _finds(node) for out in node.outputs if out.uses()]
    deciding = dict.fromkeys(v for node in graph for v in _operands_that_decide(node))
    return found, [v for v in _found_behind(deciding, from_feeds, read) if v not in found]


def _operands_that_decide(node: ir.Node) -> Iterable[ir.Value]:
    if node.domain == "" and node.op_type == "ConstantOfShape":
        return [v for v in node.inputs if v is not None]
    return [v for v, name in zip(node.inputs, _operand_names(node), strict=False) if v is not None and name in _DECIDING]


def _operand_names(node: ir.Node) -> Sequence[str]:
    return _names_of(node.op_type, node.domain)


@functools.cache
def _names_of(op_type: str, domain: str) -> Sequence[str]:
    declaration = OPS.get(op_type) if domain == DOMAIN else None
    schema = schema_of(op_type, OPSET, domain) if declaration is None else None
    formals = declaration.inputs if declaration is not None else schema.inputs if schema is not None else ()
    return tuple(formal.name.lower() for formal in formals)


def _found_behind(values: Iterable[ir.Value], from_feeds: Container[ir.Node], read: set[ir.Value]) -> list[ir.Value]:
    """The numbers that the contents of feeds decide, of which ``values`` are made."""
    found, pending = [], list(values)
    seen = set(pending)
    while pending:
        value = pending.pop()
        producer, shape = value.producer(), dims(value)
        if producer is None or producer.op_type in _SIZES or value.dtype not in _INDICES:
            continue
        if producer not in from_feeds:
            new = [v for v in producer.inputs if v is not None and v not in seen]
            seen.update(new)
            pending += new
        elif value in read and shape is not None and len(shape) <= 1:
            found.append(value)
    return found


_SIZES = frozenset({"Shape", "Size"})

_INDICES = (ir.DataType.INT64, ir.DataType.INT32)


def _finds(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _FINDING


def _from_feeds(graph: ir.Graph) -> tuple[dict[ir.Node, None], set[ir.Value]]:
    """The nodes of standard ops, without bodies, that depend on feeds and constants alone; values that depend on contents."""
    known: dict[ir.Node, None] = {}
    read = {v for v in graph.inputs if not v.is_initializer()}
    for node in graph:
        operands = [v for v in node.inputs if v is not None]
        plain = node.domain == "" or "shape" in _operand_names(node)  # sums at indices, as of the degrees of a graph's nodes
        bodies = any(a.type in _BODIES for a in node.attributes.values())
        if plain and not bodies and node.op_type not in _DRAWS and all(_is_known(v, known) for v in operands):
            known[node] = None
            if node.op_type not in _SIZES and not read.isdisjoint(operands):
                read.update(node.outputs)
    return known, read


_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

_DRAWS = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"})


def _is_known(value: ir.Value, known: Container[ir.Node]) -> bool:
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
    decompose_graph(graph, lambda node: False)
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
