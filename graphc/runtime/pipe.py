"""Runs a rank's stages of a pipeline by a schedule.

    post Recv 1F0 │ wait, unpack │ forward of micro-batch 0 │ pack, Send │ post … │ backward of micro-batch 0 │ … │ updates

A plan of a pipeline is bound once for every micro-batch that may be in flight (a **slot**): the slots of a stage differ in the
stash of activations and in the feeds, and share everything else, since the tasks of a rank run one after the other. A transfer
goes through a mailbox, so a receive is under way before its task begins, and a slot is free when its task ends.

Each pair of ranks has a channel of its own for each direction. A channel carries its transfers in the order in which the
sender's row of the schedule makes them, and the receiver posts them in that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, HostSync, Run
from graphc.distributed.communicator import Communicator, Handle
from graphc.distributed.groups import Groups
from graphc.ir.facts import dtype_of, shape_of
from graphc.ir.index_operands import index_ranges
from graphc.ir.names import kept_outputs
from graphc.pipe.clock import assign_slots
from graphc.pipe.split import Edge
from graphc.pipe.tables import Action, Table
from graphc.pipe.tasks import Task
from graphc.plan.buffers import STASH
from graphc.plan.partition import Plan
from graphc.plan.pipe_events import micro_tag, sends_of
from graphc.plan.steps import PlanStep
from graphc.runtime.accumulators import MicroBatchCursor
from graphc.runtime.bind import StepBinder
from graphc.runtime.buffers import BufferMap
from graphc.runtime.collectives import Transfers
from graphc.runtime.input_staging import Feeds
from graphc.runtime.nonfinite import Check
from graphc.runtime.state import State
from graphc.runtime.updates import Updates, owns_nothing

Wrap = Callable[[str, str, Run], Run]


@dataclass(frozen=True, slots=True)
class PipeLinks:
    """How a rank of a pipeline reaches the others.

    Attributes:
        rank: place on the pipe axis.
        groups: the communicators of the mesh.
    """

    rank: int
    groups: Groups

    def channel(self, sender: int, receiver: int) -> Communicator:
        """The channel between two places of the pipe axis."""
        return self.groups.channel("pipe", sender, receiver)


class _SlotMap(BufferMap):
    """The arrays of a stage for one micro-batch in flight."""

    def __init__(self, base: BufferMap, stage: int, inputs: Sequence[ir.Value]) -> None:
        self.plan, self.state, self.memory = base.plan, base.state, base.memory
        name = f"{STASH}{stage}"
        own = {name: base.memory.zeros(base.plan.buffers[name])} if name in base.plan.buffers else {}
        self.buffers = {**base.buffers, **own}
        self.reusable_buffers = base.reusable_buffers
        specs = {v.name or "": (shape_of(v), np.dtype(dtype_of(v).numpy())) for v in inputs}
        self.feeds = Feeds(base.memory, specs)
        self.inputs = self.feeds.inputs
        self._views = {v: self.inputs[v.name or ""] for v in inputs}
        self._lent = {}
        self.outputs = {}


class StagePlan:
    """A plan of a pipeline's rank, bound to memory.

    Attributes:
        inputs: the arrays of the feeds, by name, of one micro-batch.
        outputs: results of a step.
        index_ranges: graph input → the ranges that its elements must lie in, for those that are read as indices.
    """

    def __init__(
        self,
        plan: Plan,
        state: State,
        backend: Backend,
        links: PipeLinks,
        *,
        check: bool = True,
        wrap: Wrap | None = None,
    ) -> None:
        self.plan, self.backend, self.links = plan, backend, links
        self.places = BufferMap(plan, state, backend.memory)
        self.turn = MicroBatchCursor()
        self._updates = Updates(self.places, backend, None)
        self._transfers = Transfers(self.places, links.groups)
        world = links.groups.world
        self._check = Check(self.places, backend, world, world) if check else None
        self._wrap = wrap
        self._slots: dict[tuple[int, int], _SlotMap] = {}
        self._bound: dict[tuple[Task, int], list[tuple[PlanStep, Run | None]]] = {}
        self._once: dict[Task, list[Run]] = {}
        self.inputs, self.outputs = self.places.inputs, self.places.outputs
        self.index_ranges = index_ranges(plan.model.graph)
        self.steps: dict[Task, list[PlanStep]] = {}
        self._index = {id(step): k for k, step in enumerate(plan.steps)}
        for step in plan.steps:
            if step.task is not None:
                self.steps.setdefault(step.task, []).append(step)

    def slot(self, stage: int, number: int) -> _SlotMap:
        """The arrays of slot ``number`` of ``stage``."""
        found = self._slots.get((stage, number))
        if found is None:
            read = {
                v
                for task, steps in self.steps.items()
                if task.stage == stage and task.kind in "FBW"
                for s in steps
                for v in s.inputs
            }
            sources = {self.plan.views.get(v, v) for v in read}
            inputs = [v for v in self.plan.model.graph.inputs if v in sources]
            found = self._slots[stage, number] = _SlotMap(self.places, stage, inputs)
        return found

    def runs(self, task: Task, number: int, micro: int) -> list[Run]:
        """The closures of a task for micro-batch ``micro`` in slot ``number``."""
        places = self.slot(task.stage, number)
        found = self._bound.get((task, number))
        if found is None:
            binder = StepBinder(places, self.backend, self._updates, self.turn, None)
            found = self._bound[task, number] = [
                (step, self._wrapped(step, binder.bind(step)) if step.transfer is None else None)
                for step in self.steps.get(task, ())
                if step.kind not in ("send", "recv")
            ]
        transfers = Transfers(places, self.links.groups, functools.partial(micro_tag, task, micro))
        runs = [run if step.transfer is None else self._wrapped(step, self._transfer(transfers, step)) for step, run in found]
        return [run for run in runs if run is not None]

    def _transfer(self, transfers: Transfers, step: PlanStep) -> Run:
        run = transfers.bind(step, self._index[id(step)])
        return run.run if isinstance(run, HostSync) else run

    def once(self, task: Task, move: Callable[[PlanStep], Run]) -> list[Run]:
        """The closures of what runs once a step; ``move`` binds its transfers."""
        binder = StepBinder(self.places, self.backend, self._updates, self.turn, self._check)
        found: list[Run] = []
        for step in self.steps.get(task, ()):
            if step.group is not None and owns_nothing(step.group):
                continue
            if step.kind in ("send", "recv"):
                run: Run | None = move(step)
            elif step.transfer is not None:
                run = self._transfer(self._transfers, step)
            else:
                run = binder.bind(step)
            if isinstance(run, HostSync):
                run = run.run
            wrapped = self._wrapped(step, run)
            found += [wrapped] if wrapped is not None else []
        return found

    def _wrapped(self, step: PlanStep, run: Run | None) -> Run | None:
        return self._wrap(step.kind, f"{step.task} {step.name}", run) if self._wrap is not None and run is not None else run

    def kept(self, task: Task) -> list[str]:
        """The outputs to keep that a task of every micro-batch makes."""
        names = kept_outputs(self.plan.model) if task.kind == "F" else []
        made = {v.name for step in self.steps.get(task, ()) for node in step.nodes for v in node.outputs}
        return [name for name in names if name in made]

    def values(self, edge: Edge, *, sends: bool) -> list[ir.Value]:
        """The values of a transfer in this rank's graph."""
        kind = "send" if sends else "recv"
        name = f"{kind} {edge.tag}"
        step = next(s for s in self.plan.steps if s.kind == kind and s.name == name)
        return step.inputs if sends else step.outputs


@dataclass(slots=True)
class _Box:
    """A mailbox: memory for the values of one transfer."""

    flat: Array
    parts: list[Array] = field(default_factory=list)


def _box(plan: StagePlan, values: Sequence[ir.Value]) -> _Box:
    arrays = [(shape_of(v), np.dtype(dtype_of(v).numpy())) for v in values]
    offsets, total = [], 0
    for shape, dtype in arrays:
        offsets.append(total)
        total += -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // 16) * 16
    box = _Box(plan.backend.memory.zeros(total))
    for offset, (shape, dtype) in zip(offsets, arrays, strict=True):
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        box.parts.append(box.flat[offset : offset + nbytes].view(dtype).reshape(shape))
    return box


class PipeStep:
    """One training step of a rank: its row of the schedule as a list of closures, settled before it runs.

    Args:
        plans: the plan of each micro-batch; they differ where the last batch of an epoch is smaller.
        table: the schedule of all ranks.
        prepare: called with the number of a micro-batch before each of its tasks; sets scalars.
        keep: called with the number of a micro-batch, the names and the plan behind a forward pass that makes outputs to keep.
        placed: whether the task of a step computes everything, from feeds on.
    """

    def __init__(
        self,
        plans: Sequence[StagePlan],
        table: Table,
        prepare: Callable[[int], None],
        keep: Callable[[int, Sequence[str], StagePlan], None],
        *,
        placed: bool = False,
    ) -> None:
        self._placed, self._keep = placed, keep
        self._plans, self._table = plans, table
        first = plans[0]
        self._links, self._rank = first.links, first.links.rank
        self._row = list(table[self._rank])
        self._stages = sorted({a.stage for a in self._row if a.kind in "FBW"})
        self._slots = {stage: assign_slots(self._row, stage) for stage in self._stages}
        self._edges = first.plan.edges
        self._feeds: Sequence[Mapping[str, Array]] = ()
        self._sent: dict[int, tuple[Communicator, Handle]] = {}
        self._boxes: dict[tuple[str, int], _Box] = {}
        self._free: dict[tuple[str, int], list[_Box]] = {}
        self._posted: dict[tuple[str, int], tuple[_Box, Handle]] = {}
        self._local: dict[tuple[str, int], _Box] = {}
        others = [sender for sender in range(len(table)) if sender != self._rank]
        self._order = {sender: list(sends_of(table, self._edges, sender, self._rank)) for sender in others}
        self._next = dict.fromkeys(self._order, 0)
        runs: list[Run] = []
        begin: list[tuple[int, Run]] = []
        rest = first.once(Task("P"), functools.partial(self._bind_once, first, begin))
        runs += [*_in_edge_order(begin), *rest]
        for place, action in enumerate(self._row):
            runs += self._bind_action(place, action, prepare)
        runs.append(self._finish_sends)
        self._runs = runs

    def run(self, feeds: Sequence[Mapping[str, Array]]) -> None:
        """Run the step on one set of feeds a micro-batch; results are in the outputs of the last plan.

        Raises:
            NonFiniteStepError: a NaN or an infinity on some rank; no update has changed anything.
        """
        self._feeds = feeds
        for run in self._runs:
            run()

    # Order of transfers: as in graphc.plan.pipe_events, which the ranks compare before the first step ---------------------

    def _needed(self, action: Action) -> list[Edge]:
        """The transfers that an action receives."""
        task = Task(action.kind, action.stage)
        return [e for e in self._edges if e.target == task and e.receiver == self._rank] if action.kind != "U" else []

    def _bind_action(self, place: int, action: Action, prepare: Callable[[int], None]) -> Iterator[Run]:
        if action.kind == "U":
            last = self._plans[-1]
            if self._placed:
                yield functools.partial(self._begin, last, 0, prepare)
                yield functools.partial(self._bring, last.places.feeds, 0)
            begin: list[tuple[int, Run]] = []
            rest = last.once(Task("U"), functools.partial(self._bind_once, last, begin))
            yield from (*_in_edge_order(begin), *rest)
            return
        task, micro = Task(action.kind, action.stage), action.micro
        plan, slot = self._plans[micro], self._slots[action.stage][micro]
        yield from self._post(action)
        if place + 1 < len(self._row):
            yield from self._post(self._row[place + 1])
        places = plan.slot(action.stage, slot)
        yield functools.partial(self._begin, plan, micro, prepare)
        if action.kind == "F":
            yield functools.partial(self._bring, places.feeds, micro)
        for edge in self._needed(action):
            yield from self._receive(plan, edge, micro, places)
        yield from plan.runs(task, slot, micro)
        kept = plan.kept(task)
        if kept:
            yield functools.partial(self._keep, micro, kept, plan)
        for edge in self._edges:
            if edge.source == task and edge.sender == self._rank:
                yield from self._send(plan, edge, micro, slot, places)

    def _begin(self, plan: StagePlan, micro: int, prepare: Callable[[int], None]) -> None:
        plan.turn.index, plan.turn.last = micro, micro == len(self._plans) - 1
        prepare(micro)

    def _bring(self, feeds: Feeds, micro: int) -> None:
        feeds.bring(self._feeds[micro])

    # Receiving --------------------------------------------------------------------------------------------------------

    def _post(self, action: Action) -> Iterator[Run]:
        """Begin the receives of an action, and those that come before them in their channels."""
        for edge in self._needed(action):
            if edge.sender == self._rank or (edge.tag, action.micro) in self._posted:
                continue
            order = self._order[edge.sender]
            while (edge.tag, action.micro) not in self._posted:
                other, micro = order[self._next[edge.sender]]
                self._next[edge.sender] += 1
                plan = self._plans[micro]
                free = self._free.setdefault((other.tag, id(plan)), [])
                box = free.pop() if free else _box(plan, plan.values(other, sends=False))
                channel = self._links.channel(other.sender, self._rank)
                handle = channel.prepare(box.flat, tag=other.shown(micro), kind="recv")
                self._posted[other.tag, micro] = box, handle
                yield functools.partial(channel.begin, handle)

    def _receive(self, plan: StagePlan, edge: Edge, micro: int, places: BufferMap) -> Iterator[Run]:
        if edge.sender == self._rank:
            box = self._local_box(plan, edge, micro, sends=False)
        else:
            box, handle = self._posted[edge.tag, micro]
            yield functools.partial(self._links.channel(edge.sender, self._rank).wait, handle)
        for part, value in zip(box.parts, plan.values(edge, sends=False), strict=True):
            yield plan.backend.memory.bind_copy(places.array(value), part)
        if edge.sender != self._rank:
            self._free[edge.tag, id(plan)].append(box)

    # Sending ----------------------------------------------------------------------------------------------------------

    def _send(self, plan: StagePlan, edge: Edge, micro: int, slot: int, places: BufferMap) -> Iterator[Run]:
        values = plan.values(edge, sends=True)
        if edge.receiver == self._rank:
            box = self._local_box(plan, edge, micro, sends=True)
        else:
            key = f"{edge.tag} {id(plan)}", slot
            box = self._boxes.setdefault(key, _box(plan, values))
            yield functools.partial(self._wait_sent, id(box))
        for part, value in zip(box.parts, values, strict=True):
            yield plan.backend.memory.bind_copy(part, places.array(value))
        if edge.receiver != self._rank:
            channel = self._links.channel(self._rank, edge.receiver)
            handle = channel.prepare(box.flat, tag=edge.shown(micro), kind="send")
            yield functools.partial(self._begin_send, channel, handle, id(box))

    def _begin_send(self, channel: Communicator, handle: Handle, box: int) -> None:
        channel.begin(handle)
        self._sent[box] = channel, handle

    def _wait_sent(self, box: int) -> None:
        sent = self._sent.pop(box, None)
        if sent is not None:
            channel, handle = sent
            channel.wait(handle)

    def _finish_sends(self) -> None:
        for box in list(self._sent):
            self._wait_sent(box)

    def _local_box(self, plan: StagePlan, edge: Edge, micro: int, *, sends: bool) -> _Box:
        """The mailbox between two stages of this rank."""
        found = self._local.get((edge.tag, micro))
        if found is None:
            found = self._local[edge.tag, micro] = _box(plan, plan.values(edge, sends=sends))
        return found

    # What runs once a step --------------------------------------------------------------------------------------------

    def _bind_once(self, plan: StagePlan, begin: list[tuple[int, Run]], step: PlanStep) -> Run:
        """Bind a transfer that runs once a step; receives begin with the task, by closures appended to ``begin``.

        They are under way while the rank computes what does not need them.
        """
        edge = next(e for e in self._edges if f"{step.kind} {e.tag}" == step.name)
        sends = step.kind == "send"
        values = step.inputs if sends else step.outputs
        box = _box(plan, values)
        arrays = [plan.places.array(v) for v in values]
        channel = self._links.channel(edge.sender, edge.receiver)
        handle = channel.prepare(box.flat, tag=edge.tag, kind="send" if sends else "recv")
        copy = plan.backend.memory.bind_copy
        if sends:
            pack = [copy(part, array) for part, array in zip(box.parts, arrays, strict=True)]

            def send() -> None:
                self._wait_sent(id(box))
                for run in pack:
                    run()
                self._begin_send(channel, handle, id(box))

            return send
        unpack = [copy(array, part) for part, array in zip(box.parts, arrays, strict=True)]

        begin.append((self._edges.index(edge), functools.partial(channel.begin, handle)))

        def receive() -> None:
            channel.wait(handle)
            for run in unpack:
                run()

        return receive


def _in_edge_order(begin: Sequence[tuple[int, Run]]) -> list[Run]:
    """The begins of receives in the order of the edges, in which a channel's sender sends."""
    return [run for _, run in sorted(begin, key=lambda pair: pair[0])]
