"""The interface of collectives between ranks.

Every rank calls the same collectives in the same order; :func:`~graphc.distributed.consistency.agree` checks that before step
0. An AllReduce works in place on a flat buffer. ``start`` returns at once and ``wait`` waits for the end, so communication
overlaps computation. One thread of each rank uses its communicator.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, get_args

import numpy as np

from graphc.distributed.reductions import LOW, Array, Parts, even_parts
from graphc.distributed.rma_windows import Windows
from graphc.errors import UsageError, nearest

Kind: TypeAlias = Literal[
    "allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier", "send", "recv"
]
T = TypeVar("T")

KINDS: tuple[Kind, ...] = get_args(Kind)
REDUCING: tuple[Kind, ...] = ("allreduce", "reduce_scatter", "reduce")
"""The collectives that have a reduction."""

REDUCTIONS = ("sum", "mean", "min", "max", "prod", "tree", "adasum")
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int64"))) | LOW


class CommunicatorOptions(TypedDict, total=False):
    """Options of ``start`` and ``prepare``.

    Attributes:
        kind: ``allreduce`` (the default); ``reduce_scatter``: afterwards ``array[start:stop]`` of ``parts[rank]`` holds the
            reduction and the other elements are undefined; ``all_gather``: every rank gives that part of its array and receives
            the parts of all; ``broadcast``: every rank receives the array of rank ``root``; ``reduce``: the array of rank
            ``root`` holds the reduction, those of the others are undefined; ``all_to_all``: of N equal parts rank k receives
            the k-th of every rank, in rank order; ``barrier``: the array stays as it is; ``send``, ``recv``: from one rank of a
            channel to the other (:meth:`Communicator.subgroup`).
        parts: ``(start, stop)`` in elements for each rank, in order and disjoint; they may be empty. None: equal parts.
        root: the source of a ``broadcast``, the target of a ``reduce``; by default 0.
        lengths: elements of the consecutive tensors in ``array``, over each of which ``adasum`` takes its dot products
            (padding may be a tensor of its own). None: one tensor.
        overlap: run on another thread from ``begin`` on (the default); False: run inside ``wait``.
        staged: through the host's memory, although a GPU could carry it out by itself.
    """

    kind: Kind
    parts: Parts | None
    root: int
    lengths: Sequence[int] | None
    overlap: bool
    staged: bool


class Communicator(ABC):
    """What the runtime needs from a transport.

    Arrays are one-dimensional, contiguous, writable and of dtype float32, float64, int64, bfloat16 or float16 (what only moves
    data takes any), with the same length and dtype on every rank. Reductions: sum, min, max, prod; ``mean``, the
    sum divided by ``size`` (floats only); ``tree``, the sum by the fixed tree of
    :func:`~graphc.distributed.reductions.tree_pairs`; ``adasum`` (floats only, see :mod:`graphc.distributed.reductions`).
    bfloat16 and float16 are accumulated in float32 and rounded once. Results are bit-identical on all ranks.

    Attributes:
        observer: called with the handle of every collective that has ended.
        step: the training step, shown in errors and flight logs; -1 before the first.
        deadline: seconds after which a collective that has not ended ends the run; by default GRAPHC_DEADLINE, or 300.
        ranks: the numbers of its ranks in the world, in the order of their ranks here.
        group: what the ranks have in common, such as ``tensor``; empty for the world.

    Raises (all calls):
        UsageError: an array or reduction that is not supported.
        WorldError: another rank is gone, called another collective, or did not come before the deadline. A rank that is blocked
            inside MPI cannot raise: its process ends with the message.
    """

    rank: int
    size: int
    observer: Callable[[Handle], None] | None
    step: int
    deadline: float
    ranks: Sequence[int]
    group: str = ""

    @property
    @abstractmethod
    def transport(self) -> str:
        """How arrays travel: ``null`` (there is one rank), ``threads``, ``mpi``, ``tcp`` or ``nccl``."""

    def allreduce(self, array: Array, op: str = "sum", tag: str = "", *, lengths: Sequence[int] | None = None) -> None:
        """Reduce ``array`` over all ranks in place; ``tag`` names the collective in errors; ``lengths`` as in ``start``."""
        self.wait(self.start(array, op, tag, lengths=lengths, overlap=False))

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Copy ``array`` of rank ``root`` into ``array`` of every other rank."""
        self.wait(self.start(array, kind="broadcast", root=root, overlap=False))

    def start(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        """:meth:`prepare` and :meth:`begin` a collective. The array may not be touched until ``wait``.

        Collectives run in the order of their start.

        Args:
            op: the reduction of ``allreduce`` and ``reduce_scatter``.
            options: see :class:`CommunicatorOptions`.
        """
        handle = self.prepare(array, op, tag, **options)
        self.begin(handle)
        return handle

    @abstractmethod
    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        """Check a collective that will run many times; arguments as for :meth:`start`."""

    @abstractmethod
    def begin(self, handle: Handle) -> None:
        """Begin a prepared collective that is not under way."""

    @abstractmethod
    def wait(self, handle: Handle) -> None:
        """Wait for what ``begin`` began, or raise its error."""

    def check(self) -> None:  # noqa: B027  where ``wait`` raises every error there is nothing to do
        """Raise the error of a ``queued`` collective; call it after waiting for the device, before using results."""

    @abstractmethod
    def allgather_object(self, item: T) -> list[T]:
        """An object of every rank, in rank order.

        Args:
            item: None, a number, text, bytes or an array, or a list, tuple or dict of these; nothing is ever unpickled.

        Raises:
            UsageError: it is something else.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and release threads; calling it twice is fine."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the work of all ranks because this one failed; the others, or the launcher, name it and ``reason``.

        Over MPI this ends the process and does not return; with one rank it does nothing.
        """

    @abstractmethod
    def subgroup(self, members: Sequence[int], group: str, index: int) -> Communicator:
        """A communicator of some ranks of this one, which runs beside it; only they call it, all in the same order.

        A subgroup of two ranks is a channel if it carries ``send`` on the first and ``recv`` on the second only.

        Args:
            members: ranks of this communicator; their places are their ranks in the new one. This rank is one of them.
            group: its name in errors.
            index: a number of at least 1, equal on its members, that no other subgroup has.
        """

    def machine(self) -> str:
        """A name that is equal on ranks of one machine; every rank calls it at the same point."""
        return os.uname().nodename

    def introduce(self, name: str, *, spare: bool) -> None:  # noqa: B027  not every transport outlives a rank
        """Set this rank's name in messages; when a ``spare`` rank dies, the others continue and none may wait for it."""

    def gone(self) -> frozenset[int]:
        """Spare ranks that died, and over threads those that ended their program."""
        return frozenset()

    def open_windows(self, nbytes: int) -> Windows:
        """Make ``nbytes`` zeroed bytes (0: none) of this rank readable and writable for all; every rank calls it at once.

        Raises:
            UsageError: there is only one rank, or the transport has no windows.
        """
        if self.size == 1:
            raise UsageError("parameter servers need at least two ranks; this run has one")
        raise UsageError(
            f"parameter servers do not work with transport {self.transport!r}: workers write into the servers' memory; take"
            " transport 'mpi' or 'threads'"
        )


class Handle:
    """A prepared collective, which can run many times.

    Attributes:
        since, until: start and end of the last run, ``time.monotonic()`` in seconds.
        queued: ``begin`` and ``wait`` only queue work on the device, so they may be captured in a CUDA graph.
    """

    __slots__ = ("_done", "action", "error", "finished", "kind", "nbytes", "op", "overlap", "queued", "since", "tag", "until")

    def __init__(
        self, action: Callable[[], Any], kind: str, op: str = "", tag: str = "", nbytes: int = 0, *, overlap: bool = False
    ) -> None:
        self.action = action
        self.kind = kind
        self.op = op
        self.tag = tag
        self.nbytes = nbytes
        self.overlap = overlap
        self.queued = False
        self.since = 0.0
        self.until = 0.0
        self.finished = True
        self.error: BaseException | None = None
        self._done = threading.Lock()

    @property
    def what(self) -> str:
        """The collective in errors."""
        return f"{self.kind} {self.tag}".rstrip()

    def check_idle(self) -> None:
        """Raise UsageError if it is under way."""
        if not self.finished:
            raise UsageError(f"{self.what} was begun a second time before it was waited for")

    def arm(self) -> None:
        """Mark it as under way."""
        self.check_idle()
        self._done.acquire()
        self.finished = False

    def end(self, error: BaseException | None) -> None:
        """Mark it as ended and wake up the thread that waits."""
        self.error = error
        self.until = time.monotonic()
        self.finished = True
        self._done.release()

    def block(self) -> None:
        """Wait until another thread has run it."""
        with self._done:
            pass


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A checked collective: its array, and all options with their defaults; see :class:`CommunicatorOptions`."""

    array: Array
    kind: Kind
    op: str
    tag: str
    parts: Parts
    root: int
    lengths: Sequence[int] | None
    overlap: bool

    @property
    def reduction(self) -> str:
        """The reduction; empty where nothing is reduced."""
        return self.op if self.kind in REDUCING else ""

    @property
    def what(self) -> str:
        """The collective in errors."""
        return f"{self.kind} {self.tag}".rstrip()

    @property
    def shown(self) -> str:
        """The collective with everything that must be equal on all ranks."""
        array = f"{self.array.dtype}[{self.array.size}]"
        rooted = {"broadcast": f" from rank {self.root}", "reduce": f" to rank {self.root}"}.get(self.kind, "")
        if self.kind in ("send", "recv"):
            return f"transfer {self.tag} of {array}"
        if self.reduction:
            return f"{self.what}{rooted} ({self.op} of {array})"
        return f"{self.what}{rooted} of {array}"

    def handle(self, action: Callable[[], None]) -> Handle:
        """The handle of this collective, which ``action`` carries out."""
        return Handle(action, self.kind, self.reduction, self.tag, self.array.nbytes, overlap=self.overlap)


def check_collective(array: Array, size: int, op: str, tag: str, options: CommunicatorOptions) -> CollectiveRequest:
    """Raise UsageError unless the arguments of :meth:`Communicator.prepare` fit together; the array's layout is not checked."""
    kind, parts, root = options.get("kind", "allreduce"), options.get("parts"), options.get("root", 0)
    if kind not in KINDS:
        raise UsageError(f"unknown collective {kind!r}{nearest(kind, KINDS)}; the collectives are {', '.join(KINDS)}")
    divided = kind in ("reduce_scatter", "all_gather")
    if kind == "reduce":  # the reduction of one part, which is everything
        parts = [(0, 0)] * root + [(0, array.size)] + [(array.size, array.size)] * (size - root - 1)
    elif parts is None or not divided:
        parts = even_parts(array.size, size)
    request = CollectiveRequest(array, kind, op, tag, parts, root, options.get("lengths"), options.get("overlap", True))
    if request.reduction:
        _check_reduction(array, op, request.lengths)
    if kind in ("broadcast", "reduce") and not 0 <= root < size:
        raise UsageError(f"{kind} {'from' if kind == 'broadcast' else 'to'} rank {root}: the ranks are 0 … {size - 1}")
    if kind == "all_to_all" and array.size % size:
        raise UsageError(f"all_to_all gives {size} ranks equal parts, which {array.size} elements have not")
    if kind in ("send", "recv") and size != 2:
        raise UsageError(f"{kind} needs a channel, which has two ranks; this communicator has {size}")
    if divided:
        _check_parts(parts, array.size, size)
    return request


def _check_reduction(array: Array, op: str, lengths: Sequence[int] | None) -> None:
    if op not in REDUCTIONS:
        raise UsageError(f"unknown reduction {op!r}{nearest(op, REDUCTIONS)}; the reductions are {', '.join(REDUCTIONS)}")
    if array.dtype not in DTYPES:
        raise UsageError(f"a collective takes float32, float64, bfloat16, float16 or int64, not {array.dtype}")
    if op in ("mean", "adasum") and array.dtype == np.int64:
        raise UsageError(f"reduce={op!r} needs a floating-point dtype, got {array.dtype}; use reduce='sum'")
    if lengths is not None and sum(lengths) != array.size:
        raise UsageError(f"tensors of {sum(lengths)} elements in all cannot make up an array of {array.size}")


def _check_parts(parts: Parts, elements: int, size: int) -> None:
    end = 0
    for start, stop in parts:
        if not end <= start <= stop <= elements:
            raise UsageError(f"the parts {list(parts)} are not in order, disjoint and within {elements} elements")
        end = stop
    if len(parts) != size:
        raise UsageError(f"{len(parts)} parts for {size} ranks")


def check_layout(array: Array) -> None:
    """Raise UsageError unless an array of the host or a device is one-dimensional, contiguous and, on the host, writable."""
    if array.ndim != 1 or not array.flags.c_contiguous or not getattr(array.flags, "writeable", True):
        raise UsageError(
            f"a collective takes a writable, contiguous one-dimensional array, not one of shape {array.shape} "
            f"and strides {array.strides}"
        )
