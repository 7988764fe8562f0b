"""Emits LLVM IR for the statements of a kernel.

Sums of a reduction are reordered, so that they become vectors, in a way that depends on the size of their loop and not on what
else is in it, or on whether that size is written out (:mod:`graphc.backends.host.loop_vectors`); every other operation is
rounded as written. So a value has the same bits in every kernel that computes it by the same loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from llvmlite import ir as ll

from graphc.backends.host import language as lang
from graphc.backends.host.kinds import F32, I1, I32, I64, KINDS, Typed
from graphc.backends.host.language import LanguageError
from graphc.backends.host.loop_vectors import Vectors, into_vectors, vectors_of
from graphc.backends.host.mathematics import Mathematics
from graphc.backends.host.series import intrinsic
from graphc.backends.host.sizes import Formula, Sizes

REORDERED = ("reassoc", "nsz")

_SIZE = re.compile(r"size_(\d+)([ilfd])")

_WORDS = {"i": "int", "l": "INDEX", "f": "float", "d": "double"}
"""Last letter of the name of a size → its C type."""

_BY_RANK = {rank: kind for kind, (_, rank, _) in KINDS.items() if kind not in ("INDEX", "half_bits", "bfloat_bits", "char")}


class Emitter:
    """Emits statements at a builder's place.

    Args:
        builder: where code goes.
        arrays: name → (pointer, C type of an element).
        functions: makes elementary functions in the module.
        vector: elements that ``EACH`` walks.
        table: the pointer to the sizes that differ between shapes, and what is in it; None: all are written out.
    """

    def __init__(
        self,
        builder: ll.IRBuilder,
        arrays: Mapping[str, tuple[Any, str]],
        functions: Mathematics,
        vector: int,
        table: tuple[Any, Sizes] | None = None,
    ) -> None:
        self.builder = builder
        self.vector = vector
        self.lanes: Any = None  # elements that EACH walks
        self.existing: Any = None  # how many of these exist, where not all do; the others read 0 and store nothing
        self._arrays: dict[str, tuple[Any, str]] = dict(arrays)
        self._functions = functions
        self._scopes = [dict[str, tuple[Any, str]]()]
        self.columns: Callable[[Sequence[lang.Statement]], None] | None = None
        self._table = table
        self._words: dict[tuple[int, str], Any] = {}  # place in the table, C type → the value
        self._sums = self._loops = 0  # emitted so far
        self._walking = False  # inside EACH

    # Variables --------------------------------------------------------------------------------------------------------

    def define(self, name: str, value: Any, kind: str = "INDEX") -> None:
        """Give a name to a value."""
        place = self.room(KINDS[kind][0], name)
        self.builder.store(value, place)
        self._scopes[-1][name] = (place, kind)

    def room(self, kind: ll.Type, name: str, count: int | None = None) -> Any:
        """Memory of the function's frame, so that a loop does not take more of it."""
        with self.builder.goto_entry_block():
            shape = ll.ArrayType(kind, count) if count else kind
            return self.builder.alloca(shape, name=name)

    def variable(self, name: str) -> tuple[Any, str]:
        """Where a variable lies, and its C type."""
        for scope in reversed(self._scopes):
            found: tuple[Any, str] | None = scope.get(name)
            if found is not None:
                return found
        raise LanguageError(f"unknown name {name!r}")

    def size(self, number: int, *loops: str, by: Formula | None = None, key: Hashable = None) -> Any:
        """A number that follows from the sizes of ``loops``: read from the table if one of them is there.

        Args:
            by, key: see :meth:`Sizes.of_loops`.
        """
        if self._table is not None and not self._table[1].loops.keys().isdisjoint(loops):
            return self._word(self._table[1].of_loops(number, by, key), "INDEX")
        return ll.Constant(I64, number)

    def length(self, name: str, size: int) -> Any:
        """The size of a loop."""
        return self.size(size, name, by=lambda sizes: sizes[name], key=name)

    def write_out(self, loop: str) -> None:
        """Say that the text is only of this size of a loop."""
        if self._table is not None and loop in self._table[1].loops:
            self._table[1].serves = False

    def _word(self, place: int, kind: str) -> Any:
        """A number of the table, read when the kernel begins."""
        assert self._table is not None
        if (place, kind) not in self._words:
            with self.builder.goto_entry_block():
                at = self.builder.gep(self._table[0], [ll.Constant(I64, place)], inbounds=True, source_etype=I64)
                self._words[place, kind] = self.builder.load(at, typ=KINDS[kind][0])
        return self._words[place, kind]

    # Statements -------------------------------------------------------------------------------------------------------

    def run(self, statements: Sequence[lang.Statement]) -> None:
        """Emit statements in order, in a scope of their own."""
        self._scopes.append({})
        for statement in statements:
            self._statement(statement)
        self._scopes.pop()

    def _statement(self, statement: lang.Statement) -> None:
        match statement:
            case lang.Declare(kind, name, None, count):
                size = self.vector if count == "VECTOR" else self._count(count or "1")
                kind = "unsigned char" if count and kind == "bool" else kind
                self._scopes[-1][name] = (self.room(KINDS[kind][0], name, size if count else None), kind)
            case lang.Declare(kind, name, value, None) if value is not None:
                self.define(name, self.to(kind, self.expression(value)), kind)
            case lang.Assign(target, value):
                self._assign(target, value)
            case lang.Do(call):
                if call.function not in ("reduce_across",):
                    raise LanguageError(f"cannot call {call.function!r}")
            case lang.Block(kind, body):
                self._block(kind, body)
            case _:
                raise LanguageError(f"cannot emit {statement}")

    def _count(self, text: str) -> int:
        """Elements of an array in the kernel's frame, whose size is written out."""
        size = _SIZE.fullmatch(text) if self._table is not None else None
        if self._table is None or size is None:
            return int(text)
        self._table[1].serves = False
        return self._table[1].words[int(size[1])]

    def _block(self, kind: str, body: Sequence[lang.Statement]) -> None:
        if kind in ("FOR_CHUNKS", "FOR_COLUMNS"):
            if self.columns is None:
                raise LanguageError("no columns")
            self.columns(body)
        elif kind == "EACH" and self.lanes is not None:
            self._walking = True
            self.loop(ll.Constant(I64, 0), self.lanes, "v", lambda: self.run(body))
            self._walking = False
        elif kind in ("EACH", "FIRST_LANE"):
            self.run(body)
        else:
            raise LanguageError(f"unexpected {kind}")

    def loop(
        self,
        start: Any,
        stop: Any,
        name: str,
        body: Callable[[], None],
        following: Callable[[], Any] = lambda: None,
        *,
        vectors: Vectors | None = None,
    ) -> None:
        """Emit ``for (name = start; name < stop; ++name) body``.

        Args:
            following: may give another next value than name + 1.
            vectors: how the loop becomes vectors; None: by its size, if that is written out.
        """
        b = self.builder
        before = b.block
        head, inside, behind = (b.append_basic_block(f"{name}.{part}") for part in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        counter = b.phi(I64, name)
        counter.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", counter, stop), inside, behind)
        b.position_at_end(inside)
        self._scopes.append({})
        self.define(name, counter)
        loops, sums = self._loops, self._sums
        body()
        self._scopes.pop()
        after = following()
        counter.add_incoming(b.add(counter, ll.Constant(I64, 1), flags=("nsw",)) if after is None else after, b.block)
        again = b.branch(head)
        if vectors is None and isinstance(stop, ll.Constant):
            vectors = vectors_of(stop.constant)
        if self._loops == loops and vectors is not None and not self._walking:
            into_vectors(again, vectors, self._sums > sums)
        self._loops += 1
        b.position_at_end(behind)

    def _assign(self, target: lang.Name | lang.Index, value: lang.Expression) -> None:
        place, kind = self._place(target)
        found = self._stored(self.expression(value), kind)
        if not self._is_padded(target):
            self.builder.store(found, place)
            return
        with self.builder.if_then(self._exists()):
            self.builder.store(found, place)

    def _is_padded(self, target: lang.Name | lang.Index) -> bool:
        """Whether lanes that do not exist must leave an element of a kernel's operand alone."""
        return self.existing is not None and self._walking and isinstance(target, lang.Index) and target.array in self._arrays

    def _exists(self) -> Any:
        return self.builder.icmp_signed("<", self._name("v").value, self.existing)

    def _stored(self, value: Typed, kind: str) -> Any:
        return value.value if kind in ("half_bits", "bfloat_bits") else self.to(kind, value)

    def _place(self, target: lang.Name | lang.Index) -> tuple[Any, str]:
        if isinstance(target, lang.Name):
            return self.variable(target.text)
        at = self.to("INDEX", self.expression(target.at))
        if target.array in self._arrays:
            pointer, kind = self._arrays[target.array]
            return self.builder.gep(pointer, [at], inbounds=True, source_etype=KINDS[kind][0]), kind
        pointer, kind = self.variable(target.array)
        zero = ll.Constant(I64, 0)
        return self.builder.gep(pointer, [zero, at], inbounds=True), kind

    # Expressions ------------------------------------------------------------------------------------------------------

    def expression(self, node: lang.Expression) -> Typed:
        """Emit an expression."""
        match node:
            case lang.Number(text, kind):
                return self._number(text, kind)
            case lang.Name(text):
                return self._name(text)
            case lang.Index():
                place, kind = self._place(node)
                if not self._is_padded(node):
                    return Typed(self.builder.load(place, typ=KINDS[kind][0]), kind)
                before, zero = self.builder.block, ll.Constant(KINDS[kind][0], None)
                with self.builder.if_then(self._exists()):
                    found, inside = self.builder.load(place, typ=KINDS[kind][0]), self.builder.block
                value = self.builder.phi(KINDS[kind][0])
                value.add_incoming(found, inside)
                value.add_incoming(zero, before)
                return Typed(value, kind)
            case lang.Unary(sign, value):
                return self._unary(sign, self.expression(value))
            case lang.Binary(sign, left, right):
                return self._binary(sign, self.expression(left), self.expression(right))
            case lang.Convert(kind, value):
                return Typed(self.to(kind, self.expression(value)), kind)
            case lang.Conditional(test, yes, no):
                return self._choice(test, yes, no)
            case lang.Call(function, arguments, types):
                return self._call(function, [self.expression(a) for a in arguments], types)
        raise LanguageError(f"cannot emit {node}")

    def _number(self, text: str, kind: str) -> Typed:
        if kind in ("float", "double"):
            return Typed(ll.Constant(KINDS[kind][0], float(text.rstrip("fF"))), kind)
        return Typed(ll.Constant(KINDS[kind][0], int(text.rstrip("uUlL"), 0)), kind)

    def _name(self, text: str) -> Typed:
        if text in ("true", "false"):
            return Typed(ll.Constant(I1, text == "true"), "bool")
        if text == "NAN_VALUE":
            return Typed(ll.Constant(F32, float("nan")), "float")
        if text == "INFINITY_VALUE":
            return Typed(ll.Constant(F32, float("inf")), "float")
        size = _SIZE.fullmatch(text) if self._table is not None else None
        if size is not None:
            kind = _WORDS[size[2]]
            return Typed(self._word(int(size[1]), kind), kind)
        place, kind = self.variable(text)
        return Typed(self.builder.load(place, typ=KINDS[kind][0]), kind)

    def _choice(self, test: lang.Expression, yes: lang.Expression, no: lang.Expression) -> Typed:
        condition = self.to("bool", self.expression(test))
        if not any(map(_reads, (yes, no))):
            first, second = self._alike(self.expression(yes), self.expression(no))
            return Typed(self.builder.select(condition, first.value, second.value), first.kind)
        with self.builder.if_else(condition) as (then, other):  # what is not there must not be read
            with then:
                first = self.expression(yes)
                kind = first.kind
                ended = self.builder.block
            with other:
                second = self.expression(no)
                if second.kind != kind and (first.is_float or second.rank <= first.rank):
                    second = Typed(self.to(kind, second), kind)
                elif second.kind != kind:
                    raise LanguageError("the two sides of a choice differ in type")
                ended_too = self.builder.block
        result = self.builder.phi(KINDS[kind][0])
        result.add_incoming(first.value, ended)
        result.add_incoming(second.value, ended_too)
        return Typed(result, kind)

    def _unary(self, sign: str, x: Typed) -> Typed:
        if sign == "!":
            return Typed(self.builder.not_(self.to("bool", x)), "bool")
        x = self._promoted(x)
        if sign == "~":
            return Typed(self.builder.not_(x.value), x.kind)
        return Typed(self.builder.fneg(x.value) if x.is_float else self.builder.neg(x.value), x.kind)

    def _promoted(self, x: Typed) -> Typed:
        return Typed(self.to("int", x), "int") if x.rank < 3 else x

    def _alike(self, a: Typed, b: Typed) -> tuple[Typed, Typed]:
        """C's usual arithmetic conversions."""
        if a.kind == b.kind:
            return a, b
        kind = _BY_RANK[max(a.rank, b.rank, 3)]
        return Typed(self.to(kind, a), kind), Typed(self.to(kind, b), kind)

    def _binary(self, sign: str, a: Typed, b: Typed) -> Typed:
        build = self.builder
        if sign in ("&&", "||"):  # both sides are always safe to compute
            left, right = self.to("bool", a), self.to("bool", b)
            return Typed(build.and_(left, right) if sign == "&&" else build.or_(left, right), "bool")
        if sign in ("<<", ">>"):
            a = self._promoted(a)
            by = self.to(a.kind, b)
            return Typed(
                build.shl(a.value, by) if sign == "<<" else (build.ashr if a.signed else build.lshr)(a.value, by), a.kind
            )
        a, b = self._alike(self._promoted(a), self._promoted(b))
        if sign in ("==", "!=", "<", ">", "<=", ">="):
            if a.is_float:
                compare = build.fcmp_unordered if sign == "!=" else build.fcmp_ordered
            else:
                compare = build.icmp_signed if a.signed else build.icmp_unsigned
            return Typed(compare(sign, a.value, b.value), "bool")
        if sign in ("&", "|", "^"):
            return Typed({"&": build.and_, "|": build.or_, "^": build.xor}[sign](a.value, b.value), a.kind)
        if a.is_float:
            make = {"+": build.fadd, "-": build.fsub, "*": build.fmul, "/": build.fdiv}.get(sign)
        elif a.signed:
            make = {"+": build.add, "-": build.sub, "*": build.mul, "/": build.sdiv, "%": build.srem}.get(sign)
        else:
            make = {"+": build.add, "-": build.sub, "*": build.mul, "/": build.udiv, "%": build.urem}.get(sign)
        if make is None:
            raise LanguageError(f"{sign} of {a.kind}")
        return Typed(make(a.value, b.value), a.kind)

    def to(self, kind: str, x: Typed) -> Any:
        """The value of ``x`` as ``kind``."""
        if x.kind == kind:
            return x.value
        build, (target, rank, signed) = self.builder, KINDS[kind]
        if kind == "bool":
            zero = ll.Constant(x.value.type, 0 if not x.is_float else 0.0)
            return build.fcmp_unordered("!=", x.value, zero) if x.is_float else build.icmp_signed("!=", x.value, zero)
        if x.is_float:
            if rank >= 7:
                return build.fpext(x.value, target) if rank > x.rank else build.fptrunc(x.value, target)
            wide = I64 if target.width < 64 else target
            found = build.fptosi(x.value, wide) if signed or target.width < 64 else build.fptoui(x.value, wide)
            return build.trunc(found, target) if wide is not target else found
        if rank >= 7:
            return build.sitofp(x.value, target) if x.signed else build.uitofp(x.value, target)
        if target.width > x.value.type.width:
            return build.sext(x.value, target) if x.signed and x.kind != "bool" else build.zext(x.value, target)
        return build.trunc(x.value, target) if target.width < x.value.type.width else x.value

    # Functions --------------------------------------------------------------------------------------------------------

    def _call(self, name: str, a: list[Typed], types: tuple[str, ...]) -> Typed:
        if name.endswith("::of"):
            return self._combined(name.removesuffix("::of"), *self._alike(a[0], a[1]))
        if name == "reduce_lanes":
            return a[0]
        build = self.builder
        if name == "bfloat_load":
            return Typed(build.bitcast(build.shl(build.zext(a[0].value, I32), ll.Constant(I32, 16)), F32), "float")
        if name == "clamp_index":
            index, size = self.to("INDEX", a[0]), self.to("INDEX", a[1])
            last = build.sub(size, ll.Constant(I64, 1))
            low = build.select(build.icmp_signed("<", index, ll.Constant(I64, 0)), ll.Constant(I64, 0), index)
            return Typed(build.select(build.icmp_signed(">", low, last), last, low), "INDEX")
        if name == "class_index":
            index, size = self.to("INDEX", a[0]), self.to("INDEX", a[1])
            zero, none = ll.Constant(I64, 0), ll.Constant(I64, -1)
            place = build.select(build.icmp_signed("<", index, zero), build.add(index, size), index)
            inside = build.and_(build.icmp_signed(">=", place, zero), build.icmp_signed("<", place, size))
            return Typed(build.select(inside, place, none), "INDEX")
        return self._functions.call(self.builder, self.to, name, a)

    def _combined(self, rule: str, a: Typed, b: Typed) -> Typed:
        build = self.builder
        if rule in ("Sum", "Prod"):
            self._sums += 1
            if a.is_float:
                make = build.fadd if rule == "Sum" else build.fmul
                return Typed(make(a.value, b.value, flags=() if self.lanes is not None else REORDERED), a.kind)
            return self._binary("+" if rule == "Sum" else "*", a, b)
        largest = rule == "Maximum"
        if a.is_float:
            made = intrinsic(build.module, "llvm.maximum" if largest else "llvm.minimum", a.value.type, 2)
            return Typed(build.call(made, [a.value, b.value], fastmath=("nsz",)), a.kind)
        compare = build.icmp_signed if a.signed else build.icmp_unsigned
        return Typed(build.select(compare(">" if largest else "<", a.value, b.value), a.value, b.value), a.kind)


def _reads(node: lang.Expression) -> bool:
    """Whether an expression reads an array."""
    match node:
        case lang.Index():
            return True
        case lang.Unary(_, value) | lang.Convert(_, value):
            return _reads(value)
        case lang.Binary(_, left, right):
            return _reads(left) or _reads(right)
        case lang.Conditional(test, yes, no):
            return _reads(test) or _reads(yes) or _reads(no)
        case lang.Call(_, arguments, _):
            return any(map(_reads, arguments))
    return False
