"""Binds the collectives of a plan: each starts in one step and is waited for in a later one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from graphc.device import Array, Choice, HostSync, Run, in_order
from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.errors import ModelError
from graphc.ir.declare import operand
from graphc.ir.facts import required
from graphc.ir.names import STEP
from graphc.ir.updates import state_of
from graphc.plan.steps import PlanStep, Transfer
from graphc.runtime.buffers import BufferMap
from graphc.runtime.sparse_allreduce import SparseSum


class Transfers:
    """Binds the start and the wait steps of a plan.

    Args:
        shown: the name of a collective in errors and flight logs, for its tag.
    """

    def __init__(self, places: BufferMap, groups: Groups | None, shown: Callable[[str], str] = str) -> None:
        self._places, self._groups, self._shown = places, groups, shown
        self._handles: dict[str, Any] = {}
        self._prepared: dict[str, Any] = {}
        self._sparse: dict[str, SparseSum] = {}
        self._done = 0
        self._ahead: set[str] = set()  # tags of collectives that only queue, and whose steps the host knows in advance
        self._picks: dict[tuple[float, ...], Callable[[], int]] = {}

    def bind(self, step: PlanStep, index: int) -> Run:
        """``step`` is step ``index`` of the plan."""
        transfer, memory = step.collective, self._places.memory
        if self._groups is None:
            raise ModelError(f"the plan has the collective {transfer.tag!r}, but there is no communicator")
        start, nbytes = transfer.offset, transfer.nbytes
        flat = self._places.buffers[transfer.buffer][start : start + nbytes].view(transfer.dtype)
        if transfer.sparse:
            return self._bind_sparse_wait(transfer) if step.kind == "wait" else self._bind_sparse(step, index, flat)
        part = flat[slice(*transfer.parts[transfer.place])] if transfer.parts else flat[:0]
        if step.kind == "wait":
            sink = self._places.buffers[transfer.sink].view(transfer.dtype) if transfer.sink else None
            after = [memory.bind_copy(sink, part)] if sink is not None else []
            if transfer.kind == "reduce" and transfer.place != transfer.root:
                after.append(memory.bind_fill(flat, 0))
            return self._bind_wait(transfer, index, after)
        before = [memory.bind_fill(flat[slice(*gap)], 0) for gap in transfer.gaps]
        if transfer.source:
            before.append(memory.bind_copy(part, self._places.buffers[transfer.source].view(transfer.dtype)))
        return self._bind_start(step, index, flat, before)

    def _comm(self, transfer: Transfer) -> Communicator:
        """The communicator that carries ``transfer``."""
        groups, channel = required(self._groups), transfer.channel
        return groups.of(transfer.group) if channel is None else groups.channel(*channel)

    def _bind_wait(self, transfer: Transfer, index: int, after: list[Run]) -> Run:
        handles, comm, tag, prepared = self._handles, self._comm(transfer), transfer.tag, self._prepared[transfer.tag]
        if tag in self._ahead:
            return self._queued(transfer, index, after, [functools.partial(comm.wait, prepared), *after])

        def wait() -> None:
            handle = handles.pop(tag, None)
            if handle is not None:
                comm.wait(handle)
            for run in after:
                run()

        return HostSync(wait)

    def _bind_start(self, step: PlanStep, index: int, flat: Array, before: list[Run]) -> Run:
        transfer, handles, comm = step.collective, self._handles, self._comm(step.collective)
        tag, overlap = transfer.tag, self._overlaps(step, index)
        if transfer.kind == "allreduce":
            lengths = transfer.lengths if transfer.reduce == "adasum" else None
            handle = comm.prepare(flat, transfer.reduce, self._shown(tag), lengths=lengths, overlap=overlap)
        else:
            reduce, kind = transfer.reduce or "sum", transfer.kind
            shown, root = self._shown(tag), transfer.root
            handle = comm.prepare(flat, reduce, shown, kind=kind, parts=transfer.parts, root=root, overlap=overlap)
        self._prepared[tag] = handle
        if handle.queued and self._known_ahead(transfer, index):
            self._ahead.add(tag)
            return self._queued(transfer, index, before, [*before, functools.partial(comm.begin, handle)])
        skipped = self._skips(transfer, index)

        def start() -> None:
            for run in before:
                run()
            if not skipped():
                handles[tag] = handle
                comm.begin(handle)

        return HostSync(start)

    def _queued(self, transfer: Transfer, index: int, without: list[Run], whole: list[Run]) -> Run:
        """Choose ``whole``, which only queues, or ``without`` in steps that leave the collective out."""
        if not _is_conditional(transfer):
            return in_order(whole)
        key = (transfer.every, transfer.since, transfer.first, transfer.last)
        if key not in self._picks:  # shared by all collectives that run in the same steps, so that they form one choice
            skipped = self._skips(transfer, index)
            self._picks[key] = lambda: int(not skipped())
        return Choice([in_order(without), in_order(whole)], self._picks[key])

    def _overlaps(self, step: PlanStep, index: int) -> bool:
        """Whether any step between the start of a collective, which is step ``index``, and its wait computes, or waits for what
        another communicator carries: the other ranks may be there only when this collective has run.
        """
        own = step.collective
        rest = self._places.plan.steps[index + 1 :]
        end = next((k for k, s in enumerate(rest) if s.kind == "wait" and s.tag == step.tag), len(rest))
        return any(s.transfer is None or (s.transfer.group, s.transfer.channel) != (own.group, own.channel) for s in rest[:end])

    def _bind_sparse(self, step: PlanStep, index: int, flat: Array) -> Run:
        transfer, handles = step.collective, self._handles
        tag = transfer.tag
        exchange = SparseSum(flat, transfer.nonzero, transfer.place, transfer.size, self._places.memory)
        handle = exchange.prepare(self._comm(transfer), tag, overlap=self._overlaps(step, index))
        self._sparse[tag] = exchange
        skipped = self._skips(transfer, index)

        def start() -> None:
            if not skipped():
                handles[tag] = handle
                exchange.start()

        return HostSync(start)

    def _bind_sparse_wait(self, transfer: Transfer) -> Run:
        handles, exchange, tag = self._handles, self._sparse[transfer.tag], transfer.tag

        def wait() -> None:
            if handles.pop(tag, None) is not None:
                exchange.finish()

        return HostSync(wait)

    # What does not run in every step ----------------------------------------------------------------------------------

    def bind_count(self) -> Run | None:
        """A closure that records, at the beginning of a step on a device, how many steps are done; None where it is not
        needed.
        """
        conditional = any(s.transfer is not None and _is_conditional(s.transfer) for s in self._places.plan.steps)
        if not conditional or self._places.memory.on_host:
            return None
        scalars = self._places.state.scalars

        def note() -> None:
            self._done = scalars.read(STEP)

        return HostSync(note)

    def _skips(self, transfer: Transfer, index: int) -> Callable[[], bool]:
        """Whether the current training step leaves out the collective, which is step ``index`` of the plan."""
        if not _is_conditional(transfer):
            return lambda: False
        state = self._places.state
        if STEP not in state.arrays:
            raise ModelError(f"{transfer} runs in some steps only, but the graph does not count steps in {STEP!r}")
        every, since, first, last = transfer.every, transfer.since, transfer.first, transfer.last or math.inf
        number = self._number(transfer, index)

        def skipped() -> bool:
            now = number()
            return not first <= now <= last or (now > since and now % every != 0)

        return skipped

    def _number(self, transfer: Transfer, index: int) -> Callable[[], int]:
        """The number of the current step, 1 for the first."""
        places = self._places
        done, memory = places.state.arrays[STEP], places.memory
        if memory.on_host:
            counted = self._counted(index)
            return lambda: int(done) + (not counted)
        if not self._known_ahead(transfer, index):
            return lambda: int(memory.fetch(done))
        return lambda: self._done + 1

    def _known_ahead(self, transfer: Transfer, index: int) -> bool:
        """Whether the host knows, before a step on a device, if the step runs the collective (step ``index`` of the plan).

        A skipped step is not counted, and at that time only the device knows that it was skipped.
        """
        plan = self._places.plan
        flags = (operand(group.nodes[0], "skip") for group in plan.groups)
        skips = any(flag is not None and flag is not plan.stop for flag in flags)
        return not (_is_conditional(transfer) and skips and self._counted(index))

    def _counted(self, index: int) -> bool:
        """Whether the graph counts the current step before step ``index`` of the plan."""
        return any(s.group is not None and state_of(s.group.nodes[0]).name == STEP for s in self._places.plan.steps[:index])


def _is_conditional(transfer: Transfer) -> bool:
    return transfer.every > 1 or transfer.first > 1 or transfer.last > 0
