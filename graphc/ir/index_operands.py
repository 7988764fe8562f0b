"""Which operands of standard ops are indices or lengths, and the range that their elements must lie in.

Gather(data: [50257, 768], indices)            −50257 … 50256
LSTM(x: [20, batch, 8], …, sequence_lens)      0 … 20
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.facts import constant, dims, input_of

VIEWS = frozenset({"Cast", "Identity", "MatchShape", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"})
"""Ops whose result holds the elements of their operand."""


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The range of an index operand: ``low`` ≤ element < ``high``.

    Attributes:
        reader: who reads it.
        part: of a part of the operand: axis and place, as of the first row of edges; None: of all elements.
    """

    low: int
    high: int
    reader: str
    part: tuple[int, int] | None = None


def behind_views(value: ir.Value | None) -> ir.Value | None:
    """The value in front of casts and reshapes that holds the elements of ``value``."""
    while value is not None and (producer := value.producer()) is not None and producer.op_type in VIEWS:
        value = producer.inputs[0]
    return value


def _part_behind_views(value: ir.Value | None) -> tuple[ir.Value | None, tuple[int, int] | None]:
    """As :func:`behind_views`, also where the elements are those at one place of an axis."""
    value = behind_views(value)
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Gather" or producer.domain:
        return value, None
    place, source = constant(producer.inputs[1]), producer.inputs[0]
    while source is not None and (before := source.producer()) is not None and before.op_type in ("Cast", "Identity"):
        source = before.inputs[0]
    if place is None or place.size != 1:
        return value, None
    return source, (producer.attributes.get_int("axis", 0), int(place.reshape(-1)[0]))


def index_ranges(graph: ir.Graph) -> dict[str, list[IndexRange]]:
    """Graph input → the ranges that its elements must lie in, where sizes are known."""
    found: dict[str, list[IndexRange]] = {}
    for node in graph:
        known = {"": INDEX_OPERANDS, DOMAIN: _OWN}.get(node.domain, {}).get(node.op_type)
        if known is None:
            continue
        operand, rule = known
        source, part = _part_behind_views(node.inputs[operand] if operand < len(node.inputs) else None)
        if source is None or not source.is_graph_input() or source.is_initializer():
            continue
        for low, high in rule(node):
            reader = f"{node.op_type} {node.name!r} on {input_of(node).name!r}"
            found.setdefault(source.name or "", []).append(IndexRange(low, high, reader, part))
    return found


Rule = Callable[[ir.Node], Iterator[tuple[int, int]]]


def _size(node: ir.Node, axis: int, operand: int = 0) -> Iterator[int]:
    """The size of an operand along an axis, if it is known."""
    found = dims(input_of(node, operand)) or ()
    if -len(found) <= axis < len(found) and isinstance(size := found[axis], int):
        yield size


def _along_axis(node: ir.Node) -> Iterator[tuple[int, int]]:
    for size in _size(node, node.attributes.get_int("axis", 0)):
        yield -size, size


def _tuples(node: ir.Node) -> Iterator[tuple[int, int]]:
    """Index tuples of one element; longer ones have a range for each place."""
    if (dims(input_of(node, 1)) or (0,))[-1] == 1:
        for size in _size(node, node.attributes.get_int("batch_dims", 0)):
            yield -size, size


def _axes(node: ir.Node) -> Iterator[tuple[int, int]]:
    found = dims(input_of(node))
    if found is not None:
        yield -len(found), len(found)


def _lengths(axis: Callable[[ir.Node], int], operand: int = 0) -> Rule:
    def rule(node: ir.Node) -> Iterator[tuple[int, int]]:
        for size in _size(node, axis(node), operand):
            yield 0, size + 1

    return rule


def _unpooled(node: ir.Node) -> Iterator[tuple[int, int]]:
    sizes = dims(node.outputs[0])
    if sizes is not None:
        total = 1
        for size in sizes:
            if not isinstance(size, int):
                return
            total *= size
        yield 0, total


def _written(node: ir.Node) -> Iterator[tuple[int, int]]:
    """TensorScatter: an update begins where it ends inside the cache; a circular one begins anywhere."""
    axis = node.attributes.get_int("axis", -2)
    for size in _size(node, axis):
        for length in _size(node, axis, 1):
            if node.attributes.get_string("mode", "linear") == "linear":
                yield 0, size - length + 1


def _first_axis(operand: int) -> Rule:
    def rule(node: ir.Node) -> Iterator[tuple[int, int]]:
        for size in _size(node, 0, operand):
            yield 0, size

    return rule


_STEPS = _lengths(lambda node: node.attributes.get_int("layout", 0))

INDEX_OPERANDS: Mapping[str, tuple[int, Rule]] = {
    "Gather": (1, _along_axis),
    "GatherElements": (1, _along_axis),
    "ScatterElements": (1, _along_axis),
    "GatherND": (1, _tuples),
    "ScatterND": (1, _tuples),
    "CumSum": (1, _axes),
    "CumProd": (1, _axes),
    "ReverseSequence": (1, _lengths(lambda node: node.attributes.get_int("time_axis", 0))),
    "RNN": (4, _STEPS),
    "GRU": (4, _STEPS),
    "LSTM": (4, _STEPS),
    "MaxUnpool": (1, _unpooled),
    "RoiAlign": (2, _first_axis(0)),
    "RotaryEmbedding": (3, _first_axis(1)),
    "TensorScatter": (2, _written),
    "Attention": (6, _lengths(lambda node: -2, 1)),
}
"""Op → its operand of indices or lengths, and the rule for their range."""


def _rows_of_result(node: ir.Node) -> Iterator[tuple[int, int]]:
    size = (dims(node.outputs[0]) or (None,))[0]
    if isinstance(size, int):
        yield -size, size


_OWN: Mapping[str, tuple[int, Rule]] = {
    "GatherGrad": (1, _rows_of_result),
    "RecurrentTraining": (4, _lengths(lambda node: 0)),
}
"""The same for ``graphc`` ops that take the place of such an op."""
