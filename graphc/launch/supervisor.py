"""Supervises workers: forwards output, ends the run on a failure, reports the cause."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals

from graphc.distributed.health.flight_recorder import dump
from graphc.distributed.health.hang_report import join_ranks, waits_between_stages
from graphc.distributed.health.status_board import RankState, RankStatus, StatusBoard
from graphc.distributed.health.watchdog import is_alive, is_stopped
from graphc.launch.processes import kill_all, rank_processes
from graphc.launch.signals import ending

TICK = 0.05  # seconds between looks at the board
PARTIAL = 0.1  # seconds after which an unfinished line (a progress bar) is shown
PATIENCE = 3.0  # seconds mpiexec has to end the others after the first failure
MARGIN = 2.0  # seconds beyond the deadline that a worker may be stopped: waiting ranks report first, with more detail
TERMINATION = 2.0  # seconds between SIGTERM and SIGKILL
START = 10.0  # seconds that a worker may take at least to begin its program, on a busy machine

# Open MPI's message about the first failed process; it wraps lines, so whitespace is normalised first.
ENDED = (
    re.compile(
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ "
        r"(?:exited on signal (?P<signal>\d+)|exiting(?: with exit code (?P<code>\d+))?)"
    ),
    re.compile(r"Process name: \[[^],]*,(?P<rank>\d+)\] Exit code: (?P<code>\d+)"),
)

HINTS = {
    "SIGKILL": " (by someone, or by the kernel because memory ran out)",
    "SIGBUS": " (a file that it has mapped became shorter, or the disk or shared memory under it is full)",
}


class Stream:
    """One worker's stdout or stderr; forwards whole lines."""

    def __init__(self, path: Path, name: str) -> None:
        # Opened for writing too, so that the pipe reports no end of file before its worker opens it.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._since = 0.0

    def pump(self) -> None:
        """Forward the complete lines read so far."""
        while True:
            try:
                data = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            lines, newline, self._rest = (self._rest + self._decoder.decode(data)).rpartition("\n")
            self._since = time.monotonic()
            self._emit(lines + newline)
        if self._rest and time.monotonic() - self._since > PARTIAL:
            self.flush()

    def flush(self) -> None:
        """Forward the unfinished last line."""
        self._emit(self._rest)
        self._rest = ""

    def _emit(self, text: str) -> None:
        if text:
            target = sys.stdout if self.name == "stdout" else sys.stderr
            try:
                target.write(text)
                target.flush()
            except OSError:  # closed reader or full disk: the workers go on
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, target.fileno())
                os.close(null)


class Supervisor:
    """Supervises ``process`` (mpiexec, or what starts workers over TCP) and the workers on ``board``.

    Args:
        pipes: the workers' output, by stream and rank.
        deadline: seconds for which a process may be stopped, or a worker not begin its program.
        directory: folder of the run, by which its processes are found.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        board: StatusBoard,
        pipes: Mapping[tuple[str, int], Path],
        deadline: float,
        directory: Path,
    ) -> None:
        self.process = process
        what = "the process that started the workers" if "graphc.launch.spawn" in str(process.args) else "mpiexec"
        self._starter = f"{what} (pid {process.pid})"
        self.board = board
        self.deadline = deadline
        self.directory = directory
        self._stopped: dict[int, float] = {}  # process → seconds
        self._starting = 0.0
        self._looked = time.monotonic()
        self._verdict = ""
        self._cause = ""  # ranks that were stopped when the others failed
        self._streams = [Stream(path, name) for (name, _), path in pipes.items()]
        self._mpiexec_text = b""
        self._failed_at: float | None = None
        self._signalled = False

    def run(self, noted: Sequence[int] = ()) -> int:
        """Wait for the end of the run; return the exit code.

        Args:
            noted: signals that have come, which end the run (:func:`graphc.launch.signals.signals_noted`).
        """
        try:
            while self.process.poll() is None and not self._verdict and not noted:
                self._forward()
                self._look()
            if noted and self.process.returncode is None:
                what, code = ending(noted[0])
                self._end_all()
                print(f"graphc: stopped by {what}{self._last_step()}; the workers were stopped", file=sys.stderr)
                return code
        finally:
            if self.process.returncode != 0:
                self._end_all()
            self._forward()
            for stream in self._streams:
                stream.flush()
                os.close(stream.descriptor)
        return self._report()

    def _last_step(self) -> str:
        """The step that the workers were in, as far as their collectives tell."""
        steps = [entry.step for rank in range(self.board.size) for entry in self.board.recorder(rank).entries()]
        last = max(steps, default=-1)
        return f" in step {last}" if last >= 0 else ""

    def _forward(self) -> None:
        poll = select.poll()
        for stream in self._streams:
            poll.register(stream.descriptor, select.POLLIN)
        out = self.process.stdout
        if out is not None and not out.closed:
            poll.register(out.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(TICK * 1000 if self.process.returncode is None else 0)}
        for stream in self._streams:
            stream.pump()
        if out is not None and not out.closed and out.fileno() in ready:
            data = os.read(out.fileno(), 1 << 16)
            self._mpiexec_text += data
            if not data:
                out.close()

    def _look(self) -> None:
        """After the first failure give mpiexec some time to end the others, then kill them."""
        if self._failed_at is None:
            bad = (RankState.FAILED, RankState.STOPPED)
            if any(n.state in bad or (n.state is RankState.RUNNING and not is_alive(n.pid)) for n in self.board.statuses()):
                self._failed_at = time.monotonic()
                stopped = [(r, n) for r, n in enumerate(self.board.statuses()) if n.pid and is_stopped(n.pid)]
                self._cause = "".join(f"; {status.label(rank)} is stopped (SIGSTOP)" for rank, status in stopped)
                begun = rank_processes(self.directory).keys() | {r for r, n in enumerate(self.board.statuses()) if n.pid}
                if is_stopped(self.process.pid) and len(begun) < self.board.size:  # nobody is to blame for not being started
                    self._verdict = f"{self._starter} has been stopped (SIGSTOP) before it had started every worker"
            else:
                self._look_for_idle()
            return
        late = time.monotonic() - self._failed_at - PATIENCE
        if late > TERMINATION:
            self._kill()
        elif late > 0 and not self._signalled:
            self._signalled = True
            self.process.terminate()

    def _look_for_idle(self) -> None:
        """Find a process that is stopped (SIGSTOP), and a worker that does not begin; nobody else would notice."""
        now = time.monotonic()
        if now - self._looked < min(1.0, self.deadline):
            return
        # Cap the time between two looks: this process may have been stopped too.
        passed, self._looked = min(now - self._looked, 2.0), now
        statuses = self.board.statuses()
        absent = [rank for rank, status in enumerate(statuses) if status.state is RankState.ABSENT]
        if absent:
            self._starting += passed
            for rank, pid in rank_processes(self.directory).items():
                if rank < self.board.size:
                    self.board.announce(rank, pid)
        names = {self.process.pid: self._starter}
        names |= {status.pid: f"rank {rank} (pid {status.pid})" for rank, status in enumerate(statuses) if status.pid}
        for pid in names:
            self._stopped[pid] = self._stopped.get(pid, 0.0) + passed if is_stopped(pid) else 0.0
        longest = max(names, key=lambda pid: self._stopped[pid])
        limit = self.deadline + MARGIN
        if self._stopped[longest] > limit or (self._stopped[longest] and self._starting > max(limit, START)):
            self._verdict = f"{names[longest]} has been stopped (SIGSTOP) for {self.deadline:g} s"
        elif self._starting > max(limit, START):
            self._verdict = f"{join_ranks(absent)} did not begin the program within {max(self.deadline, START):g} s"

    def _end_all(self) -> None:
        """End all processes of this run, and wait until they are gone."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TERMINATION)
        self._kill()

    def _kill(self) -> None:
        limit = time.monotonic() + TERMINATION
        self._kill_workers()
        self.process.kill()
        self.process.wait()
        while kill_all(self.directory) and time.monotonic() < limit:
            time.sleep(0.01)

    def _kill_workers(self) -> None:
        for status in self.board.statuses():
            if status.pid and is_alive(status.pid):
                for send in (os.killpg, os.kill):  # mpiexec makes each worker the leader of a process group
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        send(status.pid, signal.SIGKILL)

    def _report(self) -> int:
        """Report which rank ended the run, and why."""
        statuses = self.board.statuses()
        code = self.process.returncode
        if self._verdict:
            self._say(self._verdict)
            return 1
        failed = [rank for rank, status in enumerate(statuses) if status.state is RankState.FAILED]
        text = self._mpiexec_text.decode("utf-8", "replace")
        for ended in self._ended(text):
            rank = int(ended["rank"])
            if statuses[rank].state not in (RankState.FAILED, RankState.STOPPED):
                if ended.groupdict().get("pid"):
                    self.board.announce(rank, int(ended["pid"]))  # it may have died before it wrote to the board
                how = {name: found for name, found in ended.groupdict().items() if name in ("signal", "code")}
                self._say(f"{self.board.read(rank).label(rank)} is gone: {_reason(**how)}", gone=rank)
                return 1
        if code < 0 and not self._signalled:
            self._say(f"{self._starter} is gone: {_reason(signal=str(-code))}")
            return 1
        if failed:
            first = min(failed, key=lambda rank: statuses[rank].time)
            self._say_failed([rank for rank in failed if statuses[rank].text == statuses[first].text], statuses[first])
            return statuses[first].code or 1
        stopped = [status for status in statuses if status.state is RankState.STOPPED]
        if stopped:
            text = min(stopped, key=lambda status: status.time).text
            self._say(text if "SIGSTOP" in text else text + self._cause)
            return 1
        gone = [rank for rank, status in enumerate(statuses) if status.state in (RankState.RUNNING, RankState.ABSENT)]
        lost = [rank for rank, status in enumerate(statuses) if status.state is RankState.SPARE]
        if not gone and (code == 0 or lost):
            for rank in lost:
                print(f"graphc: {statuses[rank].label(rank)} was lost; the others went on without it", file=sys.stderr)
            return 0
        sys.stderr.write(text)
        if code == 0:
            self._say(f"{join_ranks(gone)} ended without leaving the run in order (os._exit)")
        else:
            self._say(f"{self._starter} ended with exit code {code} before the workers did")
        return 1

    def _ended(self, text: str) -> Iterator[re.Match[str]]:
        """What the starter says of the processes that ended badly, the first one first."""
        for pattern in ENDED:
            yield from pattern.finditer(" ".join(text.split()))

    def _say_failed(self, ranks: list[int], status: RankStatus) -> None:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        self._say(f"{who} failed: {status.text}{self._cause}", alone=len(ranks) == self.board.size)

    def _say(self, message: str, *, alone: bool = False, gone: int = -1) -> None:
        """Print how the run ended, and write the flight logs; ``gone``: the rank that ended it without a word."""
        if alone or self.board.size == 1:
            print(f"graphc: {message}", file=sys.stderr, flush=True)
            return
        logs = {rank: self.board.recorder(rank).entries() for rank in range(self.board.size)}
        where = dump(logs, self.board.size, message, self.board.stamp)
        waits = waits_between_stages(logs, gone) if gone >= 0 else ""
        text = "; ".join(filter(None, (message, waits, "the other workers were stopped", where)))
        print(f"graphc: {text}", file=sys.stderr, flush=True)


def _reason(signal: str | None = None, code: str | None = None) -> str:
    if signal is None:
        return f"it ended{f' with exit code {code}' if code else ''} without leaving the run in order (os._exit, or a crash)"
    try:
        name = Signals(int(signal)).name
    except ValueError:
        name = f"signal {signal}"
    return f"killed by {name}{HINTS.get(name, '')}"
