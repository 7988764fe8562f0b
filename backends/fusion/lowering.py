"""Lowers the values of a generated kernel, from its results back to memory."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphc.backends.fusion import expressions, views
from graphc.backends.fusion.expressions import compute_type, literal
from graphc.backends.fusion.indexing import Domain, Linear, Map, Quotient, Variable, flatten
from graphc.backends.fusion.kernel_source import Access, Form, KernelSpec, NotFusibleError, loop_variables, whole_dimensions
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.ir.facts import constant, dtype_of, shape_of, size_of

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

SHARED_BY = 64
"""Elements of a kernel that read one element of a small operand, from which it counts as cached."""


FRAMES = 8
"""Python calls for a node, at most, between a result and what it is computed of."""


def _allow_depth(spec: KernelSpec) -> None:
    """Let Python follow a chain of all nodes of a graph: an unrolled loop may be a kernel of thousands.

    Its limit guards the stack of C, which calls from Python to Python do not take from since 3.11.
    """
    nodes = max(
        (len(node.graph) for v in spec.stores if (node := v.producer()) is not None and node.graph is not None), default=0
    )
    needed = 1000 + FRAMES * nodes
    if sys.getrecursionlimit() < needed:
        sys.setrecursionlimit(needed)


@dataclass(slots=True)
class Scope:
    """Statements of a row, or of an element.

    Attributes:
        heads: run once, before a vector's elements.
        lines: run for each element of the vector.
        tails: run once, after its elements.
        known: the name of each value that has one.
    """

    heads: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tails: list[str] = field(default_factory=list)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)


class Values:
    """Generates the expressions of a kernel's values and their index arithmetic.

    Args:
        in_memory: whether a value is in memory when the kernel starts.

    Attributes:
        uses: (value, offset) of loads inside loops → the loops.
    """

    def __init__(self, spec: KernelSpec, in_memory: Callable[[ir.Value], bool], form: Form) -> None:
        self.spec, self.form = spec, form
        self.uses: dict[tuple[ir.Value, Linear], set[int]] = {}
        self._in_memory = in_memory
        loops = form.loops or whole_dimensions(spec)
        self._variables = loop_variables(spec, loops)
        self._loops = list(zip(loops, self._variables, strict=True))
        self._index: Map = tuple(
            sum((Linear.of(v) * part.step for part, v in self._loops if part.dimension == k), Linear())
            for k in range(len(spec.shape))
        )
        self._inner = {v.name for part, v in self._loops if part.dimension in spec.axes}
        self._totals: dict[ir.Node, str] = {}
        self._count = 0
        _allow_depth(spec)
        self._begin()

    def _begin(self) -> None:
        """Discard the generated text."""
        self._rows = Domain([v for part, v in self._loops if part.dimension not in self.spec.axes])
        self._columns = Domain([v for part, v in self._loops if part.dimension in self.spec.axes])
        self._linears: list[tuple[Linear, bool]] = []
        self._operands: dict[ir.Value, str] = {}
        self._held: dict[tuple[ir.Value, Linear], str] = {}
        self._traffic: list[Access] = []
        self._row = Scope()
        self._scope = self._row
        self._uniform: set[str] = set()
        self._exact: dict[str, str] = {}  # names of rounded bfloat values → the stored bits
        self._varying: set[str] = set()
        self._loop_number = 0
        self._rounds = False  # whether the loop under way only stores values of 16 bits
        self._here: dict[tuple[ir.Value | None, int], Linear] = {}

    def _pull(self, value: ir.Value | None, index: Map, guard: str | None, *, root: bool = False) -> str:
        """The name or literal of element ``index`` of ``value``; read only if ``guard`` holds."""
        if value is None:
            raise NotFusibleError("an operand is omitted")
        known = constant(value)
        if known is not None and known.size == 1:
            return literal(dtype_of(value), known.reshape(-1)[0])
        key = (value, index, guard)
        for scope in (self._row, self._scope):
            if key in scope.known:
                return scope.known[key]
        if not root and self._in_memory(value):
            if guard is not None and self._is_free_to_read(value, index):
                return self._pull(value, index, None)
            return self._remember(key, index, guard, value, self._load(value, index, guard))
        producer = value.producer()
        if producer is None:
            raise NotFusibleError(f"{value.name!r} is not in memory")
        if producer in self.spec.reductions:
            return self._total(producer, index)
        index_map = op_kernel(producer).index_map
        if index_map is not None:
            pieces = index_map(producer, value.index() or 0, index)
            if pieces is not None:
                return self._remember(key, index, guard, value, self._pieces(producer, value, pieces, guard))
        text = self._expression(producer, value, index, guard)
        return self._remember(key, index, guard, value, text)

    def _remember(self, key: tuple[object, ...], index: Map, guard: str | None, value: ir.Value, text: str) -> str:
        if re.fullmatch(r"\w+(\[v\])?", text):
            return text
        scope = self._scope_of(index, guard)
        scope.known[key] = name = self._define(scope, "t", compute_type(dtype_of(value)), text)
        if text.startswith("bfloat_load("):
            self._exact[name] = f"bfloat_exact({name})"
        elif text.startswith("bfloat_round("):
            self._exact[name] = f"bfloat_store{text.removeprefix('bfloat_round')}"
        return name

    def _define(self, scope: Scope, letter: str, kind: str, text: str) -> str:
        """Define a variable in ``scope``; each row of a vector has its own, for the loops over the columns."""
        name = self._name(letter)
        if scope is self._row and self.form.strided:
            scope.heads.append(f"{kind} {name}[VECTOR];")
            scope.lines.append(f"{name}[v] = {text};")
            self._varying.add(f"{name}[v]")  # the name of a variable, where it is an index
            return f"{name}[v]"
        if self._varies(text):
            self._varying.add(name)
            scope.lines.append(f"const {kind} {name} = {text};")
        else:
            scope.heads.append(f"const {kind} {name} = {text};")
        if scope is not self._row:
            self._inner.add(name)
        return name

    def _varies(self, text: str) -> bool:
        """Whether ``text`` differs between elements of one vector; the C compiler does not hoist uniform text."""
        words = re.findall(r"\w+", text)
        if self.form.variable is None or "v" in words or not self._varying.isdisjoint(words):
            return True
        for number in re.findall(r"@(\d+)@", text):
            linear, base = self._linears[int(number)]
            for variable, _ in linear.variables():
                if variable.name in self._varying or (variable == self.form.variable and not base):
                    return True
        return False

    def _scope_of(self, index: Map, guard: str | None) -> Scope:
        """The scope that computes a value with this index: the row's unless it depends on the column."""
        names = {v.name for part in (*index, *self._here.values()) for v, _ in part.variables()}
        if guard is not None:
            names.add(guard)
        return self._row if names.isdisjoint(self._inner) else self._scope

    def _load(self, value: ir.Value, index: Map, guard: str | None) -> str:
        name = self._operands.setdefault(value, f"x{len(self._operands)}")
        dtype, offset = dtype_of(value), flatten(index, shape_of(value))
        scope, key = self._scope_of(index, guard), (value, offset)
        inner, free, uniform = scope is not self._row, guard is None, guard is None or guard in self._uniform
        held = inner and free and key in self.form.held and (self.form.vector == 1 or self._is_whole(offset, scope))
        whole = held or (uniform and self._is_whole(offset, scope))
        if inner and free:
            self.uses.setdefault(key, set()).add(self._loop_number)
        if not (held and key in self._held):
            self._traffic.append(Access(value, offset, inner, whole, self._loop_number))
        if whole:
            return expressions.load(dtype, f"{self._pack(scope, value, name, offset, held, guard)}.at[v]")
        if free and inner and self._is_same(offset):
            only = self._name("q")
            scope.heads.append(f"const {expressions.STORAGE[dtype]} {only} = {name}[{self._text(offset, base=True)}];")
            return expressions.load(dtype, only)
        text = expressions.load(dtype, f"{name}[{self._text(offset)}]")
        return text if free else f"({guard} ? {text} : {literal(dtype, 0)})"

    def _is_free_to_read(self, value: ir.Value, index: Map) -> bool:
        """Whether element ``index`` exists wherever the kernel is, and comes from the cache: a factor of a channel.

        Then a guard saves nothing, and every window that reads the factor shares one load of it.
        """
        if size_of(value) * SHARED_BY > self.spec.rows * max(1, self.spec.columns):
            return False
        bounds = zip((part.bounds() for part in index), shape_of(value), strict=True)
        return all(least >= 0 and most < size for (least, most), size in bounds)

    def _is_whole(self, offset: Linear, scope: Scope) -> bool:
        """Whether a vector's elements are contiguous in memory and aligned to the vector's length.

        The address of the vector must not depend on an index that is computed element by element.
        """
        form = self.form
        if form.variable is None:
            return False
        found_out = {v for v, _ in offset.variables()}.difference(self._variables)
        unsettled = self._varying if scope is self._row else self._inner
        if any(form.strided or v.name in unsettled for v in found_out):
            return False
        found = 0
        for term, coefficient in offset.terms:
            if term == form.variable:
                found = coefficient
            elif coefficient % form.vector or any(v == form.variable for v, _ in Linear.of(term).variables()):
                return False
        return found == 1 and offset.constant % form.vector == 0

    def _is_same(self, offset: Linear) -> bool:
        """Whether all elements of a vector read one address: the vector's variable occurs only in quotients by multiples
        of its length.
        """
        form = self.form
        if form.variable is None or any(v not in self._variables for v, _ in offset.variables()):
            return False
        for term, _ in offset.terms:
            if form.variable in {v for v, _ in Linear.of(term).variables()}:
                if not isinstance(term, Quotient) or term.by % form.vector or term.of.constant % form.vector:
                    return False
                if any(c % form.vector for t, c in term.of.terms if t != form.variable):
                    return False
        return True

    def _pack(self, scope: Scope, value: ir.Value, array: str, offset: Linear, held: bool, guard: str | None) -> str:
        """The vector at ``offset``, loaded here or by an earlier loop; zeros if ``guard`` is false."""
        kind, key = f"Pack<{expressions.STORAGE[dtype_of(value)]}, VECTOR>", (value, offset)
        load = f"load_pack<VECTOR>({array} + {self._text(offset, base=True)})"
        if held:
            return self._held_pack(scope, value, key, kind, load)
        name = self._name("q")
        scope.heads.append(f"const {kind} {name} = {load if guard is None else f'{guard} ? {load} : {kind}()'};")
        return name

    def _held_pack(self, scope: Scope, value: ir.Value, key: tuple[ir.Value, Linear], kind: str, load: str) -> str:
        """The vector that the thread keeps from the first loop that loads it."""
        first, both = key not in self._held, bool(self.form.in_shared)
        held = self._held.setdefault(key, self._name("h") if first else "")
        if first:
            storage = expressions.STORAGE[dtype_of(value)]
            self._row.heads.append(f"HOLD_BOTH({storage}, {held})" if both else f"{kind} {held}[HOLD];")
        if not both:
            scope.heads += [f"{held}[k] = {load};"] if first else []
            return f"{held}[k]"
        name = self._name("q")
        scope.heads.append(f"const {kind} {name} = {load if first else f'HELD_PACK({held}, k, {load})'};")
        scope.heads += [f"HOLD_PACK({held}, k, {name});"] if first else []
        return name

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
        dtype = dtype_of(value)
        result: list[tuple[str | None, str]] = []
        for piece in pieces:
            condition = self.guarded(piece.when, guard)
            inside = condition or guard
            if piece.operand is None:
                fill = node.inputs[piece.fill] if piece.fill is not None else None
                text = literal(dtype, 0) if fill is None else self._pull(fill, (Linear(),) * len(shape_of(fill)), guard)
                result.append((condition, text))
            else:
                result.append((condition, self._pull(node.inputs[piece.operand], piece.index, inside)))
            if condition is None:
                break
        text = result[-1][1]
        for condition, part in reversed(result[:-1]):
            text = f"({condition} ? {part} : {text})"
        return text

    def guarded(self, when: Sequence[tuple[Linear, int, int]], guard: str | None) -> str | None:
        """The name of the condition low ≤ linear < high for each of ``when``; None if it always holds."""
        tests, linears = [], []
        for linear, low, high in when:
            least, most = linear.bounds()
            tests += [f"{self._text(linear)} >= {low}"] if least < low else []
            tests += [f"{self._text(linear)} < {high}"] if most >= high else []
            linears += [linear] if least < low or most >= high else []
        if not tests:
            return None
        scope = self._scope_of(tuple(linears), guard)
        text = " && ".join([*([guard] if guard else []), *tests])
        if not self._is_uniform(linears, guard):
            return self._define(scope, "b", "bool", text)
        name = self._name("b")
        scope.heads.append(f"const bool {name} = {text};")
        self._uniform.add(name)
        if scope is not self._row:
            self._inner.add(name)
        return name

    def _is_uniform(self, linears: Sequence[Linear], guard: str | None) -> bool:
        """Whether a condition is the same for all elements of a vector, so that it can guard a vector load."""
        if self.form.variable is None or not (guard is None or guard in self._uniform):
            return False
        used = {v for linear in linears for v, _ in linear.variables()}
        return self.form.variable not in used and used <= set(self._variables)

    def element(self, value: ir.Value | None, index: Map, guard: str | None) -> str:
        """The name or literal of element ``index`` of ``value``; read only if ``guard`` holds."""
        return self._pull(value, index, guard)

    def number(self, value: ir.Value) -> str:
        """The only element of a value in memory, as text that is valid anywhere in the kernel."""
        self._traffic.append(Access(value, Linear(), False, False, self._loop_number))
        return f"{self._operands.setdefault(value, f'x{len(self._operands)}')}[0]"

    def of_vector(
        self, kind: str, offset: Linear, index: Map, guard: str | None, multiple: int, text: Callable[[str], str]
    ) -> str | None:
        """The name of a ``kind`` computed once for a vector, from the offset of its first element.

        None if the vector is not contiguous, or ``multiple`` does not divide the offset of its first element.
        """
        scope = self._scope_of(index, guard)
        if self.form.vector % multiple or not self._is_whole(offset, scope):
            return None
        name = self._name("q")
        scope.heads.append(f"const {kind} {name} = {text(self._text(offset, base=True))};")
        return name

    def is_reshape(self, node: ir.Node) -> bool:
        """Whether the node's result shares its operand's memory."""
        return op_kernel(node).same_memory

    def is_read(self, value: ir.Value) -> bool:
        """Whether this kernel reads ``value`` from memory instead of computing it."""
        return self._in_memory(value)

    def text(self, linear: Linear) -> str:
        """``linear`` as part of the kernel's text."""
        return self._text(linear)

    def place(self, indices: ir.Value | None, at: Map, size: int, guard: str | None) -> Linear:
        """The index in [0, ``size``) in element ``at`` of ``indices``; a negative one counts from the end."""
        known = constant(indices)
        if known is not None and known.size == 1:
            return Linear.of(int(known.reshape(-1)[0]) % size)
        read = self._pull(indices, at, guard)
        # Clamping turns an out-of-range index into a wrong number instead of a wild read; labels are checked before.
        wrapped = f"({read} < 0 ? {read} + {size} : {read})"
        scope = self._scope_of(at, guard)
        return Linear.of(Variable(self._define(scope, "i", "INDEX", f"(INDEX)clamp_index({wrapped}, {size})"), size))

    def _expression(self, node: ir.Node, value: ir.Value, index: Map, guard: str | None) -> str:
        kernel = op_kernel(node)
        if kernel.element is not None:
            return kernel.element(self, node, index, guard)
        if kernel.expression is None:
            raise NotFusibleError(f"{node.op_type} has no expression")
        operands = [
            "" if operand is None else self._pull(operand, views.broadcast(index, shape_of(operand)), guard)
            for operand in node.inputs
        ]
        text = kernel.expression(operands, node, dtype_of(node.inputs[kernel.typed_by]))
        fast = text.startswith("expf(") and self._rounds_results(self._scope_of(index, guard))
        return f"FAST_EXP{text.removeprefix('expf')}" if fast else text

    def _rounds_results(self, scope: Scope) -> bool:
        """Whether all that follows in a scope is rounded to 16 bits, so that a few last bits of a float32 do not matter."""
        if self.spec.reductions:
            return self._rounds and scope is not self._row
        return all(dtype_of(value) in HALVES for value in self.spec.stores)

    def class_of(self, at: Map, index: str, size: int, guard: str | None) -> str:
        """The name of the class ``index`` among ``size`` classes, as an integer of the kernel's index width."""
        return self._define(self._scope_of(at, guard), "i", "INDEX", f"class_index({index}, {size})")

    def here(self, indices: ir.Value | None, axis: int) -> Linear | None:
        """The known value of ``indices`` along ``axis``, while an element is scattered there."""
        return self._here.get((indices, axis))

    def scattered_here(
        self, updates: ir.Value | None, at: Map, key: tuple[ir.Value | None, int], here: Linear, guard: str | None
    ) -> str:
        """An update for the one element that takes it: a gather by the same indices reads the element in its own place.

        Other elements compute it too and discard it, so names defined here must not be reused afterwards.
        """
        before = [(scope, dict(scope.known)) for scope in (self._row, self._scope)]
        self._here[key] = here
        try:
            return self._pull(updates, at, guard)
        finally:
            del self._here[key]
            for scope, known in before:
                scope.known = known

    # Text -------------------------------------------------------------------------------------------------------------

    @property
    def variables(self) -> int:
        """How many variables the text defines so far."""
        return self._count

    @property
    def skewed(self) -> int:
        """How many offsets and conditions the text divides for, at places that differ from line to line."""
        inner = [variable for part in self._index for variable, _ in part.variables()]
        return len({linear for linear, _ in self._linears if linear.is_skewed(inner[-1])}) if inner else 0

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _text(self, linear: Linear, *, base: bool = False) -> str:
        """A placeholder for ``linear`` (at the first element of a vector), resolved once the merged variables are known."""
        self._linears.append((linear, base))
        self._rows.used.append(linear)
        self._columns.used.append(linear)
        return f"@{len(self._linears) - 1}@"

    def _resolved(self, text: str) -> str:
        names: dict[Variable, str] = {}
        first: dict[Variable, str] = {}
        lines = {"@lane@": ""}
        for domain, counter in ((self._rows, "row"), (self._columns, "column")):
            groups = domain.merged()
            found, rest = [], counter
            for k, group in reversed(list(enumerate(groups))):
                size = math.prod([v.size for v in group])
                name = target = group[-1].name
                names.update((v, "0") for v in group[:-1])
                if group[-1] == self.form.variable:
                    first[group[-1]] = target = f"{name}_0"
                    lines["@lane@"] = f"const INDEX {name} = {target} + v;"
                if k == 0:
                    found.append(f"const INDEX {target} = {rest};")
                else:
                    found.append(f"const INDEX {target} = {rest} % {size}, {name}_rest = {rest} / {size};")
                    rest = f"{name}_rest"
            lines[f"@{counter}s@"] = "\n".join(found)
        for mark, block in lines.items():
            text = text.replace(mark, block)
        bases = names | first

        def written(match: re.Match[str]) -> str:
            linear, base = self._linears[int(match[1])]
            return f"({linear.text(bases if base else names)})"

        return re.sub(r"@(\d+)@", written, text)
