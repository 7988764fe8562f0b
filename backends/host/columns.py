"""Emits the walk over the columns of a row; a long sum adds up in blocks, whose totals are doubles.

Added one after the other, 32 million squares in float32 miss their mean by 4e-4: what is added becomes small beside the total.
A block is so short that its own sum is exact to a few roundings, and that the doubles cost nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from llvmlite import ir as ll

from graphc.backends.host import language as lang
from graphc.backends.host.emit import Emitter
from graphc.backends.host.generator import Loops
from graphc.backends.host.kinds import F32, F64, I64
from graphc.backends.host.loop_vectors import pieces_of, vectors_of
from graphc.backends.host.sizes import Formula

BLOCK = 4096
"""Columns of a block where a sum has the lanes of vectors: 128 for each of 32."""

DISTANT = 512
"""Columns of a block where each lane has a sum of its own."""

Nest = Sequence[tuple[str, int]]


def walk(emitter: Emitter, loops: Loops, body: Sequence[lang.Statement]) -> None:
    """Emit ``body`` for each column, or for those of the part ``PART`` if there are parts."""
    if loops.parts == 1:
        _walk(emitter, loops.columns, body, lambda: emitter.run(body))
        return
    (name, size), *rest = loops.columns
    steps, left = parts_of(size, loops.parts)
    build, part = emitter.builder, emitter.expression(lang.Name("PART")).value
    start = build.mul(part, emitter.length(f"{name}_part", steps))

    def some(loop: str, count: int) -> None:
        def column() -> None:
            emitter.define(name, build.add(start, emitter.expression(lang.Name(loop)).value))
            emitter.run(body)

        _walk(emitter, [(loop, count), *rest], body, column)

    if left == steps:
        some(f"{name}_part", steps)
        return
    with build.if_else(build.icmp_signed("<", part, _number(loops.parts - 1))) as (before, last):
        with before:
            some(f"{name}_part", steps)
        with last:
            some(f"{name}_last", left)


def parts_of(size: int, parts: int) -> tuple[int, int]:
    """Steps of a part of a loop, and of the last part."""
    steps = -(-size // parts)
    return steps, size - steps * (parts - 1)


def _walk(emitter: Emitter, loops: Nest, body: Sequence[lang.Statement], column: Callable[[], None]) -> None:
    longest = BLOCK if emitter.lanes is None else DISTANT
    adds = _adds(body) and emitter.lanes is None
    sums = _sums_of(body) if depth_of_blocks(loops, longest) is not None else []
    totals = [total for total in (_Total(emitter, target) for target in sums) if total.is_float32]
    if not totals:
        nest(emitter, loops, column, adds=adds)
        return

    def end_of_block() -> None:
        for total in totals:
            total.add()

    for total in totals:
        total.begin()
    _in_blocks(emitter, loops, longest, column, end_of_block, adds=adds)
    for total in totals:
        total.end()


def depth_of_blocks(loops: Nest, longest: int) -> int | None:
    """Which of ``loops`` a sum over them divides into blocks of ``longest``; None: it is one block."""
    sizes = [size for _, size in loops]
    if math.prod(sizes) <= longest:
        return None
    return next(k for k in range(len(sizes)) if math.prod(sizes[k + 1 :]) <= longest)


def order_of(loops: Loops) -> tuple[Hashable, bool]:
    """What decides in which order the columns are added up, beside the order of their loops; whether it holds for other sizes.

    LLVM adds up less than ``FEW`` vectors in an order of its own where it knows their number, so that number is written out.
    """
    if loops.parts == 1:
        return _order_of(loops.columns, loops.vector)
    (name, size), *rest = loops.columns
    steps, left = parts_of(size, loops.parts)
    orders = [_order_of([(name, count), *rest], loops.vector) for count in (steps, left)]
    return (left == steps, *(order for order, _ in orders)), all(free for _, free in orders)


def _order_of(loops: Nest, vector: int) -> tuple[Hashable, bool]:
    depth = depth_of_blocks(loops, BLOCK if vector == 1 else DISTANT)
    if vector > 1 or not loops:
        return depth, True
    size = loops[-1][1]
    if depth == len(loops) - 1:
        steps, _, _, left = _blocks(loops[-1:], BLOCK, {})
    else:
        steps, left = size, 0
    found = [vectors_of(n) for n in (steps, left) if n]
    return (depth, *found), not any(vectors.few for vectors in found)


def nest(emitter: Emitter, loops: Nest, inside: Callable[[], None], *, adds: bool = False) -> None:
    """Emit ``inside`` in loops (name, size), the first outermost; ``adds``: it adds numbers up in single variables."""
    if not loops:
        inside()
        return
    (name, size), *rest = loops
    if not rest:
        _innermost(emitter, name, size, [name], lambda sizes: sizes[name], inside, adds=adds)
        return
    emitter.loop(_number(0), emitter.length(name, size), name, lambda: nest(emitter, rest, inside, adds=adds))


def _innermost(
    emitter: Emitter, name: str, size: int, loops: Sequence[str], by: Formula, inside: Callable[[], None], *, adds: bool
) -> None:
    """Emit a loop with no loop inside, in pieces if its order counts.

    Args:
        loops, by: see :meth:`Emitter.size`.
    """

    def end(piece: int) -> ll.Value:
        return emitter.size(_ends(size, adds)[piece], *loops, by=lambda sizes: _ends(by(sizes), adds)[piece])

    start = _number(0)
    for k, (passes, vectors) in enumerate(pieces_of(size) if adds else [(size, vectors_of(size))]):
        stop = end(k)
        if isinstance(stop, ll.Constant):
            if passes or not adds:
                emitter.loop(start, stop, name, inside, vectors=vectors)
        else:
            emitter.loop(start, stop, name, inside, vectors=replace(vectors, few=False))
        start = stop


def _ends(size: int, adds: bool) -> list[int]:
    """Where the pieces of a loop end."""
    return list(itertools.accumulate(passes for passes, _ in pieces_of(size))) if adds else [size]


def _in_blocks(
    emitter: Emitter,
    loops: Nest,
    longest: int,
    inside: Callable[[], None],
    end_of_block: Callable[[], None],
    *,
    adds: bool,
) -> None:
    (name, size), *rest = loops
    if depth_of_blocks(loops, longest) != 0:
        count = emitter.length(name, size)

        def within() -> None:
            _in_blocks(emitter, rest, longest, inside, end_of_block, adds=adds)

        emitter.loop(_number(0), count, name, within)
        return
    names = [name for name, _ in loops]

    def number(which: int) -> ll.Value:
        return emitter.size(_blocks(loops, longest, {})[which], *names, by=lambda sizes: _blocks(loops, longest, sizes)[which])

    def block(start: ll.Value, which: int) -> None:
        """The steps from ``start`` on; ``which``: their number among :func:`_blocks`."""

        def step() -> None:
            emitter.define(name, emitter.builder.add(start, emitter.expression(lang.Name(f"{name}_step")).value))
            nest(emitter, rest, inside, adds=adds)

        if rest:
            emitter.loop(_number(0), number(which), f"{name}_step", step)
        else:
            count = _blocks(loops, longest, {})[which]
            by = functools.partial(_blocks, loops, longest)
            _innermost(emitter, f"{name}_step", count, names, lambda sizes: by(sizes)[which], step, adds=adds)
        end_of_block()

    def whole() -> None:
        place = emitter.expression(lang.Name(f"{name}_block")).value
        block(emitter.builder.mul(place, number(0)), 0)

    emitter.loop(_number(0), number(1), f"{name}_block", whole)
    if not isinstance(number(3), ll.Constant) or number(3).constant:
        block(number(2), 3)


def _blocks(loops: Nest, longest: int, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Steps of the first of ``loops`` in a block, whole blocks, steps in these, and the steps that are left.

    Args:
        sizes: of loops that have another size than ``loops`` says.
    """
    size, *rest = (sizes.get(name, size) for name, size in loops)
    steps = _steps(size, longest // math.prod(rest))
    return steps, size // steps, size - size % steps, size % steps


def _steps(size: int, most: int) -> int:
    """The steps of a loop that make a block: at most ``most``, and a divisor of ``size`` if one is near."""
    fewest = -(-size // most)
    even = (size // count for count in range(fewest, 2 * fewest) if size % count == 0)
    return next(even, most)


def _sums_of(body: Sequence[lang.Statement]) -> list[lang.Name | lang.Index]:
    """The variables that ``body`` adds to."""
    found: list[lang.Name | lang.Index] = []
    for statement in body:
        match statement:
            case lang.Assign(target, lang.Call("Sum::of", (first, _))) if first == target:
                found.append(target)
            case lang.Block(_, inside):
                found += _sums_of(inside)
    return found


def _adds(body: Sequence[lang.Statement]) -> bool:
    """Whether ``body`` adds or multiplies up numbers."""
    for statement in body:
        match statement:
            case lang.Assign(_, lang.Call("Sum::of" | "Prod::of", _)):
                return True
            case lang.Block(_, inside) if _adds(inside):
                return True
    return False


class _Total:
    """A sum of floats, and beside it the total of its blocks as a double: one of each for every lane, or a single one."""

    def __init__(self, emitter: Emitter, target: lang.Name | lang.Index) -> None:
        self._emitter = emitter
        self._sum, _ = emitter.variable(target.text if isinstance(target, lang.Name) else target.array)
        kind = self._sum.allocated_type
        self._lanes = emitter.lanes if isinstance(kind, ll.ArrayType) else None
        self.is_float32 = (kind.element if isinstance(kind, ll.ArrayType) else kind) == F32
        if self.is_float32:
            self._total = emitter.room(F64, "total", kind.count if isinstance(kind, ll.ArrayType) else None)

    def begin(self) -> None:
        self._each(lambda part, total: self._emitter.builder.store(ll.Constant(F64, 0.0), total))

    def add(self) -> None:
        def one(part: ll.Value, total: ll.Value) -> None:
            build = self._emitter.builder
            wide = build.fpext(build.load(part, typ=F32), F64)
            build.store(build.fadd(build.load(total, typ=F64), wide), total)
            build.store(ll.Constant(F32, 0.0), part)

        self._each(one)

    def end(self) -> None:
        build = self._emitter.builder
        self._each(lambda part, total: build.store(build.fptrunc(build.load(total, typ=F64), F32), part))

    def _each(self, act: Callable[[ll.Value, ll.Value], object]) -> None:
        if self._lanes is None:
            act(self._sum, self._total)
            return

        def lane() -> None:
            at = [_number(0), self._emitter.expression(lang.Name("lane")).value]
            act(*(self._emitter.builder.gep(place, at, inbounds=True) for place in (self._sum, self._total)))

        self._emitter.loop(_number(0), self._lanes, "lane", lane)


def _number(value: int) -> ll.Constant:
    return ll.Constant(I64, value)
