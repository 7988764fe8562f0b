"""The timeline: the file, what it holds of a real run on two processes, and the share of communication that is hidden."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.bench.specs import SPECS
from graphc.cli import main
from graphc.distributed.threads import run_threads
from graphc.report.trace import (
    COMMUNICATING,
    COMPUTING,
    Lanes,
    Span,
    Summary,
    Trace,
    overlap,
    summarise,
    trace_events,
    write_events,
)
from tests.cli.models import cli, write_blobs, write_mlp

pytestmark = pytest.mark.full


def check_format(trace: dict[str, Any]) -> None:
    """The Trace Event Format, as far as complete events and names go: fields, types, and nesting within a thread."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        lanes[event["pid"], event["tid"]].append(event)
    for events in lanes.values():
        open_: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_ and open_[-1] <= event["ts"] + 0.01:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.01, event  # microseconds, rounded
            open_.append(end)


def made_up() -> list[Lanes]:
    """A step of 10 s on two ranks. Rank 0: 6 s in flight, 4 of them beside computation, 2 waited. Rank 1: all waited for."""
    first = Lanes(
        [
            Span("step", "step 0", 0, 10),
            Span("segment", "forward", 0, 3),
            Span("start", "start a", 3, 3.5),
            Span("kernel", "backward", 3.5, 7),
            Span("wait", "wait a", 8, 10),
        ],
        [Span("collective", "allreduce a", 3, 5), Span("collective", "allreduce b", 5, 9)],
        shift=0.0,
    )
    second = Lanes(
        [Span("step", "step 0", 100, 110), Span("segment", "forward", 100, 104), Span("wait", "wait a", 104, 110)],
        [Span("collective", "allreduce a", 104, 110)],
        shift=-100.0,
    )
    return [first, second]


def test_the_summary_of_a_made_up_trace() -> None:
    found = summarise(made_up())
    assert found.steps == 1
    assert found.in_flight == pytest.approx((6 + 6) / 2 * 1e3)
    assert found.waited == pytest.approx((2 + 6) / 2 * 1e3)
    assert found.hidden == pytest.approx((3.5 + 0) / 2 * 1e3)  # 3.5 … 7 s of rank 0
    assert found.hidden_percent == pytest.approx(100 * 3.5 / 12)
    assert str(found) == ("communication: 6000.00 ms a step in flight, 4000.00 ms waited for, 29 % hidden behind computation")
    assert Summary(3, 0.0, 0.0, 0.0).hidden_percent == 0
    assert str(Summary(3, 0.0, 0.0, 0.0)) == "communication: none in 3 traced steps"


def test_the_file_of_a_made_up_trace() -> None:
    trace = trace_events(made_up())
    check_format(trace)
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in complete} == {0, 1}
    wait = next(e for e in complete if e["name"] == "wait a" and e["pid"] == 1)
    assert (wait["ts"], wait["dur"], wait["tid"]) == (4e6, 6e6, COMPUTING)  # on the clock of rank 0
    assert {e["tid"] for e in complete if e["cat"] == "collective"} == {COMMUNICATING}


@pytest.mark.parametrize("kind", ["device", "link", "file"])
def test_a_trace_replaces_regular_files_only(kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "trace.json", tmp_path / "target.json"
    if kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "link":
        target.write_text("old")
        path.symlink_to(target)
    else:
        path.write_text("old")
    write_events(path, [])
    assert path.is_symlink() == (kind != "file")
    if kind == "device":
        assert Path("/dev/null").is_char_device()
    else:
        assert json.loads(path.read_text()) == trace_events([])


def test_overlap_counts_time_once() -> None:
    assert overlap([(0, 2), (1, 3)], [(0.5, 1.5), (1, 10)]) == 2.5
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([], [(0, 1)]) == 0


def traced(comm: Any, path: str, out: Path, trace_steps: int = 3) -> Any:
    program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), bucket_mb=0.05)
    trace = Trace(out, steps=trace_steps)
    with graphc.Trainer(program, comm=comm, threads=1, trace=trace) as trainer:
        for step in range(5):
            x, y = SPECS["mlp"].batch(4, step * 2 + comm.rank)
            trainer.step({"input": x, "label": y})
        (executor,) = trainer.plans.training.values()
        trainer.evaluate([{"input": x, "label": y}])
        return [s.name.partition(" ")[2] for s in executor.plan.steps if s.kind == "start"], [
            (s.kind, s.name) for s in executor.plan.steps
        ]


def collectives(trace: dict[str, Any], rank: int) -> list[str]:
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, COMMUNICATING)]
    return [e["name"].partition(" ")[2] for e in sorted(events, key=lambda e: e["ts"])]


def test_what_is_recorded_is_the_plan(exported: Callable[[str], str], tmp_path: Path) -> None:
    """Three of five steps, every plan step of them, every collective of them and nothing else."""
    path, out = exported("mlp"), tmp_path / "t.json"
    results = run_threads(2, lambda comm: traced(comm, path, out))
    trace = json.loads(out.read_text())
    check_format(trace)
    for rank, (tags, plan) in enumerate(results):
        assert len(tags) >= 2
        assert collectives(trace, rank) == tags * 3
        computing = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, COMPUTING)]
        assert [(e["cat"], e["name"]) for e in computing if e["cat"] != "step"] == plan * 3
        assert [e["name"] for e in computing if e["cat"] == "step"] == ["step 0", "step 1", "step 2"]


def test_one_worker_has_nothing_to_hide(exported: Callable[[str], str], tmp_path: Path) -> None:
    program = graphc.compile(exported("mlp"), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    x, y = SPECS["mlp"].batch(4, 0)
    with graphc.Trainer(program, threads=1) as plain:
        plain.step({"input": x, "label": y})
        assert plain.comm.observer is None
        assert plain.write_trace() is None
    with graphc.Trainer(program, threads=1, trace=tmp_path / "t.json") as trainer:
        trainer.step({"input": x, "label": y})
        found = trainer.write_trace()
        assert trainer.state_sha256() == plain.state_sha256()
    assert found is not None
    assert (found.steps, found.in_flight, found.hidden_percent) == (1, 0, 0)
    check_format(json.loads((tmp_path / "t.json").read_text()))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


def line(*more: object) -> list[str]:
    loss = "softmax_cross_entropy:logits=logits,label=label"
    fixed = ["train", "mlp.onnx", "--data", "d.npz", "--loss", loss, "--optimizer", "adam:lr=0.01", "--batch-size", "16"]
    return [*fixed, *map(str, more)]


@pytest.mark.mpi
def test_two_processes_in_one_file(here: Path) -> None:
    done = cli(*line("-n", 2, "--epochs", 2, "--trace", "t.json", "--trace-steps", 7, "--format", "json"))
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout.splitlines()[-1])
    trace = json.loads((here / "t.json").read_text())
    check_format(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    first, second = collectives(trace, 0), collectives(trace, 1)
    assert first == second
    assert len(first) == 7 * end["allreduces_per_step"]
    assert all(e["args"]["bytes"] > 0 for e in trace["traceEvents"] if e.get("cat") == "collective")
    assert end["traced_steps"] == 7
    assert end["communication_ms"] > 0
    assert end["waited_ms"] >= 0
    assert 0 <= end["hidden_percent"] <= 100
    # One clock: what is one collective ends on both ranks at almost the same time, and begins on neither after that.
    ends = [
        [e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, COMMUNICATING)]
        for rank in range(2)
    ]
    starts = [
        [e["ts"] for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, COMMUNICATING)]
        for rank in range(2)
    ]
    assert np.all(np.maximum(*map(np.array, starts)) <= np.minimum(*map(np.array, ends)))


def test_text_and_mistakes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line("--trace", "t.json", "-n", 2, "--transport", "threads")) == 0
    out = capfd.readouterr().out
    assert "% hidden behind computation" in out
    assert "wrote t.json" in out
    assert main(line("--trace", "nowhere/t.json")) == 1
    assert "there is no folder" in capfd.readouterr().err
    with pytest.raises(graphc.GraphcError, match="there is no folder"):
        Trace(here / "nowhere" / "t.json")
