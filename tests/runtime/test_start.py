"""What goes wrong before the workers have met ends the run within the deadline, and only the one at fault is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphc.launch.folders import PREFIX, job_folder
from graphc.launch.local import find_mpiexec
from graphc.launch.processes import processes_of, rank_processes
from tests.runtime.mpi_run import HANG, ROOT, finish, start_mpi
from tests.runtime.tcp_run import finish as finish_tcp
from tests.runtime.tcp_run import start_tcp

pytestmark = pytest.mark.mpi
FULL = pytest.mark.full
WORK = "from graphc.distributed.choose import open_communicator\ncomm = open_communicator()\nimport time\ntime.sleep(3600)\n"

NEVER = (
    "import os, time\nif '1' in (os.environ.get('OMPI_COMM_WORLD_RANK'), os.environ.get('RANK')): time.sleep(3600)\n"
    "from graphc.distributed.choose import open_communicator\nopen_communicator(deadline=1.5)\n"
)


def soon(look: Callable[[], int | None]) -> int:
    """Look until there is something to see."""
    limit = time.monotonic() + HANG
    while time.monotonic() < limit:
        found = look()
        if found is not None:
            return found
        time.sleep(0.001)
    raise AssertionError("it never came")


def folder_of(place: Path) -> Path | None:
    return next(place.glob(f"{PREFIX}*"), None)


def process(place: Path, who: int | str) -> int | None:
    """The process of a rank, or of what starts the ranks, as soon as the kernel knows it."""
    folder = folder_of(place)
    if folder is None:
        return None
    if isinstance(who, int):
        return rank_processes(folder).get(who)
    return min(processes_of(folder), default=None)


@pytest.mark.parametrize(
    ("transport", "who", "number", "message"),
    [
        ("mpi", 1, signal.SIGSTOP, r"rank 1 did not come to join .* within 2 s: rank 1 \(pid {pid}\) is stopped \(SIGSTOP\)"),
        pytest.param(
            "mpi", "starter", signal.SIGSTOP, r"mpiexec \(pid {pid}\) has been stopped \(SIGSTOP\)", marks=pytest.mark.large
        ),
        ("mpi", "starter", signal.SIGKILL, r"mpiexec \(pid {pid}\) is gone: killed by SIGKILL"),
        ("mpi", 1, signal.SIGKILL, r"rank 1 \(pid {pid}\) is gone: killed by SIGKILL"),
        pytest.param("tcp", 1, signal.SIGSEGV, r"rank 1 \(pid {pid}\) is gone: killed by SIGSEGV", marks=FULL),
        pytest.param(  # the next test stops it a moment later
            "tcp",
            "starter",
            signal.SIGSTOP,
            r"the process that started the workers \(pid {pid}\) has been stopped \(SIGSTOP\)",
            marks=pytest.mark.large,
        ),
    ],
)
def test_a_fault_as_soon_as_the_process_is_there(
    transport: str, who: int | str, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = start_mpi(3, WORK, transport=transport, deadline=2.0)
    pid = soon(lambda: process(tmp_path, who))
    os.kill(pid, number)
    done = finish(run, HANG)
    assert done.code == 1, done.text
    assert re.search(f"^graphc: {message.format(pid=pid)}", done.err, re.MULTILINE), done.text
    assert done.err.count("graphc: ") == 1, done.text
    assert list(tmp_path.iterdir()) == []


def test_a_starter_stopped_when_it_has_started_some_of_the_workers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that began fail first, for want of ranks that were never started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = start_mpi(12, WORK, transport="tcp", deadline=2.0)
    soon(lambda: process(tmp_path, 0))
    starter = soon(lambda: process(tmp_path, "starter"))
    os.kill(starter, signal.SIGSTOP)
    done = finish(run, HANG)
    assert done.code == 1, done.text
    assert done.err.startswith(f"graphc: the process that started the workers (pid {starter}) has been stopped (SIGSTOP)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.large), "tcp"])
def test_a_worker_that_never_comes_is_named_within_the_deadline_of_the_first_call(transport: str) -> None:
    """The deadline of the call counts, not the launcher's of 300 s."""
    done = finish(start_mpi(2, NEVER, transport=transport), HANG)
    assert done.code == 1, done.text
    assert re.search(r"^graphc: .*rank 1 did not come to \w+ .*within 1.5 s", done.err, re.MULTILINE), done.text


def test_a_worker_that_never_comes_is_noticed_without_our_launcher(tmp_path: Path) -> None:
    """MPI_Init waits for it, and no other thread could run if that held the interpreter."""
    script = tmp_path / "script.py"
    script.write_text(NEVER)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [str(find_mpiexec()), "-n", "2", "--bind-to", "none", "--oversubscribe", sys.executable, str(script)],
        env={**os.environ, **allowed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 1
    assert "graphc: rank 0 waited 1.5 s for all 2 workers to join: one of them died, is stopped, or never came" in done.stderr


def test_what_a_killed_launcher_leaves_the_next_one_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = start_mpi(2, WORK, transport="tcp")
    starter = soon(lambda: process(tmp_path, "starter"))
    os.kill(starter, signal.SIGKILL)  # nobody who could tidy up
    run.kill()
    run.communicate()
    left = folder_of(tmp_path)
    assert left is not None
    (tmp_path / f"{PREFIX}file").write_text("not a folder of ours")
    with job_folder(tmp_path) as mine, job_folder(tmp_path) as other:
        assert not left.exists()
        assert mine.exists()  # its owner lives
    assert not mine.exists()
    assert not other.exists()
    assert (tmp_path / f"{PREFIX}file").exists()


def test_a_start_over_tcp_that_fails_leaves_no_board(tmp_path: Path) -> None:
    """Rank 1 dies when rank 0 has made the board and waits for it to be mapped."""
    die = "import os\nfrom graphc.distributed.health.status_board import StatusBoard as Board\n"
    die += "if os.environ['RANK'] == '1': Board.__init__ = lambda *given: os.kill(os.getpid(), 9)\n"
    first, second = finish_tcp(start_tcp(2, die + WORK, env={"TMPDIR": str(tmp_path)}))
    assert second.code == -signal.SIGKILL
    assert "rank 1 lost its connection" in first.err, first.text
    assert list(tmp_path.iterdir()) == []
