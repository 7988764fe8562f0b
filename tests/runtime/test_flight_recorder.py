"""The flight recorder: what it keeps, what it costs, and what its logs tell."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from graphc.cli import main
from graphc.distributed.communicator import Handle
from graphc.distributed.health.deadline import find_deadline
from graphc.distributed.health.flight_recorder import ENTRIES, FlightRecorder, dump, load
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import UsageError, WorldError


def allreduce(tag: str) -> Handle:
    return Handle(lambda: None, "allreduce", "mean", tag, 4096)


def record(recorder: FlightRecorder, sequence: int, tag: str = "b", *, ended: bool = True) -> None:
    place = recorder.begin(1, sequence, sequence - 1, allreduce(tag), float(sequence))
    if ended:
        recorder.end(place, sequence + 0.5)


def test_the_ring_keeps_the_last_256() -> None:
    recorder = FlightRecorder()
    for sequence in range(1, 301):
        record(recorder, sequence, f"bucket{sequence}", ended=sequence < 300)
    entries = recorder.entries()
    assert [entry.number for entry in entries] == list(range(301 - ENTRIES, 301))
    assert entries[0].what == "allreduce(mean) 'bucket45' of step 44 (4096 bytes)"
    assert (entries[0].start, entries[0].end, entries[-1].end) == (45.0, 45.5, None)
    assert recorder.find(44) is None
    assert [entry.tag for entry in recorder.newest(2)] == ["bucket300", "bucket299"]


def test_a_long_tag_is_cut_and_not_spilled() -> None:
    recorder = FlightRecorder()
    for sequence in (1, 2):
        record(recorder, sequence, "größe" * 40)
    assert [entry.number for entry in recorder.entries()] == [1, 2]
    assert all(entry.tag.startswith("größe" * 10) for entry in recorder.entries())


def test_a_record_costs_next_to_nothing() -> None:
    """A collective of a step takes 100 µs and more."""
    recorder = FlightRecorder()
    best = min(_seconds(recorder) for _ in range(20))
    assert best < 5e-6, f"{best * 1e9:.0f} ns a collective"


def _seconds(recorder: FlightRecorder) -> float:
    handle, start = allreduce("bucket0"), time.thread_time()
    for k in range(2000):
        recorder.end(recorder.begin(1, k, k, handle, 1.0), 2.0)
    return (time.thread_time() - start) / 2000


@pytest.mark.full
def test_logs_of_a_slow_rank(flight_logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The logs of a run in which rank 1 stays away from the third step; the command says so, and from single files too."""

    def work(comm: ThreadCommunicator) -> None:
        for comm.step in range(3):
            if (comm.rank, comm.step) == (1, 2):
                time.sleep(0.6)
            comm.wait(comm.start(np.ones(7), "mean", "bucket0"))

    with pytest.raises(WorldError, match="flight logs: ") as caught:
        run_threads(2, work, deadline=0.3)
    folder = Path(str(caught.value).partition("flight logs: ")[2].partition(" (")[0])
    assert folder.parent == flight_logs
    assert [flight.rank for flight in load(folder)] == [0, 1]
    assert main(["show", "flight", str(folder)]) == 0
    text = capfd.readouterr().out
    assert "the run ended: rank 1 did not come to allreduce(mean) 'bucket0' of step 2 (56 bytes) within 0.3 s" in text
    assert (
        "rank 1 is behind by 1: it has ended #2 allreduce(mean) 'bucket0' of step 1 (56 bytes); "
        "the front is #3 allreduce(mean) 'bucket0' of step 2 (56 bytes), where rank 0 waited" in text
    )
    assert "did not end" in text
    files = sorted(map(str, folder.glob("*.json")))
    assert main(["show", "flight", *files, "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(found["verdict"]) == 1
    assert [len(rank["entries"]) for rank in found["ranks"]] == [3, 2]
    assert main(["show", "flight", files[0]]) == 0
    assert "there is no log of rank 1" in capfd.readouterr().out


def test_logs_of_ranks_that_disagree(flight_logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorders = [FlightRecorder(), FlightRecorder()]
    for rank, recorder in enumerate(recorders):
        for sequence, tag in enumerate(("a", "b", "c" if rank else "d"), 1):
            record(recorder, sequence, tag)
    dump({rank: recorder.entries() for rank, recorder in enumerate(recorders)}, 2, "", "disagree")
    assert main(["show", "flight", str(flight_logs / "graphc-flight-disagree"), "--last", "0"]) == 0
    expected = (
        "#3: the ranks disagree: rank 0 is in allreduce(mean) 'd' of step 2 (4096 bytes) and rank 1 is in allreduce(mean) 'c'"
    )
    assert expected in capfd.readouterr().out


def test_ranks_that_parted_before_what_the_logs_hold(flight_logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorders = [FlightRecorder(), FlightRecorder()]
    for rank, recorder in enumerate(recorders):
        for sequence in range(1, 3 * ENTRIES):
            record(recorder, sequence, "other" if (rank, sequence) == (1, 8) else "b")
    dump({rank: recorder.entries() for rank, recorder in enumerate(recorders)}, 2, "", "parted")
    assert main(["show", "flight", str(flight_logs / "graphc-flight-parted"), "--last", "0"]) == 0
    expected = "the ranks disagree: ranks 0, 1 did different collectives some time before allreduce(mean) 'b' of step 511"
    assert expected in capfd.readouterr().out


@pytest.mark.parametrize("text", ["hello", '{"rank": 0}', "{}"])
def test_a_file_that_is_no_log(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    assert main(["show", "flight", str(tmp_path)]) == 1
    assert "rank-0.json is not a flight log" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_deadline_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"GRAPHC_DEADLINE is '.*', not a positive number of seconds"):
        find_deadline({"GRAPHC_DEADLINE": text})
