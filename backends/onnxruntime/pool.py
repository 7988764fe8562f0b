"""The threads of a worker: one team that oneDNN's primitives and all native kernels share.

Compiled functions run as regions of the OpenMP runtime that oneDNN loaded, so that no second pool competes for the cores.
Without oneDNN, and for functions of Python, the pool starts threads of its own. Numba's ``parallel=True`` would be another
pool.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from graphc.backends.host.calls import NativeCall, alone_runner
from graphc.backends.onnxruntime.kernels.common.jit import NumbaFunction
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.native import Bound, bind_code, bind_numba, team_runner
from graphc.device import Run
from graphc.errors import GraphcError, UsageError, counted

_CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@lru_cache(maxsize=4096)
def partition(total: int, grain: int, threads: int) -> tuple[tuple[int, int], ...]:
    """Cut ``range(total)`` into at most ``threads`` ranges of nearly equal length and at least ``grain`` items.

    Depends on the arguments only, so that sums made a range at a time are the same in every run.
    """
    parts = max(1, min(threads, total // max(1, grain)))
    bounds = [total * k // parts for k in range(parts + 1)]
    return tuple((a, b) for a, b in itertools.pairwise(bounds))


class _Worker:
    """One thread that waits for a task; two locks hand the task over and back."""

    __slots__ = ("__weakref__", "arguments", "done", "error", "function", "ready")

    def __init__(self, name: str) -> None:
        self.ready = threading.Lock()
        self.done = threading.Lock()
        self.ready.acquire()
        self.done.acquire()
        self.function: Callable[..., None] | None = None
        self.arguments: tuple[Any, ...] = ()
        self.error: BaseException | None = None
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def _loop(self) -> None:
        take, give = self.ready.acquire, self.done.release
        while True:
            take()
            function = self.function
            if function is None:
                give()
                return
            try:
                function(*self.arguments)
            except BaseException as error:  # handed to the caller, who raises it
                self.error = error
            give()


class ThreadPool:
    """``threads`` threads, the calling one included, that run functions over fixed ranges.

    Not reentrant: one caller at a time. Every worker (rank) that runs as a thread owns a pool.
    """

    def __init__(self, threads: int, *, bf16_products: bool = False) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {threads}")
        self.threads, self.bf16_products = threads, bf16_products
        self._unpinned: set[int] = set()
        self._workers: list[_Worker] = []
        self._closer = weakref.finalize(self, _stop, self._workers)

    def bind(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        total: int,
        grain: int = 1,
        *,
        held: tuple[object, ...] = (),
    ) -> Run:
        """Bind ``function(*arguments, start, stop)`` over a fixed partition of ``range(total)``.

        What Numba compiled, and ctypes functions ``f(address, start, stop)``, run natively: a call of the result is one call
        of machine code. Fewer than ``2 · grain`` items stay in the calling thread.

        Args:
            function: releases the GIL; the types of ``arguments`` are those of every run.
            arguments: arrays, whose addresses are taken now, and numbers.
            held: what must live as long as the result.
        """
        bound = _bound(function, arguments)
        if bound is None:
            return _holding(partial(self._spread, function, arguments, partition(total, grain, self.threads)), held)
        return self.bind_code(bound, total, grain, held=held)

    def bind_code(self, bound: Bound, total: int, grain: int = 1, *, held: tuple[object, ...] = ()) -> Run:
        """Bind machine code over a fixed partition of ``range(total)`` (see :meth:`bind`)."""
        ranges = partition(total, grain, self.threads)
        team = library()
        if len(ranges) == 1:
            call = np.array([bound.code, bound.words, total], dtype=np.int64)
            return NativeCall(alone_runner(), call.ctypes.data, bound.failed, bound.check, bound, call, held)
        if team is None or team.region is None:
            return _checked(partial(self._spread, _CODE(bound.code), (bound.words,), ranges), bound, held)
        # A region always has all threads of the team: OpenMP ends those that a smaller one leaves out.
        call = np.array([bound.code, bound.words, total, len(ranges), self.threads, *team.region], dtype=np.int64)
        return NativeCall(team_runner(), call.ctypes.data, bound.failed, bound.check, bound, call, held)

    def run(self, function: Callable[..., None], arguments: tuple[Any, ...], total: int, grain: int = 1) -> None:
        """Bind a function and run it once (see :meth:`bind`)."""
        self.bind(function, arguments, total, grain)()

    def pin(self, cores: Sequence[int]) -> None:
        """Keep every thread of the team on a core of its own, until :meth:`close`.

        The calling thread may use all of ``cores``: what it starts later (data loaders, a compiler) inherits what it may use.
        It seldom leaves the first one, since others are busy with the team.

        Raises:
            UsageError: fewer cores than threads.
        """
        if len(cores) < self.threads:
            raise UsageError(
                f"pin=true needs a core for every thread: {counted(self.threads, 'thread')} on {counted(len(cores), 'core')};"
                " leave threads out, which then takes one for each core of this worker"
            )
        self._unpinned = self._unpinned or os.sched_getaffinity(0)
        self._allow([set(cores), *({core} for core in cores[1 : self.threads])])

    def _allow(self, cores: Sequence[set[int]]) -> None:
        """Say for each thread which cores it may use."""
        failed: list[OSError] = []

        def allow(_: int, start: int, stop: int) -> None:
            try:
                os.sched_setaffinity(0, cores[start])  # 0 is the calling thread
            except OSError as error:
                failed.append(error)

        code = _CODE(allow)
        self.bind(code, (0,), self.threads)()
        if failed:
            raise GraphcError(f"this machine does not keep threads on the cores {cores}: {failed[0]}")

    def _spread(self, function: Callable[..., None], arguments: tuple[Any, ...], ranges: Sequence[tuple[int, int]]) -> None:
        """Call a function in threads of this pool's own; errors are raised here, after all ranges have ended."""
        ranges = ranges if self.threads > 1 else [(ranges[0][0], ranges[-1][1])]
        while len(self._workers) < len(ranges) - 1:
            self._workers.append(_Worker(f"graphc-kernel-{len(self._workers) + 1}"))
        used = self._workers[: len(ranges) - 1]
        for worker, bounds in zip(used, ranges[1:], strict=True):
            worker.function, worker.arguments = function, (*arguments, *bounds)
            worker.ready.release()
        error: BaseException | None = None
        try:
            function(*arguments, *ranges[0])
        except BaseException as caught:
            error = caught
        for worker in used:
            worker.done.acquire()
            worker.arguments = ()
            if worker.error is not None:
                error, worker.error = error or worker.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads; the pool then runs everything in the calling thread."""
        if self._unpinned:  # OpenMP keeps its threads for the next pool
            self._allow([self._unpinned] * self.threads)
            self._unpinned = set()
        self._closer()
        self.threads = 1


def _bound(function: Callable[..., None], arguments: tuple[Any, ...]) -> Bound | None:
    """The machine code of a function with its arguments; None: it is not compiled."""
    if isinstance(function, ctypes._CFuncPtr):  # type: ignore[attr-defined]
        return bind_code(ctypes.cast(function, ctypes.c_void_p).value or 0, *arguments)
    if isinstance(function, NumbaFunction) or hasattr(function, "overloads"):
        return bind_numba(function, arguments)
    return None


def _checked(go: Run, bound: Bound, *held: object) -> Run:
    """``go``, then the check whether compiled code failed; holds the memory behind the addresses."""
    failed = bound.failed

    def run(held: object = (bound, held)) -> None:
        go()
        if failed[0]:
            bound.check()

    return run


def _holding(go: Run, held: object) -> Run:
    def run(held: object = held) -> None:
        go()

    return run


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.function = None
        worker.ready.release()
        worker.done.acquire()
    workers.clear()
