"""Records a timeline of all ranks' training steps for Chrome and Perfetto.

The format is the Trace Event Format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete
events (``ph`` X) with ``ts`` and ``dur`` in microseconds; each rank is a process whose thread 0 computes and whose thread 1
communicates.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from graphc.atomic_files import whole_file
from graphc.device import Run
from graphc.distributed.communicator import Communicator, Handle
from graphc.errors import UsageError

COMPUTE = frozenset({"segment", "kernel", "update"})
"""Kinds of plan steps that can overlap communication."""

COMPUTING, COMMUNICATING = 0, 1
"""Thread numbers of a rank in the trace."""

Interval = tuple[float, float]


class Span(NamedTuple):
    """An activity from ``start`` to ``stop``, in seconds of a rank's clock.

    ``kind`` is a plan step's kind, ``step`` or ``collective``; ``nbytes`` is the size of a collective's buffers.
    """

    kind: str
    name: str
    start: float
    stop: float
    nbytes: int = 0


@dataclass(slots=True)
class Lanes:
    """Recording of one rank: training steps, their plan steps, and the collectives running beside them.

    Attributes:
        shift: seconds to add to its clock to get rank 0's.
    """

    computing: list[Span] = field(default_factory=list)
    communicating: list[Span] = field(default_factory=list)
    shift: float = 0.0

    def spans(self, kinds: Iterable[str]) -> list[Interval]:
        wanted = frozenset(kinds)
        return [(s.start, s.stop) for s in self.computing if s.kind in wanted]


@dataclass(frozen=True, slots=True)
class Summary:
    """Communication time hidden behind computation; milliseconds per step, means over the ranks.

    Attributes:
        in_flight: a collective was running: moving data, or waiting for the slowest rank.
        waited: the rank was idle, waiting for a collective.
        hidden: the part of ``in_flight`` during which the rank computed.
    """

    steps: int
    in_flight: float
    waited: float
    hidden: float

    @property
    def hidden_percent(self) -> float:
        """Hidden share of the communication, 0 … 100; 0 without communication."""
        return 100.0 * self.hidden / self.in_flight if self.in_flight else 0.0

    def __str__(self) -> str:
        if not self.in_flight:
            return f"communication: none in {self.steps} traced steps"
        return (
            f"communication: {self.in_flight:.2f} ms a step in flight, {self.waited:.2f} ms waited for,"
            f" {self.hidden_percent:.0f} % hidden behind computation"
        )


class Trace:
    """Records training steps of one rank; rank 0 writes those of all ranks into one file.

    Args:
        path: the file that rank 0 writes.
        steps: number of training steps to record; later steps cost nothing.

    Raises:
        UsageError: the file's folder does not exist.
    """

    def __init__(self, path: str | Path, *, steps: int = 200) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise UsageError(f"trace {path}: there is no folder {self.path.absolute().parent}")
        self.lanes = Lanes()
        self._steps = steps
        self._begun = 0
        self._active = False
        self._end = math.inf  # activities that begin later are not recorded

    def watch(self, comm: Communicator) -> None:
        """Record the collectives of ``comm``."""
        comm.observer = self._observe

    def wrap(self, kind: str, name: str, run: Run) -> Run:
        """Wrap ``run`` so that it is recorded during recorded training steps."""
        record, clock = self.lanes.computing.append, time.monotonic

        def traced() -> None:
            if not self._active:
                run()
                return
            start = clock()
            run()
            record(Span(kind, name, start, clock()))

        return traced

    def step(self, number: int, run: Run) -> None:
        """Run training step ``number``; record it unless enough steps are recorded."""
        if self._begun >= self._steps:
            self._end = min(self._end, time.monotonic())
            run()
            return
        self._begun += 1
        self._active = True
        start = time.monotonic()
        try:
            run()
        finally:
            self._active = False
            self.lanes.computing.append(Span("step", f"step {number}", start, time.monotonic()))

    def write(self, comm: Communicator) -> Summary:
        """Gather all ranks' recordings, write the file on rank 0 and summarise; every rank calls this.

        Raises:
            UsageError: on rank 0, when the file cannot be written.
        """
        comm.barrier()  # queued behind all collectives, so all of them have been reported
        comm.observer = None
        inside = [(s.start, s.stop) for s in self.lanes.computing if s.kind == "step"]
        self.lanes.communicating = [s for s in self.lanes.communicating if overlap([(s.start, s.stop)], inside) > 0]
        self.lanes.shift = _clock_shift(comm)
        everyone = comm.allgather_object((self.lanes.computing, self.lanes.communicating, self.lanes.shift))
        lanes = [Lanes([Span(*s) for s in own], [Span(*s) for s in sent], shift) for own, sent, shift in everyone]
        if comm.rank == 0:
            write_events(self.path, lanes)
        return summarise(lanes)

    def _observe(self, handle: Handle) -> None:
        if handle.since < self._end:
            self.lanes.communicating.append(Span("collective", handle.what, handle.since, handle.until, handle.nbytes))


def summarise(lanes: Sequence[Lanes]) -> Summary:
    """Summarise the recordings of all ranks."""
    steps = sum(s.kind == "step" for s in lanes[0].computing)
    in_flight = waited = hidden = 0.0
    for rank in lanes:
        flying = [(s.start, s.stop) for s in rank.communicating]
        in_flight += overlap(flying, flying)
        hidden += overlap(flying, rank.spans(COMPUTE))
        waited += sum(stop - start for start, stop in rank.spans({"wait"}))
    unit = 1e3 / max(1, steps * len(lanes))
    return Summary(steps, in_flight * unit, waited * unit, hidden * unit)


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Seconds covered by both lists; overlapping intervals within a list count once."""
    a, b = _merged(first), _merged(second)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def trace_events(lanes: Sequence[Lanes]) -> dict[str, Any]:
    """Build the trace events of the file; time 0 is the first recorded activity of any rank."""
    starts = [s.start + rank.shift for rank in lanes for s in (*rank.computing, *rank.communicating)]
    origin = min(starts, default=0.0)
    events: list[Mapping[str, Any]] = []
    for number, rank in enumerate(lanes):
        events.append(_name("process_name", number, 0, f"rank {number}"))
        events.append(_name("thread_name", number, COMPUTING, "compute"))
        events.append(_name("thread_name", number, COMMUNICATING, "communication"))
        for thread, spans in ((COMPUTING, rank.computing), (COMMUNICATING, rank.communicating)):
            for span in sorted(spans, key=lambda s: (s.start, -s.stop)):
                start, duration = (span.start + rank.shift - origin) * 1e6, (span.stop - span.start) * 1e6
                common = {"ph": "X", "pid": number, "tid": thread, "ts": round(start, 3), "dur": round(duration, 3)}
                sizes = {"args": {"bytes": span.nbytes}} if span.nbytes else {}
                events.append({"name": span.name, "cat": span.kind, **common, **sizes})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, rank: int, thread: int, text: str) -> Mapping[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": text}}


def _clock_shift(comm: Communicator) -> float:
    """Seconds to add to this rank's clock to get rank 0's: 0 on one machine, else estimated from the ends of barriers."""
    ends = []
    for _ in range(9):
        comm.barrier()
        ends.append(time.monotonic())
    machine, theirs = comm.allgather_object((_machine(), ends))[0]
    return 0.0 if machine == _machine() else statistics.median(a - b for a, b in zip(theirs, ends, strict=True))


def _machine() -> str:
    """Identify the monotonic clock: equal for processes that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def write_events(path: Path, lanes: Sequence[Lanes]) -> None:
    """Write the recordings of all ranks as a file of trace events.

    Raises:
        UsageError: the file cannot be written.
    """
    content = trace_events(lanes)
    try:
        with whole_file(path) as file:
            file.write(json.dumps(content, separators=(",", ":")).encode())
    except OSError as error:
        raise UsageError(f"cannot write the trace {str(path)!r}: {error.strerror or error}") from error
