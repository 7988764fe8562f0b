"""Which worker am I, and how many are there?

Looked for in this order: what the caller says → the worker threads of this process → ``RANK``/``WORLD_SIZE``/``LOCAL_RANK``
→ Open MPI's and PMI's variables → Slurm's → alone. Processes talk by MPI; where a launcher that knows no MPI sets
``MASTER_ADDR`` beside ``RANK`` (torchrun, a shell loop), they meet there by TCP. ``GRAPHC_TRANSPORT`` may say which.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from graphc.errors import UsageError, counted, nearest

Transport: TypeAlias = Literal["null", "threads", "mpi", "tcp"]

TRANSPORT = "GRAPHC_TRANSPORT"
"""Environment variable: how workers talk, one of :data:`TRANSPORTS`."""

Wanted: TypeAlias = Literal["auto", "nccl", "mpi", "tcp", "threads"]
TRANSPORTS: tuple[Wanted, ...] = get_args(Wanted)
"""``nccl`` is for arrays of GPUs only; everything else then goes by MPI or TCP."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of this worker among all.

    Attributes:
        rank: 0 … size - 1.
        size: number of workers.
        local_rank: 0 … local_size - 1, the place among the workers on this machine; names the device.
        local_size: number of workers on this machine.
        transport: how the workers talk: ``null`` (alone), ``threads``, ``mpi`` or ``tcp``.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    transport: Transport = "null"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"rank {self.rank} does not fit a world of {counted(self.size, 'worker')}: ranks are 0 … {self.size - 1}"
            )
        if not 0 <= self.local_rank < self.local_size:
            raise UsageError(
                f"local rank {self.local_rank} does not fit {counted(self.local_size, 'local worker')}: "
                f"local ranks are 0 … {self.local_size - 1}"
            )


THREAD_WORLD: contextvars.ContextVar[World | None] = contextvars.ContextVar("graphc_thread_world", default=None)
"""The world of the worker thread that asks; set by :mod:`graphc.distributed.threads`."""


def find_world(
    explicit: World | None = None, environment: Mapping[str, str] | None = None, *, transport: str | None = None
) -> World:
    """Find the world of this worker.

    Args:
        explicit: taken as it is when given.
        environment: looked through instead of ``os.environ``.
        transport: ``mpi`` or ``tcp`` settle how processes talk; None: as ``GRAPHC_TRANSPORT`` says.

    Raises:
        UsageError: a variable that is no whole number, a set of variables of which one is missing, or an unknown transport.
    """
    if explicit is not None:
        return explicit
    inside_thread = THREAD_WORLD.get()
    if inside_thread is not None:
        return inside_thread
    found = os.environ if environment is None else environment
    for look in (_from_variables, _from_slurm):
        world = look(found)
        if world is not None:
            return _over(world, wanted_transport(transport, found))
    return World()


def named_rank(environment: Mapping[str, str]) -> int | None:
    """The rank that a launcher has put into an environment; None if it names no world."""
    world = _from_variables(environment) or _from_slurm(environment)
    return None if world is None else world.rank


def wanted_transport(explicit: str | None, environment: Mapping[str, str] | None = None) -> Wanted:
    """One of :data:`TRANSPORTS`: ``explicit`` where it settles something, else what ``GRAPHC_TRANSPORT`` says, else ``auto``.

    Raises:
        UsageError: it is none of them.
    """
    settled = explicit not in (None, "auto")
    found = (explicit if settled else (os.environ if environment is None else environment).get(TRANSPORT)) or "auto"
    if found not in TRANSPORTS:
        where = "" if settled else f" in {TRANSPORT}"
        raise UsageError(
            f"unknown transport {found!r}{where}{nearest(found, TRANSPORTS)}; the transports are {', '.join(TRANSPORTS)}"
        )
    return found


def device_index(count: int, world: World | None = None) -> int:
    """Which of the ``count`` devices that this process sees is this worker's; where there are fewer, workers share them.

    >>> [device_index(2, World(rank, 3, rank, 3, "mpi")) for rank in range(3)]
    [0, 1, 0]
    """
    return find_world(world).local_rank % count


def _over(world: World, transport: Wanted) -> World:
    if world.size == 1 or (transport != "mpi" and transport != "tcp"):
        return world
    return replace(world, transport=transport)


def threads_for(world: World) -> int:
    """Compute threads for this worker: cores it may use ÷ workers on this machine, at least 1."""
    return max(1, available_cores() // world.local_size)


def usable_cores() -> tuple[int, ...]:
    """The cores in the affinity mask of this thread, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_cores() -> int:
    """How many cores this process may use at a time: a container's CPU quota may allow fewer than :func:`usable_cores`."""
    cores, quota = len(usable_cores()), cpu_quota()
    return cores if quota is None else min(cores, quota)


def cpu_quota() -> int | None:
    """How many cores all processes of this container may use at a time, at least 1; None: as many as there are."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, size, local rank and local size, as most launchers, Open MPI and PMI call them."""


def _from_variables(environment: Mapping[str, str]) -> World | None:
    for rank_name, size_name, *local in _VARIABLES:
        rank, size = _pair(environment, rank_name, size_name)
        if rank is None or size is None:
            continue
        world = _world(rank, size, *(_number(environment, name) for name in local))
        knows_mpi = any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"))
        return _over(world, "tcp") if rank_name == "RANK" and "MASTER_ADDR" in environment and not knows_mpi else world
    return None


def _from_slurm(environment: Mapping[str, str]) -> World | None:
    # The step variables exist only under srun; SLURM_NTASKS is also set in a batch script's own shell, which is one process.
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    rank = _number(environment, "SLURM_PROCID")
    if rank is None or size is None:
        return None
    node = _number(environment, "SLURM_NODEID") or 0
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_size = per_node[node] if node < len(per_node) else None
    return _world(rank, size, _number(environment, "SLURM_LOCALID"), local_size)


def _tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` → [2, 2, 2, 1]; empty where the text is something else."""
    result: list[int] = []
    for part in filter(None, text.split(",")):
        tasks, _, repeat = part.partition("(x")
        repeat = repeat.rstrip(")") or "1"
        if not (tasks.isdecimal() and repeat.isdecimal()):
            return []
        result += [int(tasks)] * int(repeat)
    return result


def _world(rank: int, size: int, local_rank: int | None, local_size: int | None) -> World:
    """Fill in what is not said: all workers on one machine."""
    if local_rank is None:
        local_rank = rank if local_size is None else rank % local_size
    if local_size is None:
        local_size = max(size, local_rank + 1)
    return World(rank, size, local_rank, local_size, "mpi" if size > 1 else "null")


def _pair(environment: Mapping[str, str], rank: str, size: str) -> tuple[int | None, int | None]:
    if (rank in environment) != (size in environment):
        there, missing = (rank, size) if rank in environment else (size, rank)
        raise UsageError(f"the environment sets {there} but not {missing}; set both, or neither to run alone")
    return _number(environment, rank), _number(environment, size)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the environment variable {name}={text!r} is not a whole number") from None
