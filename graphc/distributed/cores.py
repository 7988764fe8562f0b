"""Which cores a worker computes on: those of its process, shared with the workers beside it that may use the same ones.

A launcher may bind workers to cores (Open MPI does, to one core each or to a socket that several share), or leave all of them
to all workers, as ``graphc launch`` does. So workers tell each other what they may use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from graphc.distributed.communicator import Communicator
from graphc.distributed.world import cpu_quota, usable_cores

Place = tuple[str, Sequence[int]]
"""The machine of a worker, and the cores that it may use, in order."""


def cores_of(comm: Communicator) -> tuple[int, ...]:
    """The cores that this worker computes on, at least one; every rank calls it at the same point.

    Where a container may use fewer cores at a time than it sees, workers get as many as that allows.
    """
    mine = usable_cores()
    places = comm.allgather_object((_machine(), mine)) if comm.size > 1 else [(_machine(), mine)]
    beside = sum(machine == places[comm.rank][0] for machine, _ in places)
    share, quota = share_of_cores(places, comm.rank), cpu_quota()
    return share if quota is None else share[: max(1, quota // beside)]


def share_of_cores(places: Sequence[Place], rank: int) -> tuple[int, ...]:
    """The cores of a rank: its own, in equal parts if others may use some of them.

    >>> everywhere = [("a", (0, 1, 2, 3)), ("a", (0, 1, 2, 3)), ("b", (0, 1, 2, 3))]
    >>> [share_of_cores(everywhere, rank) for rank in range(3)]
    [(0, 1), (2, 3), (0, 1, 2, 3)]
    """
    machine, mine = places[rank]
    sharing = [k for k, (where, cores) in enumerate(places) if where == machine and not set(cores).isdisjoint(mine)]
    part = max(1, len(mine) // len(sharing))
    first = sharing.index(rank) * part % len(mine)
    return tuple(mine[first : first + part])


def _machine() -> str:
    """A name that is equal in all containers of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
