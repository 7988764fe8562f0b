"""Launches over any number of arrays: their addresses come by a table in memory, in place of one launch for each.

table    a row for each group of arrays of one length: their addresses, and the length
chunks   (row, part) for each block, which works on that part of :data:`ELEMENTS` elements
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphc.backends.cupy.codegen import prelude
from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_memory import address
from graphc.backends.cupy.device.protocol import Device
from graphc.device import Array, Run

THREADS = 256

ELEMENTS = 16384
"""Elements of a block: what it does once, with scalars say, costs it a microsecond."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Arrays of ``count`` elements each."""

    arrays: tuple[Array, ...]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A bound launch, with the arrays behind its table.

    Attributes:
        name: of what it computes.
        traffic: bytes that it moves, where that is known.
    """

    run: Run
    rows: tuple[TableRow, ...]
    name: str = ""
    traffic: int = 0

    def __call__(self) -> None:
        self.run()


def blocks_of(rows: Sequence[TableRow]) -> int:
    """Blocks of a launch over ``rows``."""
    return sum(-(-row.count // ELEMENTS) for row in rows)


def bind_table(device: Device, kernel: Any, rows: Sequence[TableRow], more: Sequence[Array] = ()) -> Launched:
    """A launch of ``kernel(table, chunks, *more)``."""
    table = np.array([[*map(address, row.arrays), row.count] for row in rows], dtype=np.int64)
    chunks = [(k, part) for k, row in enumerate(rows) for part in range(-(-row.count // ELEMENTS))]
    if not chunks:
        return Launched(_nothing, tuple(rows))  # no grid may be empty
    held = [device.put(table.reshape(-1)), device.put(np.array(chunks, dtype=np.int32).reshape(-1))]
    return Launched(device.launch(kernel, [*held, *more], block_shape(device, len(chunks))), tuple(rows))


def block_shape(device: Device, blocks: int) -> Shape:
    """A launch of whole blocks."""
    return Shape(THREADS if device.writes_cuda else 1, 1, 1, 1, blocks)


def named(body: str, device: bool) -> tuple[str, str]:
    """(name, text) of a kernel that calls itself ``$name``; rows, columns and their forms are not used here."""
    threads = THREADS if device else 1
    unused = dict.fromkeys(("SPAN", "SPLITS", "PARTS", "ROWS", "COLUMNS", "CHUNK", "VECTOR"), 1)
    macros = {"INDEX": "long long", "THREADS": threads, "LANES": threads, **unused, "STRIDED": 0, "HOLD": 0}
    head = "".join(f"#define {key} {value}\n" for key, value in macros.items())
    text = head + (prelude.CUDA if device else prelude.HOST) + body
    name = "t" + hashlib.sha256(text.encode()).hexdigest()[:16]
    return name, text.replace("$name", name) + "\n"


def _nothing() -> None:
    """What there is to do for arrays without elements."""
