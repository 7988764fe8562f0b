"""The script for a machine with a GPU and no network: what it does where there is none, and where processes hang."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphc.bench.gpu import SMALL
from graphc.bench.gpu_specs import JOBS
from tests.conftest import has_gpu
from tests.harness import copy_harness

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_machine.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_machine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with two tests, without wheels and models."""
    folder = tmp_path / "bundle"
    (folder / "tests").mkdir(parents=True)
    (folder / "wheels").mkdir()
    (folder / "models").mkdir()
    copy_harness(folder / "tests")
    for name, work in (("test_cuda", "pass"), ("test_more", "import os; os.abort()")):
        (folder / "tests" / f"{name}.py").write_text(f"import pytest\n@pytest.mark.gpu\ndef test_it(): {work}\n")
    (folder / "manifest.json").write_text(json.dumps({"jobs": ["mlp-wide"], "tiny": True, "python": "3.12"}))
    shutil.copy(SCRIPT, folder / "run.py")
    return folder


def started(script: Any, bundle: Path, output: Path, **options: Any) -> Any:
    given = {"parts": "ABCD", "keep_going": False, "no_install": True, "minutes": 5.0, **options}
    return script.Run(argparse.Namespace(bundle=bundle, output=output, **given))


@pytest.mark.full
def test_a_process_that_hangs_is_killed_and_its_last_words_are_kept(script: Any, bundle: Path, tmp_path: Path) -> None:
    run = started(script, bundle, tmp_path / "out")
    begin = time.monotonic()
    hang = "import time; print('importing a driver', flush=True); time.sleep(600)"
    assert run._run("hangs", ["-c", hang], 1.0) is None
    assert time.monotonic() - begin < 100
    assert run._run("fails", ["-c", "1 / 0"], 60) == 1
    assert run._run("works", ["-c", "print('{}')"], 60, to="bench.json") == 0
    run._pack()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["parts"]["hangs"]["state"] == "killed"
    assert "importing a driver" in summary["parts"]["hangs"]["detail"]
    assert "ZeroDivisionError" in summary["parts"]["fails"]["detail"]
    assert summary["failed"] == ["hangs", "fails"]
    assert (tmp_path / "out" / "bench.json").read_text() == "{}\n"


@pytest.mark.full
def test_nothing_runs_beyond_the_time_that_was_given(script: Any, bundle: Path, tmp_path: Path) -> None:
    run = started(script, bundle, tmp_path / "out", minutes=0.0)
    begin = time.monotonic()
    assert run._run("late", ["-c", "import time; time.sleep(600)"], 300) is None
    assert time.monotonic() - begin < 100


def test_the_jobs_furthest_from_their_goals_are_measured_beside_pytorch(script: Any, bundle: Path, tmp_path: Path) -> None:
    run = started(script, bundle, tmp_path / "out")
    run.manifest["jobs"] = ["mlp-wide", "bert", "gpt2"]
    assert run._doubtful() == ["mlp-wide", "bert"]
    jobs = {"mlp-wide": (0.6, 0.6), "bert": (20.0, 14.0), "gpt2": (62.0, 31.0), "resnet50": (None, 31.0)}
    measured = {"jobs": {name: {"graphc_ms": ms, "goal_ms": goal} for name, (ms, goal) in jobs.items()}}
    (tmp_path / "out" / "bench.json").write_text(json.dumps(measured))
    assert run._doubtful() == ["gpt2", "bert"]


def test_a_bundle_that_is_too_large_is_refused_with_its_largest_files(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small").write_bytes(b"x" * 10)
    assert script.check_size(tmp_path) == 0
    monkeypatch.setattr(script, "LARGEST", 1000)
    (tmp_path / "torch.whl").write_bytes(b"x" * 2000)
    assert script.check_size(tmp_path) == 1
    assert "torch.whl" in capsys.readouterr().err


def test_a_cache_that_is_too_large_stays_behind(
    script: Any, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(script, bundle, tmp_path / "out")
    (run.cache / "graphc").mkdir(parents=True)
    (run.cache / "graphc" / "products.json").write_text("{}")
    monkeypatch.setattr(script, "PACKED", 10)
    run._pack()
    assert not (tmp_path / "out" / "cache.tar.gz").exists()
    assert "left behind" in json.loads((tmp_path / "out" / "summary.json").read_text())["cache"]


def test_a_benchmark_that_is_skipped_is_no_success(script: Any, bundle: Path, tmp_path: Path) -> None:
    run = started(script, bundle, tmp_path / "out")
    (tmp_path / "out" / "torch.json").write_text('{"skipped": "PyTorch sees no GPU"}')
    run._run = lambda name, *_: run._note(name, "ok", 1.0, "")
    run._part_d()
    assert run.summary["failed"] == ["D beside PyTorch"]
    assert run.summary["parts"]["D beside PyTorch"]["detail"] == "PyTorch sees no GPU"


@pytest.mark.large
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_ends_soon_and_says_what_failed(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, bundle / "run.py", "run", "--bundle", bundle, "--output", tmp_path / "out", "--no-install"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path)
    assert done.returncode == 1
    assert "A smoke  imports failed, driver failed, 10 stages cannot run" in done.stdout
    assert "after part A, which failed" in done.stdout
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"summary.json", "doctor.json", "smoke.jsonl", "log.txt"}


@pytest.mark.large
def test_a_test_that_kills_its_process_costs_one_test(script: Any, bundle: Path, tmp_path: Path) -> None:
    cupy = "from types import SimpleNamespace as N\ncuda = N(runtime=N(getDeviceCount=lambda: 1, deviceSynchronize=lambda: 0))"
    alone = "import pytest\n@pytest.mark.gpu\n@pytest.mark.alone\ndef test_that(): pass\n"
    (bundle / "tests" / "test_last.py").write_text(alone)
    run = started(script, bundle, tmp_path / "out")
    (run.work / "cupy.py").write_text(cupy)
    run.environment["PYTHONPATH"] = f"{run.work}:{run.environment['PYTHONPATH']}"
    run._part_c()
    found = json.loads((tmp_path / "out" / "tests.json").read_text())
    assert list(found) == ["side by side", "alone"]
    assert (found["side by side"]["passed"], list(found["side by side"]["failed"])) == (1, ["tests/test_more.py::test_it"])
    assert (found["alone"]["passed"], found["alone"]["exit"]) == (1, 0)
    assert run.summary["failed"] == ["C side by side"]


def test_every_job_has_a_smaller_copy_that_travels() -> None:
    assert set(SMALL) == set(JOBS)
