"""The common part of transports that block: checks, the order of collectives, and the thread that runs them."""

from __future__ import annotations

import collections
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar, Unpack

from graphc.distributed.communicator import (
    Asked,
    CommunicatorOptions,
    Handle,
    check_array,
    check_collective,
    check_layout,
    check_root,
    find_deadline,
)
from graphc.distributed.health.flight_recorder import Ring
from graphc.distributed.reductions import Array, Parts
from graphc.distributed.rma_windows import Windows
from graphc.errors import UsageError

T = TypeVar("T")


class QueuedCommunicator(ABC):
    """Common part of the real transports: checks, order, and the thread that runs what ``start`` queued.

    Whoever holds ``_runner`` takes the oldest entry of the queue and runs it. That is the communication thread where there is
    something to do meanwhile; a caller that waits while the runner is free runs the entry itself, which saves two thread
    switches (about 15 µs).

    ``observer``, where set, is called after each collective, on the thread that ran it. ``ring`` is the flight recorder of
    the rank, in which this communicator is the one of that ``number``; ``step`` is what is noted there.
    """

    transport = "null"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.current: Handle | None = None
        self.observer: Callable[[Handle], None] | None = None
        self.ring = Ring()
        self.number = 1
        self.step = -1
        self.deadline = find_deadline()
        self._sequence = 0
        self._queue: collections.deque[Handle] = collections.deque()
        self._runner = threading.Lock()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @abstractmethod
    def _reduce(self, array: Array, op: str, what: str, lengths: Sequence[int] | None) -> None:
        """Reduce in place; blocking."""

    def _bind_reduce(self, array: Array, op: str, what: str, lengths: Sequence[int] | None) -> Callable[[], None]:
        """What reduces in place, for every time that the collective is begun."""
        return lambda: self._reduce(array, op, what, lengths)

    @abstractmethod
    def _reduce_scatter(self, array: Array, op: str, what: str, parts: Parts, lengths: Sequence[int] | None) -> None:
        """Reduce this rank's part in place; blocking."""

    @abstractmethod
    def _all_gather(self, array: Array, what: str, parts: Parts) -> None:
        """Fill in the parts of the other ranks; blocking."""

    @abstractmethod
    def _broadcast(self, array: Array, root: int, what: str) -> None:
        """Broadcast in place; blocking."""

    @abstractmethod
    def _gather(self, item: Any) -> list[Any]:
        """Gather objects; blocking."""

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """See :class:`Communicator`."""

    def introduce(self, name: str, *, spare: bool) -> None:
        """See :class:`Communicator`."""
        return

    def gone(self) -> frozenset[int]:
        """See :class:`Communicator`."""
        return frozenset()

    def open_windows(self, nbytes: int) -> Windows:
        """See :class:`Communicator`."""
        raise UsageError("one rank has nobody to share memory with; parameter servers need at least two")

    def allreduce(self, array: Array, op: str = "sum", tag: str = "", *, lengths: Sequence[int] | None = None) -> None:
        check_array(array, op, lengths)
        what = f"allreduce {tag}"
        self._blocking(Handle(lambda: self._reduce(array, op, what, lengths), "allreduce", op, tag, array.nbytes))

    def start(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        handle = self.prepare(array, op, tag, **options)
        self.begin(handle)
        return handle

    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        asked = check_collective(array, self.size, op, options)
        check_layout(array)
        action = self._action(array, asked, f"{asked.kind} {tag}".rstrip())
        return Handle(action, asked.kind, asked.reduction, tag, array.nbytes, overlap=asked.overlap)

    def begin(self, handle: Handle) -> None:
        if self._closed:
            raise UsageError(f"{handle.what}: the communicator is closed")
        handle.arm()
        self._queue.append(handle)
        if handle.overlap:
            self._wake_up()

    def _action(self, array: Array, asked: Asked, what: str) -> Callable[[], None]:
        """What carries out a checked collective."""
        parts, root, op, lengths = asked.parts, asked.root, asked.op, asked.lengths
        if asked.kind == "allreduce":
            return self._bind_reduce(array, op, what, lengths)
        if asked.kind == "broadcast":
            return lambda: self._broadcast(array, root, what)
        if asked.kind == "all_gather":
            return lambda: self._all_gather(array, what, parts)
        return lambda: self._reduce_scatter(array, op, what, parts, lengths)

    def wait(self, handle: Handle) -> None:
        while not handle.finished:
            if self._runner.acquire(False):
                if self._queue:
                    self._run_oldest()
                self._runner.release()
            else:
                handle.block()
        if self._queue and self._thread is not None:
            self._wake.put(True)  # it may have found the runner taken
        if handle.error is not None:
            raise handle.error

    def check(self) -> None:
        """See :class:`Communicator`; nothing to do, as ``wait`` raises everything."""
        return

    def broadcast(self, array: Array, root: int = 0) -> None:
        check_layout(array)
        check_root(root, self.size)
        self._blocking(Handle(lambda: self._broadcast(array, root, "broadcast"), "broadcast", nbytes=array.nbytes))

    def allgather_object(self, item: T) -> list[T]:
        result: list[T] = []
        self._blocking(Handle(lambda: result.extend(self._gather(item)), "allgather_object"))
        return result

    def barrier(self) -> None:
        self._blocking(Handle(self._barrier, "barrier"))

    def close(self) -> None:
        if self._closed:
            return
        if self._queue:
            self._wake_up()  # what nobody has waited for
        self._closed = True
        if self._thread is not None:
            self._wake.put(False)
            self._thread.join()
            self._thread = None

    def _blocking(self, handle: Handle) -> None:
        self.begin(handle)
        self.wait(handle)

    def _wake_up(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"graphc-communication-{self.rank}", daemon=True)
            self._thread.start()
        self._wake.put(True)

    def _serve(self) -> None:
        while self._wake.get():
            while self._queue and self._runner.acquire(False):
                if self._queue:
                    self._run_oldest()
                self._runner.release()

    def _run_oldest(self) -> None:
        handle = self._queue.popleft()
        self._sequence += 1
        handle.since = now = time.monotonic()
        place = self.ring.begin(self.number, self._sequence, self.step, handle.kind, handle.op, handle.tag, handle.nbytes, now)
        self.current = handle
        error = None
        try:
            handle.action()
        except BaseException as raised:
            error = raised
        self.current = None
        handle.end(error)
        self.ring.end(place, handle.until)
        if self.observer is not None:
            self.observer(handle)


class NullCommunicator(QueuedCommunicator):
    """The only rank of a world of one: every reduction is the identity."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def begin(self, handle: Handle) -> None:
        handle.action()

    def _reduce(self, array: Array, op: str, what: str, lengths: Sequence[int] | None) -> None:
        pass

    def _reduce_scatter(self, array: Array, op: str, what: str, parts: Parts, lengths: Sequence[int] | None) -> None:
        pass

    def _all_gather(self, array: Array, what: str, parts: Parts) -> None:
        pass

    def _broadcast(self, array: Array, root: int, what: str) -> None:
        pass

    def _gather(self, item: Any) -> list[Any]:
        return [item]

    def _barrier(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass
