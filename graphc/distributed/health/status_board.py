"""The notice board of the workers of one machine: who is here, who left in good order, who failed and why.

A file of one slot and one flight recorder per rank, mapped into every worker. A worker writes only its own, and the state
byte of its slot last, so a reader never sees half a notice. It survives ``kill -9``, since the kernel owns the mapping.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from graphc.distributed.health.flight_recorder import RING_SIZE, Ring
from graphc.errors import WorldError

_SLOT = 4096
_STAMP = 64
_HEAD = struct.Struct("<qdqq")  # pid, time, exit code, length of the text


class WorkerStatus(enum.IntEnum):
    """What a worker says about itself."""

    ABSENT = 0
    RUNNING = 1
    LEFT = 2
    FAILED = 3
    STOPPED = 4
    """It stopped because another worker is gone."""
    SPARE = 5
    """Running, and the others can go on without it."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One slot: state, process id, ``time.monotonic()`` of the last change in seconds, exit code and text."""

    state: WorkerStatus
    pid: int
    time: float
    code: int
    text: str

    def called(self, rank: int) -> str:
        """What messages call the worker of this notice: by the name it gave itself while it runs, if any."""
        if self.state in (WorkerStatus.RUNNING, WorkerStatus.SPARE) and self.text:
            return f"{self.text} (rank {rank}, pid {self.pid})"
        return f"rank {rank} (pid {self.pid})"


class Board:
    """The board at ``path`` with one slot for each of ``size`` ranks."""

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(descriptor, _length(size))
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise WorldError(f"cannot open the notice board of the workers {str(path)!r}: {error}") from None

    @classmethod
    def create(cls, path: Path, size: int) -> Board:
        """Make an empty board."""
        with open(path, "xb") as file:
            file.truncate(_length(size))
        board = cls(path, size)
        stamp = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        board._map[-_STAMP : len(stamp) - _STAMP] = stamp.encode()
        return board

    @property
    def stamp(self) -> str:
        """A name for the run, the same for everyone on the board."""
        return self._map[-_STAMP:].rstrip(b"\0").decode()

    def ring(self, rank: int) -> Ring:
        """The flight recorder of ``rank``."""
        return Ring(self._map, self.size * _SLOT + rank * RING_SIZE)

    def write(self, rank: int, state: WorkerStatus, *, text: str = "", code: int = 0, pid: int | None = None) -> None:
        """Replace the notice of ``rank``; a failure stands: nothing that follows from it overwrites it."""
        if self.read(rank).state in (WorkerStatus.FAILED, WorkerStatus.STOPPED):
            return
        start = rank * _SLOT
        data = text.encode("utf-8", "replace")[: _SLOT - 8 - _HEAD.size]
        head = _HEAD.pack(os.getpid() if pid is None else pid, time.monotonic(), code, len(data))
        self._map[start + 8 : start + 8 + len(head) + len(data)] = head + data
        self._map[start] = int(state)

    def read(self, rank: int) -> Notice:
        """The notice of ``rank``."""
        start = rank * _SLOT
        state = WorkerStatus(self._map[start])
        pid, when, code, length = _HEAD.unpack_from(self._map, start + 8)
        body = start + 8 + _HEAD.size
        return Notice(state, pid, when, code, self._map[body : body + length].decode("utf-8", "replace"))

    def notices(self) -> list[Notice]:
        """All notices in rank order."""
        return [self.read(rank) for rank in range(self.size)]

    def close(self) -> None:
        self._map.close()


def _length(size: int) -> int:
    return size * (_SLOT + RING_SIZE) + _STAMP
