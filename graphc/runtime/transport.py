"""Joining the world."""

from __future__ import annotations

from graphc.backend import Memory
from graphc.runtime.communicator import Communicator
from graphc.runtime.queued import NullCommunicator
from graphc.runtime.staged import StagedCommunicator
from graphc.runtime.world import World, find_world


def open_communicator(world: World | None = None) -> Communicator:
    """The communicator of this worker, by default in the world it finds; every rank calls it at the same point.

    Raises:
        WorldError: the transport knows another world than ``world``.
        MissingExtraError: the transport's package is not installed.
    """
    world = find_world(world)
    if world.size == 1:
        return NullCommunicator()
    if world.transport == "threads":
        from graphc.runtime.threads import communicator_of

        return communicator_of(world)
    if world.transport == "tcp":
        from graphc.runtime.tcp import open_tcp

        return open_tcp(world)
    from graphc.runtime.mpi import open_mpi

    return open_mpi(world)


def for_memory(comm: Communicator, memory: Memory) -> Communicator:
    """``comm``, or what makes it take arrays of ``memory`` where these lie on a device."""
    return comm if memory.on_host or comm.size == 1 else StagedCommunicator(comm, memory)
