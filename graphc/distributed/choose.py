"""Opens the communicator of a world: threads, MPI or TCP."""

from __future__ import annotations

from graphc.distributed.communicator import Communicator
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.world import World, find_world


def open_communicator(world: World | None = None) -> Communicator:
    """The communicator of this worker; every rank calls it at the same point.

    Args:
        world: by default what :func:`~graphc.distributed.world.find_world` finds.

    Raises:
        WorldError: the transport knows another world than ``world``.
        MissingExtraError: the transport's package is not installed.
    """
    world = find_world(world)
    if world.size == 1:
        return NullCommunicator()
    if world.transport == "threads":
        from graphc.distributed.threads import communicator_of

        return communicator_of(world)
    if world.transport == "tcp":
        from graphc.distributed.tcp import open_tcp

        return open_tcp(world)
    from graphc.distributed.mpi import open_mpi

    return open_mpi(world)
