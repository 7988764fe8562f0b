"""schedule: start each collective when its last operand exists, wait for it before its first use.

    before   … dW2 … dW1 … AllReduce(b0) AllReduce(b1) Adam Adam
    after    … dW2 AllReduceStart(b0) … dW1 AllReduceStart(b1) AllReduceWait(b0) AllReduceWait(b1) Adam Adam

The order of nodes is the order of execution. It has three parts.

1. The computation. If it needs the results of a collective itself (shared batch statistics: the results reach another
   collective), the wait stands before the first use. If the loss or a gradient needs that collective, nodes that its start does
   not need move behind the start, so that work overlaps with it:

       before   dx2 dW2 sums1 AllReduce(sums1) dx1          after   dx2 sums1 AllReduceStart dW2 AllReduceWait dx1

   A collective that reads only state (the parameters of a sharded model) starts one ahead: as soon as the previous
   one has arrived. The wait of a ``transient`` one stands where the next of its kind starts, so that two are in memory.
   A collective of a few numbers, such as the loss, starts together with the next one: a start ends a segment, and values that
   wait for the backward pass would lie in memory as the graph has them, for example logarithms of all probabilities in float32.
   Collectives of which each works on the results of the one before (inside a node, between nodes, inside again) are a chain.
   The next one of a chain starts when the chain of another bucket begins, or in the end: the host does not wait for what has
   only just started, and collectives of different axes run at once.

       before   dW2 RS(b0) AR(b0) AG(b0) dW1 RS(b1) …      after   dW2 RSStart(b0) dW1 RSStart(b1) RSWait(b0) ARStart(b0) …

2. Nodes that depend on the last results: all waits, in the order of the starts (equal on every rank), then their users.
3. Updates, so that a non-finite gradient can still stop the step before any state has changed; and collectives of new state,
   each started after the updates that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.facts import producer_of, static_dims
from graphc.ir.names import marks_of
from graphc.ir.ops.collectives import collective_of
from graphc.ir.subgraphs import sources
from graphc.passes.precision.update_graph import computed_for_gradients
from graphc.pipeline import Context, graph_pass
from graphc.plan.overlap_view import overlapping


@graph_pass("schedule", changes="training")
def schedule(model: ir.Model, ctx: Context) -> bool:
    """Split every collective into Start and Wait and reorder the graph."""
    graph, op = model.graph, Builder(model.graph)
    whole = [n for n in graph if collective_of(n) is not None and not n.op_type.endswith(("Start", "Wait"))]
    pairs = [_split(graph, op, node) for node in whole]
    order = _Order(graph, pairs).run()
    changed = list(graph) != order
    if changed:
        graph.remove(order)
        graph.extend(order)
    ctx.note(f"schedule: {overlapping(graph)} of {counted(len(pairs), 'collective')} overlap with the computation")
    return changed


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    start: ir.Node
    wait: ir.Node

    @property
    def prefetched(self) -> bool:
        return all(v is None or v.is_initializer() for v in self.start.inputs)

    @property
    def transient(self) -> bool:
        return self.start.attributes.get_int("transient", 0) != 0


def _split(graph: ir.Graph, op: Builder, node: ir.Node) -> _Pair:
    op.before = node
    op.marks = marks_of(node) if all(v is None or v.is_initializer() for v in node.inputs) else {}  # else as its operands
    attributes = {k: a.value for k, a in node.attributes.items()}
    name = node.name or node.op_type.lower()
    flying = op.emit(f"{node.op_type}Start", node.inputs, attributes, domain="graphc", name=f"{name}/start")
    landed = op.emit(f"{node.op_type}Wait", flying, attributes, domain="graphc", name=f"{name}/wait")
    for old, new in zip(node.outputs, landed, strict=True):
        old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
    return _Pair(producer_of(flying[0]), producer_of(landed[0]))


class _Order:
    """Builds the new order of nodes in one walk over the old one."""

    def __init__(self, graph: ir.Graph, pairs: Sequence[_Pair]) -> None:
        self.graph, self.nodes = graph, list(graph)
        self.pair_of = {node: pair for pair in pairs for node in (pair.start, pair.wait)}
        self.starts = {pair.start for pair in pairs}
        self.waits = {pair.wait for pair in pairs}
        self.sources = {node: sources(node) for node in self.nodes}
        self.order: list[ir.Node] = []
        self.done: set[ir.Node] = set()
        self.missing = {start: len(self.sources[start]) for start in self.starts}
        self.readers: dict[ir.Node, list[ir.Node]] = {}
        for start in (n for n in self.nodes if n in self.starts):
            for source in self.sources[start]:
                self.readers.setdefault(source, []).append(start)
        self.gathers = self._gathers(pairs)
        self.next = self._chained(pairs)
        self.chains: list[_Pair] = []  # what is under way of each chain that has more to come
        self.flying: _Pair | None = None
        self.held: list[ir.Node] = []

    def run(self) -> list[ir.Node]:
        updates = {n for n in self.nodes if is_update(n)}
        after = self._reached(updates)
        inner = self._inner(after)
        late = self._reached({n for n in self.waits if n not in inner and n not in after}) | after
        for pair in self.gathers[:1]:
            self._emit(pair.start)
        prefetched = {pair.start for pair in self.gathers}
        for start in (n for n in self.nodes if n in self.starts and n not in prefetched):
            if not self.sources[start]:
                self._emit(start)
        for node in self._overlapped([n for n in self.nodes if n not in late], inner):
            self._walk(node)
        self._land()
        for node in self.nodes:
            if node not in after:
                self._walk(node)
        for node in self.nodes:
            self._walk(node)
        self._land()
        return self.order

    def _walk(self, node: ir.Node) -> None:
        if node not in self.starts and node not in self.waits:
            self._need(node)

    def _need(self, node: ir.Node) -> None:
        """Emit ``node`` after the waits and starts that it needs."""
        if node in self.done:
            return
        if node in self.starts or node in self.waits or self.waits.intersection(self.sources[node]):
            for source in self.sources[node]:
                if source in self.waits or source in self.starts:
                    self._need(source)
        if node not in self.done:  # a start is emitted as soon as it is ready
            self._emit(node)

    def _emit(self, node: ir.Node) -> None:
        pair = self.pair_of.get(node)
        if pair is not None and node is pair.start and not pair.prefetched:
            self._let_go(node)
        if pair is not None and node is pair.start and pair.transient:
            if self.flying is not None:
                self._need(self.flying.wait)
            self.flying = pair
        self.order.append(node)
        self.done.add(node)
        if pair is not None and node is pair.start and pair not in self.next.values():
            self._advance()
        if pair is not None and node is pair.start and pair in self.next:
            self.chains.append(pair)
        if pair is not None and node is pair.wait and pair in self.gathers:
            following = self.gathers[self.gathers.index(pair) + 1 :][:1]
            for later in following:
                if later.start not in self.done:
                    self._emit(later.start)
        for start in self.readers.get(node, []):
            self.missing[start] -= 1
            if self.missing[start] == 0 and start not in self.done:
                if all(v is not None and static_dims(v) == () for v in start.inputs):
                    self.held.append(start)
                else:
                    self._emit(start)

    def _advance(self) -> None:
        """Let every chain under way begin its next collective, the youngest first: it frees the link that others wait for."""
        under_way, self.chains = self.chains, []
        for pair in reversed(under_way):
            self._need(pair.wait)

    def _let_go(self, start: ir.Node | None = None) -> None:
        """Emit the small starts that were held back, in order, except ``start`` itself."""
        while self.held and start not in self.done:
            first = self.held.pop(0)
            if first is not start and first not in self.done:
                self._emit(first)
            elif first is start:
                return

    def _land(self) -> None:
        """Wait for all started collectives, in the order of the starts."""
        self._let_go()
        while self.chains:
            self._advance()
        for node in [n for n in self.order if n in self.starts]:
            self._need(self.pair_of[node].wait)

    def _chained(self, pairs: Sequence[_Pair]) -> dict[_Pair, _Pair]:
        """Collective → the one that works on its results, where nothing else reads them."""
        found: dict[_Pair, _Pair] = {}
        for pair in pairs:
            users = {user for value in pair.wait.outputs for user in value.consumers()}
            following = self.pair_of.get(users.pop()) if len(users) == 1 else None
            if following is not None:
                found[pair] = following
        return found

    def _gathers(self, pairs: Sequence[_Pair]) -> list[_Pair]:
        """Collectives of state alone, in the order of their first use."""
        position = {node: k for k, node in enumerate(self.nodes)}
        users: dict[ir.Node, int] = {}
        for node, producers in self.sources.items():
            for source in producers:
                users[source] = min(users.get(source, len(position)), position[node])
        found = [pair for pair in pairs if pair.prefetched]
        return sorted(found, key=lambda pair: users.get(pair.wait, len(position)))

    def _overlapped(self, nodes: Sequence[ir.Node], inner: set[ir.Node]) -> list[ir.Node]:
        """Move each start that the loss or a gradient needs before all nodes since the last wait that it does not depend on."""
        needed = computed_for_gradients(self.graph)
        wait_of = {p.start: w for w in inner if w in needed and not (p := self.pair_of[w]).prefetched}
        hoisted = set(wait_of.values())
        order: list[ir.Node] = []
        since = 0
        for node in nodes:
            if node in hoisted:
                continue
            landing = [source for source in self.sources[node] if source in hoisted]
            if landing:
                hoisted.difference_update(landing)
                since = len(order)
            order.append(node)
            if node in wait_of:
                order[since:] = self._start_first(order[since:])
                since = order.index(node, since) + 1
        return order

    def _start_first(self, nodes: Sequence[ir.Node]) -> list[ir.Node]:
        """Move the nodes that the last one, a start, does not depend on after it."""
        needed = {nodes[-1]}
        for node in reversed(nodes):
            if node in needed:
                needed.update(self.sources[node])
        return [n for n in nodes if n in needed] + [n for n in nodes if n not in needed]

    def _reached(self, seeds: Iterable[ir.Node]) -> set[ir.Node]:
        """``seeds`` and everything that depends on them."""
        found = set(seeds)
        for node in self.nodes:
            if node not in found and not found.isdisjoint(self.sources[node]):
                found.add(node)
        return found

    def _inner(self, after: set[ir.Node]) -> set[ir.Node]:
        """Waits whose results reach another collective before the updates."""
        leads: set[ir.Node] = set()
        for node in reversed(self.nodes):
            if node in after:
                continue
            if node in leads or node in self.starts:
                leads.update(self.sources[node])
        return {n for n in self.waits if n in leads}
