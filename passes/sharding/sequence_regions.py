"""Finds where activations may be divided along the sequence: between a sum of partial products and the next divided product.

    AllReduce ─► Add ─► Dropout ─► Add ─► LayerNormalization ─► Fork          all along axis 1 of [batch, sequence, features]

The ops of a region work on each position by itself, so a rank can hold and compute a part of the positions. That is the
sequence parallelism of Megatron-LM (Korthikanti et al. 2022). A region starts at AllReduces, grows through ops whose rule
(:mod:`graphc.passes.sharding.relations`) keeps the axis, and is kept if it reaches a Fork: elsewhere nothing would be won.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from graphc.ir.facts import dims, input_of, inputs_of
from graphc.ir.ops.collectives import collective_of
from graphc.ir.subgraphs import captured
from graphc.passes.sharding.axis_classes import AxisClasses, AxisShard
from graphc.passes.sharding.ratio import Ratio
from graphc.passes.sharding.relations import ELEMENTWISE, RESHAPES, relate

POSITIONWISE = frozenset(
    {
        *(ELEMENTWISE | RESHAPES),
        *("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax", "Transpose", "Split", "Slice", "Concat"),
        *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"),
    }
)
"""Ops of ONNX that a region may hold. Products are left out: each rank has the columns or rows of all positions."""

Place: TypeAlias = tuple[int, Ratio]
"""The axis of a value that is divided, and of how many blocks; see :class:`AxisShard`."""


@dataclass(slots=True)
class Regions:
    """What is divided along the sequence.

    Attributes:
        values: results of which each rank computes and holds a part.
        nodes: which compute parts of their results from parts of their operands.
        entries: operands of such a node that are whole on every rank, and of which it reads a part.
        whole: sums that stay whole, though divided products depend on them → why.
    """

    values: dict[ir.Value, AxisShard] = field(default_factory=dict)
    nodes: set[ir.Node] = field(default_factory=set)
    entries: dict[tuple[ir.Node, ir.Value], AxisShard] = field(default_factory=dict)
    whole: dict[ir.Value, str] = field(default_factory=dict)


def is_sum(node: ir.Node, group: str) -> bool:
    """Whether the node sums partial products over the ranks of ``group``."""
    values = node.attributes
    return (
        collective_of(node) == "AllReduce"
        and values["group"].as_string() == group
        and values.get_string("adjoint", "partial") == "whole"
    )


def is_fork(node: ir.Node, group: str) -> bool:
    """Whether divided products of ``group`` read the node's result."""
    return node.op_type == "Fork" and node.domain == "graphc" and node.attributes["group"].as_string() == group


def find_regions(graph: ir.Graph, group: str, ranks: int) -> Regions:
    """The regions of the graph of one rank, in which products, embeddings and attention are divided already."""
    bound = {*graph.outputs, *(value for node in graph for value in captured(node))}
    needed = _before_forks(graph, group)
    found, places = Regions(), dict[ir.Value, Place]()
    operands: dict[ir.Node, dict[ir.Value, Place]] = {}
    for node in graph:
        if is_sum(node, group):
            for value in node.outputs:
                place, reason = _sequence_axis(value, ranks)
                if place is not None and value not in bound:
                    places[value] = place
                elif value in needed:
                    found.whole[value] = reason or "it is an output of the model, or read inside a loop or branch"
            continue
        inside = [value for value in inputs_of(node) if value in places]
        if not inside or node.domain != "" or node.op_type not in POSITIONWISE or bound.intersection(node.outputs):
            continue
        through = _through(node, inside[0], places[inside[0]], ranks)
        if through is None or any(through.get(value) != places[value] for value in inside):
            continue
        operands[node] = {value: through[value] for value in inputs_of(node) if value in through}
        places.update((value, through[value]) for value in node.outputs)
    kept = _leading_to_forks(graph, group, set(places), set(operands))
    for node in graph:
        for value in node.outputs:
            if is_sum(node, group) and value in places and value in needed and value not in kept:
                found.whole[value] = "no divided product reads what follows from it position by position"
    found.values = {value: _shard(value, place, ranks) for value, place in places.items() if value in kept}
    found.nodes = {node for node in operands if node.outputs[0] in kept}
    for node in found.nodes:
        for value, place in operands[node].items():
            if value not in kept:
                found.entries[node, value] = _shard(value, place, ranks)
    return found


def _sequence_axis(value: ir.Value, ranks: int) -> tuple[Place | None, str]:
    """Where to divide the sum of a product's parts, or why it stays whole.

    The last axis holds features. The first one counts samples, of which the last batch may have fewer, unless the second does.
    """
    sizes = dims(value)
    if sizes is None or len(sizes) < 2:
        return None, "it has no axis of positions"
    first = 0 if len(sizes) == 2 or (isinstance(sizes[0], int) and not isinstance(sizes[1], int)) else 1
    reasons = []
    for axis in range(first, max(first + 1, len(sizes) - 1)):
        size = sizes[axis]
        if size is None:
            reasons.append(f"the size of axis {axis} is not known")
            continue
        parts = Ratio.of(size)
        place = axis, Ratio.of(1) if isinstance(size, int) else parts / Ratio(parts.number)
        if parts.number > 1 and parts.number % ranks == 0:
            return place, ""
        if isinstance(size, int):
            reasons.append(f"axis {axis} has {size} positions, which {ranks} does not divide")
        else:
            reasons.append(f"{ranks} does not divide axis {axis}, of size {size}, whatever that is")
    return None, "; ".join(reasons)


def _through(node: ir.Node, value: ir.Value, place: Place, ranks: int) -> dict[ir.Value, Place] | None:
    """The places of a node's values that go with that of one operand; None where the node needs or makes the whole axis."""
    for classes in _related(node, ranks):
        start = value, place[0]
        if classes.reason(start):
            continue
        _, weight = classes.find(start)
        root = classes.find(start)[0]
        found: dict[ir.Value, Place] = {}
        twice = False
        for other in [v for v in (*node.inputs, *node.outputs) if v is not None]:
            for axis in range(len(dims(other) or ())):
                if classes.find((other, axis))[0] == root:
                    twice |= other in found and found[other][0] != axis
                    found[other] = axis, place[1] * classes.find((other, axis))[1] / weight
        if twice or any(out not in found for out in node.outputs):
            continue
        if all(_fits(other, its, ranks) for other, its in found.items()):
            return found
    return None


def _related(node: ir.Node, ranks: int) -> Iterator[AxisClasses]:
    """The relations of one node: the first, and those with another alternative in one place."""
    first = AxisClasses(ranks)
    relate(first, node)
    yield first
    for key, count in first.offered.items():
        for alternative in range(1, count):
            other = AxisClasses(ranks, {key: alternative})
            relate(other, node)
            yield other


def _fits(value: ir.Value, place: Place, ranks: int) -> bool:
    """Whether ranks have equally many positions of each block."""
    size = (dims(value) or ())[place[0]]
    if size is None or not place[1].whole:
        return False
    each = Ratio.of(size) / place[1]
    return each.whole and each.number % ranks == 0 and (isinstance(each.size, int) or isinstance(place[1].size, int))


def _shard(value: ir.Value, place: Place, ranks: int) -> AxisShard:
    size = (dims(value) or ())[place[0]]
    assert size is not None
    blocks, each = place[1].size, (Ratio.of(size) / place[1]).size
    return AxisShard(place[0], blocks if isinstance(blocks, int) else None, each // ranks if isinstance(each, int) else None)


def _before_forks(graph: ir.Graph, group: str) -> set[ir.Value]:
    """The values on which divided products depend."""
    found: set[ir.Value] = set()
    for node in reversed(graph):
        if is_fork(node, group) or not found.isdisjoint(node.outputs):
            found.update(inputs_of(node), captured(node))
    return found


def _leading_to_forks(graph: ir.Graph, group: str, values: set[ir.Value], nodes: set[ir.Node]) -> set[ir.Value]:
    """The values of regions with a Fork at their end."""
    region: dict[ir.Value, ir.Value] = {}

    def root(value: ir.Value) -> ir.Value:
        while region.get(value, value) is not value:
            value = region[value]
        return value

    for node in nodes:
        for value in (*inputs_of(node), *node.outputs):
            if value in values:
                region[root(value)] = root(node.outputs[0])
    ends = {root(input_of(node)) for node in graph if is_fork(node, group) and input_of(node) in values}
    return {value for value in values if root(value) in ends}
