"""The process of one rank: ``python -m graphc.launch.entry SCRIPT ARGS…`` (or ``-m MODULE``, ``-c CODE``).

Runs the program as ``__main__`` with its output in this rank's own pipes, and writes its outcome to the status board. A failing
worker exits without MPI_Finalize, which would wait for the others forever.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from graphc.distributed.health.status_board import RankState
from graphc.distributed.health.watchdog import RUN_DIRECTORY, Watchdog, join_launcher
from graphc.distributed.world import find_world
from graphc.errors import GraphcError, describe_error, leaves_well

SAME_ERROR = 1.0  # seconds a failing worker waits for others with the same error, so that it is reported once


def main(argv: list[str]) -> None:
    """Run the program ``argv``; returns only if it succeeds."""
    watchdog = join_launcher(find_world()) if RUN_DIRECTORY in os.environ else None
    if watchdog is None:
        sys.exit("graphc.launch.entry is started by 'graphc launch'")
    _redirect(Path(os.environ[RUN_DIRECTORY]), watchdog.rank)
    atexit.register(watchdog.leave)
    try:
        run_program(argv)
    except BaseException as error:
        if not leaves_well(error):
            if not isinstance(error, GraphcError | SystemExit):
                _print_traceback(error)
            _fail(watchdog, *describe_error(error))


def run_program(argv: list[str]) -> None:
    """Run a script, ``-m module`` or ``-c code`` as Python does.

    Workers start with ``-P``, so that no module of the working directory takes the place of one of Python's own; a program
    of the user's gets the folder that Python would give it, in front of the path.
    """
    first, rest = argv[0], argv[1:]
    if first == "-m":
        sys.argv = rest
        if rest[0].partition(".")[0] != "graphc":
            sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _redirect(directory: Path, rank: int) -> None:
    """Send both output streams into the launcher's pipes, a whole line at a time."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(directory / f"{name}-{rank}", os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _fail(watchdog: Watchdog, text: str, code: int) -> NoReturn:
    watchdog.fail(text, code)
    limit = time.monotonic() + SAME_ERROR
    while time.monotonic() < limit and any(status.state is RankState.RUNNING for status in watchdog.board.statuses()):
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 1)


def _print_traceback(error: BaseException) -> None:
    """Format the traceback without the frames above the user's program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


if __name__ == "__main__":
    main(sys.argv[1:])
