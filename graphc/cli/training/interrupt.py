"""Says where a run of ``graphc train`` was stopped and how to go on."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphc.errors import GraphcError
from graphc.runtime import checkpoint

if TYPE_CHECKING:
    from graphc.cli.training.job import Job


class Progress:
    """How far a run is, for the message when someone stops it.

    Attributes:
        begun: time of the start, of the clock of files.
        step: finished steps; None before the first.
        steps: of the whole run; 0 if unknown.
    """

    def __init__(self) -> None:
        self.begun = time.time()
        self.step: int | None = None
        self.steps = 0


def stopped(job: Job, progress: Progress, what: str, command: Sequence[str] | None) -> str:
    """Describe a stopped run.

    Args:
        what: by what, in words.
        command: the command line, without the program's name; None: unknown.
    """
    where = "before the first step" if progress.step is None else f"after step {progress.step}"
    whole = f" of {progress.steps}" if progress.steps and progress.step is not None else ""
    return f"stopped by {what} {where}{whole}; {how_to_resume(job, progress.begun, command)}"


def how_to_resume(job: Job, begun: float, command: Sequence[str] | None) -> str:
    """Name the last checkpoint and the command that goes on from it."""
    places = [(job.checkpoint, begun), (job.resume, 0.0)]
    for folder, since in places:
        steps = _steps_of(folder, since) if folder is not None else None
        if steps is None or folder is None:
            continue
        line = f"--resume {shlex.quote(folder)}" if command is None else _resuming(command, folder)
        return f"the last checkpoint is {folder}, after step {steps}; go on with: {line}"
    if job.checkpoint is not None:
        return f"no epoch ended, so there is no checkpoint in {job.checkpoint} yet"
    return "nothing was written: --checkpoint DIR saves all state after each epoch, and --resume DIR goes on from there"


def _steps_of(folder: str, since: float) -> int | None:
    """Finished steps of the checkpoint in ``folder``; None if there is none that is newer than ``since``."""
    path = Path(folder) / checkpoint.FILE_NAME
    try:
        if path.stat().st_mtime < since:
            return None
        return int(checkpoint.metadata(folder).get("steps", 0))
    except (OSError, GraphcError):
        return None


def _resuming(command: Sequence[str], folder: str) -> str:
    """The command line with ``--resume folder`` in place of its own."""
    words: list[str] = []
    rest = iter(command)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume="):
            words.append(word)
    return shlex.join(["graphc", *words, "--resume", folder])
