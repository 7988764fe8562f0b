"""The flight recorder: keeps the last 256 collectives of every rank, also after the rank has died.

A ring buffer of fixed entries; recording a collective takes about a microsecond. Over MPI the buffers lie on the status board
(:mod:`graphc.distributed.health.status_board`), so any worker of the machine, or the launcher, can read what a stopped or
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
from typing import Any, Protocol

from graphc.atomic_files import open_regular, replace_regular
from graphc.errors import GraphcError

ENTRIES = 256
FLIGHT_DIR = "GRAPHC_FLIGHT_DIR"
"""Environment variable: folder for the logs; by default the working directory."""

CODES = (
    *("other", "allreduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "allgather_object", "join"),
    *("reduce", "all_to_all", "send", "recv"),
)
REDUCES = ("", "sum", "mean", "min", "max", "prod", "tree", "adasum")
_CODE = {kind: code for code, kind in enumerate(CODES)}
_REDUCE = {op: code for code, op in enumerate(REDUCES)}
_ENTRY = struct.Struct("<qqqqddQBBI72s")  # number, sequence, step, bytes, start, end, communicator, kind, op, trace, tag
_PRIME, _FACTOR = 4_294_967_291, 1_000_003  # of the traces: a polynomial over the digests of the collectives
_END = struct.Struct("<d")
_END_OFFSET = struct.calcsize("<qqqqd")
SUBGROUPS = 1 << 32
"""Numbers of communicators from which on they are subgroups: the number of the world's, and below it that of the subgroup."""
RECORDER_SIZE = ENTRIES * _ENTRY.size


class Collective(Protocol):
    """What is recorded of a collective, besides when it ran."""

    kind: str
    op: str
    tag: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective of one rank.

    Attributes:
        number: counts all collectives of the rank, from 1.
        communicator: number of the communicator in the process, in the order of opening.
        sequence: counts the collectives of the communicator, from 1; equal on all ranks for the same collective.
        step: training step, from 0; -1 before the first.
        kind: ``allreduce``, ``barrier`` …; ``join`` is entering the world.
        op: the reduction, or empty.
        nbytes: size of this rank's array.
        start: ``time.monotonic()`` in seconds when the rank reached it.
        end: when it ended; None while it is under way.
        trace: checksum of this and all earlier collectives of the communicator, equal on ranks that ran the same ones; 0 where
            some were not recorded.
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
        """Communicator and sequence number: equal on all ranks for the same collective."""
        return self.communicator, self.sequence

    def differs_from(self, other: Entry) -> bool:
        """Whether ``other``, of another rank, is a different collective at the same place."""
        mine, its = (_shared(e.kind, e.op, e.tag, e.nbytes) for e in (self, other))
        return self.place == other.place and mine != its

    def diverged_from(self, other: Entry) -> bool:
        """Whether ``other``, of another rank, is at the same place but earlier collectives of the two differed."""
        return self.place == other.place and 0 not in (self.trace, other.trace) and self.trace != other.trace


def _shared(kind: str, op: str, tag: str, nbytes: int) -> tuple[str, str, str, int]:
    """What the entries of all ranks of a collective have in common: one end of a channel sends, the other receives."""
    return "send" if kind == "recv" else kind, op, tag, nbytes


class FlightRecorder:
    """The entries of one rank, stored in ``memory`` from ``offset``; several threads may write."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, offset: int = 0) -> None:
        self._memory = bytearray(RECORDER_SIZE) if memory is None else memory
        self._offset = offset
        self._count = 0
        self._lock = threading.Lock()
        self._encoded: dict[tuple[str, str, str, int], tuple[int, int, bytes, int]] = {}
        self._traces: dict[int, tuple[int, int]] = {}  # by communicator: sequence and trace of the newest

    def begin(self, communicator: int, sequence: int, step: int, collective: Collective, now: float) -> int:
        """Record the start of a collective; returns its offset, for ``end``."""
        kind, op, tag, nbytes = collective.kind, collective.op, collective.tag, collective.nbytes
        code, reduce, name, digest = self._encoded.get((kind, op, tag, nbytes)) or self._encode(kind, op, tag, nbytes)
        with self._lock:
            last, trace = self._traces.get(communicator, (0, 1))
            trace = (trace * _FACTOR + digest) % _PRIME if trace and sequence == last + 1 else 0  # see Entry.trace
            self._traces[communicator] = sequence, trace
            place = self._offset + self._count % ENTRIES * _ENTRY.size
            self._count += 1
            values = self._count, sequence, step, nbytes, now, 0.0, communicator, code, reduce, trace, name
            _ENTRY.pack_into(self._memory, place, *values)
        return place

    def _encode(self, kind: str, op: str, tag: str, nbytes: int) -> tuple[int, int, bytes, int]:
        """The fields that are the same each time a collective runs."""
        name = tag.encode("utf-8", "replace")
        digest = 1 + zlib.crc32(repr(_shared(kind, op, tag, nbytes)).encode())
        encoded = self._encoded[kind, op, tag, nbytes] = _CODE.get(kind, 0), _REDUCE[op], name, digest
        return encoded

    def end(self, place: int, now: float) -> None:
        """Record the end of the collective at offset ``place``."""
        _END.pack_into(self._memory, place + _END_OFFSET, now)

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        found = [entry for entry in map(self._read, range(ENTRIES)) if entry is not None]
        return sorted(found, key=lambda entry: entry.number)

    def newest(self, count: int) -> Iterator[Entry]:
        """The last ``count`` entries that this object wrote, newest first."""
        found = map(self.find, range(self._count, max(0, self._count - count), -1))
        return (entry for entry in found if entry is not None)

    def find(self, number: int) -> Entry | None:
        """The entry with this number, unless it has been overwritten."""
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
        rank, size: of the world.
        reason: how the run ended.
        offset: seconds to add to the times of the entries to get seconds since 1970; clocks of machines differ.
    """

    rank: int
    size: int
    reason: str
    offset: float
    entries: list[Entry]


def last_of(entries: Sequence[Entry], communicator: int) -> Entry | None:
    """The newest entry of a communicator."""
    return next((entry for entry in reversed(entries) if entry.communicator == communicator), None)


def has_reached(entries: Sequence[Entry], wanted: Entry) -> bool:
    """Whether the rank with these ``entries`` has reached the collective ``wanted`` of another rank."""
    last = last_of(entries, wanted.communicator)
    return last is not None and last.sequence >= wanted.sequence


def counterpart(entries: Sequence[Entry], wanted: Entry) -> Entry | None:
    """The entry of another rank at the place of ``wanted``."""
    return next((entry for entry in reversed(entries) if entry.place == wanted.place), None)


def run_stamp() -> str:
    """A name for this run: the time and the process id."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def dump(logs: Mapping[int, Sequence[Entry]], size: int, reason: str, stamp: str = "") -> str:
    """Write the logs of some ranks to files; returns a text that says where; never raises.

    Args:
        logs: entries by rank; ranks without entries are left out.
        size: number of ranks of the world.
        reason: how the run ended.
        stamp: names the run; by default :func:`run_stamp`. The folder is ``graphc-flight-STAMP`` in ``GRAPHC_FLIGHT_DIR``, else
            in the working directory, else in the folder for temporary files.
    """
    flights = [
        RankLog(rank, size, reason, time.time() - time.monotonic(), list(entries)) for rank, entries in logs.items() if entries
    ]
    if not flights:
        return ""
    problem = ""
    for place in dict.fromkeys((os.environ.get(FLIGHT_DIR) or os.getcwd(), tempfile.gettempdir())):
        folder = Path(place) / f"graphc-flight-{stamp or run_stamp()}"
        try:
            for flight in flights:
                _write(folder, flight)
            return f"flight logs: {folder} ('graphc show flight {folder}' compares them)"
        except OSError as error:
            problem = f"the flight logs could not be written to {folder}: {error.strerror or error}"
    return problem


def load(path: Path) -> list[RankLog]:
    """Read the log in a file, or all logs in a folder.

    Raises:
        GraphcError: there is none, or a file is not a log.
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
        replace_regular(temporary, folder / f"rank-{flight.rank}.json")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read(file: Path) -> RankLog:
    try:
        with open_regular(file) as held:
            fields: dict[str, Any] = json.load(held)
        return RankLog(**{**fields, "entries": [Entry(**entry) for entry in fields["entries"]]})
    except OSError as error:
        raise GraphcError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise GraphcError(f"{file} is not a flight log: {error}") from None
