"""The flight recorder: the last 256 collectives of every rank, in memory that outlives the rank.

A ring of fixed entries, written in place: about a microsecond a collective. Over MPI the rings lie on the notice board
(:mod:`graphc.distributed.health.status_board`), so that any worker of the machine, or the launcher, can read what a stopped or
killed rank was doing. When a run fails they are written to files, which ``graphc show flight`` compares.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphc.errors import GraphcError

ENTRIES = 256
FLIGHT_DIR = "GRAPHC_FLIGHT_DIR"
"""Environment variable: where logs are written; the working directory by default."""

CODES = ("other", "allreduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "allgather_object", "join")
REDUCES = ("", "sum", "mean", "min", "max", "prod", "tree", "adasum")
_CODE = {kind: code for code, kind in enumerate(CODES)}
_REDUCE = {op: code for code, op in enumerate(REDUCES)}
_ENTRY = struct.Struct("<qqqqddHBBI72s")  # number, sequence, step, bytes, start, end, communicator, kind, op, trace, tag
_PRIME, _FACTOR = 4_294_967_291, 1_000_003  # of the traces: a polynomial over the digests of the collectives
_END = struct.Struct("<d")
_END_OFFSET = struct.calcsize("<qqqqd")
RING_SIZE = ENTRIES * _ENTRY.size


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective of one rank.

    Attributes:
        number: counts all collectives of the rank, from 1.
        communicator: which communicator of the process, in the order in which they were opened.
        sequence: counts those of the communicator, from 1; equal on all ranks for the same collective.
        step: of the training, from 0; -1 before it.
        kind: ``allreduce``, ``barrier`` …; ``join`` is the entry into the world.
        op: the reduction, or empty.
        nbytes: of this rank's array.
        start: ``time.monotonic()`` in seconds when the rank came to it.
        end: when it was done; None while it is not.
        trace: checksum of this collective and all before it of the communicator, equal on all ranks that did the same; 0 where
            not every collective was noted.
    """

    number: int
    communicator: int
    sequence: int
    step: int
    kind: str
    op: str
    tag: str
    nbytes: int
    start: float
    end: float | None
    trace: int = 0

    @property
    def what(self) -> str:
        """``allreduce(mean) 'bucket0' of step 12 (4194304 bytes)``."""
        text = f"{self.kind}({self.op})" if self.op else self.kind
        text += f" {self.tag!r}" if self.tag else ""
        text += f" of step {self.step}" if self.step >= 0 else " before the first step"
        return text + (f" ({self.nbytes} bytes)" if self.nbytes else "")

    @property
    def place(self) -> tuple[int, int]:
        """What is the same on all ranks for one collective: the communicator and the place in its sequence."""
        return self.communicator, self.sequence

    def contradicts(self, other: Entry) -> bool:
        """Whether ``other`` of another rank stands at the same place and is another collective."""
        mine, its = (self.kind, self.op, self.tag, self.nbytes), (other.kind, other.op, other.tag, other.nbytes)
        return self.place == other.place and mine != its

    def has_parted(self, other: Entry) -> bool:
        """Whether ``other`` of another rank stands at the same place, and the two did not do the same until there."""
        return self.place == other.place and 0 not in (self.trace, other.trace) and self.trace != other.trace


class Ring:
    """The entries of one rank inside ``memory`` from ``offset``; several threads may write."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, offset: int = 0) -> None:
        self._memory = bytearray(RING_SIZE) if memory is None else memory
        self._offset = offset
        self._count = 0
        self._lock = threading.Lock()
        self._words: dict[tuple[str, str, str, int], tuple[int, int, bytes, int]] = {}
        self._traces: dict[int, tuple[int, int]] = {}  # by communicator: sequence and trace of the newest

    def begin(self, communicator: int, sequence: int, step: int, kind: str, op: str, tag: str, nbytes: int, now: float) -> int:
        """Note the start of a collective; returns its place, for ``end``."""
        code, reduce, name, digest = self._words.get((kind, op, tag, nbytes)) or self._note(kind, op, tag, nbytes)
        with self._lock:
            last, trace = self._traces.get(communicator, (0, 1))
            trace = (trace * _FACTOR + digest) % _PRIME if trace and sequence == last + 1 else 0  # see Entry.trace
            self._traces[communicator] = sequence, trace
            place = self._offset + self._count % ENTRIES * _ENTRY.size
            self._count += 1
            values = self._count, sequence, step, nbytes, now, 0.0, communicator, code, reduce, trace, name
            _ENTRY.pack_into(self._memory, place, *values)
        return place

    def _note(self, kind: str, op: str, tag: str, nbytes: int) -> tuple[int, int, bytes, int]:
        """What is written of a collective each time."""
        name = tag.encode("utf-8", "replace")
        digest = 1 + zlib.crc32(repr((kind, op, tag, nbytes)).encode())
        words = self._words[kind, op, tag, nbytes] = _CODE.get(kind, 0), _REDUCE[op], name, digest
        return words

    def end(self, place: int, now: float) -> None:
        """Note the end of the collective at ``place``."""
        _END.pack_into(self._memory, place + _END_OFFSET, now)

    def entries(self) -> list[Entry]:
        """What the ring holds, oldest first."""
        found = [entry for entry in map(self._read, range(ENTRIES)) if entry is not None]
        return sorted(found, key=lambda entry: entry.number)

    def newest(self, count: int) -> Iterator[Entry]:
        """The last ``count`` entries that this object wrote, newest first."""
        found = map(self.find, range(self._count, max(0, self._count - count), -1))
        return (entry for entry in found if entry is not None)

    def find(self, number: int) -> Entry | None:
        """The entry of that number, while it is there."""
        entry = self._read((number - 1) % ENTRIES)
        return entry if entry is not None and entry.number == number else None

    def _read(self, index: int) -> Entry | None:
        values = _ENTRY.unpack_from(self._memory, self._offset + index * _ENTRY.size)
        number, sequence, step, nbytes, start, end, communicator, kind, op, trace, tag = values
        if not number or kind >= len(CODES) or op >= len(REDUCES):
            return None
        name = tag.rstrip(b"\0").decode("utf-8", "replace")
        return Entry(number, communicator, sequence, step, CODES[kind], REDUCES[op], name, nbytes, start, end or None, trace)


@dataclass(frozen=True, slots=True)
class RankLog:
    """The log of one rank.

    Attributes:
        rank: of ``size``.
        reason: how the run ended, in words.
        offset: seconds to add to the times of the entries for seconds since 1970: clocks of machines differ.
    """

    rank: int
    size: int
    reason: str
    offset: float
    entries: list[Entry]


def last_of(entries: Sequence[Entry], communicator: int) -> Entry | None:
    """The newest entry of a communicator."""
    return next((entry for entry in reversed(entries) if entry.communicator == communicator), None)


def arrived(entries: Sequence[Entry], wanted: Entry) -> bool:
    """Whether the rank with these ``entries`` has come to the collective ``wanted`` of another rank."""
    last = last_of(entries, wanted.communicator)
    return last is not None and last.sequence >= wanted.sequence


def counterpart(entries: Sequence[Entry], wanted: Entry) -> Entry | None:
    """The entry at the place of ``wanted`` in the sequence of another rank."""
    return next((entry for entry in reversed(entries) if entry.place == wanted.place), None)


def dump(rings: Mapping[int, Sequence[Entry]], size: int, stamp: str, reason: str) -> str:
    """Write the logs of some ranks to files; returns words about where they are, never raises.

    Args:
        rings: entries by rank; ranks without any are left out.
        size: of the world.
        stamp: names the run; the folder is ``graphc-flight-STAMP`` in ``GRAPHC_FLIGHT_DIR``, else in the working directory,
            else where temporary files go.
    """
    flights = [
        RankLog(rank, size, reason, time.time() - time.monotonic(), list(entries)) for rank, entries in rings.items() if entries
    ]
    if not flights:
        return ""
    problem = ""
    for place in dict.fromkeys((os.environ.get(FLIGHT_DIR) or os.getcwd(), tempfile.gettempdir())):
        folder = Path(place) / f"graphc-flight-{stamp}"
        try:
            for flight in flights:
                _write(folder, flight)
            return f"flight logs: {folder} ('graphc show flight {folder}' compares them)"
        except OSError as error:
            problem = f"the flight logs could not be written to {folder}: {error.strerror or error}"
    return problem


def load(path: Path) -> list[RankLog]:
    """The log in a file, or all logs in a folder.

    Raises:
        GraphcError: there is none, or it is no log.
    """
    files = sorted(path.glob("rank-*.json")) if path.is_dir() else [path]
    if not files:
        raise GraphcError(f"there are no flight logs (rank-*.json) in {path}")
    return [_read(file) for file in files]


def _write(folder: Path, flight: RankLog) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".rank-{flight.rank}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(asdict(flight)))
        os.replace(temporary, folder / f"rank-{flight.rank}.json")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read(file: Path) -> RankLog:
    try:
        fields: dict[str, Any] = json.loads(file.read_text())
        return RankLog(**{**fields, "entries": [Entry(**entry) for entry in fields["entries"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GraphcError(f"{file} is no flight log: {error}") from None
