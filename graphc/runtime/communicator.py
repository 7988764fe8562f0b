"""Collectives between workers.

Every rank calls the same collectives in the same order; :func:`agree` checks that before step 0. An AllReduce works in
place on a flat buffer. ``start`` returns at once and ``wait`` ends it, so that communication runs beside computation; a
communicator is used by one thread of its rank.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

import numpy as np

from graphc.errors import UsageError, WorldError, nearest
from graphc.runtime.flight import Ring
from graphc.runtime.reductions import LOW, Array, Parts, even_parts
from graphc.runtime.windows import Windows
from graphc.runtime.world import World, find_world

Kind: TypeAlias = Literal["allreduce", "reduce_scatter", "all_gather", "broadcast"]
T = TypeVar("T")

DEADLINE = "GRAPHC_DEADLINE"
"""Environment variable: seconds after which a collective that has not ended ends the work."""

KINDS: tuple[Kind, ...] = get_args(Kind)
REDUCTIONS = ("sum", "mean", "min", "max", "prod", "tree", "adasum")
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int64"))) | LOW


class Communicator(Protocol):
    """What the runtime needs from a transport.

    Arrays are one-dimensional, contiguous, writable and of dtype float32, float64, int64, bfloat16 or float16 (``broadcast``
    and ``all_gather`` take any), with the same length and dtype on every rank. Reductions: sum, min, max, prod; ``mean``, the
    sum divided by ``size`` (floats only); ``tree``, the sum by the fixed tree of :func:`~graphc.runtime.reductions.tree_pairs`;
    ``adasum`` (floats only, see :mod:`graphc.runtime.reductions`). bfloat16 and float16 are accumulated in float32 and
    rounded once. Results are bit-identical on all ranks.

    Raises (all calls):
        UsageError: an array or reduction that is not supported.
        WorldError: another rank is gone, called something else, or did not come before the deadline. Where a rank is blocked
            inside MPI there is nobody to raise it: the process ends with the message instead.
    """

    rank: int
    size: int
    observer: Callable[[Handle], None] | None
    step: int
    """The step of the training, which errors and flight logs name; set by whoever takes steps, -1 before the first."""
    deadline: float
    """Seconds after which a collective that has not ended ends the work; by default GRAPHC_DEADLINE, or 300."""

    def allreduce(self, array: Array, op: str = "sum", tag: str = "", *, lengths: Sequence[int] | None = None) -> None:
        """Reduce ``array`` over all ranks in place; ``tag`` names the collective in errors; ``lengths`` as in ``start``."""

    def start(
        self,
        array: Array,
        op: str = "sum",
        tag: str = "",
        *,
        kind: Kind = "allreduce",
        parts: Parts | None = None,
        root: int = 0,
        lengths: Sequence[int] | None = None,
        overlap: bool = True,
    ) -> Handle:
        """Begin a collective, in place. The array may not be touched until ``wait``. They run in the order of their start.

        :meth:`prepare` and :meth:`begin` in one.

        Args:
            op: the reduction of ``allreduce`` and ``reduce_scatter``.
            kind: ``allreduce``; ``reduce_scatter``: afterwards ``array[start:stop]`` of ``parts[rank]`` holds the reduction,
                and the other elements nothing of use; ``all_gather``: every rank gives that part of its array, and all have
                the parts of all afterwards; ``broadcast``: all have the array of rank ``root`` afterwards.
            parts: ``(start, stop)`` in elements for each rank, in order and disjoint; they may be empty. None: equal parts.
            lengths: elements of the consecutive tensors in ``array``, over each of which ``adasum`` takes its dot products
                (padding may be a tensor of its own). None: one tensor.
            overlap: begin at once, on another thread; False where nothing is done before ``wait``, which then does it all.
        """

    def prepare(
        self,
        array: Array,
        op: str = "sum",
        tag: str = "",
        *,
        kind: Kind = "allreduce",
        parts: Parts | None = None,
        root: int = 0,
        lengths: Sequence[int] | None = None,
        overlap: bool = True,
    ) -> Handle:
        """Check a collective that will be begun, and waited for, again and again; arguments as for :meth:`start`."""

    def begin(self, handle: Handle) -> None:
        """Begin a prepared collective, which is not under way."""

    def wait(self, handle: Handle) -> None:
        """End what ``start`` began, or raise the error it met."""

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Copy ``array`` of rank ``root`` into ``array`` of every other rank."""

    def allgather_object(self, item: T) -> list[T]:
        """A picklable object of every rank, in rank order."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:
        """Finish what is under way and release threads; calling it twice is fine."""

    def abort(self, reason: str) -> None:
        """End the work of all ranks because this one cannot go on; the others, or the launcher, name it and ``reason``.

        Over MPI this ends the process and does not return; alone it does nothing.
        """

    def introduce(self, name: str, *, spare: bool) -> None:
        """Say what messages call this rank; when a ``spare`` one dies, the others go on, and none of them may wait for it."""

    def gone(self) -> frozenset[int]:
        """Spare ranks that died, and over threads those that ended their program."""

    def open_windows(self, nbytes: int) -> Windows:
        """Make ``nbytes`` zeroed bytes (0: none) of this rank readable and writable for all; every rank calls it at once.

        Raises:
            UsageError: there is only one rank.
        """


class Handle:
    """A collective; ``since`` and ``until`` are when it ran last, by ``time.monotonic()`` in seconds."""

    __slots__ = ("_done", "action", "error", "finished", "kind", "nbytes", "op", "overlap", "since", "tag", "until")

    def __init__(
        self, action: Callable[[], Any], kind: str, op: str = "", tag: str = "", nbytes: int = 0, *, overlap: bool = False
    ) -> None:
        self.action = action
        self.kind = kind
        self.op = op
        self.tag = tag
        self.nbytes = nbytes
        self.overlap = overlap
        self.since = 0.0
        self.until = 0.0
        self.finished = True
        self.error: BaseException | None = None
        self._done = threading.Lock()

    @property
    def what(self) -> str:
        """The collective in words."""
        return f"{self.kind} {self.tag}".rstrip()

    def arm(self) -> None:
        """Get ready to run."""
        if not self.finished:
            raise UsageError(f"{self.what} was begun a second time before anybody waited for it")
        self._done.acquire()
        self.finished = False

    def end(self, error: BaseException | None) -> None:
        """Note the end, and wake up who blocks."""
        self.error = error
        self.until = time.monotonic()
        self.finished = True
        self._done.release()

    def block(self) -> None:
        """Sleep until another thread has executed the collective."""
        with self._done:
            pass


class QueuedCommunicator(ABC):
    """Common part of the real transports: checks, order, and the thread that runs what ``start`` queued.

    Whoever holds ``_runner`` takes the oldest entry of the queue and runs it. That is the communication thread where there is
    something to do meanwhile; a caller that waits while the runner is free runs the entry itself, which saves two thread
    switches (about 15 µs).

    ``observer``, where set, is called after each collective, on the thread that ran it. ``ring`` is the flight recorder of
    the rank, in which this communicator is the one of that ``number``; ``step`` is what is noted there.
    """

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

    def start(
        self,
        array: Array,
        op: str = "sum",
        tag: str = "",
        *,
        kind: Kind = "allreduce",
        parts: Parts | None = None,
        root: int = 0,
        lengths: Sequence[int] | None = None,
        overlap: bool = True,
    ) -> Handle:
        handle = self.prepare(array, op, tag, kind=kind, parts=parts, root=root, lengths=lengths, overlap=overlap)
        self.begin(handle)
        return handle

    def prepare(
        self,
        array: Array,
        op: str = "sum",
        tag: str = "",
        *,
        kind: Kind = "allreduce",
        parts: Parts | None = None,
        root: int = 0,
        lengths: Sequence[int] | None = None,
        overlap: bool = True,
    ) -> Handle:
        action = self._action(array, op, f"{kind} {tag}", kind, parts, root, lengths)
        reduces = kind in ("allreduce", "reduce_scatter")
        return Handle(action, kind, op if reduces else "", tag, array.nbytes, overlap=overlap)

    def begin(self, handle: Handle) -> None:
        if self._closed:
            raise UsageError(f"{handle.what}: the communicator is closed")
        handle.arm()
        self._queue.append(handle)
        if handle.overlap:
            self._wake_up()

    def _action(
        self,
        array: Array,
        op: str,
        what: str,
        kind: Kind,
        parts: Parts | None,
        root: int,
        lengths: Sequence[int] | None,
    ) -> Callable[[], None]:
        """Check a collective and return what carries it out."""
        if kind == "allreduce":
            check_array(array, op, lengths)
            return self._bind_reduce(array, op, what, lengths)
        if kind == "broadcast":
            check_layout(array)
            check_root(root, self.size)
            return lambda: self._broadcast(array, root, what)
        if kind not in KINDS:
            raise UsageError(f"unknown collective {kind!r}{nearest(kind, KINDS)}; the collectives are {', '.join(KINDS)}")
        division = even_parts(array.size, self.size) if parts is None else parts
        check_parts(division, array.size, self.size)
        if kind == "all_gather":
            check_layout(array)
            return lambda: self._all_gather(array, what, division)
        check_array(array, op, lengths)
        return lambda: self._reduce_scatter(array, op, what, division, lengths)

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


def check_array(array: Array, op: str, lengths: Sequence[int] | None = None) -> None:
    """Raise UsageError unless a communicator can reduce ``array`` by ``op``."""
    if op not in REDUCTIONS:
        raise UsageError(f"unknown reduction {op!r}{nearest(op, REDUCTIONS)}; the reductions are {', '.join(REDUCTIONS)}")
    if array.dtype not in DTYPES:
        raise UsageError(f"a collective takes float32, float64, bfloat16, float16 or int64, not {array.dtype}")
    if op in ("mean", "adasum") and array.dtype == np.int64:
        raise UsageError(f"the {op} of {array.dtype} is no {array.dtype}; reduce by sum")
    if lengths is not None and sum(lengths) != array.size:
        raise UsageError(f"tensors of {sum(lengths)} elements in all cannot make up an array of {array.size}")
    check_layout(array)


def check_parts(parts: Parts, elements: int, size: int) -> None:
    """Raise UsageError unless ``parts`` has a ``(start, stop)`` for each rank, in order, disjoint and inside the array."""
    end = 0
    for start, stop in parts:
        if not end <= start <= stop <= elements:
            raise UsageError(f"the parts {list(parts)} are not in order, disjoint and within {elements} elements")
        end = stop
    if len(parts) != size:
        raise UsageError(f"{len(parts)} parts for {size} ranks")


def check_root(root: int, size: int) -> None:
    """Raise UsageError unless ``root`` is a rank."""
    if not 0 <= root < size:
        raise UsageError(f"broadcast from rank {root}: the ranks are 0 … {size - 1}")


def check_layout(array: Array) -> None:
    """Raise UsageError unless ``array`` is one-dimensional, contiguous and writable."""
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        raise UsageError(
            f"a collective takes a writable, contiguous one-dimensional array, not one of shape {array.shape} "
            f"and strides {array.strides}"
        )


def find_deadline(environment: Mapping[str, str] | None = None) -> float:
    """Seconds a collective may take: ``GRAPHC_DEADLINE``, or 300.

    Raises:
        UsageError: it is no positive number.
    """
    text = (os.environ if environment is None else environment).get(DEADLINE, "300")
    try:
        return check_deadline(float(text))
    except ValueError:
        raise UsageError(f"{DEADLINE} is {text!r}, not a positive number of seconds") from None


def check_deadline(seconds: float) -> float:
    """``seconds``, or UsageError unless they are a positive number."""
    if not seconds > 0:
        raise UsageError(f"the deadline of collectives must be a positive number of seconds, not {seconds:g}")
    return seconds


def open_communicator(world: World | None = None) -> Communicator:
    """The communicator of this worker, by default in the world it finds; every rank calls it at the same point.

    Raises:
        WorldError: the transport knows another world than ``world``.
        MissingExtraError: the transport's package is not installed.
    """
    world = find_world(world)
    if world.size == 1:
        return NullCommunicator()
    if world.transport == "threads":
        from graphc.runtime.threads import communicator_of

        return communicator_of(world)
    from graphc.runtime.mpi import open_mpi

    return open_mpi(world)


def agree(communicator: Communicator, entries: Sequence[str], what: str) -> None:
    """Check that all ranks hold the same list, for example their sequence of collectives.

    Only a hash travels while they agree.

    Raises:
        WorldError: on every rank, naming the first entry that differs and two ranks that differ in it.
    """
    mine = list(entries)
    digests = communicator.allgather_object(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    lists = communicator.allgather_object(mine)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = lists[0], lists[other]
    shared = min(len(first), len(second))
    index = next((k for k in range(shared) if first[k] != second[k]), shared)
    shown = [repr(entries[index]) if index < len(entries) else "nothing" for entries in (first, second)]
    raise WorldError(f"the ranks disagree on {what}: entry {index} is {shown[0]} on rank 0 and {shown[1]} on rank {other}")
