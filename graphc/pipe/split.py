"""Takes the part of one rank out of a training graph, with transfers where edges between stages are cut.

    before   x ─► MatMul ─► h ─► MatMul ─► loss                         (stages 0 and 1)
    after    x ─► MatMul ─► h ─► PipeSend(0F→1F)      rank 0
             PipeRecv(0F→1F) ─► h ─► MatMul ─► loss   rank 1

A transfer carries all values that pass between two tasks. A value that several later stages read goes to each of them
directly. State goes from the stage that updates it to other readers once a step, so that only one rank holds it. What runs once
a step follows one order on all ranks, so its transfers cannot wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.facts import dtype_of, input_of, shape_of
from graphc.ir.names import SCHEDULE
from graphc.ir.ops.accumulation import is_accumulation
from graphc.ir.ops.pipe import RECV, SEND, shape_text
from graphc.ir.subgraphs import bodies, release_bodies
from graphc.pipe.measures import separate_measures
from graphc.pipe.tables import PipeSchedule
from graphc.pipe.tasks import Assignment, Task, is_placed, reads

MICRO = frozenset("FBW")
"""Kinds of tasks that run for every micro-batch."""


@dataclass(slots=True)
class Edge:
    """A transfer from a task to another one.

    Attributes:
        source, target: the tasks.
        sender, receiver: the ranks on the pipe axis.
        values: what it carries.
        number: of transfers that run once a step: their place in the order.
    """

    source: Task
    target: Task
    sender: int
    receiver: int
    values: list[ir.Value] = field(default_factory=list)
    number: int = 0

    @property
    def tag(self) -> str:
        """Its name, the same on both ranks."""
        if self.source.kind in MICRO and self.target.kind in MICRO:
            return f"{self.source}→{self.target}"
        return f"{self.source.kind} rank {self.sender}→{self.receiver} #{self.number}"

    def shown(self, micro: int) -> str:
        """Its name for one micro-batch, in errors and flight logs."""
        return f"{self.tag} micro-batch {micro}"


@dataclass(frozen=True, slots=True)
class Pipe:
    """The place of a rank on the pipe axis.

    Attributes:
        rank, ranks: the place, and the number of ranks.
        stages: number of stages; stage s lies on rank s mod ranks.
        splits_weights: whether weight gradients are tasks of their own.
        placed: whether nodes were put on devices by hand.
    """

    rank: int
    ranks: int
    stages: int
    splits_weights: bool = False
    placed: bool = False

    @classmethod
    def of(cls, model: ir.Model, rank: int, ranks: int) -> Pipe:
        """The place of a rank on the pipe axis of ``ranks`` ranks, for a model that was compiled for it."""
        if is_placed(model):
            return cls(rank, ranks, ranks, placed=True)
        schedule = PipeSchedule.parse(model.metadata_props[SCHEDULE])
        return cls(rank, ranks, schedule.stages_on(ranks), schedule.splits_weights)

    def rank_of(self, stage: int) -> int:
        """The rank of a stage."""
        return stage % self.ranks

    @property
    def own(self) -> range:
        """The stages of this rank."""
        return range(self.rank, self.stages, self.ranks)


def separate_shared_sums(graph: ir.Graph, found: Assignment) -> bool:
    """Sum the gradients of a parameter that several stages read on each stage, and add the sums once a step.

        before   Add(g0, g1) ─► Accumulate        after   g0 ─► Accumulate, g1 ─► Accumulate ─► Add

    Returns:
        Whether anything changed.
    """
    op, changed = Builder(graph), False
    pending = [n for n in graph if is_accumulation(n)]
    while pending:
        node = pending.pop()
        total = input_of(node).producer()
        if total is None or total.op_type not in ("Add", "Sum") or total.domain or len(total.outputs[0].consumers()) != 1:
            continue
        if len({found.stage.get(p) for v in total.inputs if v is not None and (p := v.producer()) is not None}) < 2:
            continue
        op.before, op.scope = node, node.name or "accumulate"
        steps, tree = node.attributes["steps"].as_int(), node.attributes.get_int("tree", 0)
        sums = [op.graphc.Accumulate(value, steps=steps, tree=tree) for value in total.inputs]
        (whole,) = op.emit(total.op_type, sums, {})
        node.outputs[0].replace_all_uses_with(whole, replace_graph_outputs=True)
        graph.remove([node, total], safe=True)
        pending += [s.producer() for s in sums if s.producer() is not None]
        changed = True
    return changed


class Split:
    """The cut edges of a graph, and each rank's part.

    Args:
        graph: specialised and decomposed; :meth:`take` changes it.
        pipe: the rank.
        owners: of a graph in inference: parameter → stage.

    Attributes:
        edges: all transfers, of all ranks, in one order.
    """

    def __init__(self, graph: ir.Graph, pipe: Pipe, owners: Mapping[str, int] | None = None) -> None:
        self.graph, self.pipe = graph, pipe
        self.trains = owners is None
        found = Assignment(graph, pipe.stages, owners, placed=pipe.placed)
        if self.trains and not pipe.placed and separate_shared_sums(graph, found):
            found = Assignment(graph, pipe.stages)
        if self.trains and separate_measures(graph, found):
            found = Assignment(graph, pipe.stages, placed=pipe.placed)
        self.found = found
        self._owners = owners or {}
        self.tasks = {n: self._task(n) for n in graph if n in found.stage or n in found.everywhere}
        self.edges: list[Edge] = []
        self._edge_of: dict[tuple[object, ...], Edge] = {}
        self._sent: set[tuple[ir.Value, Task, int]] = set()
        self._find_edges()

    def _task(self, node: ir.Node) -> Task:
        return self.found.task(node, splits_weights=self.pipe.splits_weights)

    def rank_of(self, node: ir.Node) -> int | None:
        """The rank on which a node runs; None: every rank."""
        stage = self.found.stage.get(node)
        return None if stage is None else self.pipe.rank_of(stage)

    # Edges ------------------------------------------------------------------------------------------------------------

    def _find_edges(self) -> None:
        order: dict[ir.Value, list[ir.Node]] = {}
        for node in self.graph:
            if node in self.tasks:
                for value in reads(node):
                    order.setdefault(value, []).append(node)
        for value in self.graph.initializers.values():
            self._find_state_edges(value, order.get(value, []))
        for node in self.graph:
            if node not in self.tasks:
                continue
            for value in node.outputs:
                self._find_value_edges(node, value, order.get(value, []))

    def _owner(self, value: ir.Value) -> int | None:
        stage = self.found.owner.get(value)
        return self._owners.get(value.name or "") if stage is None and not self.trains else stage

    def _find_state_edges(self, value: ir.Value, readers: Sequence[ir.Node]) -> None:
        owner = self._owner(value)
        if owner is None:
            return
        sender = self.pipe.rank_of(owner)
        for node in readers:
            receiver = self.rank_of(node)
            if receiver is not None and receiver != sender:
                self._add(value, Task("P"), Task("P"), sender, receiver)

    def _find_value_edges(self, node: ir.Node, value: ir.Value, readers: Sequence[ir.Node]) -> None:
        source, sender = self.tasks[node], self.rank_of(node)
        if sender is None:
            return
        if source.kind in MICRO and not is_accumulation(node):
            forward = {self.tasks[n].stage for n in readers if self.tasks[n].kind == "F"}
            for reader in readers:
                target = self.tasks[reader]
                if target.kind in MICRO and target.stage != source.stage:
                    target = Task("F" if target.stage in forward else "B", target.stage)
                    self._add(value, source, target, sender, self.pipe.rank_of(target.stage))
            return
        once = [r for n in readers if (r := self.rank_of(n)) is not None and r != sender]
        if (value.is_graph_output() and self.trains) or not self.found.everywhere.isdisjoint(readers):
            once += [rank for rank in range(self.pipe.ranks) if rank != sender]
        for receiver in sorted(set(once)):
            self._add(value, Task("U"), Task("U"), sender, receiver)

    def _add(self, value: ir.Value, source: Task, target: Task, sender: int, receiver: int) -> None:
        if (value, target, receiver) in self._sent:
            return
        self._sent.add((value, target, receiver))
        key: tuple[object, ...] = (source, target, sender, receiver)
        if source.kind == "U":
            key = (*key, value)  # each in its place in the common order
        edge = self._edge_of.get(key)
        if edge is None:
            edge = self._edge_of[key] = Edge(source, target, sender, receiver, number=len(self.edges))
            self.edges.append(edge)
        edge.values.append(value)

    # A rank's part ----------------------------------------------------------------------------------------------------

    def take(self) -> dict[ir.Node, Task]:
        """Reduce the graph to the part of :attr:`pipe`'s rank; returns the task of every node but constants."""
        rank, graph, op = self.pipe.rank, self.graph, Builder(self.graph)
        kept = [n for n in graph if n not in self.tasks or self.rank_of(n) in (None, rank)]
        sends = {id(e): self._send(op, e) for e in self.edges if e.sender == rank}
        recvs = {id(e): self._recv(op, e) for e in self.edges if e.receiver == rank}
        order: list[ir.Node] = [n for n in kept if n not in self.tasks]
        tasks: dict[ir.Node, Task] = {}

        def add(nodes: Iterable[ir.Node], task: Task) -> None:
            for node in nodes:
                order.append(node)
                tasks[node] = task

        begin = Task("P")
        first = [e for e in self.edges if e.source == begin and rank in (e.sender, e.receiver)]
        add((sends[id(e)] if e.sender == rank else recvs[id(e)] for e in first), begin)
        for stage in self.pipe.own:
            for kind in ("F", "B", "W"):
                task = Task(kind, stage)
                add((recvs[id(e)] for e in self.edges if e.target == task and e.source.kind in MICRO), task)
                add((n for n in kept if self.tasks.get(n) == task), task)
                add((sends[id(e)] for e in self.edges if e.source == task), task)
        add(self._once(kept, sends, recvs), Task("U"))
        wanted = set(order)
        removed = [n for n in graph if n not in wanted]
        graph.remove(list(graph))
        for node in removed:
            release_bodies(node)
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        graph.extend(order)
        self._drop_unused(order)
        return tasks

    def _once(self, kept: Sequence[ir.Node], sends: Mapping[int, ir.Node], recvs: Mapping[int, ir.Node]) -> Iterable[ir.Node]:
        """What runs once a step, in the order of the whole graph.

        A value is sent as soon as it exists, and received before its first reader; results of the step before the updates,
        since the check tests them.
        """
        rank = self.pipe.rank
        sending: dict[ir.Value, list[ir.Node]] = {}
        waiting: dict[ir.Value, ir.Node] = {}
        for edge in self.edges:
            if edge.source.kind == "U" and edge.sender == rank:
                sending.setdefault(edge.values[0], []).append(sends[id(edge)])
            if edge.source.kind == "U" and edge.receiver == rank:
                node = recvs[id(edge)]
                waiting[node.outputs[0]] = node
        mine = {n for n in kept if n in self.tasks and self.tasks[n].kind == "U"}
        results = [v for v in waiting if v.is_graph_output()]
        for node in self.graph:
            if node in mine:
                needed = [v for v in reads(node) if v in waiting] + (results if is_update(node) else [])
                yield from (waiting.pop(v) for v in dict.fromkeys(needed) if v in waiting)
                yield node
            for value in node.outputs:
                yield from sending.pop(value, ())
        yield from waiting.values()

    def _send(self, op: Builder, edge: Edge) -> ir.Node:
        op.scope = "pipe"
        op.emit(SEND, edge.values, {"tag": edge.tag, "peer": edge.receiver}, domain="graphc", outputs=0)
        return self.graph[-1]

    def _recv(self, op: Builder, edge: Edge) -> ir.Node:
        """Emit a PipeRecv and let the readers of its task on this rank read its results."""
        op.scope = "pipe"
        attributes = {
            "tag": edge.tag,
            "peer": edge.sender,
            "types": [int(dtype_of(v)) for v in edge.values],
            "shapes": [shape_text(shape_of(v)) for v in edge.values],
        }
        results = op.emit(RECV, [], attributes, domain="graphc", outputs=len(edge.values))
        for old, new in zip(edge.values, results, strict=True):
            for user, index in list(old.uses()):
                if self._reads_from(user, edge):
                    user.replace_input_with(index, new)
            if edge.target.kind == "U" and old.is_graph_output() and self.trains:
                name, old.name = old.name, f"{old.name}::elsewhere"
                new.name = name
                for k, value in enumerate(self.graph.outputs):
                    if value is old:
                        self.graph.outputs[k] = new
        return self.graph[-1]

    def _reads_from(self, user: ir.Node, edge: Edge) -> bool:
        """Whether a reader of a value, or the node whose subgraph it is part of, gets it by ``edge``."""
        node = user
        if node not in self.tasks:
            node = next(
                (n for n in self.graph for body in bodies(n) if n in self.tasks and user in set(body.all_nodes())), user
            )
        task = self.tasks.get(node)
        if task is None:
            return False
        if edge.target.kind in MICRO:
            return task.kind in MICRO and task.stage == edge.target.stage
        if edge.target.kind == "P":
            return self.rank_of(node) == edge.receiver
        return task.kind == "U" and self.rank_of(node) in (None, edge.receiver)

    def _drop_unused(self, order: Sequence[ir.Node]) -> None:
        """Remove inputs, initializers and outputs of the graph that this rank has nothing to do with."""
        graph = self.graph
        used = {v for node in order for v in reads(node)}
        for name, value in list(graph.initializers.items()):
            if value not in used:
                del graph.initializers[name]
        for value in [v for v in graph.inputs if v not in used]:
            graph.inputs.remove(value)
        made = {v for node in order for v in node.outputs}
        for value in [v for v in graph.outputs if v not in made and not v.is_initializer() and not v.is_graph_input()]:
            graph.outputs.remove(value)
