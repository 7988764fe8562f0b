"""Scratch memory of one worker: all kernels and segments of a pool run one after another and share it."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import numpy as np

from graphc.backend import Pool
from graphc.device import ALIGNMENT, Array

ROOM = 1 << 26
"""Bytes of address space to begin with. The system provides memory for those that are written, so more of it costs nothing."""


class Scratchpad:
    """Memory in which a kernel or a segment finds what another has left.

    Beyond :data:`ROOM` it grows while kernels are bound, so kernels take addresses at the first run after it grew; ``cell``
    holds the present one.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.cell = np.zeros(1, dtype=np.int64)
        self._place(ROOM)

    def _place(self, nbytes: int) -> None:
        raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._memory = raw[start : start + nbytes]
        self.cell[0] = self.address

    def reserve(self, nbytes: int) -> None:
        """Make room for a kernel that needs ``nbytes`` bytes."""
        if nbytes > self._memory.nbytes:
            self._place(nbytes)
            self.generation += 1

    def take(self, nbytes: int) -> Array:
        """``nbytes`` bytes for good: they stay where they are when the scratchpad grows."""
        self.reserve(nbytes)
        return self._memory[:nbytes]

    def floats(self, *shapes: tuple[int, ...]) -> list[Array]:
        """Arrays of float32 for good, one behind another on cache lines of their own."""
        sizes = [4 * math.prod(shape) for shape in shapes]
        ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        memory = self.take(ends[-1])
        starts = [0, *ends[:-1]]
        return [
            memory[start : start + size].view(np.float32).reshape(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)


def on_lines(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Zeros whose last axis is made longer to fill lines of the cache: threads that write different rows share no line.

    Processors fetch lines in pairs, so a row has whole pairs of them.
    """
    each = 2 * ALIGNMENT // np.dtype(dtype).itemsize
    shape = (*shape[:-1], -(-shape[-1] // each) * each)
    raw = np.zeros(math.prod(shape) + each, dtype=dtype)
    start = -raw.ctypes.data % (2 * ALIGNMENT) // raw.itemsize
    return raw[start : start + math.prod(shape)].reshape(shape)


_SCRATCHPADS: weakref.WeakKeyDictionary[Pool, Scratchpad] = weakref.WeakKeyDictionary()


def scratchpad_of(pool: Pool) -> Scratchpad:
    """The scratchpad of all that one pool runs."""
    found = _SCRATCHPADS.get(pool)
    return _SCRATCHPADS.setdefault(pool, Scratchpad()) if found is None else found
