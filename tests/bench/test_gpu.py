"""The script of ``make gpu-bench`` where there is no GPU: what it does when parts fail, and all of it at tiny sizes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from graphc.bench import gpu
from graphc.bench.gpu_processes import BenchProcess, Clock, once
from graphc.bench.gpu_specs import JOBS
from graphc.bench.kernel_table import worst

ANSWERS = "print('loading'); print('{\"a\": 1}', flush=True); import sys; [print('{\"b\": 2}', flush=True) for _ in sys.stdin]"


def test_a_worker_answers_in_json_among_whatever_it_prints() -> None:
    with BenchProcess(("-c", ANSWERS), os.environ, Clock(30)) as worker:
        assert worker.read() == {"a": 1}
        assert [worker.measure(), worker.measure()] == [{"b": 2}] * 2


def test_a_worker_that_dies_is_told_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 1; .*ZeroDivisionError"):
        once(("-c", "1 / 0"), os.environ, Clock(30))
    with BenchProcess(("-c", "print('{}'); import os; os._exit(3)"), os.environ, Clock(30)) as worker:
        assert worker.read() == {}
        with pytest.raises(RuntimeError, match="ended with status 3"):
            worker.measure()


def test_nobody_is_waited_for_when_the_time_is_spent() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="has not answered in its time"):
        once(("-c", "import time; time.sleep(600)"), os.environ, Clock(0.3))
    assert time.monotonic() - begin < 200, "the end of its sleep was waited for"


def test_the_best_round_counts_for_every_mode_that_ran() -> None:
    rounds = [{"graphc": 2.0, "eager": 5.0}, {"graphc": 3.0, "eager": 4.0, "compile": 8.0}]
    found = gpu.best_of(rounds)
    assert (found["graphc_ms"], found["pytorch_ms"], found["best_pytorch"]) == (2.0, {"eager": 4.0, "compile": 8.0}, "eager")
    assert found["ratio"] == 2.0
    assert gpu.best_of([{"eager": 1.0}])["ratio"] is None
    assert gpu.best_of([{"graphc": 1.0}])["ratio"] is None


STAND_IN = """
import json, sys
side, job, *rest = sys.argv[1:]
if job == "bert" and side == "graphc": raise SystemExit("no kernel for it")
refused = ["CUDARuntimeError: cudaErrorStreamCaptureUnsupported"] if job == "resnet50" else []
found = {"first_step_s": 1.5, "shares_s": {}, "device_bytes": 7, "calls": 1, "not_captured": refused, "losses": [2.0, 1.0]}
if job == "resnet50" and side == "torch": import time; time.sleep(60)
if side == "torch": found = {"version": "2", "first_step_s": {"eager": 9.0}, "peak_bytes": {}, "failed": {"compile": "no"}}
print(json.dumps(found), flush=True)
for _ in sys.stdin: print(json.dumps({"graphc": 2.0} if side == "graphc" else {"eager": 3.0}), flush=True)
"""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for both sides, and what is written."""
    (tmp_path / "worker.py").write_text(STAND_IN)
    monkeypatch.setattr(gpu, "WORKER", (str(tmp_path / "worker.py"),))
    monkeypatch.setattr(
        gpu, "export_all", lambda models, *_, **__: {m: "no exporter" if m[0] == "gpt2" else Path("m") for m in models}
    )
    written: list[Any] = []
    monkeypatch.setattr(gpu, "write_json", lambda path, result: written.append(json.loads(json.dumps(result))))
    return written


def test_a_job_that_fails_leaves_the_others_their_results(results: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry", "--only", "gpt2,bert,mlp-wide", "--rounds", "2"]) == 1
    jobs = results[-1]["jobs"]
    assert "no exporter" in jobs["gpt2"]["failed"]["graphc, uncached"]
    assert jobs["gpt2"]["pytorch_ms"] == {"eager": 3.0}
    assert "no kernel for it" in jobs["bert"]["failed"]["graphc"]
    assert jobs["bert"]["parity"]["bf16 and PyTorch"]["largest"] == 0.0
    assert jobs["mlp-wide"]["failed"] == {"PyTorch compile": "no"}
    assert (jobs["mlp-wide"]["ratio"], len(jobs["mlp-wide"]["rounds"]), jobs["mlp-wide"]["device_bytes"]) == (1.5, 2, 7)
    assert any("gpt2" not in result["jobs"] for result in results), "every part is written when it is done"
    assert list(jobs) == ["mlp-wide", "bert", "gpt2"], "the smallest job first"
    assert "failed: graphc: RuntimeError" in capsys.readouterr().out


@pytest.mark.large
def test_a_side_that_does_not_get_ready_does_not_keep_the_other_waiting(results: list[Any]) -> None:
    assert gpu.main(["--dry", "--only", "resnet50", "--rounds", "2", "--patience", "3"]) == 1
    job = results[-1]["jobs"]["resnet50"]
    assert "has not answered" in job["failed"]["torch"]
    assert job["graphc_ms"] == 2.0


def test_a_step_that_is_not_captured_fails_the_job(results: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry", "--only", "resnet50", "--rounds", "1", "--modes", "none"]) == 1
    job = results[-1]["jobs"]["resnet50"]
    assert job["graphc_ms"] == 2.0
    assert "cudaErrorStreamCaptureUnsupported" in job["failed"]["capture"]
    assert "failed: capture: the step is not one CUDA graph" in capsys.readouterr().out


def test_without_pytorch_nothing_asks_for_it(results: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models come as skeletons; a cache that an earlier run has filled is used again."""
    asked: list[str] = []
    monkeypatch.setattr(gpu, "once", lambda command, *_: asked.append(command[2]) or {"losses": [1.0], **TOLD})
    monkeypatch.setattr(gpu, "fill_all", lambda models, skeletons, *_, **__: {m: skeletons / m[0] for m in models})
    (tmp_path / "kept" / "mlp-wide" / "graphc").mkdir(parents=True)
    (tmp_path / "kept" / "mlp-wide" / "graphc" / "products.json").write_text("{}")
    command = ["--dry", "--only", "mlp-wide", "--rounds", "1", "--modes", "none", "--skeletons", str(tmp_path)]
    assert gpu.main([*command, "--cache", str(tmp_path / "kept")]) == 0
    job = results[-1]["jobs"]["mlp-wide"]
    assert set(job["parity"]) == {"fp32 and CPU backend"}
    assert set(job["first_step_s"]) == {"cached"}
    assert not any("torch" in side for side in asked)
    assert gpu.main([*command, "--cache", str(tmp_path / "fresh")]) == 0
    assert set(results[-1]["jobs"]["mlp-wide"]["first_step_s"]) == {"uncached", "cached"}


def test_weights_of_noise_are_not_compared_with_pytorchs(
    results: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "fill_all", lambda models, skeletons, *_, **__: {m: skeletons / m[0] for m in models})
    gpu.main(["--dry", "--only", "mlp-wide", "--rounds", "1", "--modes", "eager", "--skeletons", str(tmp_path)])
    job = results[-1]["jobs"]["mlp-wide"]
    assert set(job["parity"]) == {"fp32 and CPU backend"}
    assert job["ratio"] == 1.5, "times are compared"


TOLD = {"first_step_s": 1.5, "shares_s": {}, "device_bytes": 7, "calls": 1, "not_captured": []}


@pytest.mark.full
def test_a_job_has_a_time_limit_of_its_own(results: list[Any]) -> None:
    begin = time.monotonic()
    assert gpu.main(["--dry", "--only", "resnet50,mlp-wide", "--rounds", "1", "--limit", "3"]) == 1
    assert time.monotonic() - begin < 100
    jobs = results[-1]["jobs"]
    assert "has not answered" in jobs["resnet50"]["failed"]["torch"]
    assert jobs["mlp-wide"]["ratio"] == 1.5


def test_the_worst_calls_are_named() -> None:
    table = [{"name": f"kernel {k}", "calls": 2, "predicted_us": 10.0, "excess_us": 20.0 - k} for k in range(30)]
    named = worst(table)
    assert len(named) == 10
    assert named[0] == "20.0 µs over 10.0, 2 × kernel 0"
    assert worst([{"name": "fast", "calls": 1, "predicted_us": 9.0, "excess_us": -1.0}]) == []


def test_an_unknown_job_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--only", "resnet"]) == 2
    assert "did you mean 'resnet50'" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.large
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_whole_benchmark_runs_at_tiny_sizes_on_the_pretended_device(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = ["--dry", "--load", "tests.backends.pretended", "--backend", "pretended", "--only", "mlp-wide", "--rounds", "2"]
    assert gpu.main([*command, "--seconds", "0.02", "--output", str(target)]) == 0
    found = json.loads(target.read_text())["jobs"]["mlp-wide"]
    assert found["failed"] == {}
    assert {"uncached", "cached", "eager"} == found["first_step_s"].keys()
    assert found["calls"] == 1, "the step is one recording"
    assert found["not_captured"] == []
    for parity in found["parity"].values():
        assert parity["largest"] <= parity["goal"]
        assert parity["last"] != parity["first"]


def test_tiny_jobs_are_of_the_same_kind() -> None:
    for job in JOBS.values():
        tiny = job.tiny()
        assert (tiny.optimizer, tiny.precision, tiny.per_token) == (job.optimizer, job.precision, job.per_token)
        assert {name: list(array.shape) for name, array in tiny.feeds().items()} == tiny.shapes()
