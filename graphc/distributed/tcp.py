"""Collectives over the store of rank 0, for launchers that set ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` and know no MPI.

It is what host objects and small arrays need beside NCCL, and a last resort for large ones: every byte passes through rank 0
(an AllReduce of n bytes over N ranks moves 4 N n). MPI is the fast transport between processors.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphc.distributed.health.watchdog import Watch, watch_peers
from graphc.distributed.host_queue import QueuedCommunicator
from graphc.distributed.reductions import LOW, Array, Parts, adasum_rows, combine, cuts_of, even_parts
from graphc.distributed.tcp_store import Store, meeting_place
from graphc.distributed.world import World

_store: Store | None = None
_numbers = itertools.count(1)


def open_tcp(world: World) -> TcpCommunicator:
    """Join the ranks that meet at ``MASTER_ADDR:MASTER_PORT``; a process connects once, for all its communicators.

    Raises:
        UsageError: the environment does not say where.
        WorldError: rank 0 was not reached, or not all ranks came before the deadline.
    """
    global _store
    communicator = TcpCommunicator(world)
    if _store is None:
        _store = Store(world.rank, world.size, meeting_place(), communicator.deadline)
        atexit.register(_store.close)
    communicator.store = _store
    communicator.watch = watch_peers(communicator, world)
    communicator.watch.end_all = communicator.end_all
    if _store.server is not None:
        communicator.watch.tell = _store.server.fail
    atexit.register(communicator.leave)
    return communicator


class TcpCommunicator(QueuedCommunicator):
    """One rank of those that meet at the store."""

    transport = "tcp"
    store: Store

    def __init__(self, world: World) -> None:
        super().__init__(world.rank, world.size)
        self.watch: Watch | None = None
        self._name = next(_numbers)
        self._meetings = itertools.count()

    def abort(self, reason: str) -> None:
        if self.watch is not None:
            self.watch.fail(reason)
        self.store.abort(reason)

    def end_all(self, code: int) -> None:
        """Tell the others why, and end this process with exit code ``code``."""
        if self.watch is not None:
            self.store.abort(self.watch.board.read(self.rank).text)
        self.store.close()
        os._exit(code)

    def leave(self) -> None:
        """End in good order; called when the interpreter ends."""
        self.close()
        if self.watch is not None:
            self.watch.goodbye()

    def introduce(self, name: str, *, spare: bool) -> None:
        if self.watch is not None:
            self.watch.introduce(name, spare=spare)

    def gone(self) -> frozenset[int]:
        return self.watch.lost if self.watch is not None else frozenset()

    def _meet(self, what: str, pieces: Sequence[bytes | memoryview]) -> list[memoryview]:
        return self.store.exchange(f"{self._name}/{next(self._meetings)}", what, pieces, self.deadline)

    def _reduce(self, array: Array, op: str, what: str, lengths: Sequence[int] | None) -> None:
        parts = even_parts(array.size, self.size)
        self._reduce_scatter(array, op, what, parts, lengths)
        self._all_gather(array, what, parts)

    def _reduce_scatter(self, array: Array, op: str, what: str, parts: Parts, lengths: Sequence[int] | None) -> None:
        name = f"{what} ({op} of {array.dtype}[{array.size}])"
        received = self._meet(name, [_bytes(array[start:stop]) for start, stop in parts])
        rows = [np.frombuffer(row, array.dtype) for row in received]
        mine = array[slice(*parts[self.rank])]
        if op == "adasum":
            rows = [row.astype(np.float32 if array.dtype in LOW else array.dtype) for row in rows]
            adasum_rows(rows, cuts_of(lengths or [array.size], parts[self.rank]), len(lengths or "1"), self._add_up)
            mine[...] = rows[0]
        else:
            combine(rows, op, mine)

    def _add_up(self, sums: Array) -> None:
        rows = self._meet("dot products of adasum", [_bytes(sums)])
        sums[...] = sum(np.frombuffer(row, sums.dtype) for row in rows)

    def _all_gather(self, array: Array, what: str, parts: Parts) -> None:
        received = self._meet(f"{what} of {array.dtype}[{array.size}]", [_bytes(array[slice(*parts[self.rank])])])
        for rank, (start, stop) in enumerate(parts):
            if rank != self.rank:
                array[start:stop] = np.frombuffer(received[rank], array.dtype)

    def _broadcast(self, array: Array, root: int, what: str) -> None:
        name = f"{what} from rank {root} of {array.dtype}[{array.size}]"
        received = self._meet(name, [_bytes(array) if self.rank == root else b""])
        if self.rank != root:
            array[...] = np.frombuffer(received[root], array.dtype)

    def _gather(self, item: Any) -> list[Any]:
        return [pickle.loads(text) for text in self._meet("allgather_object", [pickle.dumps(item)])]

    def _barrier(self) -> None:
        self._meet("barrier", [b""])


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data
