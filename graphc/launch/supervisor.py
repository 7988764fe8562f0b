"""Supervises workers: forwards output, ends the run on a failure, reports the cause."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals

from graphc.distributed.health.flight_recorder import dump
from graphc.distributed.health.status_board import RankState, RankStatus, StatusBoard
from graphc.distributed.health.watchdog import is_alive, is_stopped
from graphc.launch.signals import termination_interrupts

TICK = 0.05  # seconds between looks at the board
PARTIAL = 0.1  # seconds after which an unfinished line (a progress bar) is shown
PATIENCE = 3.0  # seconds mpiexec has to end the others after the first failure
MARGIN = 2.0  # seconds beyond the deadline that a worker may be stopped: waiting ranks report first, with more detail
TERMINATION = 2.0  # seconds between SIGTERM and SIGKILL

# Open MPI's message about the first failed process; it wraps lines, so whitespace is normalised first.
ENDED = (
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ (?:exited on signal (?P<signal>\d+)|exiting)"),
    re.compile(r"Process name: \[[^],]*,(?P<rank>\d+)\] Exit code: (?P<code>\d+)"),
)


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
    """Supervises ``process`` (mpiexec, or what starts workers over TCP) and the workers on ``board``."""

    def __init__(
        self, process: subprocess.Popen[bytes], board: StatusBoard, pipes: Mapping[tuple[str, int], Path], deadline: float
    ) -> None:
        self.process = process
        self._starter = "the process that started them" if "graphc.launch.spawn" in str(process.args) else "mpiexec"
        self.board = board
        self.deadline = deadline
        self._stopped: dict[int, float] = {}
        self._stopped_looked = 0.0
        self._streams = [Stream(path, name) for (name, _), path in pipes.items()]
        self._mpiexec_text = b""
        self._failed_at: float | None = None
        self._signalled = False

    def run(self) -> int:
        """Wait for the end of the run; return the exit code."""
        try:
            with termination_interrupts():
                while self.process.poll() is None:
                    self._forward()
                    self._look()
        except KeyboardInterrupt as end:
            number = end.args[0] if end.args else signal.SIGINT
            self._end_all()
            what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            print(f"graphc: stopped by {what}{self._last_step()}; the workers were stopped", file=sys.stderr)
            return int(128 + number)
        finally:
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
            self._look_for_stopped()
            return
        late = time.monotonic() - self._failed_at - PATIENCE
        if late > TERMINATION:
            self._kill()
        elif late > 0 and not self._signalled:
            self._signalled = True
            self.process.terminate()

    def _look_for_stopped(self) -> None:
        """Find a worker stopped (SIGSTOP) outside collectives, whose absence no other rank would notice."""
        now = time.monotonic()
        if now - self._stopped_looked < min(1.0, self.deadline):
            return
        # Cap the time between two looks: this process may have been stopped too.
        passed, self._stopped_looked = min(now - self._stopped_looked, 2.0), now
        for rank, status in enumerate(self.board.statuses()):
            waited = self._stopped.get(rank, 0.0) + passed if status.pid and is_stopped(status.pid) else 0.0
            self._stopped[rank] = waited
            if waited > self.deadline + MARGIN:
                text = f"rank {rank} (pid {status.pid}) has been stopped (SIGSTOP) for {self.deadline:g} s"
                self.board.write(rank, RankState.STOPPED, text=text, code=1, pid=status.pid)
                self._failed_at = now

    def _end_all(self) -> None:
        """Kill all processes of this run."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(TERMINATION)
            except subprocess.TimeoutExpired:
                self._kill()
        self._kill_workers()

    def _kill(self) -> None:
        self._kill_workers()
        self.process.kill()
        self.process.wait()

    def _kill_workers(self) -> None:
        for status in self.board.statuses():
            if status.pid and is_alive(status.pid):
                for send in (os.killpg, os.kill):  # mpiexec makes each worker the leader of a process group
                    try:
                        send(status.pid, signal.SIGKILL)
                    except (ProcessLookupError, PermissionError):
                        continue

    def _report(self) -> int:
        """Report which rank ended the run, and why."""
        statuses = self.board.statuses()
        failed = [rank for rank, status in enumerate(statuses) if status.state is RankState.FAILED]
        text = self._mpiexec_text.decode("utf-8", "replace")
        for pattern in ENDED:
            ended = pattern.search(" ".join(text.split()))
            rank = int(ended["rank"]) if ended is not None else 0
            if ended is not None and statuses[rank].state in (RankState.RUNNING, RankState.SPARE):
                self._say(f"{statuses[rank].label(rank)} is gone: {_reason(**ended.groupdict())}")
                return 1
        if failed:
            first = min(failed, key=lambda rank: statuses[rank].time)
            self._say_failed([rank for rank in failed if statuses[rank].text == statuses[first].text], statuses[first])
            return statuses[first].code or 1
        stopped = [status for status in statuses if status.state is RankState.STOPPED]
        if stopped:
            self._say(min(stopped, key=lambda status: status.time).text)
            return 1
        gone = [rank for rank, status in enumerate(statuses) if status.state in (RankState.RUNNING, RankState.ABSENT)]
        lost = [rank for rank, status in enumerate(statuses) if status.state is RankState.SPARE]
        if not gone and (self.process.returncode == 0 or lost):
            for rank in lost:
                print(f"graphc: {statuses[rank].label(rank)} was lost; the others went on without it", file=sys.stderr)
            return 0
        sys.stderr.write(text)
        names = ", ".join(map(str, gone or range(self.board.size)))
        self._say(f"rank {names} did not end well: {self._starter} returned {self.process.returncode}")
        return 1

    def _say_failed(self, ranks: list[int], status: RankStatus) -> None:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        self._say(f"{who} failed: {status.text}", alone=len(ranks) == self.board.size)

    def _say(self, message: str, *, alone: bool = False) -> None:
        if alone or self.board.size == 1:
            print(f"graphc: {message}", file=sys.stderr, flush=True)
            return
        logs = {rank: self.board.recorder(rank).entries() for rank in range(self.board.size)}
        where = dump(logs, self.board.size, message, self.board.stamp)
        text = "; ".join(filter(None, (message, "the other workers were stopped", where)))
        print(f"graphc: {text}", file=sys.stderr, flush=True)


def _reason(rank: str, signal: str | None = None, code: str | None = None) -> str:
    if signal is None:
        return f"it ended{f' with exit code {code}' if code else ''} without leaving the run in order (os._exit, or a crash)"
    try:
        name = Signals(int(signal)).name
    except ValueError:
        name = f"signal {signal}"
    hint = " (by someone, or by the kernel because memory ran out)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
