"""Runs a rank's stages of a pipeline by a schedule.

    post Recv 1F0 │ wait, unpack │ forward of micro-batch 0 │ pack, Send │ post … │ backward of micro-batch 0 │ … │ updates

A transfer goes through a mailbox, so a receive is under way before its task begins, and the slot of a micro-batch
(:mod:`graphc.runtime.stage_plan`) is free when its task ends.

Each pair of ranks has a channel of its own for each direction. A channel carries its transfers in the order in which the
sender's row of the schedule makes them, and the receiver posts them in that order.

On a device all this only queues: tasks on the compute stream, each channel over NCCL on a stream of its own. The first steps
send through the host's memory (:class:`_Move`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.device import Array, Memory, Run
from graphc.distributed.communicator import Communicator, Kind
from graphc.errors import DeviceError, counted
from graphc.ir.facts import dtype_of, shape_of
from graphc.pipe.clock import assign_slots
from graphc.pipe.split import Edge
from graphc.pipe.tables import Action, Table
from graphc.pipe.tasks import Task
from graphc.plan.pipe_events import sends_of
from graphc.plan.steps import PlanStep
from graphc.runtime.buffers import BufferMap
from graphc.runtime.input_staging import Feeds
from graphc.runtime.stage_plan import StagePlan

WARM = 2
"""Steps on a device that send through the host's memory: in the first one kernels are loaded and measured, in the second one
tasks are recorded. Either may wait for everything on the device, which must not wait for another rank then.
"""


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


class _Move:
    """A transfer over a channel.

    Over NCCL it has two forms: in the first steps (:data:`WARM`) it goes through the host's memory, later the device does it by
    itself.

    Args:
        warming: whether such a step runs.
    """

    def __init__(self, channel: Communicator, box: _Box, tag: str, kind: Kind, warming: Callable[[], bool]) -> None:
        self._channel, self._warming = channel, warming
        self._handle = self._current = channel.prepare(box.flat, tag=tag, kind=kind)
        self._staged = self._handle
        if channel.transport == "nccl":
            self._staged = channel.prepare(box.flat, tag=tag, kind=kind, staged=True)

    def begin(self) -> None:
        self._current = self._staged if self._warming() else self._handle
        self._channel.begin(self._current)

    def wait(self) -> None:
        self._channel.wait(self._current)


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
        self._feeds: Sequence[Mapping[str, Array]] = ()
        self._sent: dict[int, _Move] = {}
        self._boxes: dict[tuple[str, int], _Box] = {}
        self._free: dict[tuple[str, int], list[_Box]] = {}
        self._posted: dict[tuple[str, int], tuple[_Box, _Move]] = {}
        self._local: dict[tuple[str, int], _Box] = {}
        others = [sender for sender in range(len(table)) if sender != self._rank]
        self._order = {sender: list(sends_of(table, self._edges, sender, self._rank)) for sender in others}
        self._next = dict.fromkeys(self._order, 0)
        self._done = 0
        self._names: list[str] = []  # of what each closure belongs to
        runs: list[Run] = []
        begin: list[tuple[int, Run]] = []
        rest = first.once(Task("P"), functools.partial(self._bind_once, first, begin))
        self._add(runs, "the beginning", [*_in_edge_order(begin), *rest])
        for place, action in enumerate(self._row):
            name = "the updates" if action.kind == "U" else f"{Task(action.kind, action.stage)} micro-batch {action.micro}"
            self._add(runs, name, self._bind_action(place, action, prepare))
        self._add(runs, "the last sends", [self._finish_sends])
        self._runs = runs
        plans[-1].settle()

    def run(self, feeds: Sequence[Mapping[str, Array]]) -> None:
        """Run the step on one set of feeds a micro-batch; results are in the outputs of the last plan.

        Raises:
            NonFiniteStepError: a NaN or an infinity on some rank; no update has changed anything.
            DeviceError: of the device; ``during`` says of which stages, and what was queued.
        """
        self._feeds = feeds
        runs = iter(self._runs)
        try:
            self._plans[-1].note_scale()
            for run in runs:
                run()
            self._plans[-1].finish()
        except (DeviceError, RuntimeError) as error:
            found = _of_device(error, self._plans[-1].backend.memory)
            if found is None:
                raise
            found.during = self._during(len(self._runs) - operator.length_hint(runs))
            raise found from (error if found is not error else error.__cause__)
        self._done += 1

    def _add(self, runs: list[Run], name: str, own: Iterable[Run]) -> None:
        runs += own
        self._names += [name] * (len(runs) - len(self._names))

    def _warming(self) -> bool:
        return self._done < WARM

    def _during(self, begun: int) -> str:
        """What the rank did when ``begun`` closures had begun, the last of which may have failed."""
        own = f"of {counted(len(self._stages), 'stage')} {', '.join(map(str, self._stages))}" if self._stages else "of no stage"
        if begun < len(self._runs):
            return f"while it queued {self._names[begun - 1]} {own}"
        return f"while it waited for {self._names[0]} … {self._names[-1]} {own}"

    def _edges(self, micro: int) -> Sequence[Edge]:
        """The transfers of a micro-batch: what crosses a cut may depend on its size, as where one sample needs no index."""
        return self._plans[micro].plan.edges

    # Order of transfers: as in graphc.plan.pipe_events, which the ranks compare before the first step ---------------------

    def _needed(self, action: Action) -> list[Edge]:
        """The transfers that an action receives."""
        task = Task(action.kind, action.stage)
        if action.kind == "U":
            return []
        return [e for e in self._edges(action.micro) if e.target == task and e.receiver == self._rank]

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
        for edge in self._edges(micro):
            if edge.source == task and edge.sender == self._rank:
                yield from self._send(plan, edge, micro, slot, places)

    def _begin(self, plan: StagePlan, micro: int, prepare: Callable[[int], None]) -> None:
        plan.turn.index, plan.turn.last = micro, micro == len(self._plans) - 1
        prepare(micro)

    def _bring(self, feeds: Feeds, micro: int) -> None:
        if feeds.inputs:
            feeds.bring({name: self._feeds[micro][name] for name in feeds.inputs})

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
                move = self._move(other, box, other.shown(micro), "recv")
                self._posted[other.tag, micro] = box, move
                yield move.begin

    def _receive(self, plan: StagePlan, edge: Edge, micro: int, places: BufferMap) -> Iterator[Run]:
        if edge.sender == self._rank:
            box = self._local_box(plan, edge, micro, sends=False)
        else:
            box, move = self._posted[edge.tag, micro]
            yield move.wait
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
            yield functools.partial(self._begin_send, self._move(edge, box, edge.shown(micro), "send"), id(box))

    def _move(self, edge: Edge, box: _Box, tag: str, kind: Kind) -> _Move:
        return _Move(self._links.channel(edge.sender, edge.receiver), box, tag, kind, self._warming)

    def _begin_send(self, move: _Move, box: int) -> None:
        move.begin()
        self._sent[box] = move

    def _wait_sent(self, box: int) -> None:
        sent = self._sent.pop(box, None)
        if sent is not None:
            sent.wait()

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
        place, edge = next((k, e) for k, e in enumerate(plan.plan.edges) if f"{step.kind} {e.tag}" == step.name)
        sends = step.kind == "send"
        values = step.inputs if sends else step.outputs
        box = _box(plan, values)
        arrays = [plan.places.array(v) for v in values]
        move = self._move(edge, box, edge.tag, "send" if sends else "recv")
        copy = plan.backend.memory.bind_copy
        if sends:
            pack = [copy(part, array) for part, array in zip(box.parts, arrays, strict=True)]

            def send() -> None:
                self._wait_sent(id(box))
                for run in pack:
                    run()
                self._begin_send(move, id(box))

            return send
        unpack = [copy(array, part) for part, array in zip(box.parts, arrays, strict=True)]

        begin.append((place, move.begin))

        def receive() -> None:
            move.wait()
            for run in unpack:
                run()

        return receive


def _in_edge_order(begin: Sequence[tuple[int, Run]]) -> list[Run]:
    """The begins of receives in the order of the edges, in which a channel's sender sends."""
    return [run for _, run in sorted(begin, key=lambda pair: pair[0])]


def _of_device(error: DeviceError | RuntimeError, memory: Memory) -> DeviceError | None:
    """``error`` as a :class:`DeviceError`; None: it does not come from the device."""
    if isinstance(error, DeviceError):
        return error
    try:
        memory.synchronize()  # raises nothing on the host, and the device's own error there
    except DeviceError as found:
        return found
    return None
