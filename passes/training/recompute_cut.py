"""Chooses which activations to keep for the backward pass, by a minimum cut.

Every forward value v is an edge v·in → v·out whose capacity is its size in bytes. Values that the backward pass reads lead to
the sink; nodes that must not be recomputed hang on the source; other nodes lead from their operands to their results. The
edges of a minimum cut are the values to keep (the formulation is that of Horace He and Shangdi Yu, "Transcending runtime-
memory tradeoffs in checkpointing by being fusion aware", MLSys 2023). If everything may be recomputed, the forward pass is
first divided into stretches whose borders are kept (T. Chen et al., "Training deep nets with sublinear memory cost", 2016).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import onnx_ir as ir

from graphc.ir.declare import has_effect
from graphc.ir.evaluate import NOT_DETERMINED
from graphc.ir.facts import constant, dims, producer_of
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL
from graphc.ir.subgraphs import bodies, captured
from graphc.passes.gradients.reverse_mode import ancestors

EXPENSIVE = frozenset(
    {"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "DeformConv", "Attention", "RNN", "GRU", "LSTM", "Det", "DFT", "STFT"}
    | {"TopK", "Unique", "MatMulInteger", "ConvInteger", "NonMaxSuppression", "ScaledDotProductAttention", "RecurrentTraining"}
    | {"GroupedMatMul", "Solve", "TriangularSolve", "Cholesky", "LogDeterminant", "Cofactors"}
)
"""Ops that take much longer than reading and writing their operands."""

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})

_TINY = 64

Copy: TypeAlias = "tuple[ir.Value, bool]"
"""A value, and whether it is the recomputed copy."""

Event: TypeAlias = "tuple[list[Copy], list[Copy]]"
"""The values that a node writes, and the values that it reads."""


@dataclass(frozen=True, slots=True)
class RecomputeRegion:
    """Nodes to recompute, in order, before the backward node ``before``, and the values they replace there."""

    before: ir.Node
    nodes: tuple[ir.Node, ...]
    values: frozenset[ir.Value]


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The effect of keeping one set of values.

    Attributes:
        regions: the nodes to recompute, and where.
        peak: most bytes of activations alive at once.
        work: a measure of the added time: bytes written by recomputed nodes, expensive ones counted 16 times.
        kept: bytes that are held from the forward pass to the backward pass.
    """

    regions: tuple[RecomputeRegion, ...]
    peak: int
    work: int
    kept: int


@dataclass
class Joint:
    """A graph with its forward and backward nodes, in order.

    Args:
        size: stands for every symbolic dimension.
    """

    graph: ir.Graph
    size: int
    forward: list[ir.Node] = field(init=False)
    backward: list[ir.Node] = field(init=False)
    made: dict[ir.Value, int] = field(init=False)
    needed: dict[ir.Value, None] = field(init=False)
    pinned: set[ir.Value] = field(init=False)

    def __post_init__(self) -> None:
        nodes = [n for n in self.graph if n.op_type != "Constant" or n.domain]
        gradients = [v for n in nodes for v in n.outputs if GRADIENT_OF in v.metadata_props]
        results = [v for n in nodes for v in n.outputs if LOSS_TOTAL in v.metadata_props]
        results += [v for v in self.graph.outputs if GRADIENT_OF not in v.metadata_props]
        early, late = ancestors(nodes, results), ancestors(nodes, gradients)
        self.forward = [n for n in nodes if any(v in early for v in n.outputs)]
        first = set(self.forward)
        self.backward = [n for n in nodes if n not in first and any(v in late for v in n.outputs)]
        self.made = {v: k for k, n in enumerate(self.forward) for v in n.outputs if not self.free(v)}
        self.needed = {v: None for n in self.backward for v in n.inputs if v in self.made}
        self.pinned = {v for n in self.backward for v in captured(n) if v in self.made}
        self.needed.update(dict.fromkeys(self.pinned))

    def free(self, value: ir.Value) -> bool:
        """Whether keeping the value is free: it is held anyway, or consists of a few integers."""
        if value.producer() is None or constant(value) is not None or not isinstance(value.type, ir.TensorType):
            return True
        found = dims(value)
        whole = value.dtype is not None and not value.dtype.is_floating_point()
        return whole and found is not None and len(found) <= 1 and all(isinstance(d, int) and d <= _TINY for d in found)

    def nbytes(self, value: ir.Value) -> int:
        """Size in bytes, with ``size`` for every unknown dimension."""
        count = 1
        for d in dims(value) or ():
            count *= d if isinstance(d, int) else self.size
        return int(count * value.dtype.itemsize) if value.dtype is not None else 0

    def operands(self, node: ir.Node) -> Iterator[ir.Value]:
        """The forward values that a node reads and that cost memory to keep."""
        yield from dict.fromkeys(v for v in (*node.inputs, *captured(node)) if v is not None and v in self.made)

    def repeatable(self, node: ir.Node) -> bool:
        """Whether recomputing the node gives the same result and has no other effect."""
        if has_effect(node) or node.op_type in NOT_DETERMINED or any(True for _ in bodies(node)):
            return False
        if node.op_type == "Dropout" and node.domain == "" and len(node.inputs) > 2:
            return False
        return all(v.type is None or isinstance(v.type, ir.TensorType) for v in node.outputs)

    # Cuts -------------------------------------------------------------------------------------------------------------

    def nothing(self) -> RecomputeChoice:
        """Keep everything, as without this pass."""
        return self.cost(set(self.needed))

    def cheap(self) -> RecomputeChoice:
        """Recompute all cheap nodes where that saves memory."""
        barred = {n for n in self.forward if n.op_type in EXPENSIVE or not self.repeatable(n)}
        return self.cost(self.cut(barred, self.pinned))

    def stretches(self, count: int) -> RecomputeChoice:
        """Keep the borders of ``count`` stretches of the forward pass, and recompute what lies between them.

        The last stretch is the first one that the backward pass reaches; dropping its products would gain nothing.
        """
        borders = self.borders(count)
        last = borders[-1] if borders else -1
        barred = {n for n in self.forward if not self.repeatable(n)}
        barred |= {n for n in self.forward[last + 1 :] if n.op_type in EXPENSIVE}
        pinned = set(self.pinned)
        for border in borders:
            pinned.update(self.crossing(border))
        return self.cost(self.cut(barred, pinned))

    def crossing(self, border: int) -> list[ir.Value]:
        """The values of forward nodes up to ``border`` that later forward nodes read."""
        return list(dict.fromkeys(v for n in self.forward[border + 1 :] for v in self.operands(n) if self.made[v] <= border))

    def borders(self, count: int) -> list[int]:
        """Choose positions that divide the needed values evenly; each moves to where the fewest bytes cross."""
        sizes = [sum(self.nbytes(v) for v in n.outputs if v in self.needed) for n in self.forward]
        found: list[int] = []
        total, seen = sum(sizes), 0
        targets = [total * k / count for k in range(1, count)]
        reach = max(1, len(sizes) // (3 * count))
        position = 0
        for target in targets:
            while position < len(sizes) - 1 and seen < target:
                seen += sizes[position]
                position += 1
            window = range(max(0, position - reach), min(len(sizes) - 1, position + reach + 1))
            best = min(window, key=lambda k: (self._crossing_bytes[k], abs(k - position)), default=None)
            if best is not None and (not found or best > found[-1]):
                found.append(best)
        return found

    @cached_property
    def _crossing_bytes(self) -> list[int]:
        last: dict[ir.Value, int] = {}
        for k, node in enumerate(self.forward):
            for value in self.operands(node):
                last[value] = k
        changes = [0] * (len(self.forward) + 1)
        for value, end in last.items():
            changes[self.made[value]] += self.nbytes(value)
            changes[end] -= self.nbytes(value)
        return list(itertools.accumulate(changes))

    def cut(self, barred: Collection[ir.Node], pinned: Collection[ir.Value]) -> set[ir.Value]:
        """Find the smallest set of values from which everything that the backward pass needs can be computed.

        Args:
            barred: nodes that are not recomputed.
            pinned: values that are kept if they are needed at all.
        """
        import networkx as nx  # imported here: importing networkx takes longer than most compilations

        ids = {value: k for k, value in enumerate(self.made)}
        network = nx.DiGraph()
        network.add_nodes_from(("source", "sink"))
        for node in self.forward:
            outputs = [v for v in node.outputs if v in ids]
            for value in outputs:
                k = ids[value]
                network.add_edge(2 * k, 2 * k + 1, capacity=max(1, self.nbytes(value)))
                if node in barred or value in pinned:
                    network.add_edge("source", 2 * k)
                    continue
                for operand in self.operands(node):
                    network.add_edge(2 * ids[operand] + 1, 2 * k)
        for value in self.needed:
            network.add_edge(2 * ids[value] + 1, "sink")
        _, (near, _) = nx.minimum_cut(network, "source", "sink")
        return {v for v, k in ids.items() if 2 * k in near and 2 * k + 1 not in near}

    # Costs ------------------------------------------------------------------------------------------------------------

    def regions(self, kept: Collection[ir.Value]) -> Iterator[RecomputeRegion]:
        """The nodes to recompute if only ``kept`` is kept, each before the first backward node that reads it."""
        again: set[ir.Value] = set()
        for node in self.backward:
            wanted = [v for v in node.inputs if v in self.made and v not in kept and v not in again]
            if not wanted:
                continue
            region: dict[int, ir.Node] = {}
            values: set[ir.Value] = set()
            stack = [v for v in wanted if v is not None]
            while stack:
                value = stack.pop()
                if value in kept or value in again:
                    continue
                maker = producer_of(value)
                fresh = {v for v in maker.outputs if v in self.made and v not in kept}
                again |= fresh
                values |= fresh
                region[self.made[value]] = maker
                stack.extend(self.operands(maker))
            yield RecomputeRegion(node, tuple(region[k] for k in sorted(region)), frozenset(values))

    def cost(self, kept: set[ir.Value]) -> RecomputeChoice:
        """Measure a choice by walking the steps in order."""
        regions = tuple(self.regions(kept))
        return RecomputeChoice(
            regions,
            self.peak(regions),
            sum(self.nbytes(v) * (16 if n.op_type in EXPENSIVE else 1) for r in regions for n in r.nodes for v in n.outputs),
            sum(self.nbytes(v) for v in self.needed if v in kept),
        )

    def peak(self, regions: Sequence[RecomputeRegion]) -> int:
        """Most bytes of intermediate values alive at once; gradients of parameters have buffers of their own."""
        first = {r.before: r for r in regions}
        again: set[ir.Value] = set()
        events: list[Event] = []

        def walk(node: ir.Node, *, second: bool) -> None:
            reads = [(_root(v), v in again) for v in (*node.inputs, *captured(node)) if v is not None]
            makes = [] if _is_view(node) else [(v, second) for v in node.outputs]
            events.append((makes, [(root, repeated and root in again) for root, repeated in reads]))

        for node in self.forward:
            walk(node, second=False)
        for node in self.backward:
            if node in first:
                again |= first[node].values
                for repeated in first[node].nodes:
                    walk(repeated, second=True)
            walk(node, second=False)
        return self._sweep(events)

    def _sweep(self, events: Sequence[Event]) -> int:
        ends: dict[Copy, int] = {}
        for k, (makes, reads) in enumerate(events):
            for key in (*makes, *reads):
                ends[key] = k
        dying: dict[int, list[Copy]] = {}
        for key, k in ends.items():
            dying.setdefault(k, []).append(key)
        alive: dict[Copy, int] = {}
        level = most = 0
        for k, (makes, _) in enumerate(events):
            for key in makes:
                value = key[0]
                if key not in alive and GRADIENT_OF not in value.metadata_props and constant(value) is None:
                    alive[key] = self.nbytes(value)
                    level += alive[key]
            most = max(most, level)
            for key in dying.get(k, ()):
                level -= alive.pop(key, 0)
        return most


def _is_view(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in VIEWS


def _root(value: ir.Value) -> ir.Value:
    """The value whose memory a view shares."""
    producer = value.producer()
    while producer is not None and _is_view(producer) and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value
