"""Collectives on arrays of a device through host memory, over any transport.

    device array ── copy ──► pinned mirror ── collective of the transport ──► pinned mirror ── copy ──► device array
                    begin                                                                      wait

``begin`` waits for what the compute stream has queued so far, because the transport reads the mirror on the host; what is
queued afterwards runs beside the collective. Only what a rank gives, and what it receives, is copied. Arrays in host memory go
straight to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import numpy as np

from graphc.device import Memory, Run
from graphc.distributed.communicator import (
    Communicator,
    CommunicatorOptions,
    Handle,
    Kind,
    check_collective,
    check_device_layout,
)
from graphc.distributed.reductions import Array, Parts
from graphc.distributed.rma_windows import Windows

T = TypeVar("T")


class StagedHandle(Handle):
    """A collective on a device array: that on its mirror, and the copies before and after."""

    __slots__ = ("fetches", "inner", "returns")

    def __init__(self, inner: Handle, fetches: list[Run], returns: list[Run]) -> None:
        super().__init__(inner.action, inner.kind, inner.op, inner.tag, inner.nbytes, overlap=inner.overlap)
        self.inner = inner
        self.fetches = fetches
        self.returns = returns


class StagedCommunicator:
    """A transport that works on host memory, for arrays of a device too.

    Results, errors, deadlines, flight logs and trace events are those of the transport.

    Args:
        inner: the transport.
        memory: of the device.
    """

    def __init__(self, inner: Communicator, memory: Memory) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
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

    def allreduce(self, array: Array, op: str = "sum", tag: str = "", *, lengths: Sequence[int] | None = None) -> None:
        if lies_on_host(array):
            self.inner.allreduce(array, op, tag, lengths=lengths)
        else:
            self.wait(self.start(array, op, tag, lengths=lengths, overlap=False))

    def start(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        handle = self.prepare(array, op, tag, **options)
        self.begin(handle)
        return handle

    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        prepare = self.inner.prepare
        if lies_on_host(array):
            return prepare(array, op, tag, **options)
        check_device_layout(array)
        mirror = self._memory.pinned(array.nbytes).view(array.dtype)
        inner, asked = prepare(mirror, op, tag, **options), check_collective(array, self.size, op, options)
        given, received = moved(asked.kind, asked.parts, asked.root, self.rank, array.size)
        copy = self._memory.bind_copy
        fetches = [copy(mirror[start:stop], array[start:stop]) for start, stop in given]
        returns = [copy(array[start:stop], mirror[start:stop]) for start, stop in received]
        return StagedHandle(inner, fetches, returns)

    def begin(self, handle: Handle) -> None:
        if not isinstance(handle, StagedHandle):
            self.inner.begin(handle)
            return
        handle.inner.check_idle()  # the mirror may be at work
        for copy in handle.fetches:
            copy()
        self._memory.synchronize()  # what was received last time has left the mirror, too
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

    def under_way(self) -> str:
        """The collective that the device works on, in words; empty where the host does all."""
        return ""

    def broadcast(self, array: Array, root: int = 0) -> None:
        if lies_on_host(array):
            self.inner.broadcast(array, root)
        else:
            self.wait(self.start(array, kind="broadcast", root=root, overlap=False))

    def allgather_object(self, item: T) -> list[T]:
        return self.inner.allgather_object(item)

    def barrier(self) -> None:
        self.inner.barrier()

    def close(self) -> None:
        self.inner.close()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def introduce(self, name: str, *, spare: bool) -> None:
        self.inner.introduce(name, spare=spare)

    def gone(self) -> frozenset[int]:
        return self.inner.gone()

    def open_windows(self, nbytes: int) -> Windows:
        return self.inner.open_windows(nbytes)


def lies_on_host(array: Any) -> bool:
    """Whether the host can read ``array``."""
    return isinstance(array, np.ndarray)


def moved(kind: Kind, parts: Parts, root: int, rank: int, elements: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """``(start, stop)`` ranges of elements that ``rank`` gives to a collective, and those that it receives.

    >>> moved("all_gather", [(0, 4), (4, 8), (8, 10)], 0, rank=1, elements=12)
    ([(4, 8)], [(0, 4), (8, 10)])
    """
    whole, mine = [(0, elements)], [parts[rank]]
    given, received = {
        "allreduce": (whole, whole),
        "reduce_scatter": (list(parts), mine),
        "all_gather": (mine, [part for other, part in enumerate(parts) if other != rank]),
        "broadcast": (whole, []) if rank == root else ([], whole),
    }[kind]
    return _joined(given), _joined(received)


def _joined(ranges: Parts) -> list[tuple[int, int]]:
    """Neighbouring ranges as one; empty ones are left out."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
