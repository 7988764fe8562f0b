"""Device memory, and bound work: closures that are built once and queued in every step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from graphc.errors import HostMemoryError

ALIGNMENT = 64
"""Alignment, in bytes, of every slice of a flat buffer and of the arena: a cache line, and an AVX-512 register."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays: TypeAlias = "Mapping[str, Array]"
Run: TypeAlias = "Callable[[], None]"


class HostSync:
    """Bound work that reads results on the host, or differs from step to step: it cannot be recorded."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self) -> None:
        self.run()

    @property
    def queued(self) -> bool:
        return False


class Choice:
    """Bound work that only queues, but differs from step to step.

    Args:
        options: the alternatives.
        pick: index of the alternative for the present step; called before its row runs. Choices with the same ``pick`` change
            together.
    """

    __slots__ = ("options", "pick")

    def __init__(self, options: Sequence[Run], pick: Callable[[], int]) -> None:
        self.options, self.pick = tuple(options), pick

    def __call__(self) -> None:
        self.options[self.pick()]()

    @property
    def queued(self) -> bool:
        return False  # for callers that do not handle choices


class Variants:
    """A row of work with choices: each combination is recorded separately, when the row is bound.

    Args:
        record: see :meth:`Backend.record`.
    """

    def __init__(self, row: Sequence[Run], record: Callable[[Sequence[Run]], Run]) -> None:
        counts: dict[Callable[[], int], int] = {}
        for run in row:
            if isinstance(run, Choice):
                counts[run.pick] = len(run.options)
        self._picks = list(counts)
        self._recordings: dict[tuple[int, ...], Run] = {}
        for key in itertools.product(*(range(count) for count in counts.values())):
            index = dict(zip(self._picks, key, strict=True))
            self._recordings[key] = record([run.options[index[run.pick]] if isinstance(run, Choice) else run for run in row])

    def __call__(self) -> None:
        self._recordings[tuple(pick() for pick in self._picks)]()


def only_queues(run: Run) -> bool:
    """Whether bound work queues the same calls in every step and waits for nothing (see :meth:`Backend.record`)."""
    return bool(getattr(run, "queued", True))


class InOrder:
    """Bound work that calls ``runs`` one after another."""

    __slots__ = ("runs",)

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    def __call__(self) -> None:
        for one in self.runs:
            one()


def in_order(runs: Sequence[Run]) -> Run:
    """``runs`` one after another, as one."""
    if len(runs) == 1:
        return runs[0]
    return InOrder(runs) if all(only_queues(one) for one in runs) else HostSync(InOrder(runs))


class Event(Protocol):
    """A point in a queue of work."""

    def wait(self) -> None:
        """Wait until everything before it has run."""


class Memory(Protocol):
    """The memory that a backend's arrays lie in, and copies to and from it.

    Device arrays share with numpy arrays what needs no access to elements: ``shape``, ``dtype``, ``size``, ``nbytes``,
    ``view``,
    ``reshape`` and slices. Everything else goes through these methods, whose work on a device is queued in order with that of
    the bound segments.
    """

    on_host: bool
    """Whether numpy can access the arrays."""

    def zeros(self, nbytes: int) -> Array:
        """Allocate zeroed memory as a flat array of bytes, aligned for every use by the backend."""

    def pinned(self, nbytes: int) -> Array:
        """Allocate host memory, as a flat array of bytes, that transfers reach fastest."""

    def adopt(self, array: object) -> Array | None:
        """View another library's array in this memory without a copy; None when it lies on the host.

        Work that is queued here from now on waits for what the other library has queued for it.

        Raises:
            ValueError: it lies on another device, or cannot be shared.
        """

    def copy(self, target: Array, source: Array) -> None:
        """Queue a copy between arrays of equal shape and type; either may be on the host, and may be reused afterwards."""

    def fetch(self, array: Array) -> Array:
        """Return the contents of ``array`` on the host once everything queued has run; a host array is returned itself."""

    def bind_copy(self, target: Array, source: Array) -> Run:
        """A closure that queues a copy between two arrays of this memory, or between one and :meth:`pinned` memory."""

    def bind_feed(self, target: Array) -> Callable[[Array], None]:
        """A closure that queues the copy of an array of the target's shape and type, on the host, to ``target``."""

    def bind_fill(self, target: Array, value: float) -> Run:
        """A closure that queues filling ``target`` with one number."""

    def send(self, target: Array, source: Array, after: Event | None = None) -> Event:
        """Start a copy from :meth:`pinned` memory beside the queue, once ``after`` has passed; returns its event."""

    def after(self, event: Event) -> None:
        """Make work that is queued from now on wait for ``event``."""

    def mark(self) -> Event:
        """An event that passes when everything queued so far has run."""

    def available(self) -> int | None:
        """Bytes that can still be allocated; None: limited by the host's memory only."""

    def synchronize(self) -> None:
        """Wait until everything queued has run; raises the errors of queued work."""


def aligned_zeros(nbytes: int) -> Array:
    """Zeroed bytes on the host, aligned to the cache line.

    Raises:
        HostMemoryError: there is not so much memory.
    """
    try:
        raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    except (MemoryError, ValueError):  # ValueError: more than an address can reach
        raise HostMemoryError(
            f"a buffer of {nbytes:,} bytes does not fit into the memory of this machine; a smaller batch, accumulate or"
            " recompute need less"
        ) from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class Passed:
    """The event of a memory without a queue."""

    def wait(self) -> None:
        """Has always passed."""


PASSED: Event = Passed()


class Unqueued:
    """Base of memories without a queue, which share no arrays with other libraries."""

    def adopt(self, array: object) -> Array | None:
        return None

    def after(self, event: Event) -> None:
        """Every event has passed."""

    def mark(self) -> Event:
        return PASSED

    def available(self) -> int | None:
        return None

    def synchronize(self) -> None:
        """Everything has run."""


class HostMemory(Unqueued):
    """Host memory, where numpy works at once."""

    on_host = True

    def zeros(self, nbytes: int) -> Array:
        return aligned_zeros(nbytes)

    def pinned(self, nbytes: int) -> Array:
        return aligned_zeros(nbytes)

    def copy(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def fetch(self, array: Array) -> Array:
        return array

    def bind_copy(self, target: Array, source: Array) -> Run:
        return functools.partial(np.copyto, target, source)

    def bind_feed(self, target: Array) -> Callable[[Array], None]:
        return functools.partial(np.copyto, target)

    def bind_fill(self, target: Array, value: float) -> Run:
        return functools.partial(target.fill, value)

    def send(self, target: Array, source: Array, after: Event | None = None) -> Event:
        np.copyto(target, source)
        return PASSED


HOST: Memory = HostMemory()


LEAST_DRIVER = {12: "525", 13: "580"}
"""CUDA version → the oldest driver for Linux that runs it (NVIDIA's table of minor version compatibility)."""
