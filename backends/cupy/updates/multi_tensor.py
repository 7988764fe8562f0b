"""One launch over any number of arrays, whose addresses are in a table in memory.

table    a row for each group of arrays of one length: their addresses, and the length
chunks   (row, part) for each block, which works on that part of :data:`ELEMENTS` elements
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.codegen.whole_blocks import THREADS
from graphc.backends.cupy.device.cuda_memory import address
from graphc.backends.cupy.device.protocol import Device
from graphc.device import Array, Run

ELEMENTS = 16384
"""Elements per block: enough to amortise work done once per block, such as scalars, which takes a microsecond."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Arrays of ``count`` elements each."""

    arrays: tuple[Array, ...]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A bound launch, with the arrays behind its table.

    Attributes:
        name: the ops that it computes.
        traffic: bytes that it moves, if known.
    """

    run: Run
    rows: tuple[TableRow, ...]
    name: str = ""
    traffic: int = 0

    def __call__(self) -> None:
        self.run()


def blocks_of(rows: Sequence[TableRow]) -> int:
    """The number of blocks of a launch over ``rows``."""
    return sum(-(-row.count // ELEMENTS) for row in rows)


def bind_table(device: Device, kernel: Any, rows: Sequence[TableRow], more: Sequence[Array] = ()) -> Launched:
    """Bind a launch of ``kernel(table, chunks, *more)``."""
    table = np.array([[*map(address, row.arrays), row.count] for row in rows], dtype=np.int64)
    chunks = [(k, part) for k, row in enumerate(rows) for part in range(-(-row.count // ELEMENTS))]
    if not chunks:
        return Launched(_nothing, tuple(rows))  # CUDA refuses an empty grid
    held = [device.put(table.reshape(-1)), device.put(np.array(chunks, dtype=np.int32).reshape(-1))]
    return Launched(device.launch(kernel, [*held, *more], block_shape(device, len(chunks))), tuple(rows))


def block_shape(device: Device, blocks: int) -> Shape:
    """The launch shape of ``blocks`` whole blocks."""
    return Shape(THREADS if device.writes_cuda else 1, 1, 1, 1, blocks)


def _nothing() -> None:
    """Does nothing: the arrays are empty."""
