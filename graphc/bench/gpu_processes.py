"""Child processes of ``make gpu-bench``: measuring workers and model exports."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

TAIL = 1500
"""Number of characters of a failed process's standard error in messages."""


class Clock:
    """Counts down the seconds of a run's time budget."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, most: float = float("inf")) -> float:
        """The seconds left, between 0 and ``most``."""
        return max(0.0, min(most, self._end - time.monotonic()))


class BenchProcess:
    """A process that prints one line of JSON after its set-up and one per request line.

    Args:
        command: arguments of the Python interpreter.
        clock: time budget; reading fails after its end instead of waiting.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], clock: Clock) -> None:
        self.name, self._clock = " ".join(command[1:]), clock
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # its children are killed with it
        )
        self._input = cast("IO[str]", self._process.stdin)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the process and its children; one that hangs in the driver is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._errors.close()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    def read(self, seconds: float = float("inf")) -> dict[str, Any]:
        """Read the next result line.

        Raises:
            RuntimeError: the process or the time budget ended first.
        """
        try:
            line = self._lines.get(timeout=min(self._clock.left(seconds), threading.TIMEOUT_MAX))
        except queue.Empty:
            raise RuntimeError(f"{self.name} has not answered in its time; {self.said()}") from None
        if line is None:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; {self.said()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def said(self) -> str:
        """The last characters of its standard error."""
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()[-TAIL:].strip()

    def measure(self, what: str = "go") -> dict[str, Any]:
        """Request one measurement; :func:`.gpu_worker.serve` lists the requests.

        Raises:
            RuntimeError: as for :meth:`read`.
        """
        try:
            self._input.write(f"{what}\n")
            self._input.flush()
        except OSError:
            pass  # the process has ended; read() reports how
        return self.read()


def once(command: Sequence[str], environment: Mapping[str, str], clock: Clock, seconds: float = float("inf")) -> dict[str, Any]:
    """Start a process, return its first result within ``seconds``, and kill it."""
    with BenchProcess(command, environment, clock) as worker:
        return worker.read(seconds)


def export_all(
    models: Sequence[tuple[str, int]], folder: Path, *, tiny: bool, clock: Clock
) -> dict[tuple[str, int], Path | str]:
    """Export every (job, layers) in parallel; return each one's file, or why the export failed."""

    def export(wanted: tuple[str, int]) -> Path | str:
        model, layers = wanted
        path = folder / f"{model}-{layers}.onnx"
        command = [sys.executable, "-m", "graphc.bench.gpu_models", model, str(path), "--layers", str(layers)]
        try:
            done = subprocess.run(
                [*command, *(["--tiny"] if tiny else [])], capture_output=True, text=True, check=False, timeout=clock.left()
            )
        except subprocess.TimeoutExpired:
            return f"the export of {model} took too long"
        return f"the export of {model} failed: {done.stderr[-TAIL:]}" if done.returncode else path

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(models, pool.map(export, models), strict=True))


def fill_all(
    models: Sequence[tuple[str, int]], skeletons: Path, folder: Path, *, clock: Clock
) -> dict[tuple[str, int], Path | str]:
    """Fill the skeleton of every (job, layers) with noise, one by one; return each one's file, or why there is none."""

    def filled(model: str, layers: int) -> Path | str:
        name = f"{model}-{layers}.onnx"
        if not (skeletons / name).exists():
            return f"{skeletons} holds no {name}"
        command = [sys.executable, "-m", "graphc.bench.skeleton", "fill", str(skeletons / name), str(folder / name)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=clock.left())
        except subprocess.TimeoutExpired:
            return f"filling {name} took too long"
        return f"filling {name} failed: {done.stderr[-TAIL:]}" if done.returncode else folder / name

    return {(model, layers): filled(model, layers) for model, layers in models}
