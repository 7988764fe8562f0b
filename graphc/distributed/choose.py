"""Opens the communicator of a world: threads, MPI or TCP."""

from __future__ import annotations

from graphc.distributed.communicator import Communicator
from graphc.distributed.health.deadline import check_deadline, find_deadline
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.world import World, find_world


def open_communicator(world: World | None = None, *, deadline: float | None = None) -> Communicator:
    """The communicator of this worker; every rank calls it at the same point.

    Args:
        world: by default what :func:`~graphc.distributed.world.find_world` finds.
        deadline: seconds in which all ranks must have come to a collective, their first meeting included; None:
            GRAPHC_DEADLINE, or 300.

    Raises:
        UsageError: the deadline is not positive.
        WorldError: the transport knows another world than ``world``.
        MissingExtraError: the transport's package is not installed.
    """
    world = find_world(world)
    limit = find_deadline() if deadline is None else check_deadline(deadline)
    if world.size == 1:
        return NullCommunicator()
    if world.transport == "threads":
        from graphc.distributed.threads import communicator_of

        communicator = communicator_of(world)
        if deadline is not None:
            communicator.deadline = limit
        return communicator
    if world.transport == "tcp":
        from graphc.distributed.tcp import open_tcp

        return open_tcp(world, limit)
    from graphc.distributed.mpi import open_mpi

    return open_mpi(world, limit)
