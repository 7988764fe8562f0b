"""How ``graphc train`` begins and ends: what it writes, what it says of divergence, of a resumed run and of signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from graphc.cli import main
from graphc.cli.training.report import Reporter
from graphc.runtime import checkpoint

X = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
LABEL = X @ np.array([[1.0], [2], [3], [4]], np.float32)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,1] y)
        <float[4,1] w = {0, 0, 0, 0}> { y = MatMul(x, w) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, label=LABEL)
    return tmp_path


def arguments(*more: object, lr: float = 0.01, epochs: int = 2) -> list[str]:
    fixed = ["train", "m.onnx", "--data", "d.npz", "--loss", "mse", "--optimizer", f"sgd:lr={lr}", "--epochs", str(epochs)]
    return [*fixed, "--batch-size", "16", "--backend", "numpy", *map(str, more)]


def weights(path: str) -> np.ndarray[Any, Any]:
    (found,) = onnx.load(path).graph.initializer
    return onnx.numpy_helper.to_array(found)


def test_a_run_that_writes_nothing_says_so_before_it_starts(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments()) == 0
    assert "neither -o FILE nor --checkpoint DIR is given: the trained weights will not be written" in capfd.readouterr().err
    for option, place in (("-o", "t.onnx"), ("--checkpoint", "c")):
        assert main(arguments(option, place)) == 0
        assert "will not be written" not in capfd.readouterr().err


def test_finished_epochs_are_told_and_steps_are_those_of_this_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--checkpoint", "c")) == 0
    assert "8 steps on 1 worker" in capfd.readouterr().out
    assert main(arguments("--resume", "c", "-o", "t.onnx")) == 0
    found = capfd.readouterr()
    assert "--resume c holds 2 finished epochs, and --epochs 2 counts them" in found.err
    assert "say --epochs 3 or more" in found.err
    assert "0 steps (8 in all) on 1 worker" in found.out
    assert main(arguments("--resume", "c", "--format", "json", epochs=5)) == 0
    out, err = capfd.readouterr()
    end = json.loads(out.splitlines()[-1])
    assert (end["steps"], end["steps_of_run"]) == (20, 12)
    assert "finished epochs" not in err


def test_one_table_holds_steps_and_epochs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--log-every", 2, "--eval-data", "d.npz", "-o", "t.onnx")) == 0
    head, *rows = capfd.readouterr().out.splitlines()[:7]
    assert head.split() == ["epoch", "step", "loss", "eval", "loss", "seconds"]
    ends = [head.index("step") + 4, head.index("loss") + 4]
    for row, step in zip(rows, (2, 4, 4, 6, 8, 8), strict=True):
        assert row[: ends[0]].split()[-1] == str(step)
        assert len(row[ends[0] : ends[1]].split()) == 1  # every loss ends in its column
    assert [len(row.split()) for row in rows] == [2, 2, 5, 2, 2, 5]


def test_every_epoch_has_the_same_fields(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also one whose steps were all skipped, and one before the first skipped step."""
    x = X.copy()
    x[16:, 0] = np.nan
    np.savez(here / "d.npz", x=x, label=LABEL)
    for batch, expected in ((16, 3), (64, 1)):
        assert main(arguments("--nonfinite", "skip", "--format", "json", "--no-shuffle", "--batch-size", batch, epochs=1)) == 0
        (epoch,) = [e for e in map(json.loads, capfd.readouterr().out.splitlines()) if e["event"] == "epoch"]
        assert list(epoch) == ["event", "epoch", "loss", "skipped", "seconds"]
        assert epoch["skipped"] == expected
    assert epoch["loss"] is None
    assert main(arguments("--nonfinite", "skip", "--no-shuffle", "--batch-size", 32)) == 0
    out, err = capfd.readouterr()
    assert [line.split()[:1] for line in out.splitlines()[:3]] == [["epoch"], ["1"], ["2"]]
    assert "step 1 skipped" in err


@pytest.mark.parametrize("kept", ["weights", "checkpoint"])
def test_divergence_is_told_once_and_the_last_good_epoch_kept(kept: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The learning rate grows; a shorter run with the same rates ends with the weights of the last good epoch."""
    more = ["--warmup-steps", 40, "-o", "t.onnx", *(["--checkpoint", "c"] if kept == "checkpoint" else [])]
    assert main(arguments(*more, lr=8, epochs=5)) == 0
    err = capfd.readouterr().err
    assert err.count("training diverges: in step") == 1
    assert "at a learning rate of" in err
    assert "the training diverged, and t.onnx holds its last weights" in err
    diverged, good = weights("t.onnx"), weights("t.last-good.onnx")
    assert np.abs(diverged).max() > 1000 * np.abs(good).max()
    step = int(err.partition("training diverges: in step ")[2].split()[0])
    epoch = (step - 1) // 4
    assert epoch >= 1
    assert f"t.last-good.onnx holds the last good ones after epoch {epoch}" in err
    assert main(arguments("--warmup-steps", 40, "-o", "short.onnx", lr=8, epochs=epoch)) == 0
    np.testing.assert_array_equal(good, weights("short.onnx"))
    if kept == "checkpoint":
        assert checkpoint.metadata("c.last-good")["steps"] == 4 * epoch
        assert checkpoint.metadata("c")["steps"] == 20


@pytest.mark.parametrize("lr", [3e38, 1e30])  # the weights overflow, or the loss that they give
def test_a_broken_last_update_replaces_no_file(lr: float, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "t.onnx").write_bytes(b"a good file")
    assert main(arguments("-o", "t.onnx", "--batch-size", 64, lr=lr, epochs=1)) == 1
    err = capfd.readouterr().err
    assert "t.onnx was not written" in err
    assert "learning rate" in err
    assert (here / "t.onnx").read_bytes() == b"a good file"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("folder", ["my c", None])
def test_a_stopped_run_says_where_and_how_to_go_on(
    number: signal.Signals, folder: str | None, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = Reporter.epoch

    def stop_in_the_third(self: Reporter, event: Any, step: int) -> None:
        epoch(self, event, step)
        if event["epoch"] == 3:
            assert threading.current_thread() is threading.main_thread()
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Reporter, "epoch", stop_in_the_third)
    more = ["-o", "t.onnx", *(["--checkpoint", folder] if folder else [])]
    before = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    try:
        assert main(arguments(*more, epochs=9)) == 128 + number
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert signal.getsignal(signal.SIGTERM) is before
    err = capfd.readouterr().err
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"stopped by {name} after step 12 of 36; " in err
    assert not (here / "t.onnx").exists()
    if folder is None:
        assert "--checkpoint DIR saves all state after each epoch, and --resume DIR goes on from there" in err
        return
    assert "the last checkpoint is my c, after step 8; go on with: graphc train m.onnx --data d.npz" in err
    assert err.rstrip().endswith("--checkpoint 'my c' --resume 'my c'")
    monkeypatch.undo()
    os.chdir(here)
    assert main(arguments(*more, "--resume", folder, epochs=9)) == 0
    assert main(arguments("-o", "whole.onnx", epochs=9)) == 0
    np.testing.assert_array_equal(weights("t.onnx"), weights("whole.onnx"))


@pytest.mark.mpi
def test_stopped_processes_say_the_same(here: Path) -> None:
    command = [sys.executable, "-m", "graphc", *arguments("-n", 2, "--checkpoint", "c", lr=1e-5, epochs=1_000_000)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            until = time.monotonic() + 60
            while not (here / "c" / checkpoint.FILE_NAME).exists() and run.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            run.terminate()
            err = run.communicate(timeout=60)[1]
        finally:
            run.kill()
    assert run.returncode == 128 + signal.SIGTERM, err
    told, resume = err.strip().splitlines()[-2:]
    step = int(told.partition("stopped by SIGTERM in step ")[2].partition(";")[0])
    saved = int(resume.partition("the last checkpoint is c, after step ")[2].partition(";")[0])
    assert 4 <= saved <= step + 1
    assert saved == checkpoint.metadata(here / "c")["steps"]
    assert resume.endswith("--checkpoint c --resume c")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_threads_say_the_same(number: int, here: Path) -> None:
    """The workers are in native code when the signal comes; the interpreter's own end would abort there."""
    wide = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,1] y)
        { h = MatMul(x, w)  a = Tanh(h)  b = Tanh(a)  y = MatMul(b, v) }"""
    )
    for name, shape in {"w": (4, 20_000), "v": (20_000, 1)}.items():
        wide.graph.initializer.append(onnx.numpy_helper.from_array(np.full(shape, 0.01, np.float32), name))
    onnx.save(wide, here / "m.onnx")
    command = arguments("-n", 2, "--transport", "threads", "--checkpoint", "c", lr=1e-9, epochs=1_000_000)
    command[command.index("numpy")] = "onnxruntime"
    with subprocess.Popen(
        [sys.executable, "-m", "graphc", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a job in the background ignores SIGINT
    ) as run:
        try:
            until = time.monotonic() + 120
            while not (here / "c" / checkpoint.FILE_NAME).exists() and run.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            run.send_signal(number)
            err = run.communicate(timeout=60)[1]
        finally:
            run.kill()
    assert run.returncode == 128 + number, err
    (told,) = [line for line in err.splitlines() if "stopped by" in line]
    assert told.startswith(f"graphc: stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'} after step "), err
    assert "the last checkpoint is c, after step " in told
    assert "Traceback" not in err
    assert "terminate" not in err


STUCK = """
import threading, time
from graphc.distributed.choose import open_communicator
comm = open_communicator(deadline=1.0)
if comm.rank == 1: time.sleep(3600)
comm.barrier()
"""


@pytest.mark.full
def test_a_worker_thread_that_is_stuck_does_not_keep_the_process(here: Path) -> None:
    (here / "stuck.py").write_text(STUCK)
    command = [sys.executable, "-m", "graphc", "launch", "-n", "2", "--transport", "threads", "stuck.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "rank 1 did not come to barrier" in done.stderr
