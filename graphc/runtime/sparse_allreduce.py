"""Reduces arrays that are mostly zero by exchanging non-zero elements with their indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphc.device import HOST, Array, Memory
from graphc.errors import ModelError


class SparseSum:
    """Sums ``flat`` over the ranks, in place, where each rank has at most ``nonzero`` elements that are not zero.

    A rank sends 8 bytes for each of them to every other rank; a ring AllReduce moves 8 bytes for each element of the array.
    So it pays for fewer than 1 / ranks of the elements. Sums run in rank order, the same on all ranks.

    Args:
        flat: float32 vector in ``memory``; on a device, the host works on a copy of it.
    """

    def __init__(self, flat: Array, nonzero: int, rank: int, size: int, memory: Memory = HOST) -> None:
        if flat.dtype != np.float32 or flat.size >= 2**31:
            raise ModelError(f"a sparse sum takes fewer than 2³¹ float32 elements, not {flat.dtype}[{flat.size}]")
        self._there, self._memory, self._nonzero = flat, memory, nonzero
        self._flat = flat if memory.on_host else memory.pinned(flat.nbytes).view(flat.dtype)
        # one row a rank: count, indices, values as bits
        self._rows = np.zeros((size, 1 + 2 * nonzero), dtype=np.int32)
        self._mine = self._rows[rank]
        self._comm: Any = None
        self._handle: Any = None

    def prepare(self, comm: Any, tag: str, *, overlap: bool) -> Any:
        """Take the communicator of this rank; returns the prepared collective."""
        width = self._rows.shape[1]
        parts = [(r * width, (r + 1) * width) for r in range(len(self._rows))]
        rows = self._rows.reshape(-1)
        self._comm, self._handle = comm, comm.prepare(rows, "sum", tag, kind="all_gather", parts=parts, overlap=overlap)
        return self._handle

    def start(self) -> None:
        """Start; the array may not be touched until ``finish``."""
        if not self._memory.on_host:
            self._memory.copy(self._flat, self._there)
            self._memory.synchronize()
        places = np.flatnonzero(self._flat)
        count = places.size
        if count > self._nonzero:
            raise ModelError(f"{count} elements are not zero where {self._nonzero} were promised")
        self._mine[0] = count
        self._mine[1 : 1 + count] = places
        self._mine[1 + self._nonzero : 1 + self._nonzero + count] = self._flat[places].view(np.int32)
        self._comm.begin(self._handle)

    def finish(self) -> None:
        """Wait, and write the sum."""
        self._comm.wait(self._handle)
        self._flat[self._mine[1 : 1 + self._mine[0]]] = 0
        for row in self._rows:
            places, bits = row[1 : 1 + row[0]], row[1 + self._nonzero : 1 + self._nonzero + row[0]]
            self._flat[places] += bits.view(np.float32)
        if not self._memory.on_host:
            self._memory.copy(self._there, self._flat)
