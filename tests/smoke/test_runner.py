"""Stages run in processes of their own: what becomes of one that fails, hangs or crashes, and of those after it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from graphc.cli import main
from graphc.smoke import runner
from graphc.smoke.runner import Stage, run, usable
from graphc.smoke.stages import STAGES
from tests.conftest import has_gpu

ANSWER = 'print(\'chatter\'); print(\'{"state": "ok", "detail": "fine", "rate": 3}\')'


def stage(name: str, code: str, limit: float = 30.0, **options: object) -> Stage:
    return Stage(name, limit=limit, command=("-c", code), **options)  # type: ignore[arg-type]


@pytest.mark.full
def test_what_hangs_or_crashes_is_named_and_stops_nobody() -> None:
    hang = "import sys, time; print('smoke: import a driver', file=sys.stderr, flush=True); time.sleep(600)"
    crash = "import sys, os; print('smoke: a launch', file=sys.stderr, flush=True); print('oh', file=sys.stderr); os.abort()"
    stages = [stage("hangs", hang, 0.6), stage("aborts", crash), stage("exits", "raise SystemExit(3)"), stage("fine", ANSWER)]
    begin = time.monotonic()
    found = {result["stage"]: result for result in run(stages)}
    assert time.monotonic() - begin < 100, "the end of a sleep was waited for"
    assert found["hangs"]["state"] == "hung"
    assert found["hangs"]["detail"] == "killed after 0.6 s during: import a driver"
    assert found["aborts"]["state"] == "crashed"
    assert found["aborts"]["detail"].startswith("ended with signal SIGABRT during: a launch; oh")
    assert found["exits"]["detail"].startswith("ended with status 3")
    assert (found["fine"]["state"], found["fine"]["rate"]) == ("ok", 3)
    assert not usable(list(found.values()))
    assert usable([found["fine"], {"stage": "two", "state": "skipped"}])


@pytest.mark.full
def test_the_children_of_a_stage_end_with_it(tmp_path: Path) -> None:
    """They would keep the GPU."""
    file = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(file)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    (result,) = run([stage("parent", code, 1.5)])
    assert result["state"] == "hung"
    child = Path("/proc") / file.read_text()
    deadline = time.monotonic() + 30
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


def test_a_stage_without_what_it_needs_is_not_tried() -> None:
    stages = [stage("driver", "1 / 0", remedy="install it"), stage("kernel", ANSWER, needs=("driver",))]
    first, second = run(stages)
    assert (first["state"], second["state"]) == ("crashed", "cannot run")
    assert first["detail"].endswith("; install it")
    assert second["detail"] == "it needs the stage 'driver'"


SHAPES = """
def fails(note):
    note("the second product")
    assert False, "off by 0.5"
def skips(note):
    from graphc.smoke.process import SkippedError
    raise SkippedError("one GPU")
def measures(note):
    return {"detail": "fast", "rate": 7}
"""


def test_a_stage_tells_what_it_was_doing_when_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_stages.py").write_text(SHAPES)
    stages = [Stage(name, "own_stages", name) for name in ("fails", "skips", "measures")]
    found = [*run(stages, {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"})]
    assert [result["state"] for result in found] == ["failed", "skipped", "ok"]
    assert found[0]["detail"] == "AssertionError: off by 0.5 (during: the second product)"
    assert found[1]["detail"] == "one GPU"
    assert found[2]["rate"] == 7


def test_every_stage_needs_earlier_ones_and_exists() -> None:
    seen: set[str] = set()
    for one in STAGES:
        assert set(one.needs) <= seen
        seen.add(one.name)


@pytest.mark.full
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_doctor_says_which_stages_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--smoke", "--stages", "driver,kernel,mlp", "--format", "json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["stage"], line["state"]) for line in found] == [
        ("driver", "failed"),
        ("kernel", "cannot run"),
        ("mlp", "cannot run"),
    ]


def test_doctor_prints_a_table_and_what_is_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        {"stage": "driver", "state": "ok", "seconds": 1.0, "detail": "H200"},
        {"stage": "kernel", "state": "hung", "seconds": 60.0, "detail": "killed after 60 s during: compile"},
    ]
    monkeypatch.setattr(runner, "run", lambda *_: iter(results))
    assert main(["doctor", "--smoke"]) == 1
    out = capsys.readouterr().out
    assert "killed after 60 s during: compile" in out
    assert "not fit for training on a GPU: kernel" in out
    assert main(["doctor", "--smoke", "--stages", "kernels"]) == 2
    assert "did you mean 'kernel'" in capsys.readouterr().err
    assert main(["doctor", "--stages", "kernel"]) == 2
