"""Running programs and functions on real MPI processes, for tests.

done = run_mpi(2, "print('hello')")                        # program text, or a Path to a script
assert done.code == 0, done.text

sums = map_ranks(2, work, 3.0)                             # work(comm, 3.0) on every rank; results in rank order
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

HANG = 200.0
"""Seconds after which a run counts as hanging. Not a measure of speed: a busy machine may need minutes."""

_LAUNCH = """
import json, sys
from graphc.errors import GraphcError
from graphc.launch.local import launch
workers, transport, env, argv, options = json.loads(sys.argv[1])
try:
    sys.exit(launch(workers, argv, transport, env, **options))
except GraphcError as error:
    print(f"graphc: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""

_CALL = """
import importlib.util, pickle, sys
from pathlib import Path
file, name, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("tested", file)
module = importlib.util.module_from_spec(spec)
sys.modules["tested"] = module
spec.loader.exec_module(module)
from graphc.distributed.choose import open_communicator
comm = open_communicator()
arguments = pickle.loads(Path(folder, "arguments").read_bytes())
result = getattr(module, name)(comm, *arguments)
Path(folder, f"result-{comm.rank}").write_bytes(pickle.dumps(result))
comm.close()
"""


@dataclass(frozen=True)
class Done:
    """How a run ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def start_mpi(
    workers: int,
    program: str | Path,
    *arguments: str,
    transport: str = "mpi",
    env: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start the launcher and return at once; ``options`` are those of ``launch``."""
    import json

    argv = ["-c", program, *arguments] if isinstance(program, str) else [str(program), *arguments]
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, json.dumps([workers, transport, env or {}, argv, options])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float) -> Done:
    """Wait for the launcher; one that does not end in ``timeout`` seconds is killed and fails the test."""
    start = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers notice that the launcher is gone and end
        out, err = process.communicate()
        raise AssertionError(f"the run did not end within {timeout} s\n--- stdout\n{out}\n--- stderr\n{err}") from None
    return Done(process.returncode, out, err, time.monotonic() - start)


def run_mpi(
    workers: int,
    program: str | Path,
    *arguments: str,
    timeout: float = HANG,
    transport: str = "mpi",
    env: dict[str, str] | None = None,
    **options: Any,
) -> Done:
    """Run program text, or a script, as ``workers`` ranks and wait."""
    return finish(start_mpi(workers, program, *arguments, transport=transport, env=env, **options), timeout)


def map_ranks(workers: int, function: Callable[..., Any], *arguments: Any, timeout: float = HANG) -> list[Any]:
    """Call a module-level ``function(comm, *arguments)`` on every MPI rank; picklable results in rank order."""
    file = inspect.getsourcefile(function)
    assert file is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
        done = run_mpi(workers, _CALL, file, function.__name__, folder, timeout=timeout)
        assert done.code == 0, done.text
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(workers)]
