"""A thread pool for native kernels, one per worker; handing work over takes about ten microseconds.

Numba's own ``parallel=True`` is not used: one of its threading layers cannot be called from several threads, and the other
keeps a second set of spinning threads besides those of onnxruntime.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any


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
    """``threads`` threads, the calling one included, that run nogil functions over fixed ranges.

    Not reentrant: one caller at a time. Every worker (rank) that runs as a thread owns a pool.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {threads}")
        self.threads = threads
        self._workers = [_Worker(f"graphc-kernel-{k}") for k in range(1, threads)]
        self._closer = weakref.finalize(self, _stop, self._workers)

    def run(self, function: Callable[..., None], arguments: tuple[Any, ...], total: int, grain: int = 1) -> None:
        """Call ``function(*arguments, start, stop)`` over a fixed partition of ``range(total)`` and wait.

        The caller takes the first range itself; fewer than ``2 · grain`` items never leave it. Errors of any range are
        raised here, after all ranges have ended.
        """
        ranges = partition(total, grain, self.threads)
        if len(ranges) == 1:
            function(*arguments, 0, total)
            return
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
        self._closer()
        self._workers = []
        self.threads = 1


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.function = None
        worker.ready.release()
        worker.done.acquire()
    workers.clear()
