"""The specification of a generated kernel, and its source text with operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.fusion.indexing import Linear, Variable


class NotFusibleError(Exception):
    """The kernel cannot compute this value; it must already be in memory."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What one kernel computes.

    Attributes:
        shape: the dimensions it loops over.
        axes: those of them that are columns; empty for an elementwise kernel.
        reductions: the reduction nodes it evaluates, in topological order; each reduces ``axes`` of ``shape``.
        stores: the values it writes, of the whole shape or of one element a row.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    reductions: tuple[ir.Node, ...] = ()
    stores: tuple[ir.Value, ...] = ()

    @property
    def rows(self) -> int:
        return math.prod([d for k, d in enumerate(self.shape) if k not in self.axes])

    @property
    def columns(self) -> int:
        return math.prod([self.shape[k] for k in self.axes])


@dataclass(frozen=True, slots=True)
class LoopPart:
    """A loop over a part of a dimension: ``size`` values, each ``step`` elements of the dimension apart.

    dimension 2 of 24 elements = LoopPart(2, 3, 8), which counts 0, 8, 16, and LoopPart(2, 8, 1)
    """

    dimension: int
    size: int
    step: int


def whole_dimensions(spec: KernelSpec) -> tuple[LoopPart, ...]:
    """One loop a dimension, as they stand."""
    return tuple(LoopPart(k, size, 1) for k, size in enumerate(spec.shape))


def loop_variables(spec: KernelSpec, loops: Sequence[LoopPart]) -> list[Variable]:
    """The variable of each loop: r for rows or c for columns, the dimension, and which part of one, the innermost first.

    Names tell no sizes: kernels that differ in these alone have one text (:mod:`graphc.backends.host.sizes`).
    """
    found = []
    for part in loops:
        letter = "c" if part.dimension in spec.axes else "r"
        steps = sorted(other.step for other in loops if other.dimension == part.dimension)
        which = f"part{steps.index(part.step)}" if len(steps) > 1 else ""
        found.append(Variable(f"{letter}{part.dimension}{which}", part.size))
    return found


@dataclass(frozen=True, slots=True)
class Access:
    """One access of a kernel to an array.

    Attributes:
        offset: the element, by loop variables.
        inner: whether it is inside a loop over the columns; otherwise once a row.
        whole: whether elements are accessed as vectors.
        loop: number of the loop over the columns.
    """

    value: ir.Value
    offset: Linear
    inner: bool
    whole: bool
    loop: int = 0


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel distributes its elements over threads.

    Attributes:
        vector: neighbouring elements that a thread takes at once, as one access of up to 16 bytes.
        along: what ``vector`` counts: ``columns`` or ``rows``.
        variable: the loop variable of these elements; None if ``vector`` is 1.
        strided: whether neighbouring threads take neighbouring rows, and threads further apart share the columns of a row.
        held: (value, offset) of loads that stay with their thread for all loops over the columns.
        lanes: threads that share a row; 0: as its length asks.
        loops: the loops from outermost to innermost, rows and columns each among themselves; empty: one a dimension, as they
            stand. Pieces of a dimension lie in any order.
        in_shared, in_registers: held vectors of each thread in shared memory, and the next ones, in registers; what it had
            last is read again, from the cache. 0 and 0: all are in registers.
    """

    vector: int = 1
    along: str = "rows"
    variable: Variable | None = None
    strided: bool = False
    held: frozenset[tuple[ir.Value, Linear]] = frozenset()
    lanes: int = 0
    in_shared: int = 0
    in_registers: int = 0
    loops: tuple[LoopPart, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A generated kernel.

    Attributes:
        body: the function text; its name is ``$name`` and its sizes are the macros of :meth:`text`.
        operands: the values it reads, then those it writes, in the order of its parameters.
        reads: how many of the operands it only reads.
        rows, columns: the extent of its loops.
        form: how its elements are distributed over threads.
        traffic: its reads and writes of memory.
        partials: element types of the partial totals, ``SPLITS`` × rows each, which follow the operands of both halves of a
            reduction whose columns several blocks share.
        totals: totals that each block leaves if these are sums over columns; 0: one for each of its rows.
        finishes: whether the last block of those that share rows adds up their partial totals; then a counter for each group of
            rows, 0 before and after a launch, follows the partial totals.
        moved: bytes that move, if the kernel touches only a part of its operands; else 0.
        reach: the greatest index that the kernel computes, also of values that are not in memory.
    """

    body: str
    operands: tuple[ir.Value, ...]
    reads: int
    rows: int
    columns: int
    partials: tuple[ir.DataType, ...] = ()
    form: Form = Form()
    traffic: tuple[Access, ...] = ()
    totals: int = 0
    finishes: bool = False
    moved: int = 0
    reach: int = 0

    def partial_bytes(self, parts: int) -> list[int]:
        """Bytes of each array of partial totals."""
        return [parts * (self.totals or self.rows) * max(4, int(dtype.itemsize)) for dtype in self.partials]
