"""A worker that dies ends the run, and the message names it. Nothing is left running.

Only graphc ends these programs: left alone they would run for an hour. So a run that ends in :data:`HANG` seconds was ended by
what its message says, however busy the machine is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphc.distributed.health.flight_recorder import load
from graphc.distributed.health.watchdog import is_alive
from graphc.launch.local import find_mpiexec
from tests.runtime.mpi_run import HANG, ROOT, Done, finish, run_mpi, start_mpi

pytestmark = pytest.mark.mpi

STEPS = """
    for k in range(n):
        comm.step = k
        comm.wait(comm.start(buffer, "mean", f"bucket{k % 2}"))
"""

START = """
import os, signal, sys, threading, time
import numpy as np
from graphc.errors import FeedError, UnsupportedOpError
from graphc.distributed.choose import open_communicator
comm = open_communicator()
print("pid", comm.rank, os.getpid())
comm.barrier()
buffer = np.ones(4_000_000, np.float32)
def steps(n=100_000_000):
    for k in range(n):
        comm.wait(comm.start(buffer, "mean", f"bucket{k % 2}"))
def shoot(number, after=0.3):
    threading.Timer(after, os.kill, (os.getpid(), number)).start()
"""


def ended_well(done: Done) -> None:
    """Every worker of the run is gone."""
    pids = [int(pid) for pid in re.findall(r"^pid \d+ (\d+)$", done.out, re.MULTILINE)]
    assert len(pids) >= 2, done.text
    limit = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not any(map(is_alive, pids)), done.text


FULL = pytest.mark.full
LARGE = (pytest.mark.full, pytest.mark.large)

CASES = [
    pytest.param(
        "if comm.rank == 1: shoot(9)\nsteps()", r"rank 1 \(pid \d+\) is gone: killed by SIGKILL", 1, id="killed-in-allreduce"
    ),
    pytest.param(
        "if comm.rank == 0: shoot(9)\nsteps()", r"rank 0 \(pid \d+\) is gone: killed by SIGKILL", 1, id="rank-0", marks=LARGE
    ),
    pytest.param(
        "if comm.rank == 1: shoot(9)\ntime.sleep(3600)",
        r"rank 1 \(pid \d+\) is gone: killed by SIGKILL",
        1,
        id="killed-while-others-sleep",
        marks=FULL,
    ),
    pytest.param(
        "x = np.ones((2000, 2000))\nif comm.rank == 1: shoot(9)\nwhile True: x = np.tanh(x @ x)",
        r"rank 1 \(pid \d+\) is gone: killed by SIGKILL",
        1,
        id="killed-in-computation",
        marks=pytest.mark.large,
    ),
    pytest.param(
        "if comm.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\nsteps()",
        r"rank 1 \(pid \d+\) is gone: killed by SIGSEGV",
        1,
        id="crash",
        marks=LARGE,
    ),
    pytest.param(
        "if comm.rank == 1: os._exit(7)\nsteps()",
        r"rank 1 \(pid \d+\) is gone: it ended with exit code 7 without",
        1,
        id="os._exit",
        marks=LARGE,
    ),
    pytest.param(
        "if comm.rank == 0: raise ValueError('bad sample 7')\nsteps()", "rank 0 failed: ValueError: bad sample 7", 1, id="error"
    ),
    pytest.param(
        "if comm.rank == 1: raise FeedError('feed x is missing')\nsteps()",
        "rank 1 failed: feed x is missing",
        1,
        id="feed",
        marks=LARGE,
    ),
    pytest.param(
        "if comm.rank == 1: raise UnsupportedOpError('no rule for Foo')\nsteps()",
        "rank 1 failed: no rule for Foo",
        3,
        id="op",
        marks=FULL,
    ),
    pytest.param(
        "raise UnsupportedOpError('no rule for Foo')",
        r"ranks? \d(, \d)? failed: no rule for Foo",
        3,
        id="same-error",
        marks=pytest.mark.large,
    ),
    pytest.param("if comm.rank == 1: sys.exit(5)\nsteps()", "rank 1 failed: exit code 5", 5, id="sys.exit"),
    pytest.param(
        "if comm.rank == 1: sys.exit('out of data')\nsteps()", "rank 1 failed: out of data", 1, id="sys.exit-text", marks=LARGE
    ),
    pytest.param(
        "if comm.rank == 1: comm.abort('the disk is full')\nsteps()",
        "rank 1 failed: the disk is full",
        1,
        id="abort",
        marks=LARGE,
    ),
    pytest.param(
        "if comm.rank == 1: sys.exit()\nsteps()",
        "rank 1 ended its program while rank 0 waits for it in 'allreduce bucket",
        1,
        id="left-early",
        marks=FULL,
    ),
]


@pytest.mark.parametrize(("program", "message", "code"), CASES)
def test_the_message_names_the_rank(program: str, message: str, code: int) -> None:
    done = run_mpi(2, START + program)
    assert done.code == code, done.text
    assert re.search(f"^graphc: {message}", done.err, re.MULTILINE), done.text
    assert done.err.count("graphc: ") == 1, done.text
    assert "prterun" not in done.err, done.text
    # The traceback of a program's own mistake is shown; a message meant for the user comes without one.
    assert ("Traceback" in done.err) == ("ValueError" in program), done.text
    ended_well(done)


SPARE = """
if comm.rank == 1: comm.introduce("worker 0", spare=True); comm.barrier(); time.sleep(0.2); os.kill(os.getpid(), 9)
comm.barrier()
limit = time.monotonic() + 100
while comm.gone() != {1} and time.monotonic() < limit: time.sleep(0.01)
print("gone", sorted(comm.gone()))
"""


def test_the_others_go_on_without_a_spare_worker() -> None:
    done = run_mpi(3, START + SPARE, keep_going=True)
    assert done.code == 0, done.text
    assert done.out.count("gone [1]") == 2, done.text
    assert re.search(r"^graphc: worker 0 \(rank 1, pid \d+\) was lost; the others went on without it$", done.err, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "message", "code"),
    [
        pytest.param("if comm.rank == 0: shoot(9)\nsteps()", r"rank 0 \(pid \d+\) is gone", 1, marks=pytest.mark.large),
        ("if comm.rank == 1: raise FeedError('feed x is missing')\nsteps()", "rank 1 failed: feed x is missing", 1),
        pytest.param(
            "if comm.rank == 1:\n with_error = FeedError('bad')\n comm.abort('bad')\nsteps()",
            "rank 1 failed: bad",
            1,
            marks=pytest.mark.large,
        ),
    ],
)
def test_a_worker_nobody_can_spare_ends_the_run(program: str, message: str, code: int) -> None:
    done = run_mpi(3, START + program, keep_going=True)
    assert done.code == code, done.text
    assert re.search(f"^graphc: {message}", done.err, re.MULTILINE), done.text
    ended_well(done)


@pytest.mark.full
def test_killed_before_it_opened_a_communicator() -> None:
    program = "import os\nprint('pid', 0, os.getpid())\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\n"
    done = run_mpi(2, program + START)
    assert done.code == 1, done.text
    assert "rank 1 (pid" in done.err, done.text
    assert "killed by SIGKILL" in done.err, done.text


@pytest.mark.full
@pytest.mark.large
def test_killed_from_outside_among_four() -> None:
    process = start_mpi(4, START + "steps()")
    assert process.stdout is not None
    pids = dict(line.split()[1:] for line in (process.stdout.readline() for _ in range(4)))
    time.sleep(0.5)
    os.kill(int(pids["2"]), signal.SIGKILL)
    done = finish(process, HANG)
    assert f"graphc: rank 2 (pid {pids['2']}) is gone: killed by SIGKILL" in done.err, done.text
    assert done.code == 1
    assert not any(is_alive(int(pid)) for pid in pids.values())


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGHUP, marks=pytest.mark.large),
        *(pytest.param(number, marks=FULL) for number in (signal.SIGTERM, signal.SIGKILL)),
        pytest.param(signal.SIGQUIT, marks=LARGE),
    ],
)
def test_ending_the_launcher_ends_all_workers(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, which has the launcher ignore the signal too")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start_mpi(2, START + "steps()")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[2]) for _ in range(2)]
    time.sleep(0.3)
    os.kill(process.pid, number)
    done = finish(process, HANG)
    limit = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(is_alive, pids)), done.text
    assert "Traceback" not in done.err, done.text
    if number != signal.SIGKILL:
        assert done.code == 128 + number, done.text
        assert "the workers were stopped" in done.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("if comm.rank == 1: shoot(9)\nsteps()", "rank 1"),
        ("if comm.rank == 0: raise ValueError('bad sample 7')\nsteps()", "graphc: rank 0 failed: ValueError: bad sample 7"),
        pytest.param(
            "if comm.rank == 1: sys.exit(3)\nsteps()",
            "graphc: rank 1 ended its program while rank 0 waits for it",
            marks=pytest.mark.large,  # takes 5 s, as "left-early" does, which says the same
        ),
    ],
)
def test_without_our_launcher(program: str, message: str, tmp_path: Path) -> None:
    """Started by mpiexec itself, the workers watch each other."""
    script = tmp_path / "script.py"
    script.write_text(START + program)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    start = time.monotonic()
    done = subprocess.run(
        [str(find_mpiexec()), "-n", "2", "--bind-to", "none", "--oversubscribe", sys.executable, str(script)],
        env={**os.environ, **allowed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    ended_well(Done(done.returncode, done.stdout, done.stderr, time.monotonic() - start))
    assert done.returncode != 0
    assert message in done.stderr, done.stderr


# A collective that does not end by its deadline ------------------------------------------------------------------------

WAITING = "comm.deadline = 1.5\ndef busy():\n steps(7)\n time.sleep(3600)\n"
BUCKET = r"allreduce\(mean\) 'bucket\d' of step \d+ \(16000000 bytes\)"
LATE = [
    pytest.param(
        "if comm.rank == 1: shoot(19)\nsteps()",
        # A rank beside the stopped one may hang one collective earlier than the other, and then it is late as well.
        rf"(ranks? (0, )?1(, 2)? did not come to {BUCKET} within 1.5 s: .*rank 1 \(pid \d+\) is stopped \(SIGSTOP\); it"
        rf"(s last was| is in) {BUCKET}|{BUCKET} did not end within 1.5 s: all ranks have come to it, "
        r"but rank 1 \(pid \d+\) is stopped \(SIGSTOP\))",
        id="stopped",
    ),
    pytest.param(
        "if comm.rank == 2: busy()\nsteps()",
        r"rank 2 did not come to allreduce\(mean\) 'bucket1' of step 7 \(16000000 bytes\) within 1.5 s: rank 2 "
        r"\(pid \d+\) is busy with something else; its last was allreduce\(mean\) 'bucket0' of step 6 "
        r"\(16000000 bytes\), which ended \d.\d s ago",
        id="slow",
    ),
    pytest.param(
        "if comm.rank in (0, 2): busy()\nsteps()",
        r"ranks 0, 2 did not come to allreduce\(mean\) 'bucket1' of step 7 \(16000000 bytes\) within 1.5 s: rank 0 "
        r"\(pid \d+\) is busy",
        id="slow-two",
        marks=LARGE,
    ),
    pytest.param(
        "if comm.rank == 1:\n steps(7)\n comm.allreduce(buffer, 'mean', 'other')\nsteps()",
        r"the ranks disagree: (rank 0 is in allreduce\(mean\) 'bucket1' of step 7 .* and rank 1 is in allreduce\(mean\) 'other'"
        r"|rank 1 is in allreduce\(mean\) 'other' .* and rank 2 is in allreduce\(mean\) 'bucket1' of step 7)",
        id="other-collective",
    ),
    pytest.param(
        "buffer = buffer[:2]\nif comm.rank == 1:\n steps(7)\n comm.allreduce(buffer, 'mean', 'other')\nsteps()",
        # Thousands pass between two looks, but where workers wait for a processor it can be few.
        r"the ranks disagree: ((ranks 0, 1|ranks 1, 2) did different collectives some time before allreduce\(mean\) 'bucket\d'"
        r"|rank \d is in allreduce\(mean\) '(bucket1|other)' of step \d \(8 bytes\) and rank)",
        id="other-collective-long-ago",
        marks=LARGE,  # tests/runtime/test_flight_recorder.py has the message
    ),
    pytest.param(
        "comm.allreduce(np.ones(3 + comm.rank), 'sum', 'w')\nsteps()",
        r"the ranks disagree: rank 0 is in allreduce\(sum\) 'w' before the first step \(24 bytes\) and rank 1 is in "
        r"allreduce\(sum\) 'w' before the first step \(32 bytes\)"
        r"|rank \d failed: allreduce w failed on rank \d: .*MPI_ERR_TRUNCATE",
        id="other-length",
        marks=LARGE,
    ),
    pytest.param(
        "if comm.rank == 1: os.kill(os.getpid(), 19)",
        r"rank 1 \(pid \d+\) has been stopped \(SIGSTOP\) for 2 s",
        id="stopped-at-the-end",
        marks=LARGE,
    ),
]


@pytest.mark.parametrize(("program", "message"), LATE)
def test_a_late_worker_is_named_and_the_logs_tell_where(program: str, message: str) -> None:
    done = run_mpi(3, START + "def steps(n=100_000_000):\n" + STEPS + WAITING + program, deadline=2.0)
    assert done.code == 1, done.text
    assert re.search(f"^graphc: ({message}).*; the other workers were stopped; flight logs: ", done.err, re.MULTILINE), (
        done.text
    )
    assert done.err.count("graphc: ") == 1, done.text
    ended_well(done)
    found = re.search(r"flight logs: (\S+) \(", done.err)
    assert found is not None
    flights = load(Path(found[1]))
    assert [flight.rank for flight in flights] == [0, 1, 2]
    assert {flight.reason for flight in flights} <= {done.err[len("graphc: ") :].partition("; the other workers")[0]}


@pytest.mark.large  # tests/runtime/test_start.py stops rank 1 as early in `make test`
def test_stopped_before_the_workers_met() -> None:
    """Nobody watches yet; the launcher's own patience, or that of the others as they join, ends the run."""
    program = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 19)\n"
    done = run_mpi(2, program + START, deadline=2.0)
    assert done.code == 1, done.text
    assert re.search(r"rank 1 (\(pid \d+\) has been|did not come to join before the first step) ", done.err), done.text


@pytest.mark.faults
def test_what_one_machine_can_tell_of_another(tmp_path: Path) -> None:
    """Two ranks under host names of their own do not see each other's processes, nor flight logs."""
    if subprocess.run(["unshare", "-u", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot give a process a host name of its own")
    script = tmp_path / "script.py"
    script.write_text(
        START + "def steps(n=100_000_000):\n" + STEPS + WAITING + "if comm.rank == 1: steps(7); time.sleep(3600)\nsteps()"
    )
    inside = f'hostname machine$OMPI_COMM_WORLD_RANK; exec "{sys.executable}" "{script}"'
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    start = time.monotonic()
    done = subprocess.run(
        [str(find_mpiexec()), "-n", "2", "--bind-to", "none", "--oversubscribe", "unshare", "-u", "sh", "-c", inside],
        env={**os.environ, **allowed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    told = (
        r"graphc: allreduce\(mean\) 'bucket1' of step 7 \(16000000 bytes\) did not end within 1.5 s: all ranks of this machine "
        r"\(0\) have come to it, so rank 1 on other machines, which cannot be seen from here, has not; flight logs: "
    )
    assert re.search(told, done.stderr), done.stderr
    ended_well(Done(done.returncode, done.stdout, done.stderr, time.monotonic() - start))
