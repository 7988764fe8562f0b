"""The status board: the state of each worker of one machine, and why it failed.

A file with one slot and one flight recorder per rank, mapped into every worker. A worker writes only its own slot, and the
state byte last, so a reader never sees half an update. It survives ``kill -9``, since the kernel owns the mapping.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from graphc.distributed.health.flight_recorder import RECORDER_SIZE, FlightRecorder, run_stamp
from graphc.errors import WorldError

_SLOT = 4096
_STAMP = 64
_PID = struct.Struct("<i")  # as the launcher found it, behind the state
_HEAD = struct.Struct("<qdqq")  # pid, time, exit code, length of the text


class RankState(enum.IntEnum):
    """The state a worker has written."""

    ABSENT = 0
    RUNNING = 1
    LEFT = 2
    FAILED = 3
    STOPPED = 4
    """Ended because another worker is gone."""
    SPARE = 5
    """Running; the others can continue without it."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One slot: state, process id (0: unknown), ``time.monotonic()`` of the last change in seconds, exit code and text."""

    state: RankState
    pid: int
    time: float
    code: int
    text: str

    def label(self, rank: int) -> str:
        """The worker in messages: by the name it gave itself, if any, while it runs."""
        if self.state in (RankState.RUNNING, RankState.SPARE) and self.text:
            return f"{self.text} (rank {rank}, pid {self.pid})"
        return f"rank {rank} (pid {self.pid})" if self.pid else f"rank {rank}"


class StatusBoard:
    """The board in the file ``path`` with a slot for each of ``size`` ranks."""

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(descriptor, _length(size))
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise WorldError(f"cannot open the status board of the workers {str(path)!r}: {error}") from None

    @classmethod
    def create(cls, path: Path, size: int) -> StatusBoard:
        """Make an empty board of the file ``path``, which need not exist."""
        with open(path, "wb") as file:
            file.truncate(_length(size))
        board = cls(path, size)
        stamp = run_stamp()
        board._map[-_STAMP : len(stamp) - _STAMP] = stamp.encode()
        return board

    @property
    def stamp(self) -> str:
        """The name of the run, the same for all workers on the board."""
        return self._map[-_STAMP:].rstrip(b"\0").decode()

    def recorder(self, rank: int) -> FlightRecorder:
        """The flight recorder of ``rank``."""
        return FlightRecorder(self._map, self.size * _SLOT + rank * RECORDER_SIZE)

    def announce(self, rank: int, pid: int) -> None:
        """Set the process id of a rank that has not written its own."""
        _PID.pack_into(self._map, rank * _SLOT + _PID.size, pid)

    def write(self, rank: int, state: RankState, *, text: str = "", code: int = 0, pid: int | None = None) -> None:
        """Set the status of ``rank``; a failure is never overwritten by what follows from it."""
        if self.read(rank).state in (RankState.FAILED, RankState.STOPPED):
            return
        start = rank * _SLOT
        data = text.encode("utf-8", "replace")[: _SLOT - 8 - _HEAD.size]
        head = _HEAD.pack(os.getpid() if pid is None else pid, time.monotonic(), code, len(data))
        self._map[start + 8 : start + 8 + len(head) + len(data)] = head + data
        self._map[start] = int(state)

    def read(self, rank: int) -> RankStatus:
        """The status of ``rank``."""
        start = rank * _SLOT
        state = RankState(self._map[start])
        pid, when, code, length = _HEAD.unpack_from(self._map, start + 8)
        body = start + 8 + _HEAD.size
        (announced,) = _PID.unpack_from(self._map, start + _PID.size)
        return RankStatus(state, pid or announced, when, code, self._map[body : body + length].decode("utf-8", "replace"))

    def statuses(self) -> list[RankStatus]:
        """The status of every rank, in rank order."""
        return [self.read(rank) for rank in range(self.size)]

    def close(self) -> None:
        self._map.close()


def _length(size: int) -> int:
    return size * (_SLOT + RECORDER_SIZE) + _STAMP
