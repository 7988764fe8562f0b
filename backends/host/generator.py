"""Generates the text of a kernel for the host: plain loops over rows and columns, which LLVM turns into vectors.

Where columns lie apart in memory and rows are neighbours (sums over a batch), a kernel takes ``VECTOR`` rows at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.indexing import Linear, Variable
from graphc.backends.fusion.kernel_source import Form, KernelSource, KernelSpec
from graphc.backends.fusion.lowering import Scope
from graphc.ir.facts import dtype_of, size_of

VECTOR = 16
LANES = 8
"""Rows that a pass over fewer than ``VECTOR`` is filled up to in multiples: the missing ones read nothing and store nothing."""

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


@dataclass(slots=True)
class Loops:
    """The loops of a kernel, from the outermost: (variable, size).

    Attributes:
        vector: rows taken at once, by ``EACH``; 1: one.
        beside: the loop of ``rows`` whose neighbours are computed beside each other, ``LINE`` at a time, as what they read lies
            in the same lines of the cache; empty: rows come one after the other.
    """

    rows: list[tuple[str, int]] = field(default_factory=list)
    columns: list[tuple[str, int]] = field(default_factory=list)
    vector: int = 1
    beside: str = ""


class HostGenerator(Generator):
    """Generates the source of ``spec`` for the host.

    Attributes:
        loops: of the last source.
    """

    def __init__(self, spec: KernelSpec, in_memory: Any) -> None:
        super().__init__(spec, in_memory, Form())
        self.loops = Loops()

    def kernel(self) -> KernelSource:
        """The source, in the form that its memory wants."""
        source = self.source()
        if self.spec.axes and self._columns_lie_apart():
            inner, size = self.innermost("rows")
            if inner is not None and size >= NARROWEST:
                self.form = Form(vector=VECTOR, variable=inner, strided=True)
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

    def _columns_lie_apart(self) -> bool:
        """Whether neighbouring rows are neighbours in memory, and neighbouring columns are not, in most of what is read."""
        rows, _ = self.innermost("rows")
        columns, _ = self.innermost("columns")
        steps = dict.fromkeys(("rows", "columns"), 0)
        for access in self._traffic:
            low, high = access.offset.bounds()
            for name, variable in (("rows", rows), ("columns", columns)):
                if any(term == variable and factor == 1 for term, factor in access.offset.terms):
                    steps[name] += high - low + 1
        return steps["rows"] > steps["columns"]

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
