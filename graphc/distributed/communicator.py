"""Collectives between workers.

Every rank calls the same collectives in the same order; :func:`~graphc.distributed.consistency.agree` checks that before step
0. An AllReduce works in place on a flat buffer. ``start`` returns at once and ``wait`` ends it, so that communication runs
beside computation; a communicator is used by one thread of its rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, get_args

import numpy as np

from graphc.distributed.reductions import LOW, Array, Parts, even_parts
from graphc.distributed.rma_windows import Windows
from graphc.errors import UsageError, nearest

Kind: TypeAlias = Literal["allreduce", "reduce_scatter", "all_gather", "broadcast"]
T = TypeVar("T")

KINDS: tuple[Kind, ...] = get_args(Kind)
REDUCTIONS = ("sum", "mean", "min", "max", "prod", "tree", "adasum")
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int64"))) | LOW


class CommunicatorOptions(TypedDict, total=False):
    """What ``start`` and ``prepare`` take beside the array, its reduction and the tag.

    Attributes:
        kind: ``allreduce`` (unless another is named); ``reduce_scatter``: afterwards ``array[start:stop]`` of ``parts[rank]``
            holds the reduction, and the other elements nothing of use; ``all_gather``: every rank gives that part of its array,
            and all have the parts of all afterwards; ``broadcast``: all have the array of rank ``root`` afterwards.
        parts: ``(start, stop)`` in elements for each rank, in order and disjoint; they may be empty. None: equal parts.
        root: whose array a ``broadcast`` gives to all; 0.
        lengths: elements of the consecutive tensors in ``array``, over each of which ``adasum`` takes its dot products
            (padding may be a tensor of its own). None: one tensor.
        overlap: begin at once, on another thread (that is so unless it is False); False where nothing is done before ``wait``,
            which then does it all.
    """

    kind: Kind
    parts: Parts | None
    root: int
    lengths: Sequence[int] | None
    overlap: bool


class Communicator(Protocol):
    """What the runtime needs from a transport.

    Arrays are one-dimensional, contiguous, writable and of dtype float32, float64, int64, bfloat16 or float16 (``broadcast``
    and ``all_gather`` take any), with the same length and dtype on every rank. Reductions: sum, min, max, prod; ``mean``, the
    sum divided by ``size`` (floats only); ``tree``, the sum by the fixed tree of
    :func:`~graphc.distributed.reductions.tree_pairs`; ``adasum`` (floats only, see :mod:`graphc.distributed.reductions`).
    bfloat16 and float16 are accumulated in float32 and rounded once. Results are bit-identical on all ranks.

    Raises (all calls):
        UsageError: an array or reduction that is not supported.
        WorldError: another rank is gone, called something else, or did not come before the deadline. Where a rank is blocked
            inside MPI there is nobody to raise it: the process ends with the message instead.
    """

    rank: int
    size: int

    @property
    def transport(self) -> str:
        """How arrays travel: ``null`` (there is one rank), ``threads``, ``mpi``, ``tcp`` or ``nccl``."""

    observer: Callable[[Handle], None] | None
    step: int
    """The step of the training, which errors and flight logs name; set by whoever takes steps, -1 before the first."""
    deadline: float
    """Seconds after which a collective that has not ended ends the work; by default GRAPHC_DEADLINE, or 300."""

    def allreduce(self, array: Array, op: str = "sum", tag: str = "", *, lengths: Sequence[int] | None = None) -> None:
        """Reduce ``array`` over all ranks in place; ``tag`` names the collective in errors; ``lengths`` as in ``start``."""

    def start(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        """Begin a collective, in place. The array may not be touched until ``wait``. They run in the order of their start.

        :meth:`prepare` and :meth:`begin` in one.

        Args:
            op: the reduction of ``allreduce`` and ``reduce_scatter``.
            options: see :class:`CommunicatorOptions`.
        """

    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        """Check a collective that will be begun, and waited for, again and again; arguments as for :meth:`start`."""

    def begin(self, handle: Handle) -> None:
        """Begin a prepared collective, which is not under way."""

    def wait(self, handle: Handle) -> None:
        """End what ``start`` began, or raise the error it met."""

    def check(self) -> None:
        """Raise what a ``queued`` collective met; called once the device has been waited for, before results are used."""

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
    """A collective; ``since`` and ``until`` are when it ran last, by ``time.monotonic()`` in seconds.

    Attributes:
        queued: ``begin`` and ``wait`` do nothing but queue work of the device, and so may be captured in a CUDA graph.
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
        """The collective in words."""
        return f"{self.kind} {self.tag}".rstrip()

    def check_idle(self) -> None:
        """Raise UsageError while it is under way."""
        if not self.finished:
            raise UsageError(f"{self.what} was begun a second time before anybody waited for it")

    def arm(self) -> None:
        """Get ready to run."""
        self.check_idle()
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


DEADLINE = "GRAPHC_DEADLINE"
"""Environment variable: seconds after which a collective that has not ended ends the work."""


def check_array(array: Array, op: str, lengths: Sequence[int] | None = None) -> None:
    """Raise UsageError unless a communicator can reduce ``array`` by ``op``."""
    check_reduction(array.dtype, array.size, op, lengths)
    check_layout(array)


def check_reduction(dtype: np.dtype[Any], elements: int, op: str, lengths: Sequence[int] | None = None) -> None:
    """Raise UsageError unless a communicator can reduce an array of ``elements`` elements by ``op``."""
    if op not in REDUCTIONS:
        raise UsageError(f"unknown reduction {op!r}{nearest(op, REDUCTIONS)}; the reductions are {', '.join(REDUCTIONS)}")
    if dtype not in DTYPES:
        raise UsageError(f"a collective takes float32, float64, bfloat16, float16 or int64, not {dtype}")
    if op in ("mean", "adasum") and dtype == np.int64:
        raise UsageError(f"reduce={op!r} needs a floating-point dtype, got {dtype}; use reduce='sum'")
    if lengths is not None and sum(lengths) != elements:
        raise UsageError(f"tensors of {sum(lengths)} elements in all cannot make up an array of {elements}")


@dataclass(frozen=True, slots=True)
class Asked:
    """The checked arguments of a collective, defaults filled in; see :class:`CommunicatorOptions`."""

    op: str
    kind: Kind
    parts: Parts
    root: int
    lengths: Sequence[int] | None
    overlap: bool

    @property
    def reduction(self) -> str:
        """The reduction; empty where nothing is reduced."""
        return self.op if self.kind in ("allreduce", "reduce_scatter") else ""


def check_collective(array: Array, size: int, op: str, options: CommunicatorOptions) -> Asked:
    """Raise UsageError unless the arguments of :meth:`Communicator.prepare` fit; returns all of them."""
    kind, parts, root = options.get("kind", "allreduce"), options.get("parts"), options.get("root", 0)
    if kind not in KINDS:
        raise UsageError(f"unknown collective {kind!r}{nearest(kind, KINDS)}; the collectives are {', '.join(KINDS)}")
    division = even_parts(array.size, size) if parts is None else parts
    asked = Asked(op, kind, division, root, options.get("lengths"), options.get("overlap", True))
    if asked.reduction:
        check_reduction(array.dtype, array.size, op, asked.lengths)
    if kind == "broadcast":
        check_root(root, size)
    if kind in ("reduce_scatter", "all_gather"):
        check_parts(division, array.size, size)
    return asked


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


def check_device_layout(array: Array) -> None:
    """Raise UsageError unless an array of a device is one-dimensional and contiguous."""
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise UsageError(f"a collective takes a contiguous one-dimensional array, not one of shape {array.shape}")
