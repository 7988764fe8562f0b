"""Collectives of arrays that the host cannot read, called as if it could: cases written for transports serve for both."""

from __future__ import annotations

from typing import Any

from graphc.device import Memory
from graphc.distributed.communicator import Communicator


class OnDevice:
    """Puts arrays on the device before a collective of ``comm``, and fetches them after it."""

    def __init__(self, comm: Communicator, memory: Memory) -> None:
        self.comm = comm
        self.memory = memory
        self.rank, self.size = comm.rank, comm.size

    def allreduce(self, array: Any, op: str = "sum", tag: str = "", **options: Any) -> None:
        held = self.put(array)
        self.comm.allreduce(held, op, tag, **options)
        self.get(held, array)

    def broadcast(self, array: Any, root: int = 0) -> None:
        held = self.put(array)
        self.comm.broadcast(held, root)
        self.get(held, array)

    def start(self, array: Any, op: str = "sum", tag: str = "", **options: Any) -> tuple[Any, Any, Any]:
        held = self.put(array)
        return self.comm.start(held, op, tag, **options), held, array

    def wait(self, started: tuple[Any, Any, Any]) -> None:
        handle, held, array = started
        self.comm.wait(handle)
        self.get(held, array)

    def put(self, array: Any) -> Any:
        held = self.memory.zeros(array.nbytes).view(array.dtype)
        self.memory.copy(held, array)
        return held

    def get(self, held: Any, array: Any) -> None:
        array[...] = self.memory.fetch(held)
        self.comm.check()
