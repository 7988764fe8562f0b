"""Running programs and functions on processes that only their environment introduces, as torchrun or a shell loop starts them.

runs = run_tcp(2, "print('hello')")                        # one Done a rank
sums = map_tcp(2, work, 3.0)                               # work(comm, 3.0) on every rank; results in rank order
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphc.launch.spawn import free_port
from tests.runtime.mpi_run import _CALL, HANG, ROOT, Done


def start_tcp(
    workers: int, program: str, *arguments: str, env: dict[str, str] | None = None, ranks: Sequence[int] | None = None
) -> list[subprocess.Popen[str]]:
    """Start ``ranks`` (None: all) of ``workers``; they meet on this machine."""
    port = str(free_port())
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    common = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**common, "RANK": str(rank), **(env or {})},
        )
        for rank in (range(workers) if ranks is None else ranks)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = HANG) -> list[Done]:
    """Wait for all; one that does not end in time fails the test, and none is left."""
    start = time.monotonic()
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, start + timeout - time.monotonic()))
            found.append(Done(process.returncode, out, err, time.monotonic() - start))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"rank {len(found)} did not end within {timeout} s; the others: {found}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
    return found


def run_tcp(workers: int, program: str, *arguments: str, timeout: float = HANG, **options: Any) -> list[Done]:
    return finish(start_tcp(workers, program, *arguments, **options), timeout)


def map_tcp(workers: int, function: Callable[..., Any], *arguments: Any, timeout: float = HANG) -> list[Any]:
    """Call a module-level ``function(comm, *arguments)`` on every rank; picklable results in rank order."""
    file = inspect.getsourcefile(function)
    assert file is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
        for done in run_tcp(workers, _CALL, file, function.__name__, folder, timeout=timeout):
            assert done.code == 0, done.text
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(workers)]
