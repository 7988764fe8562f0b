"""Memory that a backend's arrays lie in, and work over it that is bound once and queued in every step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

ALIGNMENT = 64
"""Bytes to which every slice of a flat buffer and of the arena is aligned: a cache line, and an AVX-512 register."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Run: TypeAlias = "Callable[[], None]"


class HostSync:
    """Bound work that looks at results on the host, or decides anew in each step: it cannot be recorded."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self) -> None:
        self.run()

    @property
    def queued(self) -> bool:
        return False


class Choice:
    """Bound work that only queues, but not the same in every step.

    Args:
        options: what may be queued.
        pick: which of them in the present step; called before anything of the row runs in which it stands. Choices with equal
            ``pick`` go together.
    """

    __slots__ = ("options", "pick")

    def __init__(self, options: Sequence[Run], pick: Callable[[], int]) -> None:
        self.options, self.pick = tuple(options), pick

    def __call__(self) -> None:
        self.options[self.pick()]()

    @property
    def queued(self) -> bool:
        return False  # to whoever does not know of choices


class Variants:
    """A row of work with choices in it: each combination is a recording of its own, made when the row is bound.

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
    """Whether bound work for a device queues the same in every step and waits for nothing (see :meth:`Backend.record`)."""
    return bool(getattr(run, "queued", True))


def in_order(runs: Sequence[Run]) -> Run:
    """A closure that calls ``runs`` one after another."""
    held = tuple(runs)
    if len(held) == 1:
        return held[0]

    def run() -> None:
        for one in held:
            one()

    return run if all(only_queues(one) for one in held) else HostSync(run)


class Event(Protocol):
    """A point in the work that was queued."""

    def wait(self) -> None:
        """Return when everything before it has run."""


class Memory(Protocol):
    """Where a backend's arrays lie, and how they get there and back.

    Arrays on a device share with numpy's what needs no look at their elements: ``shape``, ``dtype``, ``size``, ``nbytes``,
    ``view``, ``reshape`` and slices. Everything else goes through these methods, whose work on a device is queued in order
    with that of the bound segments.
    """

    on_host: bool
    """Whether numpy may touch the arrays."""

    def zeros(self, nbytes: int) -> Array:
        """New zeroed memory as a flat array of bytes, aligned for whatever the backend does with it."""

    def pinned(self, nbytes: int) -> Array:
        """Memory of the host, as a flat array of bytes, that transfers reach fastest."""

    def adopt(self, array: object) -> Array | None:
        """An array of whatever library that lies in this memory, as one of it, without a copy; None: the host's.

        What the other library has queued for it is waited for by what is queued here from now on.

        Raises:
            ValueError: it lies on another device, or cannot be handed over.
        """

    def copy(self, target: Array, source: Array) -> None:
        """Queue a copy between arrays of equal shape and type; either may be the host's, and may be reused afterwards."""

    def fetch(self, array: Array) -> Array:
        """What ``array`` holds once everything queued has run, in the host's memory; there, the array itself."""

    def bind_copy(self, target: Array, source: Array) -> Run:
        """What queues a copy between two arrays of this memory, or between one and :meth:`pinned` memory."""

    def bind_fill(self, target: Array, value: float) -> Run:
        """What queues the filling of ``target`` with one number."""

    def send(self, target: Array, source: Array, after: Event | None = None) -> Event:
        """Begin a copy from :meth:`pinned` memory beside what is queued, once ``after`` has passed; when it is done."""

    def after(self, event: Event) -> None:
        """Let what is queued from now on wait for ``event``."""

    def mark(self) -> Event:
        """When everything that is queued now has run."""

    def available(self) -> int | None:
        """Bytes that can still be allocated; None: as many as the host has."""

    def synchronize(self) -> None:
        """Return once everything queued has run; errors of queued work are raised here."""


def aligned_zeros(nbytes: int) -> Array:
    """Zeroed bytes of the host whose address is a multiple of the cache line."""
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class Passed:
    """The event of a memory where nothing is ever queued."""

    def wait(self) -> None:
        """It has passed already."""


PASSED: Event = Passed()


class Unqueued:
    """What a :class:`Memory` is where nothing is ever queued, nor handed over by other libraries."""

    def adopt(self, array: object) -> Array | None:
        return None

    def after(self, event: Event) -> None:
        """Whatever was to be waited for has passed."""

    def mark(self) -> Event:
        return PASSED

    def available(self) -> int | None:
        return None

    def synchronize(self) -> None:
        """Everything has run."""


class HostMemory(Unqueued):
    """The memory of the host, where numpy does at once what is asked."""

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

    def bind_fill(self, target: Array, value: float) -> Run:
        return functools.partial(target.fill, value)

    def send(self, target: Array, source: Array, after: Event | None = None) -> Event:
        np.copyto(target, source)
        return PASSED


HOST: Memory = HostMemory()


LEAST_DRIVER = {12: "525", 13: "580"}
"""CUDA version → the oldest driver for Linux that runs it (NVIDIA's table of minor version compatibility)."""
