"""The collectives and transfers of a whole step of a pipeline's rank, in the order of its row of the schedule.

    row   0F0 0F1 0B0 …
    0F0   allreduce '0F micro-batch 0: tensor/fc'   send '0F→1F micro-batch 0'
    0B0   recv '1B→0B micro-batch 0'                allreduce '0B micro-batch 0: tensor/x::fork'

The proof before the first step (:mod:`graphc.distributed.collective_proof`) plays those of all ranks against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphc.ir.facts import dtype_of, shape_of
from graphc.pipe.clock import assign_slots
from graphc.pipe.split import Edge, Pipe
from graphc.pipe.tables import Action, Table
from graphc.pipe.tasks import Task
from graphc.plan.group_places import CollectiveEvent, collective_events
from graphc.plan.partition import Plan
from graphc.plan.steps import PlanStep


def micro_tag(task: Task, micro: int, tag: str = "") -> str:
    """The name of what a task does for a micro-batch, in errors, flight logs and traces: ``"1F micro-batch 2: tensor/fc"``."""
    return f"{task} micro-batch {micro}: {tag}"


def pipe_events(plan: Plan, pipe: Pipe, table: Table) -> list[CollectiveEvent]:
    """The begins and waits of ``plan``'s rank in a step in which every micro-batch has the plan's shapes."""
    return list(_Row(plan, pipe, table).events())


class _Row:
    """The row of one rank; see :class:`graphc.runtime.pipe.PipeStep`, which runs it."""

    def __init__(self, plan: Plan, pipe: Pipe, table: Table) -> None:
        self.rank, self.table, self.row = pipe.rank, table, table[pipe.rank]
        self.edges = [e for e in plan.edges if e.sender != e.receiver and self.rank in (e.sender, e.receiver)]
        self.steps: dict[Task, list[PlanStep]] = {}
        for step in plan.steps:
            if step.task is not None:
                self.steps.setdefault(step.task, []).append(step)
        stages = {a.stage for a in self.row if a.kind != "U"}
        self.slots = {stage: assign_slots(self.row, stage) for stage in stages}
        self.posted: set[tuple[str, int]] = set()
        self.sent: dict[tuple[str, int], CollectiveEvent] = {}  # by transfer and slot: what its mailbox carries

    def events(self) -> Iterator[CollectiveEvent]:
        yield from self._once(Task("P"))
        for place, action in enumerate(self.row):
            if action.kind == "U":
                yield from self._once(Task("U"))
            else:
                yield from self._micro(place, action)
        for event in self.sent.values():
            yield _wait(event)

    def _micro(self, place: int, action: Action) -> Iterator[CollectiveEvent]:
        task, micro = Task(action.kind, action.stage), action.micro
        slot = self.slots[action.stage][micro]
        for following in self.row[place : place + 2]:
            yield from self._post(following)
        for edge in self._received(action):
            yield _wait(_event(edge, edge.shown(micro)))
        for event in collective_events(self.steps.get(task, ())):
            tag = micro_tag(task, micro, event.tag)
            yield CollectiveEvent(tag, event.begins, event.text, event.group, event.source, event.target)
        for edge in self.edges:
            if edge.source == task and edge.sender == self.rank:
                before = self.sent.get((edge.tag, slot))
                if before is not None:
                    yield _wait(before)
                event = self.sent[edge.tag, slot] = _event(edge, edge.shown(micro))
                yield event

    def _received(self, action: Action) -> list[Edge]:
        task = Task(action.kind, action.stage)
        return [e for e in self.edges if e.target == task and e.receiver == self.rank] if action.kind != "U" else []

    def _post(self, action: Action) -> Iterator[CollectiveEvent]:
        """Begin the receives of an action, and those that come before them in their channels."""
        for edge in self._received(action):
            for other, micro in sends_of(self.table, lambda _: self.edges, edge.sender, self.rank):
                if (edge.tag, action.micro) in self.posted:
                    break
                if (other.tag, micro) not in self.posted:
                    self.posted.add((other.tag, micro))
                    yield _event(other, other.shown(micro))

    def _once(self, task: Task) -> Iterator[CollectiveEvent]:
        own = [e for e in self.edges if e.source == task]
        yield from (_event(e, e.tag) for e in own if e.receiver == self.rank)
        for step in self.steps.get(task, ()):
            if step.kind in ("send", "recv"):
                edge = next((e for e in own if f"{step.kind} {e.tag}" == step.name), None)
                if edge is not None and step.kind == "send":
                    event = self.sent[edge.tag, 0] = _event(edge, edge.tag)
                    yield event
                elif edge is not None:
                    yield _wait(_event(edge, edge.tag))
            else:
                yield from collective_events([step])


def sends_of(table: Table, edges: Callable[[int], Sequence[Edge]], sender: int, receiver: int) -> Iterator[tuple[Edge, int]]:
    """What ``sender`` sends to ``receiver`` in its row, with the micro-batch, in order.

    Args:
        edges: the transfers of a micro-batch.
    """
    for action in table[sender]:
        if action.kind != "U":
            task = Task(action.kind, action.stage)
            for edge in edges(action.micro):
                if edge.source == task and (edge.sender, edge.receiver) == (sender, receiver):
                    yield edge, action.micro


def _event(edge: Edge, tag: str) -> CollectiveEvent:
    text = ",".join(f"{dtype_of(v).name}{list(shape_of(v))}" for v in edge.values)
    return CollectiveEvent(tag, True, text, "pipe", edge.sender, edge.receiver)


def _wait(event: CollectiveEvent) -> CollectiveEvent:
    return CollectiveEvent(event.tag, False, event.text, event.group, event.source, event.target)
