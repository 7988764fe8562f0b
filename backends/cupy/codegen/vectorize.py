"""Spreads a kernel over vectors, lanes and blocks, according to its memory accesses.

elements      a thread takes 16 bytes of each operand
rows          a warp or a block takes a row, in vectors of neighbouring columns; registers keep values that several loops read
strided rows  columns lie apart in memory: a thread takes a vector of neighbouring rows, as a sum over the batch needs
"""

from __future__ import annotations

from dataclasses import replace

from graphc.backends.cupy.codegen.launch_shape import BLOCKS, WARP, Shape, spread
from graphc.backends.cupy.codegen.memory_order import rows_are_neighbours
from graphc.backends.fusion.expressions import compute_type, stored_bytes
from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.indexing import Variable
from graphc.backends.fusion.kernel_source import Form, KernelSource, KernelSpec
from graphc.backends.fusion.packed_masks import BITS, packs
from graphc.ir.facts import constant, size_of

WIDEST = 16
"""Bytes of one access."""

THREADS = 256

FEWEST = 4
"""Fewest neighbouring rows for threads side by side to take them, where columns lie apart."""

EACH = 32
"""Most columns of a row per thread before more threads share the row."""

HELD = 64
"""Registers per thread that may hold operands from one loop to the next."""

FULL = 40
"""The same in a block of 1024 threads, where each thread has 64 registers in all."""

PAIR, PAIR_REGISTERS, PAIR_SHARED = 512, 16, 40 << 10
"""Threads of a block whose row is long, and registers of each thread and bytes of shared memory that keep a part of the row.

Two such blocks fit a multiprocessor: one loads or stores while the other computes, which a block of 1024 threads cannot. With
20 registers for the row NVRTC spills others.
"""

MOST_TOTALS = 120 << 10
"""Bytes of partial totals that a last block adds up sooner than a second kernel.

Up to here ``TICKET`` and the bytes at the rate of ``LAST_BLOCK`` are estimated at less than ``FINISH``, all of them in
``predict/hardware.py``: a single multiprocessor reads the bytes, where a second kernel has many.
"""

LINE = 128
"""Bytes of a line of the cache."""

UNROLLED = 64
"""Most elements per thread for which a loop is unrolled (:mod:`.prelude`); unrolled loops can hold elements in registers."""


def choose(generator: Generator, source: KernelSource, *, wide: bool = True) -> Form:
    """Choose the form of a kernel from the plain ``source`` that ``generator`` made.

    Args:
        wide: whether several threads share a row, as on a device; this decides what fits into registers.
    """
    found = _chosen(generator, source, wide=wide)
    return replace(found, loops=generator.form.loops)


def _chosen(generator: Generator, source: KernelSource, *, wide: bool) -> Form:
    spec = generator.spec
    strided = bool(spec.axes) and _strided(generator, source)
    along = "columns" if spec.axes and not strided else "rows"
    vector, variable = vector_of(generator, source, along)
    if not spec.axes or strided:
        return Form(vector, along, variable, strided)
    plain = Form(vector, along, variable)
    repeated = [key for key, loops in generator.uses.items() if len(loops) > 1 and constant(key[0]) is None]
    lanes = rows_of(spec, vector, held=True).lanes if wide else 1
    each = sum(-(-vector * stored_bytes(value.dtype) // 4) for value, _ in repeated if value.dtype)
    if wide and lanes > PAIR and each:
        chunks = -(-spec.columns // (PAIR * vector))
        in_shared, in_registers = min(chunks, PAIR_SHARED // (4 * PAIR * each)), PAIR_REGISTERS // each
        if chunks * vector <= 2 * UNROLLED and in_shared and in_registers:
            return Form(vector, along, variable, False, frozenset(repeated), PAIR, in_shared, in_registers)
    chunks = -(-spec.columns // (lanes * vector))
    registers = chunks * each
    most = FULL if lanes == 1024 else HELD
    if not repeated or registers > (most if wide else 1 << 12) or (wide and chunks * vector > UNROLLED):
        return plain
    return Form(vector, along, variable, held=frozenset(repeated))


def _strided(generator: Generator, source: KernelSource) -> bool:
    """Whether threads side by side take neighbouring rows."""
    rows, count = generator.innermost("rows")
    columns, _ = generator.innermost("columns")
    neighbours = rows_are_neighbours(source, rows if count >= FEWEST else None, columns)
    return not contiguous(generator.spec) if neighbours is None else neighbours


def contiguous(spec: KernelSpec) -> bool:
    """Whether neighbouring columns are neighbours in memory; otherwise neighbouring rows are."""
    return not spec.axes or len(spec.shape) - 1 in spec.axes


def vector_of(generator: Generator, source: KernelSource, along: str) -> tuple[int, Variable | None]:
    """The number of neighbours a thread takes at once, and the variable that indexes them."""
    variable, size = generator.innermost(along)
    if variable is None:
        return 1, None
    taken = [access.value for access in source.traffic if dict(access.offset.terms).get(variable) == 1]
    widths = [stored_bytes(value.dtype) for value in taken if value.dtype is not None]
    vector = min(WIDEST // min(widths), 2 * WIDEST // max(widths)) if widths else 1
    vector = min(8, vector)
    # An array may begin at any multiple of its own size: a slice of a Scan input does.
    sizes = (size, *(size_of(value) * (BITS if packs(value) else 1) for value in taken))
    while any(each % vector for each in sizes):
        vector //= 2
    return (vector, variable) if vector > 1 else (1, None)


def elements(rows: int, vector: int) -> Shape:
    """The launch shape of an elementwise kernel."""
    threads = 128 if rows < BLOCKS * THREADS * vector else THREADS
    span = threads * vector
    return Shape(threads, 1, span, 1, -(-rows // span))


def rows_of(spec: KernelSpec, vector: int, splits: int = 1, *, held: bool = False) -> Shape:
    """The launch shape of a kernel that reads rows in vectors of columns.

    Args:
        held: whether operands stay in registers, which takes more threads per row.
    """
    rows, chunks = spec.rows, -(-spec.columns // vector)
    if spec.columns <= 8:
        return spread(rows, spec.columns, splits=splits)
    if chunks <= WARP or (spec.columns <= WARP * EACH and rows >= BLOCKS):
        lanes = min(WARP, _power(chunks))
        span = 128 // lanes
        return Shape(128, lanes, span, splits, -(-rows // span) * splits)
    lanes = next((n for n in (128, 256, 512) if spec.columns <= n * EACH), 1024 if held else 512)
    return Shape(lanes, lanes, 1, splits, rows * splits)


def strided_rows(rows: int, columns: int, vector: int, splits: int = 1, most: int = WARP) -> Shape:
    """The launch shape of a kernel that takes vectors of rows; several threads share their columns.

    Args:
        most: most vectors that lie side by side.
    """
    across = min(most, _power(-(-rows // vector)))
    lanes = THREADS // across
    while lanes > 1 and columns < lanes * 4 * splits:
        lanes //= 2
    across = THREADS // lanes
    span = across * vector
    return Shape(THREADS, lanes, span, splits, -(-rows // span) * splits)


def parts_sum(rows: int, parts: int) -> Shape:
    """The launch shape of the kernel that adds up partial totals of rows."""
    lanes = min(16, _power(-(-parts // 2)))
    if rows * lanes < BLOCKS // 2 * THREADS and parts >= 128:
        lanes *= 2  # few rows: twice as many blocks; eight neighbouring rows still fill a sector
    return Shape(THREADS, lanes, THREADS // lanes, 1, -(-rows // (THREADS // lanes)))


def last_block(first: Shape, source: KernelSource, parts: int) -> Shape | None:
    """The launch shape with which the last block of those that share rows adds up their totals; None: a second kernel does.

    ``first`` is the shape of the first half, ``source`` its source. The totals are added in the order of :func:`parts_sum`.
    """
    if sum(source.partial_bytes(parts)) * min(first.span, source.rows) > MOST_TOTALS * source.rows:
        return None
    vector = 1
    if all(compute_type(dtype) == "float" for dtype in source.partials) and source.form.strided:
        vector = source.form.vector
    return replace(first, last=(parts_sum(source.rows, parts).lanes, vector))


def divided(spec: KernelSpec, source: KernelSource, splits: int | None = None) -> tuple[int, Shape, bool]:
    """How many blocks share a row's columns, the launch shape, and whether the last block adds up their totals.

    Where blocks take fewer rows, more of them come last, each with less to add up. Rows fill a line of the cache at least.

    Args:
        source: the first half of the kernel.
        splits: the blocks that share a row; None: as many as keep the device busy.
    """
    form = source.form
    widths = [WARP]
    if form.strided:
        read = [stored_bytes(access.value.dtype) for access in source.traffic if access.inner and access.value.dtype]
        widths = [width for width in (32, 16, 8) if width == WARP or width * form.vector * min(read, default=4) >= LINE]
    for width in widths:
        parts = parts_of(spec, form, splits, width)
        found = last_block(shape_of_form(spec, form, parts, width), source, parts)
        if found is not None and parts > 1:
            return parts, found, True
    parts = parts_of(spec, form, splits)
    return parts, shape_of_form(spec, form, parts), False


def shape_of_form(spec: KernelSpec, form: Form, splits: int = 1, most: int = WARP) -> Shape:
    """The launch shape of this form on a device; see :func:`strided_rows`."""
    if not spec.axes:
        return elements(spec.rows, form.vector)
    if form.strided:
        return strided_rows(spec.rows, spec.columns, form.vector, splits, most)
    if form.lanes:
        return Shape(form.lanes, form.lanes, 1, splits, spec.rows * splits, resident=2)
    return rows_of(spec, form.vector, splits, held=bool(form.held))


def parts_of(spec: KernelSpec, form: Form, wanted: int | None = None, most: int = WARP) -> int:
    """The number of blocks that share the columns of a row: as ``wanted``, or so that the device is busy.

    Args:
        most: see :func:`strided_rows`.
    """
    if wanted is None:
        shape = shape_of_form(spec, form, most=most)
        each = shape.lanes * (8 if form.strided else 4 * form.vector)  # with fewer columns a block costs more than it saves
        wanted = 1 if shape.blocks >= BLOCKS else min(-(-BLOCKS // shape.blocks), spec.columns // each)
    return max(1, min(wanted, spec.columns // (1 if form.strided else form.vector)))


def _power(number: int) -> int:
    """The least power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
