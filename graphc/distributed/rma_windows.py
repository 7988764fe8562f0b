"""Memory of some ranks that every rank reads and writes without their help.

Over MPI these are one-sided windows with passive targets (MPI-4, chapter 12); among threads, arrays and a lock each.

A window starts with **cells**, int64 numbers that are read and written as a whole; behind them lie bytes. Who puts bytes and
then publishes a cell is seen in that order by whoever reads the cell first. Every byte has one writer at a time, by
protocol; a writer that dies therefore holds nothing up.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

CELL = 8  # bytes
PIECE = 1 << 30  # bytes of one transfer: MPI counts in 32 bits


class Windows(ABC):
    """One rank's access to the windows of all.

    Attributes:
        memory: the bytes of this rank's own window, uint8.
    """

    memory: Array

    @abstractmethod
    def put(self, rank: int, offset: int, data: Array) -> None:
        """Write the bytes ``data`` (uint8) at ``offset`` of the window of ``rank``; ``data`` is free again on return."""

    @abstractmethod
    def get(self, rank: int, offset: int, out: Array) -> None:
        """Read bytes at ``offset`` of the window of ``rank`` into ``out`` (uint8)."""

    @abstractmethod
    def publish(self, rank: int, cell: int, values: Array) -> None:
        """Write int64 cells; whatever this rank put before, anywhere, has arrived when they can be read."""

    @abstractmethod
    def read(self, rank: int, cell: int, out: Array) -> None:
        """Read consecutive int64 cells into ``out``."""

    @abstractmethod
    def add(self, rank: int, cell: int, amount: int) -> int:
        """Add to a cell; returns what it held before. No two callers get the same answer for an ``amount`` above 0."""


class ThreadWindows(Windows):
    """Shared arrays; the lock of each makes cells whole and orders what is put before them."""

    def __init__(self, nbytes: int, share: Callable[[Any], list[Any]]) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self._windows: list[tuple[Array, threading.Lock]] = share((self.memory, threading.Lock()))

    def put(self, rank: int, offset: int, data: Array) -> None:
        self._windows[rank][0][offset : offset + data.size] = data

    def get(self, rank: int, offset: int, out: Array) -> None:
        out[:] = self._windows[rank][0][offset : offset + out.size]

    def publish(self, rank: int, cell: int, values: Array) -> None:
        memory, lock = self._windows[rank]
        with lock:
            _cells(memory, cell, values.size)[:] = values

    def read(self, rank: int, cell: int, out: Array) -> None:
        memory, lock = self._windows[rank]
        with lock:
            out[:] = _cells(memory, cell, out.size)

    def add(self, rank: int, cell: int, amount: int) -> int:
        memory, lock = self._windows[rank]
        with lock:
            before = int(_cells(memory, cell, 1)[0])
            _cells(memory, cell, 1)[0] = before + amount
            return before


def _cells(memory: Array, cell: int, count: int) -> Array:
    found: Array = memory[cell * CELL : (cell + count) * CELL].view(np.int64)
    return found


class MpiWindows(Windows):
    """MPI windows, open to everyone from the first to the last moment (``MPI_Win_lock_all``).

    Cells are read and written by accumulate operations, which are atomic for each element; bytes by ``MPI_Put`` and
    ``MPI_Get``, ended by a flush. On one machine Open MPI does all of it by loads and stores in shared memory: nobody has to
    answer, not even a process that is stopped.
    """

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        self._mpi = mpi
        self._window = mpi.Win.Allocate(nbytes, 1, mpi.INFO_NULL, comm)
        self.memory = np.frombuffer(self._window.tomemory() if nbytes else bytearray(), np.uint8)
        self._window.Lock_all(self._mpi.MODE_NOCHECK)
        self.memory[:] = 0
        self._window.Sync()
        comm.Barrier()
        self._scratch = np.zeros(1, np.int64)

    def put(self, rank: int, offset: int, data: Array) -> None:
        for start in range(0, data.size, PIECE):
            part = data[start : start + PIECE]
            self._window.Put([part, self._mpi.BYTE], rank, [offset + start, part.size, self._mpi.BYTE])
        self._window.Flush_local(rank)

    def get(self, rank: int, offset: int, out: Array) -> None:
        for start in range(0, out.size, PIECE):
            part = out[start : start + PIECE]
            self._window.Get([part, self._mpi.BYTE], rank, [offset + start, part.size, self._mpi.BYTE])
        self._window.Flush(rank)

    def publish(self, rank: int, cell: int, values: Array) -> None:
        kind = self._mpi.INT64_T
        self._window.Flush_all()
        self._window.Sync()
        self._window.Accumulate([values, kind], rank, [cell * CELL, values.size, kind], self._mpi.REPLACE)
        self._window.Flush(rank)

    def read(self, rank: int, cell: int, out: Array) -> None:
        kind = self._mpi.INT64_T
        if self._scratch.size < out.size:
            self._scratch = np.zeros(out.size, np.int64)
        origin = [self._scratch[: out.size], kind]
        self._window.Get_accumulate(origin, [out, kind], rank, [cell * CELL, out.size, kind], self._mpi.NO_OP)
        self._window.Flush(rank)
        self._window.Sync()

    def add(self, rank: int, cell: int, amount: int) -> int:
        before = np.zeros(1, np.int64)
        self._window.Fetch_and_op(np.array([amount]), before, rank, cell * CELL, self._mpi.SUM)
        self._window.Flush(rank)
        return int(before[0])
