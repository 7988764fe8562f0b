"""Runs one attempt in a forked child with limits of memory and time, and says how it ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphc.errors import GraphcError, InternalError

Ending = Literal["result", "refused", "internal", "exception", "death", "hang"]
GOOD: tuple[Ending, ...] = ("result", "refused")


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: a result and a clear error are good, the rest are faults of graphc."""

    ending: Ending
    detail: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.ending in GOOD


def attempt(work: Callable[[], object], *, seconds: float = 20.0, megabytes: int = 4096) -> Outcome:
    """Fork, run ``work`` with at most that time and that much more memory, and classify how it ended."""
    with tempfile.TemporaryFile() as report:
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(work, report.fileno(), megabytes)
        status = _wait(pid, seconds)
        took = time.monotonic() - start
        if status is None:
            return Outcome("hang", f"over {seconds:g} s", took)
        report.seek(0)
        text = report.read().decode(errors="replace")
        if os.WIFSIGNALED(status):
            return Outcome("death", f"signal {signal.Signals(os.WTERMSIG(status)).name} {text[-600:]}", took)
        ending, _, detail = text.partition("\n")
        if ending not in ("result", "refused", "internal", "exception"):
            return Outcome("death", f"exit {os.WEXITSTATUS(status)} {text[-600:]}", took)
        return Outcome(ending, detail, took)  # type: ignore[arg-type]


def _wait(pid: int, seconds: float) -> int | None:
    """The status of the child, or None if it had to be killed after ``seconds``."""
    end = time.monotonic() + seconds
    pause = 0.001
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _child(work: Callable[[], object], report: int, megabytes: int) -> None:
    """Run ``work`` and write how it ended; never returns."""
    with contextlib.suppress(BaseException):
        faulthandler.disable()  # a death is told once, in the outcome
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            work()
            ending, detail = "result", ""
        except InternalError as error:
            ending, detail = "internal", f"{error}\n{_place(error.__cause__ or error)}"
        except GraphcError as error:
            ending, detail = "refused", str(error)
        except BaseException as error:
            ending, detail = "exception", f"{type(error).__name__}: {error}\n{_place(error)}"
        os.write(report, f"{ending}\n{detail}".encode(errors="replace"))
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    os._exit(0)


def _place(error: BaseException) -> str:
    """The innermost line of graphc in the traceback of ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/tests/" not in f.filename and "site-packages" not in f.filename] or frames
    return f"at {inside[-1].filename}:{inside[-1].lineno} {inside[-1].name}" if inside else ""
