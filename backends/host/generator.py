"""Generates the text of a kernel for the host: plain loops over rows and columns, which LLVM turns into vectors.

Where columns lie apart in memory and rows are neighbours (sums over a batch), a kernel takes ``VECTOR`` rows at once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import onnx_ir as ir

from graphc.backends.fusion.expressions import compute_type
from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.indexing import Linear, Map, Variable, flatten
from graphc.backends.fusion.kernel_source import Form, KernelSource, KernelSpec, LoopPart
from graphc.backends.fusion.lowering import Scope
from graphc.backends.fusion.op_kernels import op_kernel, reduction_of
from graphc.ir.facts import dtype_of, size_of

VECTOR = 16
LANES = 8
"""Rows that a pass over fewer than ``VECTOR`` is filled up to in multiples: the missing ones read nothing and store nothing."""

PIECE = 16
"""Elements from which a loop's part is worth a loop of its own."""

NARROWEST = 3
"""Fewest neighbouring rows for a pass over several: beside fewer, vectors go along the columns, however far apart these lie."""

LINE = 16
"""Elements of four bytes in a line of the cache; so many rows are computed beside each other."""

TURNED = 64
"""Elements of each of these rows that are computed before the next ones: the lines that they read stay in the first cache."""

SETS, WAYS, BYTES = 64, 8, 64
"""The first cache of common processors: ``WAYS`` lines of ``BYTES`` in each set; the address of a line tells its set."""

FEWEST = 8
"""Rows of the smallest share of a kernel over distant columns: a line of the cache. A pass takes several shares at once."""

KEPT = 1 << 12
"""Most numbers that a row keeps for a later loop over its columns: half of the first cache."""

COSTLY = 4
"""Operations of an element from which keeping it takes less time than computing it again; an exponential counts four."""

Place: TypeAlias = tuple[ir.Value, Map]
"""A value, and the element of it by the loops' variables."""

UNITS = 16
"""Units that keep the threads of common processors busy; a kernel of fewer units is divided."""

LARGE = 1 << 17
"""Elements from which dividing a kernel pays."""

SHARE = 1 << 13
"""Elements of the smallest part of a divided kernel."""


@dataclass(slots=True)
class Loops:
    """The loops of a kernel, from the outermost: (variable, size).

    Attributes:
        vector: rows taken at once, by ``EACH``; 1: one.
        beside: the loop of ``rows`` whose neighbours are computed beside each other, ``LINE`` at a time, as what they read lies
            in the same lines of the cache; empty: rows come one after the other.
        parts: of the outermost loop of ``columns``; the last may be shorter. A unit reduces one, the first units the first.
    """

    rows: list[tuple[str, int]] = field(default_factory=list)
    columns: list[tuple[str, int]] = field(default_factory=list)
    vector: int = 1
    beside: str = ""
    parts: int = 1


def units_of(loops: Loops, reduces: bool) -> tuple[int, int]:
    """(number of units, elements of each)."""
    sizes = [size for _, size in loops.rows]
    columns = -(-math.prod(size for _, size in loops.columns) // loops.parts)
    if not sizes:
        return loops.parts, columns
    if loops.vector > 1:
        return loops.parts * math.prod(sizes[:-1]) * -(-sizes[-1] // loops.vector), loops.vector * columns
    if reduces:
        return loops.parts * math.prod(sizes), columns
    if loops.beside:
        beside = dict(loops.rows)[loops.beside]
        blocks, parts = -(-beside // LINE), -(-sizes[-1] // TURNED)
        return math.prod(sizes[:-1]) // beside * blocks * parts, LINE * min(TURNED, sizes[-1])
    return (math.prod(sizes[:-1]), sizes[-1]) if len(sizes) > 1 else (sizes[0], 1)


class HostGenerator(Generator):
    """Generates the source of ``spec`` for the host.

    Attributes:
        loops: of the last source.
    """

    def __init__(self, spec: KernelSpec, in_memory: Any, form: Form | None = None) -> None:
        self._kept: dict[Place, str] = {}  # what a row keeps for a later loop over its columns → the array
        self._loops_of: dict[Place, list[int]] = {}  # value of a column → the loops that compute it, or read it
        super().__init__(spec, in_memory, form or Form())
        self.loops = Loops()

    def kernels(self) -> list[tuple[KernelSource, Loops]]:
        """The sources in order, each with its loops: one, or two if the rows are too few for many threads.

        The first of two reduces parts of each row, the second combines their totals. The number of parts depends on the sizes
        alone, so that any number of threads computes the same bits.
        """
        whole = self._kernel()
        undivided = self._undivided()
        if undivided:
            return HostGenerator(self.spec, self._in_memory, Form(loops=undivided)).kernels()
        parts = self._parts()
        if parts == 1:
            return [(whole, self.loops)]
        first, totals = self._parts_of_rows(parts)
        loops = replace(self.loops, parts=parts)
        second = self._whole_rows(totals)
        return [(first, loops), (second, replace(self.loops, columns=[("part", parts)]))]

    def _undivided(self) -> tuple[LoopPart, ...]:
        """The loops in which no innermost variable is divided; none if there is nothing to gain, or they are in pieces already.

        A reader of 4096 columns as 64 × 64 finds its element by c ÷ 64 and c mod 64, which LLVM makes no vectors of.
        """
        divisors: dict[Linear, set[int]] = {}
        pending = [linear for linear, _ in self._linears] if not self.form.loops else []
        while pending:
            for term, _ in pending.pop().terms:
                if not isinstance(term, Variable):
                    pending.append(term.of)
                    divisors.setdefault(term.of, set()).add(term.by)
        inner = [self.innermost(along)[0] for along in ("rows", "columns")] if divisors else []
        loops: list[LoopPart] = []
        for part, variable in self._loops:
            steps = [1]
            for by in sorted(divisors.get(Linear.of(variable), ())) if variable in inner else ():
                if by >= PIECE and by % steps[-1] == 0 and variable.size % by == 0 and by < variable.size:
                    steps.append(by)
            sizes = [b // a for a, b in itertools.pairwise([*steps, variable.size])]
            loops += [LoopPart(part.dimension, size, step) for size, step in zip(reversed(sizes), reversed(steps), strict=True)]
        return tuple(loops) if len(loops) > len(self._loops) else ()

    def _parts(self) -> int:
        """Parts of a row that are units of their own; 1: rows are enough."""
        if not self.loops.columns or not all(dtype.is_floating_point() for dtype in self._types()):
            return 1
        units, elements = units_of(self.loops, reduces=True)
        if units >= UNITS or units * elements < LARGE or not self.divides():
            return 1
        most = min(2 * UNITS // units, units * elements // SHARE)
        size = self.loops.columns[0][1]
        even = next((n for n in range(most, 1, -1) if size % n == 0), 1)
        return even if 2 * even > min(most, size) else -(-size // -(-size // min(most, size)))

    def _parts_of_rows(self, parts: int) -> tuple[KernelSource, dict[ir.Node, ir.Value]]:
        """The source that reduces one part of each row, and the values of the parts, parts × rows."""
        self._begin()
        stored, _ = self._divided_stores()
        whole = [(value, f"y{k}") for k, (value, _) in enumerate(stored)]
        body = self._reduce(self.spec.reductions, final=False, beside=whole)
        totals = {node: _total_of(node, parts, self.spec.rows) for node in self.spec.reductions}
        stores = [(value, f"y{len(whole) + k}") for k, value in enumerate(totals.values())]
        row = self._text(self._row_offset())
        lines = [
            f"{y}[PART * {self.spec.rows} + {row}] = {self._totals[node]};" for node, (_, y) in zip(totals, stores, strict=True)
        ]
        body += ["if (LANE == 0) { EACH(v) {", "@lane@", *lines, "} }"]
        return self._source(body, [*whole, *stores]), totals

    def _whole_rows(self, totals: Mapping[ir.Node, ir.Value]) -> KernelSource:
        """The source that combines the parts of each row, and stores what follows from a row."""
        self._begin()
        self._operands = {value: f"x{k}" for k, value in enumerate(totals.values())}
        lane, size, each = ("[v]", "[VECTOR]", "EACH(v) ") if self.form.strided else ("", "", "")
        body, added, after = list[str](), list[str](), list[str]()
        row = self._text(self._row_offset())
        for node, value in totals.items():
            dtype, rule, name = dtype_of(node.outputs[0]), reduction_of(node), self._name("s")
            total = self._totals[node] = f"{name}{lane}"
            body.append(f"{compute_type(dtype)} {name}{size}; {each}{total} = {rule.start(dtype)};")
            part = f"{self._operands[value]}[part * {self.spec.rows} + {row}]"
            added.append(f"{total} = {rule.combine}::of({total}, {part});")
            after.append(f"{each}{total} = {rule.last(total, dtype, self.spec.columns)};")
        body += ["FOR_COLUMNS(column) { EACH(v) {", "@lane@", *added, "} }", *after]
        _, single = self._divided_stores()
        stores = [(value, f"y{k}") for k, (value, _) in enumerate(single)]
        return self._source([*body, *self._row_stores(stores)], stores)

    def _row_offset(self) -> Linear:
        """The row as a number."""
        kept = [k for k in range(len(self.spec.shape)) if k not in self.spec.axes]
        return flatten(tuple(self._index[k] for k in kept), tuple(self.spec.shape[k] for k in kept))

    def _kernel(self) -> KernelSource:
        """The source, in the form that its memory wants."""
        source = self.source()
        if self.spec.axes and self._columns_lie_apart():
            inner, size = self.innermost("rows")
            if inner is not None and size >= NARROWEST:
                self.form = replace(self.form, vector=VECTOR, variable=inner, strided=True)
                self._begin()
                source = self.source()
        again = [place for place, loops in self._loops_of.items() if len(loops) > 1]
        if again and not self.form.strided and self.spec.columns <= KEPT // len(again):
            self._kept = {place: f"b{k}" for k, place in enumerate(again)}
            self._begin()
            source = self.source()
        if not self.spec.axes:
            self.loops.beside = self._turned()
        return source

    def source(self) -> KernelSource:
        """The source; results of the whole shape that need no reduction are stored by the loop that reduces."""
        whole = [v for v in self.spec.stores if size_of(v) != self.spec.rows]
        if not self.spec.axes or not whole or not self.divides():
            return super().source()
        stores = [(value, f"y{k}") for k, value in enumerate(self.spec.stores)]
        body = self._reduce(self.spec.reductions, beside=[s for s in stores if s[0] in whole])
        return self._source([*body, *self._row_stores([s for s in stores if s[0] not in whole])], stores)

    def _online(self) -> dict[ir.Node, ir.Node]:
        """None: rows stay in a core's cache, and the vectors of a loop would compute two exponentials for each number."""
        return {}

    def _begin(self) -> None:
        super()._begin()
        self._loops_of.clear()
        for (value, _), name in self._kept.items():
            self._row.heads.append(f"{compute_type(dtype_of(value))} {name}[{self.spec.columns}];")

    def _pull(self, value: ir.Value | None, index: Map, guard: str | None, *, root: bool = False) -> str:
        """As in the base class; what takes long to compute and is wanted by several loops over the columns is kept."""
        node = None if value is None or root or guard is not None or self._in_memory(value) else value.producer()
        of_column = index == self._index and self._scope is not self._row and not self._here
        if value is None or node is None or not of_column or op_kernel(node).work < COSTLY or node in self.spec.reductions:
            return super()._pull(value, index, guard, root=root)
        scope, key, place = self._scope, (value, index, guard), (value, index)
        if key in scope.known:
            return scope.known[key]
        loops = self._loops_of.setdefault(place, [])
        known, kept = bool(loops), self._kept.get(place)
        if self._loop_number not in loops:
            loops.append(self._loop_number)
        if kept is None:
            return super()._pull(value, index, guard)
        columns = [k for k in range(len(self.spec.shape)) if k in self.spec.axes]
        column = flatten(tuple(self._index[k] for k in columns), tuple(self.spec.shape[k] for k in columns))
        element = f"{kept}[{self._text(column)}]"
        if known:
            scope.known[key] = name = self._define(scope, "t", compute_type(dtype_of(value)), element)
            return name
        name = super()._pull(value, index, guard)
        scope.lines.append(f"{element} = {name};")
        return name

    def _columns_lie_apart(self) -> bool:
        """Whether neighbouring rows are neighbours in memory, and neighbouring columns are not, in most of what is read.

        A vector along the rows, or along the columns, gathers an array whose elements lie apart that way. The way that gathers
        less wins; an array with one element for the whole vector is not gathered. Distances of all pairs,
        Σₖ (x[i, k] − y[j, k])² with rows i, j, gather y along the rows and nothing along the columns. Their gradient
        Σⱼ (x[i, k] − y[j, k]) ÷ d[i, j] with rows i, k gathers y along the columns and nothing along the rows.
        """
        inner = {along: self.innermost(along)[0] for along in ("rows", "columns")}
        beside, apart = dict.fromkeys(inner, 0), dict.fromkeys(inner, 0)
        for access in self._traffic:
            low, high = access.offset.bounds()
            steps = dict(access.offset.terms)
            for along, variable in inner.items():
                step = steps.get(variable, 0) if variable is not None else 0
                if step == 1:
                    beside[along] += high - low + 1
                elif step and access.inner:
                    apart[along] += high - low + 1
        return apart["rows"] < apart["columns"] or (apart["rows"] == apart["columns"] and beside["rows"] > beside["columns"])

    def _turned(self) -> str:
        """The loop whose rows read the same lines of the cache, if the kernel reads a matrix by columns; "" for other kernels.

        Adding two matrices of 131072 × 256 and turning the sum reads each line from memory 16 times, one row after the other;
        with neighbours beside each other it takes 0.4 times as long. Where the lines of a row fit the first cache, nothing is
        gained.
        """
        inner, size = self.innermost("rows")
        for access in self._traffic:
            factors = {term: factor for term, factor in access.offset.terms if isinstance(term, Variable)}
            step = int(abs(factors[inner]) * dtype_of(access.value).itemsize) if inner in factors else 0
            apart = math.gcd(step // BYTES, SETS) if step % BYTES == 0 else 1
            if step < BYTES or size <= SETS // apart * WAYS:
                continue
            for *_, variable in self._rows.merged()[:-1]:
                if factors.get(variable) == 1 and variable.size >= LANES:
                    return variable.name
        return ""

    def _is_whole(self, offset: Linear, scope: Scope) -> bool:
        return False  # no vectors in the text: LLVM makes them

    def _is_same(self, offset: Linear) -> bool:
        return False

    def _resolved(self, text: str) -> str:
        names: dict[Variable, str] = {}
        first: dict[Variable, str] = {}
        lane = ""
        self.loops = Loops(vector=self.form.vector)
        for domain, found in ((self._rows, self.loops.rows), (self._columns, self.loops.columns)):
            for group in domain.merged():
                inner = group[-1]
                name = target = inner.name
                names.update((v, "0") for v in group[:-1])
                if inner == self.form.variable:
                    first[inner] = target = f"{name}_0"
                    lane = f"const INDEX {name} = {target} + v;"
                found.append((target, math.prod([v.size for v in group])))
        text = text.replace("@lane@", lane).replace("@rows@", "").replace("@columns@", "")
        bases = names | first

        def written(match: re.Match[str]) -> str:
            linear, base = self._linears[int(match[1])]
            return f"({linear.text(bases if base else names)})"

        return re.sub(r"@(\d+)@", written, text)


def _total_of(node: ir.Node, parts: int, rows: int) -> ir.Value:
    """What each part of each row leaves of a reduction."""
    (result,) = node.outputs
    dtype = ir.DataType.DOUBLE if dtype_of(result) == ir.DataType.DOUBLE else ir.DataType.FLOAT
    return ir.Value(name=f"{result.name}/parts", shape=ir.Shape((parts, rows)), type=ir.TensorType(dtype))
