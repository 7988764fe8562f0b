"""Finds the processes of a run by their environment, whoever started them and whether or not they have begun to work."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from graphc.distributed.health.watchdog import RUN_DIRECTORY
from graphc.distributed.world import named_rank
from graphc.errors import UsageError


def processes_of(directory: Path) -> dict[int, dict[str, str]]:
    """The environment of each process of the run in ``directory``, by process id."""
    wanted = f"{RUN_DIRECTORY}={directory}".encode()
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # gone, or another user's
            entries = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if wanted in entries:
                pairs = (os.fsdecode(entry).partition("=") for entry in entries)
                found[int(name)] = {key: value for key, _, value in pairs}
    return found


def rank_processes(directory: Path) -> dict[int, int]:
    """Rank → process id of the workers; the processes that a worker has started bear its rank too and are left out."""
    ranks = {pid: _rank(environment) for pid, environment in processes_of(directory).items()}
    return {
        rank: pid for pid, rank in sorted(ranks.items(), reverse=True) if rank is not None and ranks.get(_parent(pid)) != rank
    }


def kill_all(directory: Path) -> bool:
    """Kill every process of the run, stopped ones too; returns whether there was any."""
    found = processes_of(directory)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _rank(environment: Mapping[str, str]) -> int | None:
    try:
        return named_rank(environment)
    except UsageError:
        return None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
