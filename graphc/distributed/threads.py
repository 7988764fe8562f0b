"""Ranks as threads of one process: for tests, and for scripts started with ``--transport threads``.

Numpy releases the GIL in its loops, so ranks compute at the same time. Sums run in rank order and each slice is summed by
one rank, so results do not depend on timing. When a rank raises, leaves early or misses a deadline, the others raise a
:class:`~graphc.errors.WorldError` that names it.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from graphc.distributed.communicator import CollectiveRequest
from graphc.distributed.health.deadline import check_deadline, find_deadline
from graphc.distributed.health.flight_recorder import dump, last_of
from graphc.distributed.health.hang_report import explain_timeout
from graphc.distributed.host_queue import QueuedCommunicator, reduce_part
from graphc.distributed.reductions import Array
from graphc.distributed.rma_windows import ThreadWindows, Windows
from graphc.distributed.world import THREAD_WORLD, World
from graphc.errors import PeerError, UsageError, WorldError, describe_error
from graphc.ir.facts import required

T = TypeVar("T")

TICK = 0.1  # seconds between looks at the workers

LEAVING = 3.0
"""Seconds that a worker may go on after another has failed, before nobody waits for it any more."""

_THREADS = "graphc-worker-"

_COMMUNICATOR: contextvars.ContextVar[ThreadCommunicator | None] = contextvars.ContextVar("graphc_thread", default=None)


class ThreadGroup:
    """``size`` ranks that exchange objects in memory.

    Args:
        deadline: seconds in which all ranks must come to a collective; by default GRAPHC_DEADLINE.
        ranks: their numbers in the world, where this is a subgroup.
    """

    def __init__(self, size: int, *, deadline: float | None = None, ranks: Sequence[int] | None = None) -> None:
        if size < 1:
            raise UsageError(f"a group needs at least one rank, not {size}")
        self.size = size
        self.ranks: Sequence[int] = range(size) if ranks is None else ranks  # in the world
        self.communicators = [ThreadCommunicator(self, rank) for rank in range(size)]
        for communicator in self.communicators:
            communicator.deadline = find_deadline() if deadline is None else check_deadline(deadline)
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._gone: dict[int, str] = {}
        self._generation = 0
        self._table: list[Any] = []
        self._subgroups: dict[int, tuple[Sequence[int], ThreadGroup]] = {}

    def meet(self, rank: int, what: str, item: Any) -> list[Any]:
        """Give ``item`` and wait for all ranks; returns their items in rank order.

        Args:
            what: the collective, which must be the same on all ranks.

        Raises:
            WorldError: a rank failed, is gone, came to another collective, or did not come before the deadline.
        """
        with self._changed:
            self._check(rank, what)
            generation = self._generation
            self._arrived[rank] = (what, item)
            if len(self._arrived) == self.size:
                self._finish_round()
            else:
                self._check(rank, what)
                deadline = self.communicators[rank].deadline
                limit = time.monotonic() + deadline
                while self._generation == generation and self.failure is None:
                    if time.monotonic() < limit:
                        self._changed.wait(limit - time.monotonic())
                    else:
                        self._fail(self._explain_timeout(rank, deadline))
            if self._generation == generation:
                raise PeerError(self.failure or "the group has failed")
            return self._table

    def leave(self, rank: int, reason: str, *, failed: bool) -> None:
        """Record that ``rank`` has left; after a failure all others raise at once."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            subgroups = list(self._subgroups.values())
            if failed:
                self._fail(f"rank {self.ranks[rank]} {reason}")
            elif self._arrived and self.failure is None:
                waiting, (what, _) = next(iter(self._arrived.items()))
                self._fail(self._absence(rank, reason, waiting, what))
        for members, subgroup in subgroups:
            if rank in members:
                subgroup.leave(members.index(rank), reason, failed=failed)
            elif failed:  # its ranks may wait for others, which this one keeps waiting
                subgroup.fail(f"rank {self.ranks[rank]} {reason}")

    def fail(self, message: str) -> None:
        """Make all ranks raise ``message`` at their next collective, in subgroups too."""
        with self._changed:
            self._fail(message)
            subgroups = list(self._subgroups.values())
        for _, subgroup in subgroups:
            subgroup.fail(message)

    def subgroup(self, members: Sequence[int], index: int) -> ThreadGroup:
        """The group of some ranks, which the first of them to come makes."""
        with self._changed:
            if index not in self._subgroups:
                ranks = [self.ranks[member] for member in members]
                group = self._subgroups[index] = members, ThreadGroup(len(members), deadline=1.0, ranks=ranks)
                for member, reason in self._gone.items():
                    if member in members:
                        group[1].leave(members.index(member), reason, failed=self.failure is not None)
            return self._subgroups[index][1]

    def gone(self) -> frozenset[int]:
        """Ranks that have ended their program.

        Raises:
            WorldError: a rank failed.
        """
        with self._changed:
            if self.failure is not None:
                raise PeerError(self.failure)
            return frozenset(self._gone)

    def _explain_timeout(self, rank: int, deadline: float) -> str:
        logs = {self.ranks[communicator.rank]: communicator.recorder.entries() for communicator in self.communicators}
        waiting = self.communicators[rank]
        wanted = required(last_of(logs[self.ranks[rank]], waiting.number))
        now = time.monotonic()
        message = explain_timeout(wanted, deadline, logs, {}, {}, now, self.ranks, waiting.group)
        return f"{message}; {dump(logs, self.communicators[0].root.size, message)}"

    def _absence(self, gone: int, reason: str, waiting: int, what: str) -> str:
        return f"rank {self.ranks[gone]} {reason} while rank {self.ranks[waiting]} waits for it in {what!r}"

    def _check(self, rank: int, what: str) -> None:
        for gone, reason in self._gone.items():
            if gone != rank:
                self._fail(self._absence(gone, reason, rank, what))
        if self.failure is not None:
            raise PeerError(self.failure)

    def _finish_round(self) -> None:
        names = {rank: what for rank, (what, _) in sorted(self._arrived.items())}
        self._table = [self._arrived[rank][1] for rank in range(self.size)]
        self._arrived = {}
        other = next((rank for rank in names if names[rank] != names[0]), None)
        if other is not None:
            first, second = self.ranks[0], self.ranks[other]
            self._fail(f"the ranks disagree: rank {first} is in {names[0]!r} and rank {second} in {names[other]!r}")
            raise PeerError(self.failure)
        self._generation += 1
        self._changed.notify_all()

    def _fail(self, message: str) -> None:
        if self.failure is None:
            self.failure = message
            self._changed.notify_all()


class ThreadCommunicator(QueuedCommunicator):
    """One rank of a :class:`ThreadGroup`."""

    transport = "threads"

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(rank, group.size)
        self.threads = group
        self.world = World(rank, group.size, rank, group.size, "threads")

    def abort(self, reason: str) -> None:
        if self.root is self:
            self.threads.leave(self.rank, f"stopped: {reason}", failed=True)
        else:
            self.root.abort(reason)

    def gone(self) -> frozenset[int]:
        return self.threads.gone()

    def open_windows(self, nbytes: int) -> Windows:
        return ThreadWindows(nbytes, lambda own: self.threads.meet(self.rank, "windows", own))

    def _reduce_scatter(self, request: CollectiveRequest) -> None:
        arrays: list[Array] = self.threads.meet(self.rank, request.shown, request.array)
        # Each rank reduces one part, into its own array: nobody else reads or writes that part.
        part = slice(*request.parts[self.rank])
        reduce_part(request, self.rank, [other[part].copy() for other in arrays], self._add_up)
        self.threads.meet(self.rank, request.shown, None)

    def _all_gather(self, request: CollectiveRequest) -> None:
        arrays = self.threads.meet(self.rank, request.shown, request.array)
        for rank, (start, stop) in enumerate(request.parts):
            if rank != self.rank:
                request.array[start:stop] = arrays[rank][start:stop]
        self.threads.meet(self.rank, request.shown, None)

    def _broadcast(self, request: CollectiveRequest) -> None:
        arrays = self.threads.meet(self.rank, request.shown, request.array)
        if self.rank != request.root:
            request.array[:] = arrays[request.root]
        self.threads.meet(self.rank, request.shown, None)

    def _all_to_all(self, request: CollectiveRequest) -> None:
        each = request.array.size // self.size
        mine = slice(self.rank * each, (self.rank + 1) * each)
        arrays = self.threads.meet(self.rank, request.shown, request.array)
        received = np.concatenate([array[mine] for array in arrays])
        self.threads.meet(self.rank, request.shown, None)
        request.array[:] = received

    def _subgroup(self, members: Sequence[int], index: int) -> ThreadCommunicator:
        return self.threads.subgroup(members, index).communicators[members.index(self.rank)]

    def _gather(self, data: bytes) -> list[bytes]:
        return self.threads.meet(self.rank, "allgather_object", data)

    def _barrier(self) -> None:
        self.threads.meet(self.rank, "barrier", None)


def communicator_of(world: World) -> ThreadCommunicator:
    """The communicator of the calling worker thread.

    Raises:
        WorldError: not called inside :func:`run_threads`.
    """
    found = _COMMUNICATOR.get()
    if found is None or found.world != world:
        raise WorldError(
            "there is no such worker thread here; start worker threads with graphc.distributed.threads.run_threads"
        )
    return found


def run_threads(size: int, function: Callable[[ThreadCommunicator], T], *, deadline: float | None = None) -> list[T]:
    """Run ``function(communicator)`` in ``size`` worker threads; returns the results in rank order.

    Inside, ``find_world()`` and ``open_communicator`` know the worker's own rank. When a rank raises, the others end with an
    error too, and the first cause is raised again here. So is KeyboardInterrupt. A worker that takes no notice of the failure
    for ``LEAVING`` seconds is left behind; see :func:`end_process`.
    """
    group = ThreadGroup(size, deadline=deadline)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(communicator: ThreadCommunicator) -> None:
        THREAD_WORLD.set(communicator.world)
        _COMMUNICATOR.set(communicator)
        try:
            results[communicator.rank] = function(communicator)
            communicator.close()  # runs collectives that were never waited for
        except BaseException as error:
            errors.append(error)
            group.leave(communicator.rank, f"failed: {describe_error(error)[0]}", failed=True)
        else:
            group.leave(communicator.rank, "ended its program", failed=False)
        finally:
            communicator.close()

    threads = [
        threading.Thread(target=contextvars.Context().run, args=(work, c), name=f"{_THREADS}{c.rank}", daemon=True)
        for c in group.communicators
    ]
    try:
        for thread in threads:
            thread.start()
        _join(threads, group)
    except KeyboardInterrupt:
        group.fail("the run was interrupted")
        _join(threads, group)
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return results


def _join(threads: list[threading.Thread], group: ThreadGroup) -> None:
    """Wait for the workers; for those that still run after a failure only ``LEAVING`` seconds."""
    limit: float | None = None
    while running := [thread for thread in threads if thread.is_alive()]:
        if group.failure is not None:
            limit = limit or time.monotonic() + LEAVING
            if time.monotonic() > limit:
                return
        running[0].join(TICK)


def end_process(code: int) -> None:
    """End the process with ``code`` if a worker was left behind: the interpreter's own end would abort inside native code."""
    if any(thread.name.startswith(_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
