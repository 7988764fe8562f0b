"""Collectives over TCP through rank 0, for launchers that set ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` but not MPI.

Enough for objects and small arrays beside NCCL. Large arrays are slow, since every byte passes through rank 0: an AllReduce of
n bytes over N ranks moves 4 N n. MPI is the fast transport between hosts.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Sequence

import numpy as np

from graphc.distributed.communicator import CollectiveRequest
from graphc.distributed.health.watchdog import watch_peers
from graphc.distributed.host_queue import ProcessCommunicator, reduce_part
from graphc.distributed.reductions import Array
from graphc.distributed.tcp_store.client import Store
from graphc.distributed.tcp_store.job_secret import LOOPBACK, is_loopback, job_secret, listening_place, meeting_place
from graphc.distributed.world import World
from graphc.errors import UsageError, describe_error

_store: Store | None = None
_numbers = itertools.count(1)


def open_tcp(world: World, deadline: float) -> TcpCommunicator:
    """Join the ranks that meet at ``MASTER_ADDR:MASTER_PORT``; all communicators of a process share one connection.

    Raises:
        UsageError: the environment does not say where, or names no secret for a meeting beyond the loopback.
        WorldError: rank 0 was not reached, or not all ranks came before the deadline.
    """
    global _store
    communicator = TcpCommunicator(world.rank, world.size, f"{next(_numbers)}")
    communicator.deadline = deadline
    if _store is None:
        _store = _join(world, communicator.deadline)
        atexit.register(_store.close)
    communicator.store = _store
    communicator.watchdog = watch_peers(communicator, world)
    communicator.watchdog.end_all = communicator.end_all
    if _store.server is not None:
        communicator.watchdog.notify = _store.server.fail
    atexit.register(communicator.leave)
    return communicator


def _join(world: World, deadline: float) -> Store:
    place = meeting_place()
    if world.rank > 0:
        return Store(world.rank, world.size, place, job_secret(place[0]), deadline)
    listens = listening_place(place)
    host = listens[0]
    if world.local_size < world.size and host not in (LOOPBACK, "localhost", "::1") and is_loopback(host):
        raise UsageError(
            f"on this machine {host} is an address of the loopback, where rank 0 cannot be reached by workers of other "
            "machines; set MASTER_ADDR to its address on their network"
        )
    return Store(0, world.size, place, job_secret(place[0], host), deadline, listens=listens)


class TcpCommunicator(ProcessCommunicator):
    """One rank of those that are connected to the store; a subgroup has a connection of its own."""

    transport = "tcp"
    store: Store

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name = name
        self._exchanges = itertools.count()

    def abort(self, reason: str) -> None:
        error = sys.exception()
        if self.watchdog is not None:
            self.watchdog.fail(reason, 1 if error is None else describe_error(error)[1])
        self.store.abort(reason)

    def end_all(self, code: int) -> None:
        """Tell the others why, and end this process with exit code ``code``."""
        if self.watchdog is not None:
            self.store.abort(self.watchdog.board.read(self.rank).text)
        self.store.close()
        os._exit(code)

    def _exchange(self, what: str, pieces: Sequence[bytes | memoryview]) -> list[memoryview]:
        return self.store.exchange(f"{self._name}/{next(self._exchanges)}", what, pieces, self.deadline, self.ranks)

    def close(self) -> None:
        ends = not self._closed and self.root is not self
        super().close()
        if ends:
            self.store.close()

    def _subgroup(self, members: Sequence[int], index: int) -> TcpCommunicator:
        found = TcpCommunicator(members.index(self.rank), len(members), f"{self._name}.{index}")
        own = self.store
        found.store = Store(own.rank, own.size, own.place, own.secret, self.deadline, subgroup=True)
        return found

    def _all_to_all(self, request: CollectiveRequest) -> None:
        array, each = request.array, request.array.size // self.size
        received = self._exchange(request.shown, [_bytes(array[k * each : (k + 1) * each]) for k in range(self.size)])
        for rank, piece in enumerate(received):
            array[rank * each : (rank + 1) * each] = np.frombuffer(piece, array.dtype)

    def _reduce_scatter(self, request: CollectiveRequest) -> None:
        received = self._exchange(request.shown, [_bytes(request.array[start:stop]) for start, stop in request.parts])
        reduce_part(request, self.rank, [np.frombuffer(row, request.array.dtype) for row in received], self._add_up)

    def _all_gather(self, request: CollectiveRequest) -> None:
        array = request.array
        received = self._exchange(request.shown, [_bytes(array[slice(*request.parts[self.rank])])])
        for rank, (start, stop) in enumerate(request.parts):
            if rank != self.rank:
                array[start:stop] = np.frombuffer(received[rank], array.dtype)

    def _broadcast(self, request: CollectiveRequest) -> None:
        array, root = request.array, request.root
        received = self._exchange(request.shown, [_bytes(array) if self.rank == root else b""])
        if self.rank != root:
            array[...] = np.frombuffer(received[root], array.dtype)

    def _gather(self, data: bytes) -> list[memoryview]:
        return self._exchange("allgather_object", [data])

    def _barrier(self) -> None:
        self._exchange("barrier", [b""])


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data
