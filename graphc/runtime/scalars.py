"""Holds the scalar state of a training graph: learning rate, step count, seed and the like.

The scalars are adjacent in memory, so that the host reads all of them in one transfer, and only when a step may have changed
them. A value that the host writes is sent when it changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphc.device import Array, Memory

ROOM = 512
"""Bytes of a scalar with the padding of a flat buffer: 64 bytes of the narrowest type of its group, of eight bytes each."""


class Scalars:
    """``count`` scalars in ``memory``, each with a copy on the host (in host memory, the scalar itself).

    Attributes:
        stale: whether the device may have written them since they were read.
    """

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._there = memory.zeros(count * ROOM)
        self._here = self._there if memory.on_host else memory.pinned(count * ROOM)
        self._copies: dict[str, Array] = {}
        self._arrays: dict[str, Array] = {}
        self._sent: dict[str, float] = {}
        self.stale = True

    def place(self, name: str, dtype: np.dtype[Any], nbytes: int) -> Array:
        """The memory of scalar ``name``: a flat array of ``nbytes`` bytes that begins with it."""
        start = len(self._arrays) * ROOM
        there, here = (memory[start : start + nbytes].view(dtype) for memory in (self._there, self._here))
        self._arrays[name], self._copies[name] = there[:1].reshape(()), here[:1].reshape(())
        return there

    def adopt(self, name: str, array: Array) -> None:
        """Use this array as scalar ``name``, in host memory."""
        self._arrays[name] = self._copies[name] = array

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def read(self, name: str) -> Any:
        """The value of ``name``, of Python's types."""
        self._refresh()
        return self._copies[name].item()

    def set(self, name: str, value: float) -> None:
        """Set ``name``, which only the host writes, to ``value``; an unchanged value is not sent."""
        if self._memory.on_host:
            self._copies[name][...] = value
        elif self._sent.get(name) != value:
            self._copies[name][...] = value
            self._sent[name] = value
            self._memory.copy(self._arrays[name], self._copies[name].copy())  # a copy from pinned memory would need a wait

    def forget(self) -> None:
        """Note that the memory of the scalars was written."""
        self.stale = True
        self._sent.clear()

    def _refresh(self) -> None:
        if self.stale and not self._memory.on_host:
            self._memory.copy(self._here, self._there)
            self._memory.synchronize()
            self.stale = False
