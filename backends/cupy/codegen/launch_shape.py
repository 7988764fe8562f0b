"""Launch shapes: threads per row, blocks in the grid, and the rendered kernel text."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass

from graphc.backends.cupy.codegen import prelude
from graphc.backends.cupy.codegen.device_functions import needed
from graphc.backends.fusion.groups import SMALL
from graphc.backends.fusion.kernel_source import KernelSource, KernelSpec
from graphc.ir.facts import size_of

WARP = 32
BLOCKS = 264
"""Blocks that keep the device busy: two per multiprocessor, for 132 of them."""


def keeps_busy(spec: KernelSpec) -> bool:
    """Whether one pass over the rows keeps the device busy.

    If neighbouring rows are contiguous in memory, threads take vectors of rows, and many more rows are needed.
    """
    if math.prod(spec.shape) <= SMALL:
        return True
    return spec.rows >= (BLOCKS // 2 if len(spec.shape) - 1 in spec.axes else BLOCKS * 256)


IN_FLIGHT, MOST_COLUMNS = 64, 8
"""Bytes that a thread requests at once where columns lie apart in memory, and the most columns that it does so for."""

WINDOW = 4
"""Accesses to one array from which an elementwise kernel takes a window, such as that of a pool."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is spread over threads.

    Attributes:
        threads: threads per block.
        lanes: threads that share a row: 1, 32 or the whole block.
        span: rows per block.
        splits: blocks that share the columns of a row.
        blocks: blocks in the grid.
        last: lanes and vector of rows with which the last block of those that share rows adds up their totals.
        resident: blocks that a multiprocessor shall hold, which bounds the registers of a thread; 0: as :func:`resident` says.
    """

    threads: int
    lanes: int
    span: int
    splits: int
    blocks: int
    resident: int = 0
    last: tuple[int, int] = (1, 1)


def spread(rows: int, columns: int, *, contiguous: bool = True, splits: int = 1) -> Shape:
    """The launch shape on a device.

    Args:
        contiguous: whether neighbouring columns are neighbours in memory; otherwise neighbouring rows are.
    """
    if columns <= 8 or not contiguous:
        threads = 128 if rows < BLOCKS * 256 else 256
        span = threads if columns > 1 else threads * 4
        return Shape(threads, 1, span, splits, -(-rows // span) * splits)
    if columns <= 1024 and rows >= BLOCKS:
        return Shape(128, WARP, 4, splits, -(-rows // 4) * splits)
    threads = 256 if columns <= 8192 else 512
    return Shape(threads, threads, 1, splits, rows * splits)


def blocks(rows: int, columns: int) -> Shape:
    """The launch shape with a whole block per row, whose threads exchange partial results."""
    threads = 32 if columns <= 64 else 128 if columns <= 1024 else 512
    return Shape(threads, threads, 1, 1, rows)


def shared_rows(rows: int, lanes: int) -> Shape:
    """The launch shape with ``lanes`` threads per row."""
    return Shape(128, lanes, 128 // lanes, 1, -(-rows // (128 // lanes)))


def host(rows: int, columns: int, *, splits: int = 1, vector: int = 1, strided: bool = False) -> Shape:
    """The launch shape on the host, where one thread does everything."""
    span = vector if strided else vector * max(1, 4096 // max(1, columns) // vector)
    return Shape(1, 1, span, splits, -(-rows // span) * splits)


def batch(source: KernelSource) -> int:
    """Columns whose loads a thread requests before it uses the first, where columns lie apart in memory."""
    read = source.operands[: source.reads]
    once = sum(
        source.form.vector * int(access.value.dtype.itemsize)
        for access in source.traffic
        if access.inner and access.value in read and access.value.dtype is not None
    )
    return max(1, min(MOST_COLUMNS, IN_FLIGHT // max(1, once)))


def resident(source: KernelSource) -> int:
    """Blocks that a multiprocessor shall hold; 0: the compiler decides.

    Where a thread requests much at once, the compiler would rather use few registers and wait for each load.
    """
    if source.form.strided:
        return 2
    if source.columns > 1:
        return 0
    read = Counter(access.value for access in source.traffic if access.whole)
    if max(read.values(), default=0) >= WINDOW:
        return 2
    return 4 if needed(source.body) and len(read) > 2 else 0


def render(source: KernelSource, shape: Shape, *, device: bool, parts: int = 1) -> tuple[str, str]:
    """Render the kernel as (name, text); equal kernels have equal names.

    Args:
        parts: partial totals that the second half of a split reduction adds up.
    """
    largest = max((size_of(v) for v in source.operands), default=1)
    wide = max(source.rows * max(1, source.columns), source.rows * shape.splits, largest, source.reach) >= 2**31 - 2**20
    form = source.form
    constants = {
        "INDEX": "long long" if wide else "int",
        "THREADS": shape.threads,
        "LANES": shape.lanes,
        "SPAN": shape.span,
        "SPLITS": shape.splits,
        "PARTS": parts,
        "ROWS": source.rows,
        "COLUMNS": source.columns,
        "CHUNK": -(-source.columns // (shape.splits * form.vector)) * form.vector,
        "VECTOR": form.vector,
        "STRIDED": int(form.strided),
        "BATCH": batch(source),
        **({"LAST_LANES": shape.last[0], "LAST_VECTOR": shape.last[1]} if source.finishes else {}),
        "RESIDENT": shape.resident or resident(source),
        **({"IN_SHARED": form.in_shared, "IN_REGISTERS": form.in_registers} if form.in_shared else {}),
        "HOLD": -(-source.columns // (shape.lanes * form.vector)) if form.held else 0,
    }
    head = "".join(f"#define {key} {value}\n" for key, value in constants.items())
    text = head + (prelude.CUDA if device else prelude.HOST) + needed(source.body) + source.body
    name = "k" + hashlib.sha256(text.encode()).hexdigest()[:16]
    return name, text.replace("$name", name) + "\n"
