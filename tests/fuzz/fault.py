"""Faults of a run: a worker, what starts the workers, or the launcher is killed, stopped or delayed at a random moment.

The moment may be the very first one, when the process has just begun to exist. A training of two or three workers over MPI,
TCP or threads must end in time with the documented exit code, blame nobody but the one at fault, and leave no process, no
temporary folder and no half-written file. A pause that is shorter than the deadline must change nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from graphc.launch.folders import PREFIX, job_folder
from graphc.launch.processes import processes_of, rank_processes
from tests.cli.models import write_mlp
from tests.runtime.fault_run import WORKER, check_the_files
from tests.runtime.mpi_run import start_mpi

DEADLINE = 4.0  # seconds
LIMIT = 120.0
"""Seconds in which a run must have ended after its fault; not a measure of speed, a busy machine needs its time."""

CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OUTSIDE = ("signal", "ending", "pause")
STARTERS = {"mpi": "mpiexec", "tcp": "the process that started the workers"}


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        victim: a rank, ``starter`` or ``launcher``.
        what: ``signal``; ``pause``; ``ending``, a signal to a short run, which may have ended before; or a kind of
            ``fault_worker.py``.
        delay: seconds from the first sight of the victim to the signal.
        pause: seconds for which it is stopped.
        moment: step of a fault from inside; -1: before the worker imports graphc.
    """

    transport: str
    size: int
    victim: int | str
    what: str
    number: int = 0
    delay: float = 0.0
    pause: float = 0.0
    moment: int = -1

    def __str__(self) -> str:
        who = f"rank {self.victim}" if isinstance(self.victim, int) else self.victim
        when = f"after {self.delay:.3f} s" if self.what in OUTSIDE else f"in step {self.moment}"
        name = signal.Signals(self.number).name if self.number else ""
        how = {"signal": name, "ending": f"{name} to a short run", "pause": f"pause of {self.pause:.1f} s"}
        return f"{self.transport}, {self.size} workers: {who}: {how.get(self.what, self.what)} {when}"


def choose(number: int) -> Fault:
    """The fault of an attempt."""
    rng = random.Random(f"fault {number}")
    transport = rng.choice(("mpi", "mpi", "mpi", "tcp", "tcp", "threads"))
    size = rng.choice((2, 3))
    moment = rng.choice((-1, rng.randrange(50)))
    inside = ("exit", "leave", "slow", "loader")
    if transport == "threads":
        victim, what = rng.choice((("launcher", "signal"), (rng.randrange(size), rng.choice(inside[1:]))))
    else:
        victim = rng.choice((rng.randrange(size), rng.randrange(size), "starter", "launcher"))
        what = rng.choice(("signal", "signal", "signal", "pause", *((*inside, "ending") if isinstance(victim, int) else ())))
    numbers = (*ENDS, signal.SIGKILL) if victim == "launcher" else (*CRASHES, signal.SIGSTOP, signal.SIGSTOP)
    if victim == "starter":
        numbers = tuple(n for n in numbers if n != signal.SIGABRT)  # mpiexec hands it on to all workers
    delay = rng.choice((0.0, rng.uniform(0, 0.2), rng.uniform(0, 2), rng.uniform(0, 6)))
    pause = rng.uniform(0.1, DEADLINE / 2)
    if what == "loader":
        moment = rng.randrange(500)
    if what in ("pause", "ending"):
        moment = 40
    return Fault(transport, size, victim, what, rng.choice(numbers), delay, pause, moment)


def fault(number: int, keep: Collection[int] | None = None) -> tuple[str, Callable[[], object]]:
    """Run a training in which something goes wrong, and check its end."""
    chosen = choose(number)
    return str(chosen), lambda: run(chosen)


def run(chosen: Fault) -> None:
    with tempfile.TemporaryDirectory(prefix="graphc-fuzz-") as name:
        place = Path(name)
        for folder in ("work", "temporary", "flights"):
            (place / folder).mkdir()
        write_mlp(place / "work")
        kind = {"pause": "whole", "ending": "whole", "signal": "none"}.get(chosen.what, chosen.what)
        job = {"folder": str(place / "work"), "kind": kind, "rank": chosen.victim, "moment": chosen.moment}
        with _environment(TMPDIR=str(place / "temporary"), GRAPHC_FLIGHT_DIR=str(place / "flights")):
            process = start_mpi(chosen.size, WORKER, json.dumps(job), transport=chosen.transport, deadline=DEADLINE)
        try:
            pid = _strike(chosen, process, place / "temporary")
            out, err = process.communicate(timeout=LIMIT)
            told = f"{chosen}, pid {pid}: exit code {process.returncode}\n{err[-3000:]}"
            _check_end(chosen, pid, process.returncode, out, err, told)
            _check_nothing_is_left(chosen, place, told)
            check_the_files(place / "work")
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{chosen}: the run did not end in {LIMIT:g} s") from None
        finally:
            for left in (*_strays(place), *([process.pid] if process.poll() is None else [])):
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            process.communicate()


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _strike(chosen: Fault, process: subprocess.Popen[str], place: Path) -> int:
    """Send the signal to the victim; returns its process id, 0 if the fault comes from inside."""
    if chosen.what not in OUTSIDE:
        return 0
    limit = time.monotonic() + LIMIT
    while (pid := _find(chosen.victim, process, place)) is None:
        assert time.monotonic() < limit, f"{chosen}: the victim never came"
        assert process.poll() is None, f"{chosen}: ended before: {process.communicate()[1]}"
        time.sleep(0.001)
    time.sleep(chosen.delay)
    with suppress(ProcessLookupError):  # a short run has ended already
        if chosen.what == "pause":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chosen.pause)
        os.kill(pid, signal.SIGCONT if chosen.what == "pause" else chosen.number)
    return pid


def _find(victim: int | str, process: subprocess.Popen[str], place: Path) -> int | None:
    if victim == "launcher":
        return process.pid
    folder = next(place.glob(f"{PREFIX}*"), None)
    if folder is None:
        return None
    if isinstance(victim, int):
        return rank_processes(folder).get(victim)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):
        return next((pid for pid in map(int, children.read_text().split()) if pid in processes_of(folder)), None)
    return None


def _check_end(chosen: Fault, pid: int, code: int, out: str, err: str, told: str) -> None:
    lines = [line for line in err.splitlines() if line.startswith("graphc: ")]
    if chosen.what == "pause" or (chosen.what == "ending" and code == 0):
        assert code == 0, told
        assert not lines, told
        return
    if chosen.victim == "launcher":
        # Before the launcher has begun its work a signal does what it does to every process.
        assert code in (-chosen.number, 128 + chosen.number) or (chosen.number == signal.SIGINT and code == 1), told
        assert len(lines) == (code == 128 + chosen.number), told
        if lines:
            name = "Ctrl-C" if chosen.number == signal.SIGINT else signal.Signals(chosen.number).name
            stopped = "(the workers were stopped|no worker had been started)"
            assert re.match(rf"graphc: stopped by {name}( in step \d+)?; {stopped}$", lines[0]), told
        return
    message, wanted = _expected(chosen, pid)
    assert code == wanted, told
    assert len(lines) == 1, told
    assert re.match(f"graphc: {message}", lines[0]), told
    blamed = re.findall(r"rank (\d+) (?:\(pid \d+\) )?(?:failed|is gone|is stopped|has been stopped)", lines[0])
    assert set(blamed) <= {str(chosen.victim)}, told
    assert "Traceback" not in err or chosen.what == "loader", told


def _expected(chosen: Fault, pid: int) -> tuple[str, int]:
    """How the message begins, and the exit code."""
    name = signal.Signals(chosen.number).name
    rank = chosen.victim
    if rank == "starter":
        who = rf"{STARTERS[chosen.transport]} \(pid {pid}\)"
        if chosen.number == signal.SIGSTOP:
            return rf"{who} has been stopped \(SIGSTOP\) for 4 s", 1
        if chosen.number == signal.SIGTERM:  # which it takes as a wish to end in order
            return rf"{who} (ended with exit code \d+ before the workers did|is gone: killed by SIGTERM)", 1
        return rf"{who} is gone: killed by {name}", 1
    if chosen.what in OUTSIDE and chosen.number == signal.SIGSTOP:
        return rf".*\brank {rank} \(pid {pid}\) (is|has been) stopped \(SIGSTOP\)", 1
    late = rf"(ranks? ([\d, ]+, )?{rank}\b[\d, ]* did not come to |rank \d could not reach rank {rank} at )"
    return {
        "signal": (rf"rank {rank} \(pid {pid}\) is gone: killed by {name}", 1),
        "ending": (rf"rank {rank} \(pid {pid}\) is gone: killed by {name}", 1),
        "exit": (rf"rank {rank} \(pid \d+\) is gone: it ended with exit code 7 without", 1),
        "leave": (rf"rank {rank} failed: exit code 5", 5),
        "slow": (late, 1),
        "loader": (rf"rank {rank} failed: .*ValueError: sample \d+ is damaged", 1),
    }[chosen.what]


def _check_nothing_is_left(chosen: Fault, place: Path, told: str) -> None:
    limit = time.monotonic() + LIMIT / 4  # workers of a killed launcher notice it by themselves
    while (strays := _strays(place)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not strays, f"{told}\nstill there: {strays}"
    temporary = place / "temporary"
    if chosen.victim == "launcher" and chosen.number not in ENDS:
        with job_folder(temporary), job_folder(Path("/dev/shm")):  # the next launcher tidies up
            pass
    left = [path.name for path in temporary.iterdir()]
    assert not left, f"{told}\nleft: {left}"


def _strays(place: Path) -> list[int]:
    """Processes of this attempt."""
    wanted, found = f"TMPDIR={place / 'temporary'}".encode(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and int(name) != os.getpid():
                found.append(int(name))
    return found
