"""Collectives on device arrays through pinned host memory, over any transport.

    device array ── copy ──► pinned mirror ── collective of the transport ──► pinned mirror ── copy ──► device array
                    begin                                                                      wait

``begin`` waits for the work queued on the compute stream, because the transport reads the mirror on the host; work queued
afterwards overlaps the collective. Only the elements that a rank sends or receives are copied. Arrays in host memory go
straight to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import numpy as np

from graphc.device import Memory, Run
from graphc.distributed.communicator import (
    CollectiveRequest,
    Communicator,
    CommunicatorOptions,
    Handle,
    check_collective,
    check_layout,
)
from graphc.distributed.reductions import Array, Parts
from graphc.distributed.rma_windows import Windows

T = TypeVar("T")
Ranges = list[tuple[int, int]]
"""``(start, stop)`` of consecutive elements."""


class StagedHandle(Handle):
    """A collective on a device array: the one on its mirror, with the copies before and after."""

    __slots__ = ("fetches", "inner", "returns")

    def __init__(self, inner: Handle, fetches: list[Run], returns: list[Run]) -> None:
        super().__init__(inner.action, inner.kind, inner.op, inner.tag, inner.nbytes, overlap=inner.overlap)
        self.inner = inner
        self.fetches = fetches
        self.returns = returns


class StagedCommunicator(Communicator):
    """Makes a transport for host memory accept device arrays too.

    Results, errors, deadlines, flight logs and trace events are those of the transport.

    Args:
        inner: the transport.
        memory: that of the device.
    """

    def __init__(self, inner: Communicator, memory: Memory) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.ranks, self.group = inner.ranks, inner.group
        self._memory = memory

    @property
    def transport(self) -> str:
        return self.inner.transport

    @property
    def observer(self) -> Callable[[Handle], None] | None:
        return self.inner.observer

    @observer.setter
    def observer(self, observer: Callable[[Handle], None] | None) -> None:
        self.inner.observer = observer

    @property
    def step(self) -> int:
        return self.inner.step

    @step.setter
    def step(self, step: int) -> None:
        self.inner.step = step

    @property
    def deadline(self) -> float:
        return self.inner.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.inner.deadline = seconds

    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        prepare = self.inner.prepare
        if lies_on_host(array):
            return prepare(array, op, tag, **options)
        check_layout(array)
        mirror = self._memory.pinned(array.nbytes).view(array.dtype)
        inner = prepare(mirror, op, tag, **options)
        given, received = transfers(check_collective(mirror, self.size, op, tag, options), self.rank)
        copy = self._memory.bind_copy
        fetches = [copy(mirror[start:stop], array[start:stop]) for start, stop in given]
        returns = [copy(array[start:stop], mirror[start:stop]) for start, stop in received]
        return StagedHandle(inner, fetches, returns)

    def begin(self, handle: Handle) -> None:
        if not isinstance(handle, StagedHandle):
            self.inner.begin(handle)
            return
        handle.inner.check_idle()  # it may still be using the mirror
        for copy in handle.fetches:
            copy()
        self._memory.synchronize()  # the last result has been copied out of the mirror, too
        self.inner.begin(handle.inner)

    def wait(self, handle: Handle) -> None:
        if not isinstance(handle, StagedHandle):
            self.inner.wait(handle)
            return
        self.inner.wait(handle.inner)
        for copy in handle.returns:
            copy()

    def check(self) -> None:
        self.inner.check()

    def subgroup(self, members: Sequence[int], group: str, index: int) -> Communicator:
        inner = self.inner.subgroup(members, group, index)
        return inner if inner.size == 1 else StagedCommunicator(inner, self._memory)

    def under_way(self) -> str:
        """The collective that runs on the device; empty where the host runs them."""
        return ""

    def allgather_object(self, item: T) -> list[T]:
        return self.inner.allgather_object(item)

    def barrier(self) -> None:
        self.inner.barrier()

    def close(self) -> None:
        self.inner.close()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def machine(self) -> str:
        return self.inner.machine()

    def introduce(self, name: str, *, spare: bool) -> None:
        self.inner.introduce(name, spare=spare)

    def gone(self) -> frozenset[int]:
        return self.inner.gone()

    def open_windows(self, nbytes: int) -> Windows:
        return self.inner.open_windows(nbytes)


def lies_on_host(array: Any) -> bool:
    """Whether the host can read ``array``."""
    return isinstance(array, np.ndarray)


def transfers(request: CollectiveRequest, rank: int) -> tuple[Ranges, Ranges]:
    """The ranges of elements that ``rank`` sends in a collective, and those that it receives."""
    parts, whole, mine = request.parts, [(0, request.array.size)], [request.parts[rank]]
    given, received = {
        "allreduce": (whole, whole),
        "reduce_scatter": (list(parts), mine),
        "all_gather": (mine, [part for other, part in enumerate(parts) if other != rank]),
        "broadcast": (whole, []) if rank == request.root else ([], whole),
        "reduce": (whole, mine),
        "all_to_all": (whole, whole),
        "barrier": ([], []),
        "send": (whole, []),
        "recv": ([], whole),
    }[request.kind]
    return _joined(given), _joined(received)


def _joined(ranges: Parts) -> Ranges:
    """Neighbouring ranges as one; empty ones are left out."""
    joined: Ranges = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
