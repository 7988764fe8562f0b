"""C source of one fused kernel, made by pulling each result through the nodes that define it.

A kernel walks over **rows** (the dimensions that stay) and, where it reduces, over the **columns** of each row. What does
not depend on the column is computed once a row; every level of reductions is one loop over the columns:

    softmax     row → loop: maximum → loop: Σ exp(x − maximum) → loop: store exp(x − maximum) ÷ Σ

Between two elementwise nodes, ops that only move elements are index arithmetic (:mod:`~graphc.backends.cupy.indexing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy import expressions, views
from graphc.backends.cupy.expressions import compute_type, literal
from graphc.backends.cupy.indexing import Domain, Linear, Map, Variable, flatten, unflatten
from graphc.backends.cupy.views import integers, shape_of
from graphc.ir.facts import constant


class NotFusibleError(Exception):
    """The kernel cannot compute this value; it has to be in memory before."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How columns are reduced: start, what each contributes, how two combine, and what becomes of the total."""

    start: Callable[[ir.DataType], str]
    each: Callable[[str, ir.DataType], str]
    combine: str
    last: Callable[[str, ir.DataType, int], str] = lambda total, dtype, count: total


def _least(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "false"
    return literal(dtype, -np.inf if dtype.is_floating_point() else np.iinfo(dtype.numpy()).min)


def _greatest(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "true"
    return literal(dtype, np.inf if dtype.is_floating_point() else np.iinfo(dtype.numpy()).max)


def _zero(dtype: ir.DataType) -> str:
    return literal(dtype, 0)


def _plain(value: str, dtype: ir.DataType) -> str:
    return value


def _absolute(value: str, dtype: ir.DataType) -> str:
    return f"({value} < 0 ? -{value} : {value})"


def _square(value: str, dtype: ir.DataType) -> str:
    return f"({value} * {value})"


def _over_count(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({total} / {literal(dtype, count)})"


def _root(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({compute_type(dtype)})sqrt((double){total})"


def _logarithm(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({compute_type(dtype)})log((double){total})"


REDUCTIONS: Mapping[str, Reduction] = {
    "ReduceSum": Reduction(_zero, _plain, "Sum"),
    "ReduceMean": Reduction(_zero, _plain, "Sum", _over_count),
    "ReduceMax": Reduction(_least, _plain, "Maximum"),
    "ReduceMin": Reduction(_greatest, _plain, "Minimum"),
    "ReduceProd": Reduction(lambda dtype: literal(dtype, 1), _plain, "Prod"),
    "ReduceL1": Reduction(_zero, _absolute, "Sum"),
    "ReduceL2": Reduction(_zero, _square, "Sum", _root),
    "ReduceSumSquare": Reduction(_zero, _square, "Sum"),
    "ReduceLogSum": Reduction(_zero, _plain, "Sum", _logarithm),
}


def reduced_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a reduction sums over; None where they are not known."""
    rank = len(shape_of(node.inputs[0]))
    axes = integers(node, 1)
    if len(node.inputs) > 1 and node.inputs[1] is not None and axes is None:
        return None
    if not axes:
        return () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(a % rank for a in axes))


@dataclass(frozen=True, slots=True)
class Spec:
    """What one kernel computes.

    Attributes:
        shape: the dimensions it walks over.
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
        return int(np.prod([d for k, d in enumerate(self.shape) if k not in self.axes], dtype=np.int64))

    @property
    def columns(self) -> int:
        return int(np.prod([self.shape[k] for k in self.axes], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Source:
    """A generated kernel.

    Attributes:
        body: the function, which calls itself ``$name`` and takes its sizes from the macros of :meth:`text`.
        operands: the values it reads, then those it writes, in the order of its parameters.
        reads: how many of the operands it only reads.
        rows, columns: the extent of its loops.
        partials: element types of the partial totals, ``SPLITS`` × rows each, that stand behind the operands of both halves
            of a reduction whose columns several blocks share.
    """

    body: str
    operands: tuple[ir.Value, ...]
    reads: int
    rows: int
    columns: int
    partials: tuple[ir.DataType, ...] = ()


@dataclass(slots=True)
class _Scope:
    lines: list[str] = field(default_factory=list)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)


class Generator:
    """Generates the source of ``spec``.

    Args:
        in_memory: whether a value lies in memory when the kernel starts.

    Raises:
        NotFusibleError: a value that is neither in memory nor computable here.
    """

    def __init__(self, spec: Spec, in_memory: Callable[[ir.Value], bool]) -> None:
        self.spec = spec
        self._in_memory = in_memory
        variables = [Variable(f"{'c' if k in spec.axes else 'r'}{k}", size) for k, size in enumerate(spec.shape)]
        self._index: Map = tuple(Linear.of(v) for v in variables)
        self._rows = Domain([v for k, v in enumerate(variables) if k not in spec.axes])
        self._columns = Domain([v for k, v in enumerate(variables) if k in spec.axes])
        self._inner = {v.name for v in self._columns.variables}
        self._linears: list[Linear] = []
        self._operands: dict[ir.Value, str] = {}
        self._row = _Scope()
        self._scope = self._row
        self._totals: dict[ir.Node, str] = {}
        self._count = 0

    # Structure --------------------------------------------------------------------------------------------------------

    def source(self) -> Source:
        """The whole kernel."""
        body: list[str] = []
        for level in self._levels():
            body += self._reduce(level)
        stores = [(value, f"y{k}") for k, value in enumerate(self.spec.stores)]
        whole = [s for s in stores if self.spec.axes and _size(s[0]) != self.spec.rows]
        if whole:
            body += self._loop([], [line for value, name in whole for line in self._store(value, name)], [])
        return self._source([*body, *self._row_stores([s for s in stores if s not in whole])], stores)

    def divides(self) -> bool:
        """Whether :meth:`halves` can be made: one level of reductions, on which nothing of the whole shape depends."""
        whole = [v for v in self.spec.stores if _size(v) != self.spec.rows]
        return len(self._levels()) == 1 and not any(self._reductions_before(v, {}) for v in whole)

    def halves(self) -> tuple[Source, Source]:
        """The kernel in two: many blocks add up parts of the columns of one row, then the parts are added up.

        For a kernel that :meth:`divides`.
        """
        nodes = self.spec.reductions
        stores = [(value, f"y{k}") for k, value in enumerate(self.spec.stores)]
        whole = [s for s in stores if _size(s[0]) != self.spec.rows]
        body = self._reduce(nodes, final=False, beside=whole)
        types = tuple(_dtype(node.outputs[0]) for node in nodes)
        place = "[(INDEX)SPLIT * ROWS + row]"
        body.append("if (LANE == 0) {")
        body += [f"p{k}{place} = {self._totals[node]};" for k, node in enumerate(nodes)]
        first = self._source([*body, "}"], whole, types)
        self._operands, self._row, self._linears = {}, _Scope(), []
        self._rows.used, self._columns.used = [], []
        body = []
        for k, node in enumerate(nodes):
            rule, kind, name = REDUCTIONS[node.op_type], compute_type(types[k]), self._totals[node]
            body.append(f"{kind} {name} = {rule.start(types[k])};")
            body.append(f"for (int k = 0; k < PARTS; ++k) {name} = {rule.combine}::of({name}, p{k}[(INDEX)k * ROWS + row]);")
            body.append(f"{name} = {rule.last(name, types[k], self.spec.columns)};")
        single = [s for s in stores if s not in whole]
        return first, self._source([*body, *self._row_stores(single)], single, types)

    def _row_stores(self, stores: Sequence[tuple[ir.Value, str]]) -> list[str]:
        last = [line for value, name in stores for line in self._store_row(value, name)]
        if last and self.spec.axes:
            last = ["if (LANE == 0) {", *last, "}"]
        return [*self._flush(), *last]

    def _source(
        self, body: Sequence[str], stores: Sequence[tuple[ir.Value, str]], partials: tuple[ir.DataType, ...] = ()
    ) -> Source:
        parameters = [f"const {expressions.STORAGE[_dtype(v)]}* {name}" for v, name in self._operands.items()]
        parameters += [f"{expressions.STORAGE[_dtype(v)]}* {name}" for v, name in stores]
        parameters += [f"{compute_type(dtype)}* p{k}" for k, dtype in enumerate(partials)]
        lines = [f"KERNEL $name({', '.join(parameters)}) {{", "FOR_ROWS(row) {", "@rows@", *body, "}", "}"]
        operands = (*self._operands, *(value for value, _ in stores))
        text = self._resolved("\n".join(lines))
        return Source(text, operands, len(self._operands), self.spec.rows, self.spec.columns, partials)

    def _levels(self) -> list[list[ir.Node]]:
        """Reductions by how many others of the kernel come before them."""
        level: dict[ir.Node, int] = {}
        for node in self.spec.reductions:
            before = self._reductions_before(node.inputs[0], {})
            level[node] = 1 + max((level[other] for other in before), default=-1)
        count = max(level.values(), default=-1) + 1
        return [[n for n in self.spec.reductions if level[n] == k] for k in range(count)]

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

    def _reduce(
        self, nodes: Sequence[ir.Node], *, final: bool = True, beside: Sequence[tuple[ir.Value, str]] = ()
    ) -> list[str]:
        before, inside, after = [], [], []
        self._scope = _Scope()
        stored = [line for value, name in beside for line in self._store(value, name)]
        for node in nodes:
            dtype = _dtype(node.outputs[0])
            rule, kind, name = REDUCTIONS[node.op_type], compute_type(dtype), self._name("s")
            value = self._pull(node.inputs[0], self._index, None)
            before.append(f"{kind} {name} = {rule.start(dtype)};")
            each = rule.each(value, dtype)
            inside.append(f"{name} = {rule.combine}::of({name}, {each});")
            after.append(f"{name} = reduce_lanes<LANES, {rule.combine}>({name});")
            last = rule.last(name, dtype, self.spec.columns)
            if final and last != name:
                after.append(f"{name} = {last};")
            self._totals[node] = name
        return self._loop(before, [*stored, *inside], after)

    def _loop(self, before: list[str], inside: list[str], after: list[str]) -> list[str]:
        """One loop over the columns, behind whatever its body needs of the row."""
        inner, self._scope = self._scope, self._row
        columns = ["@columns@", *inner.lines, *inside]
        return [*self._flush(), *before, "FOR_COLUMNS(column) {", *columns, "}", *after]

    def _flush(self) -> list[str]:
        lines, self._row.lines = self._row.lines, []
        return lines

    def _store(self, value: ir.Value, name: str) -> list[str]:
        if self._scope is self._row:
            self._scope = _Scope()
        offset = flatten(self._index, self.spec.shape)
        index = unflatten(offset, shape_of(value))
        result = self._pull(value, index, None, root=True)
        return [expressions.store(_dtype(value), f"{name}[{self._text(offset)}]", result)]

    def _store_row(self, value: ir.Value, name: str) -> list[str]:
        kept = tuple(part for k, part in enumerate(self._index) if k not in self.spec.axes)
        shape = tuple(size for k, size in enumerate(self.spec.shape) if k not in self.spec.axes)
        offset = flatten(kept, shape)
        index = unflatten(offset, shape_of(value))
        result = self._pull(value, index, None, root=True)
        return [expressions.store(_dtype(value), f"{name}[{self._text(offset)}]", result)]

    # Values -----------------------------------------------------------------------------------------------------------

    def _pull(self, value: ir.Value | None, index: Map, guard: str | None, *, root: bool = False) -> str:
        """The name or literal that holds element ``index`` of ``value``; what ``guard`` forbids is not read."""
        assert value is not None
        known = constant(value)
        if known is not None and known.size == 1:
            return literal(_dtype(value), known.reshape(-1)[0])
        key = (value, index, guard)
        for scope in (self._row, self._scope):
            if key in scope.known:
                return scope.known[key]
        if not root and self._in_memory(value):
            return self._remember(key, index, guard, value, self._load(value, index, guard))
        producer = value.producer()
        if producer is None:
            raise NotFusibleError(f"{value.name!r} is not in memory")
        if producer in self.spec.reductions:
            return self._total(producer, index)
        if producer.domain == "" and producer.op_type in views.RULES:
            pieces = views.RULES[producer.op_type](producer, value.index() or 0, index)
            if pieces is not None:
                return self._remember(key, index, guard, value, self._pieces(producer, value, pieces, guard))
        text = self._expression(producer, value, index, guard)
        return self._remember(key, index, guard, value, text)

    def _remember(self, key: tuple[object, ...], index: Map, guard: str | None, value: ir.Value, text: str) -> str:
        if re.fullmatch(r"\w+", text):
            return text
        scope = self._scope_of(index, guard)
        name = self._name("t")
        scope.lines.append(f"const {compute_type(_dtype(value))} {name} = {text};")
        scope.known[key] = name
        if scope is not self._row:
            self._inner.add(name)
        return name

    def _scope_of(self, index: Map, guard: str | None) -> _Scope:
        """Where a value with this index is computed: once a row unless it depends on the column."""
        names = {v.name for part in index for v, _ in part.variables()}
        if guard is not None:
            names.add(guard)
        return self._row if names.isdisjoint(self._inner) else self._scope

    def _load(self, value: ir.Value, index: Map, guard: str | None) -> str:
        name = self._operands.setdefault(value, f"x{len(self._operands)}")
        dtype = _dtype(value)
        text = expressions.load(dtype, f"{name}[{self._text(flatten(index, shape_of(value)))}]")
        return text if guard is None else f"({guard} ? {text} : {literal(dtype, 0)})"

    def _total(self, node: ir.Node, index: Map) -> str:
        kept = [part for k, part in enumerate(self._index) if k not in self.spec.axes]
        if node.attributes.get_int("keepdims", 1):
            wanted: Map = tuple(Linear() if k in self.spec.axes else part for k, part in enumerate(self._index))
        else:
            wanted = tuple(kept)
        if node not in self._totals or index != wanted:
            raise NotFusibleError(f"{node.name} is not reduced at this place of the kernel")
        return self._totals[node]

    def _pieces(self, node: ir.Node, value: ir.Value, pieces: Sequence[views.Piece], guard: str | None) -> str:
        dtype = _dtype(value)
        result: list[tuple[str | None, str]] = []
        for piece in pieces:
            tests = []
            for linear, low, high in piece.when:
                least, most = linear.bounds()
                tests += [f"{self._text(linear)} >= {low}"] if least < low else []
                tests += [f"{self._text(linear)} < {high}"] if most >= high else []
            inside = guard
            condition = None
            if tests:
                condition = self._condition(tests, [linear for linear, _, _ in piece.when], guard)
                inside = condition
            if piece.operand is None:
                known = constant(node.inputs[piece.fill]) if piece.fill is not None else None
                if piece.fill is not None and known is None:
                    raise NotFusibleError(f"{node.name} fills with a value that is not constant")
                result.append((condition, literal(dtype, 0 if known is None else known.reshape(-1)[0])))
            else:
                result.append((condition, self._pull(node.inputs[piece.operand], piece.index, inside)))
            if condition is None:
                break
        text = result[-1][1]
        for condition, part in reversed(result[:-1]):
            text = f"({condition} ? {part} : {text})"
        return text

    def _condition(self, tests: Sequence[str], linears: Sequence[Linear], guard: str | None) -> str:
        scope = self._scope_of(tuple(linears), guard)
        text = " && ".join([*([guard] if guard else []), *tests])
        name = self._name("b")
        scope.lines.append(f"const bool {name} = {text};")
        if scope is not self._row:
            self._inner.add(name)
        return name

    def _expression(self, node: ir.Node, value: ir.Value, index: Map, guard: str | None) -> str:
        if node.domain != "":
            raise NotFusibleError(f"{node.domain}.{node.op_type} is no expression")
        special = SPECIAL.get(node.op_type)
        if special is not None:
            return special(self, node, index, guard)
        rule = expressions.RULES.get(node.op_type)
        if rule is None:
            raise NotFusibleError(f"{node.op_type} is no expression")
        operands = []
        for operand in node.inputs:
            if operand is None:
                operands.append("")
            else:
                operands.append(self._pull(operand, views.broadcast(index, shape_of(operand)), guard))
        first = node.inputs[1] if node.op_type == "Where" else node.inputs[0]
        return rule(operands, node, _dtype(first))

    def gathered(self, node: ir.Node, index: Map, guard: str | None) -> str:
        """An element of input 0 whose place along ``axis`` is read from input 1 (Gather and GatherElements)."""
        data, indices = node.inputs[0], node.inputs[1]
        shape, places = shape_of(data), shape_of(indices)
        axis = node.attributes.get_int("axis", 0) % len(shape)
        at = index if node.op_type == "GatherElements" else index[axis : axis + len(places)]
        known = constant(indices)
        if known is not None and known.size == 1:
            chosen = Linear.of(int(known.reshape(-1)[0]) % shape[axis])
        else:
            read = self._pull(indices, at, guard)
            scope = self._scope_of(at, guard)
            name = self._name("i")
            # An index out of range would be a wild read; clamped it is only a wrong number, and labels are checked before.
            size = shape[axis]
            wrapped = f"({read} < 0 ? {read} + {size} : {read})"
            scope.lines.append(f"const INDEX {name} = (INDEX)clamp_index({wrapped}, {size});")
            if scope is not self._row:
                self._inner.add(name)
            chosen = Linear.of(Variable(name, size))
        if node.op_type == "GatherElements":
            source = (*index[:axis], chosen, *index[axis + 1 :])
        else:
            source = (*index[:axis], chosen, *index[axis + len(places) :])
        return self._pull(data, source, guard)

    def cast(self, node: ir.Node, index: Map, guard: str | None) -> str:
        source = node.inputs[0]
        return expressions.cast(_dtype(source), _dtype(node.outputs[0]), self._pull(source, index, guard))

    def triangle(self, node: ir.Node, index: Map, guard: str | None) -> str:
        """Trilu: elements on one side of a diagonal, zero elsewhere."""
        shift = integers(node, 1) if len(node.inputs) > 1 and node.inputs[1] is not None else [0]
        if shift is None:
            raise NotFusibleError("the diagonal of Trilu is not constant")
        sign = ">=" if node.attributes.get_int("upper", 1) else "<="
        row, column = self._text(index[-2]), self._text(index[-1])
        value = self._pull(node.inputs[0], index, guard)
        return f"({column} {sign} {row} + {shift[0]} ? {value} : {literal(_dtype(node.outputs[0]), 0)})"

    def one_hot(self, node: ir.Node, index: Map, guard: str | None) -> str:
        depth, values = integers(node, 1), node.inputs[2]
        if depth is None:
            raise NotFusibleError("the depth of OneHot is not constant")
        axis = node.attributes.get_int("axis", -1) % len(index)
        place = self._pull(node.inputs[0], (*index[:axis], *index[axis + 1 :]), guard)
        off, on = (self._pull(values, (Linear.of(k),), guard) for k in range(2))
        wrapped = f"({place} < 0 ? {place} + {depth[0]} : {place})"
        return f"({wrapped} == {self._text(index[axis])} ? {on} : {off})"

    def diagonal(self, node: ir.Node, index: Map, guard: str | None) -> str:
        shift, dtype = node.attributes.get_int("k", 0), _dtype(node.outputs[0])
        one, zero = literal(dtype, 1), literal(dtype, 0)
        return f"({self._text(index[1])} == {self._text(index[0])} + {shift} ? {one} : {zero})"

    def scattered(self, node: ir.Node, index: Map, guard: str | None) -> str:
        """ScatterElements of one element a row: everywhere else the element of input 0."""
        data, indices, updates = node.inputs
        axis = node.attributes.get_int("axis", 0) % len(index)
        wanted = tuple(1 if k == axis else size for k, size in enumerate(shape_of(data)))
        reduction = node.attributes.get_string("reduction", "none")
        if shape_of(indices) != wanted or reduction not in ("none", "add"):
            raise NotFusibleError("ScatterElements of several elements a row")
        at = (*index[:axis], Linear(), *index[axis + 1 :])
        place, old, new = (self._pull(v, i, guard) for v, i in ((indices, at), (data, index), (updates, at)))
        wrapped = f"({place} < 0 ? {place} + {shape_of(data)[axis]} : {place})"
        changed = f"({old} + {new})" if reduction == "add" else new
        return f"({wrapped} == {self._text(index[axis])} ? {changed} : {old})"

    # Text -------------------------------------------------------------------------------------------------------------

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _text(self, linear: Linear) -> str:
        """A mark for ``linear``, which is written out once it is known which loop variables merge."""
        self._linears.append(linear)
        self._rows.used.append(linear)
        self._columns.used.append(linear)
        return f"@{len(self._linears) - 1}@"

    def _resolved(self, text: str) -> str:
        names: dict[Variable, str] = {}
        lines = {}
        for domain, counter in ((self._rows, "row"), (self._columns, "column")):
            groups = domain.merged()
            found, rest = [], counter
            for k, group in reversed(list(enumerate(groups))):
                size = int(np.prod([v.size for v in group], dtype=np.int64))
                name = group[-1].name
                names.update((v, "0") for v in group[:-1])
                if k == 0:
                    found.append(f"const INDEX {name} = {rest};")
                else:
                    found.append(f"const INDEX {name} = {rest} % {size}, {name}_rest = {rest} / {size};")
                    rest = f"{name}_rest"
            lines[f"@{counter}s@"] = "\n".join(found)
        for mark, block in lines.items():
            text = text.replace(mark, block)
        return re.sub(r"@(\d+)@", lambda m: f"({self._linears[int(m[1])].text(names)})", text)


SPECIAL: Mapping[str, Callable[[Generator, ir.Node, Map, str | None], str]] = {
    "Gather": Generator.gathered, "GatherElements": Generator.gathered, "ScatterElements": Generator.scattered,
    "Cast": Generator.cast, "CastLike": Generator.cast, "Trilu": Generator.triangle, "OneHot": Generator.one_hot,
    "EyeLike": Generator.diagonal,
}  # fmt: skip


def is_expression(node: ir.Node) -> bool:
    """Whether kernels know the op; a node of it may still be one that they cannot compute."""
    name = node.op_type
    known = name in expressions.RULES or name in SPECIAL or name in views.RULES or name in REDUCTIONS
    return known and node.domain == "" and not (name == "Pad" and node.attributes.get_string("mode", "constant") != "constant")


def _dtype(value: ir.Value | None) -> ir.DataType:
    assert value is not None
    assert value.dtype is not None
    return value.dtype


def _size(value: ir.Value) -> int:
    return int(np.prod(shape_of(value), dtype=np.int64))
