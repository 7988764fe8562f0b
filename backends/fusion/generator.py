"""Generates the C source of one fused kernel from the nodes that define its results.

A kernel loops over **rows** (the dimensions that stay) and, if it reduces, over the **columns** of each row. A value that is
independent of the column is computed once a row; each level of reductions is one loop over the columns:

    softmax     row → loop: maximum → loop: Σ exp(x − maximum) → loop: store exp(x − maximum) ÷ Σ

Ops that only move elements become index arithmetic (:mod:`~graphc.backends.fusion.indexing`). A thread takes a vector of
neighbours (:class:`.Form`): of elements, of columns if these are contiguous in memory, else of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphc.backends.fusion import expressions
from graphc.backends.fusion.expressions import compute_type
from graphc.backends.fusion.indexing import Variable, flatten, unflatten
from graphc.backends.fusion.kernel_source import Access, Form, KernelSource, KernelSpec, NotFusibleError
from graphc.backends.fusion.lowering import HALVES, Scope, Values
from graphc.backends.fusion.op_kernels import op_kernel, reduction_of
from graphc.backends.fusion.packed_masks import BITS, packs
from graphc.ir.facts import dtype_of, input_of, producer_of, shape_of, size_of

Stores = Sequence[tuple[ir.Value, str]]

LONG = 1 << 14
"""Columns beyond which a softmax computes maximum and sum in one loop (M. Milakov and N. Gimelshein, 2018): reading a row twice
costs more than correcting the sum when the maximum grows.
"""


class Generator(Values):
    """Generates the source of ``spec``.

    Args:
        in_memory: whether a value is in memory when the kernel starts.

    Raises:
        NotFusibleError: a value that is neither in memory nor computable here.
    """

    def __init__(self, spec: KernelSpec, in_memory: Any, form: Form | None = None) -> None:
        super().__init__(spec, in_memory, form or Form())

    def source(self) -> KernelSource:
        """The source of the whole kernel."""
        return self._source(*self._statements())

    def reads(self) -> tuple[ir.Value, ...]:
        """The operands that the kernel reads, in parameter order, without writing its text.

        Raises:
            KeyError: an operand or a result has a type that no kernel takes.
        """
        _, stores = self._statements()
        for value in (*self._operands, *(value for value, _ in stores)):
            expressions.STORAGE[dtype_of(value)]
        return tuple(self._operands)

    def _statements(self) -> tuple[list[str], Stores]:
        """The statements of the whole kernel, and what they store."""
        body: list[str] = []
        for level in self._levels():
            body += self._reduce(level)
        stores = [(value, f"y{k}") for k, value in enumerate(self.spec.stores)]
        whole = [s for s in stores if self.spec.axes and size_of(s[0]) != self.spec.rows]
        single = [s for s in stores if s not in whole]
        picked = [s for s in single if self._picks(s[0])] if whole else []
        if picked:  # what the loop below writes may lie in the place of what these read
            body += [*self._row_stores(picked), "SYNC;" if self.form.strided else "SYNC_LANES;"]
        if whole:
            body += self._whole_stores(whole)
        return [*body, *self._row_stores([s for s in single if s not in picked])], stores

    def divides(self) -> bool:
        """Whether :meth:`halves` applies: one level of reductions, and no full-shape result depends on them."""
        whole = [v for v in self.spec.stores if size_of(v) != self.spec.rows]
        return len(self._levels()) == 1 and not self._online() and not any(self._reductions_before(v, {}) for v in whole)

    def halves(self) -> tuple[KernelSource, KernelSource]:
        """Split the kernel in two: blocks reduce parts of a row, a second kernel combines them.

        Requires :meth:`divides`.
        """
        nodes, types = self.spec.reductions, self._types()
        whole, single = self._divided_stores()
        first = self._source(self._partial_totals(whole), whole, types)
        self.form = Form(strided=True)
        self._begin()
        named = [(node, self._name("s"), reduction_of(node), dtype) for node, dtype in zip(nodes, types, strict=True)]
        body = [f"{compute_type(dtype)} {name}[VECTOR] = {{{rule.start(dtype)}}};" for _, name, rule, dtype in named]
        body.append("UNROLL_PARTS for (int k = LANE; k < PARTS; k += LANES) {")  # so that many loads are under way at once
        for k, (_, name, rule, _) in enumerate(named):
            body.append(f"{name}[0] = {rule.combine}::of({name}[0], p{k}[(INDEX)k * ROWS + row]);")
        body.append("}")
        for node, name, rule, dtype in named:
            self._totals[node] = f"{name}[v]"
            body.append(f"reduce_across<{rule.combine}>({name});")
            body.append(f"EACH(v) {name}[v] = {rule.last(self._totals[node], dtype, self.spec.columns)};")
        return first, self._source([*body, *self._row_stores(single)], single, types)

    def finished(self) -> KernelSource:
        """Both halves in one kernel: of the blocks that share rows, the one that comes last combines what all have left.

        It adds the partial totals in the order of the second half, so that the bits are the same.

        Requires :meth:`divides`.
        """
        nodes, types, form = self.spec.reductions, self._types(), self.form
        whole, single = self._divided_stores()
        body = self._partial_totals(whole)
        self._row = self._scope = Scope()
        self.form = Form(strided=True)
        names = [self._name("s") for _ in nodes]
        rules = [reduction_of(node) for node in nodes]
        self._totals = {node: f"{name}[v]" for node, name in zip(nodes, names, strict=True)}
        last = ["if (is_last(counters + BLOCK / SPLITS, SPLITS)) {"]
        for macro, number in {"LANES": "LAST_LANES", "VECTOR": "LAST_VECTOR", "STRIDED": "1"}.items():
            last += [f"#undef {macro}", f"#define {macro} {number}"]  # what follows is shaped as the second half
        last.append("LAST_ROWS(row) {\n@rows@")
        for name, rule, dtype in zip(names, rules, types, strict=True):
            last.append(f"{compute_type(dtype)} {name}[VECTOR]; EACH(v) {name}[v] = {rule.start(dtype)};")
        last.append("UNROLL_TOTALS for (INDEX k = LANE; k < PARTS; k += LANES) {")
        for k, (name, rule, dtype) in enumerate(zip(names, rules, types, strict=True)):
            total, kind = self._name("q"), f"Pack<{compute_type(dtype)}, VECTOR>"
            last.append(f"const {kind} {total} = load_total<VECTOR>(p{k} + k * (INDEX)ROWS + row);")
            last.append(f"EACH(v) {name}[v] = {rule.combine}::of({name}[v], {total}.at[v]);")
        last.append("}")
        for node, name, rule, dtype in zip(nodes, names, rules, types, strict=True):
            last.append(f"reduce_last<LANES, {rule.combine}>({name});")
            last.append(f"EACH(v) {name}[v] = {rule.last(self._totals[node], dtype, self.spec.columns)};")
        last += [*self._row_stores(single), "}", "}"]
        if not form.strided:  # a vector was of columns, which are added up by now
            last = [line.replace("@lane@", "") for line in last]
        self.form = form
        return self._source(body, [*whole, *single], types, after=last, finishes=True)

    def innermost(self, along: str) -> tuple[Variable | None, int]:
        """The variable whose neighbours may form a vector, and their number; call it after generating a source."""
        groups = (self._columns if along == "columns" else self._rows).merged()
        if not groups:
            return None, 1
        size = 1
        for variable in groups[-1]:
            size *= variable.size
        return groups[-1][-1], size

    def _types(self) -> tuple[ir.DataType, ...]:
        return tuple(dtype_of(node.outputs[0]) for node in self.spec.reductions)

    def _divided_stores(self) -> tuple[Stores, Stores]:
        """What a divided kernel stores: of the whole shape, and of one element a row."""
        stores = [(value, f"y{k}") for k, value in enumerate(self.spec.stores)]
        whole = [s for s in stores if size_of(s[0]) != self.spec.rows]
        return whole, [s for s in stores if s not in whole]

    def _partial_totals(self, whole: Stores) -> list[str]:
        """Statements that leave a block's totals of each row, and store values of the whole shape."""
        nodes = self.spec.reductions
        body = self._reduce(nodes, final=False, beside=whole)
        lane, each = ("EACH(v) ", " + v") if self.form.strided else ("", "")
        stored = [f"{lane}p{k}[(INDEX)SPLIT * ROWS + row{each}] = {self._totals[node]};" for k, node in enumerate(nodes)]
        return [*body, "if (LANE == 0) {", *stored, "}"]

    # Structure --------------------------------------------------------------------------------------------------------

    def _whole_stores(self, stores: Stores) -> list[str]:
        """The loop that stores values of the whole shape."""
        self._rounds = all(dtype_of(value) in HALVES for value, _ in stores)
        try:
            return self._loop([], lambda: [self._store(value, name) for value, name in stores], [])
        finally:
            self._rounds = False

    def _picks(self, value: ir.Value) -> bool:
        """Whether this kernel reads elements for ``value`` at indices that it finds in memory."""
        producer = value.producer()
        if producer is None or producer in self.spec.reductions:
            return False
        own = value in self.spec.stores
        if not own and self._in_memory(value):
            return False
        return op_kernel(producer).picks or any(v is not None and self._picks(v) for v in producer.inputs)

    def _row_stores(self, stores: Stores) -> list[str]:
        if not self.spec.axes:
            self._scope = self._row
        results = [self._store_row(value, name) for value, name in stores]
        if not self.spec.axes:
            self._row.lines += results
            return self._flush()
        if not results:
            return self._flush()
        if self.form.strided:
            return [*self._flush(), "if (LANE == 0) { EACH(v) {", "@lane@", *results, "} }"]
        return [*self._flush(), "if (LANE == 0) {", *results, "}"]

    def _source(
        self,
        body: Sequence[str],
        stores: Stores,
        partials: tuple[ir.DataType, ...] = (),
        *,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        totals: int = 0,
        finishes: bool = False,
    ) -> KernelSource:
        parameters = [f"const {expressions.STORAGE[dtype_of(v)]}* RESTRICT {name}" for v, name in self._operands.items()]
        parameters += [f"{expressions.STORAGE[dtype_of(v)]}* RESTRICT {name}" for v, name in stores]
        parameters += [f"{compute_type(dtype)}* RESTRICT p{k}" for k, dtype in enumerate(partials)]
        parameters += ["unsigned int* RESTRICT counters"] if finishes else []
        walk = "ROW_CHUNK(row)" if self.form.strided else "FOR_ROW_CHUNKS(row)" if not self.spec.axes else "FOR_ROWS(row)"
        lines = [f"KERNEL $name({', '.join(parameters)}) {{", *before, walk + " {", "@rows@", *body, "}", *after, "}"]
        operands = (*self._operands, *(value for value, _ in stores))
        text = self._resolved("\n".join(lines))
        spec, traffic = self.spec, tuple(self._traffic)
        reach = max((abs(bound) for linear, _ in self._linears for bound in linear.bounds()), default=0)
        reads, rows, columns = len(self._operands), spec.rows, spec.columns
        form = self.form
        return KernelSource(text, operands, reads, rows, columns, partials, form, traffic, totals, finishes, reach=reach)

    def _levels(self) -> list[list[ir.Node]]:
        """The kernel's reductions, grouped by dependency depth."""
        level: dict[ir.Node, int] = {}
        online = self._online()
        for node in self.spec.reductions:
            before = self._reductions_before(node.inputs[0], {}) - {online.get(node)}
            level[node] = 1 + max((level[other] for other in before), default=-1)
            if node in online:
                level[node] = max(level[node], level[online[node]])
        count = max(level.values(), default=-1) + 1
        return [[n for n in self.spec.reductions if level[n] == k] for k in range(count)]

    def _online(self) -> dict[ir.Node, ir.Node]:
        """Sums of exp(x − maximum) over long rows → the maximum that the same loop computes."""
        if self.form.strided or self.spec.columns <= LONG:
            return {}
        found = {}
        for node in self.spec.reductions:
            exp = self._inside(node.inputs[0], "Exp") if node.op_type == "ReduceSum" else None
            moved = self._inside(exp.inputs[0], "Sub") if exp is not None else None
            most = moved.inputs[1].producer() if moved is not None and moved.inputs[1] is not None else None
            if moved is None or most not in self.spec.reductions or most is None or most.op_type != "ReduceMax":
                continue
            if most.inputs[0] is moved.inputs[0] and dtype_of(node.outputs[0]) == ir.DataType.FLOAT:
                found[node] = most
        return found

    def _inside(self, value: ir.Value | None, op_type: str) -> ir.Node | None:
        """The node of this op type in this kernel that produces ``value``."""
        node = value.producer() if value is not None and not self._in_memory(value) else None
        return node if node is not None and node.op_type == op_type and node.domain == "" else None

    def _reductions_before(self, value: ir.Value | None, seen: dict[ir.Value, set[ir.Node]]) -> set[ir.Node]:
        if value is None or value in seen or self._in_memory(value):
            return set()
        seen[value] = set()
        producer = value.producer()
        if producer is None:
            return set()
        if producer in self.spec.reductions:
            return {producer}
        found: set[ir.Node] = set()
        for operand in producer.inputs:
            found |= self._reductions_before(operand, seen)
        return found

    def _reduce(self, nodes: Sequence[ir.Node], *, final: bool = True, beside: Stores = ()) -> list[str]:
        """One loop over the columns that accumulates ``nodes`` and stores the values ``beside`` them."""
        strided, online = self.form.strided, {s: m for s, m in self._online().items() if s in nodes and m in nodes}
        names = {node: self._name("s") for node in sorted(nodes, key=lambda n: n in online)}
        before, after = [], []
        maxima = {m: names[s] for s, m in online.items()}
        for node, name in names.items():
            dtype, rule = dtype_of(node.outputs[0]), reduction_of(node)
            self._totals[node] = f"{name}[v]" if strided else name
            if strided:
                before.append(f"{compute_type(dtype)} {name}[VECTOR]; EACH(v) {name}[v] = {rule.start(dtype)};")
                after.append(f"reduce_across<{rule.combine}>({name});")
            else:
                before.append(f"{compute_type(dtype)} {name} = {rule.start(dtype)};")
                if node in maxima:
                    after.append(f"const float {name}_own = {name};")
                elif node in online:
                    after.append(f"{name} = rescaled({name}, {names[online[node]]}_own, {names[online[node]]});")
                after.append(f"{name} = reduce_lanes<LANES, {rule.combine}>({name});")
            last = rule.last(self._totals[node], dtype, self.spec.columns)
            if final and last != self._totals[node]:
                after.append(f"{'EACH(v) ' if strided else ''}{self._totals[node]} = {last};")

        def inside() -> list[str]:
            lines = [self._store(value, name) for value, name in beside]
            for node in nodes:
                dtype, rule, total = dtype_of(node.outputs[0]), reduction_of(node), self._totals[node]
                if node in online:
                    continue
                if node in maxima:
                    held = self._name("e")
                    self._scope.heads.append(f"float {held}[VECTOR];")
                    self._scope.tails.append(f"add_exponentials<VECTOR>({maxima[node]}, {total}, {held});")
                    lines.append(f"{held}[v] = {self._pull(node.inputs[0], self._index, None)};")
                    continue
                each = rule.each(self._pull(node.inputs[0], self._index, None), dtype)
                lines.append(f"{total} = {rule.combine}::of({total}, {each});")
            return lines

        return self._loop(before, inside, after)

    def _loop(self, before: list[str], inside: Any, after: list[str]) -> list[str]:
        """One loop over the columns, after the row statements that its body needs."""
        self._loop_number += 1
        self._scope = Scope()
        results = inside()
        inner, self._scope = self._scope, self._row
        lines = [*inner.heads, "EACH(v) {", "@lane@", *inner.lines, *results, "}", *inner.tails]
        walk = "FOR_COLUMNS(column) {" if self.form.strided else "FOR_CHUNKS(column, k) {"
        return [*self._flush(), *before, walk, "@columns@", *lines, "}", *after]

    def _flush(self) -> list[str]:
        """The statements of the row so far."""
        row = self._row
        heads, lines, tails = row.heads, row.lines, row.tails
        row.heads, row.lines, row.tails = [], [], []
        if self.spec.axes and not self.form.strided:
            return [*heads, *lines]
        return [*heads, *(["EACH(v) {", "@lane@", *lines, "}"] if lines else []), *tails]

    def _store(self, value: ir.Value, name: str) -> str:
        offset = flatten(self._index, self.spec.shape)
        return self._written(value, name, offset, self._scope)

    def _store_row(self, value: ir.Value, name: str) -> str:
        kept = tuple(part for k, part in enumerate(self._index) if k not in self.spec.axes)
        shape = tuple(size for k, size in enumerate(self.spec.shape) if k not in self.spec.axes)
        return self._written(value, name, flatten(kept, shape), None if self.spec.axes else self._row)

    def _written(self, value: ir.Value, name: str, offset: Any, scope: Scope | None) -> str:
        """The statement that stores an element; in ``scope`` the last element of a vector may store the whole vector."""
        if packs(value):
            return self._written_bit(value, name, offset, scope)
        result = self._pull(value, unflatten(offset, shape_of(value)), None, root=True)
        whole = scope is not None and self._is_whole(offset, scope)
        self._traffic.append(Access(value, offset, scope is not None and bool(self.spec.axes), whole, self._loop_number))
        if not whole or scope is None:
            return self._stored(value, f"{name}[{self._text(offset)}]", result)
        pack = self._name("w")
        scope.heads.append(f"Pack<{expressions.STORAGE[dtype_of(value)]}, VECTOR> {pack};")
        scope.tails.append(f"store_pack<VECTOR>({name} + {self._text(offset, base=True)}, {pack});")
        return self._stored(value, f"{pack}.at[v]", result)

    def _stored(self, value: ir.Value, place: str, result: str) -> str:
        """The statement that writes ``result``; a value that is already a bfloat is not rounded again."""
        if dtype_of(value) == ir.DataType.BFLOAT16 and result in self._exact:
            return f"{place} = {self._exact[result]};"
        return expressions.store(dtype_of(value), place, result)

    def _written_bit(self, value: ir.Value, name: str, offset: Any, scope: Scope | None) -> str:
        """The statement that adds an element's bit to a byte, which the last element of its vector stores."""
        mask = input_of(producer_of(value))
        bit = self._pull(mask, unflatten(offset, shape_of(mask)), None)
        whole = scope is not None and self._is_whole(offset, scope)
        self._traffic.append(Access(value, offset, scope is not None and bool(self.spec.axes), whole, self._loop_number))
        if self.form.variable is None:  # a trial run that finds the kernel's reads and writes, before its vectors are chosen
            return expressions.store(ir.DataType.UINT8, f"{name}[({self._text(offset)}) / {BITS}]", bit)
        if not whole or scope is None or self.form.vector != BITS:
            raise NotFusibleError(f"{mask.name} is packed by vectors of {BITS}, got {self.form.vector}")
        byte = self._name("w")
        scope.heads.append(f"unsigned char {byte} = 0;")
        scope.tails.append(f"{name}[({self._text(offset, base=True)}) / {BITS}] = {byte};")
        return f"{byte} |= (unsigned char)(({bit} ? 1 : 0) << v);"
