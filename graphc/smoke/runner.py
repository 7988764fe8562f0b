"""Runs stages in processes of their own, each with a time limit: one that hangs or crashes does not stop the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from graphc.smoke.process import NOTE

LAST = 600
"""Characters of a process's last words."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        module, function: what :mod:`.process` calls.
        limit: seconds after which the process is killed.
        needs: stages without which this one cannot run.
        remedy: what to do if it fails.
        command: arguments of the Python interpreter, in place of ``module`` and ``function``.
    """

    name: str
    module: str = ""
    function: str = ""
    limit: float = 60.0
    needs: tuple[str, ...] = ()
    remedy: str = ""
    command: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.command or ("-X", "faulthandler", "-m", "graphc.smoke.process", self.module, self.function)


def run(stages: Sequence[Stage], environment: Mapping[str, str] = os.environ, limit: float = 0.0) -> Iterator[Result]:
    """The result of every stage, as soon as it is known.

    A result has ``stage``, ``state`` (``ok``, ``failed``, ``hung``, ``crashed``, ``skipped`` or ``cannot run``), ``seconds``,
    ``detail``, and whatever the stage measured.

    Args:
        limit: most seconds of any stage; 0: those of each.
    """
    states: dict[str, str] = {}
    for stage in stages:
        missing = [name for name in stage.needs if states.get(name, "ok") != "ok"]
        if missing:
            found: Result = {"state": "cannot run", "seconds": 0.0, "detail": f"it needs the stage {missing[0]!r}"}
        else:
            found = _run(stage, environment, min(limit or stage.limit, stage.limit))
        if found["state"] in ("failed", "hung", "crashed") and stage.remedy:
            found["detail"] += f"; {stage.remedy}"
        states[stage.name] = found["state"]
        yield {"stage": stage.name, **found}


def usable(results: Sequence[Result]) -> bool:
    """Whether every stage that this machine has a use for succeeded."""
    return all(result["state"] in ("ok", "skipped") for result in results)


def _run(stage: Stage, environment: Mapping[str, str], limit: float) -> Result:
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # its children are killed with it
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        return {**_found(code, out, err, limit), "seconds": round(time.monotonic() - begin, 2)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children; one that hangs in the driver is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _found(code: int | None, out: IO[str], err: IO[str], limit: float) -> Result:
    out.seek(0)
    err.seek(0)
    said = err.read()
    notes = [line.removeprefix(NOTE) for line in said.splitlines() if line.startswith(NOTE)]
    during = f" during: {notes[-1]}" if notes else ""
    if code is None:
        return {"state": "hung", "detail": f"killed after {limit:g} s{during}"}
    answers = [line for line in out.read().splitlines() if line.startswith("{")]
    if code == 0 and answers:
        with contextlib.suppress(ValueError):
            found: Result = json.loads(answers[-1])
            return found
    last = " ".join(" ".join(line for line in said.splitlines() if not line.startswith(NOTE)).split())[-LAST:]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    return {"state": "crashed", "detail": f"ended with {how}{during}; {last or 'it said nothing'}"}
