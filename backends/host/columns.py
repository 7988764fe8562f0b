"""Emits the walk over the columns of a row; a long sum adds up in blocks, whose totals are doubles.

Added one after the other, 32 million squares in float32 miss their mean by 4e-4: what is added becomes small beside the total.
A block is so short that its own sum is exact to a few roundings, and that the doubles cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from llvmlite import ir as ll

from graphc.backends.host import language as lang
from graphc.backends.host.emit import Emitter
from graphc.backends.host.generator import Loops
from graphc.backends.host.kinds import F32, F64, I64

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
    build, part, steps = emitter.builder, emitter.expression(lang.Name("PART")).value, -(-size // loops.parts)
    start = build.mul(part, emitter.size(steps, name))

    def column() -> None:
        emitter.define(name, build.add(start, emitter.expression(lang.Name(f"{name}_part")).value))
        emitter.run(body)

    left = size - steps * (loops.parts - 1)
    if left == steps:
        _walk(emitter, [(f"{name}_part", steps), *rest], body, column)
        return
    with build.if_else(build.icmp_signed("<", part, _number(loops.parts - 1))) as (before, last):
        for branch, count in (before, steps), (last, left):
            with branch:
                _walk(emitter, [(f"{name}_part", count), *rest], body, column)


def _walk(emitter: Emitter, loops: Nest, body: Sequence[lang.Statement], column: Callable[[], None]) -> None:
    longest = BLOCK if emitter.lanes is None else DISTANT
    sums = _sums_of(body) if depth_of_blocks(loops, longest) is not None else []
    totals = [total for total in (_Total(emitter, target) for target in sums) if total.is_float32]
    if not totals:
        nest(emitter, loops, column)
        return

    def end_of_block() -> None:
        for total in totals:
            total.add()

    for total in totals:
        total.begin()
    _in_blocks(emitter, loops, longest, column, end_of_block)
    for total in totals:
        total.end()


def depth_of_blocks(loops: Nest, longest: int) -> int | None:
    """Which of ``loops`` a sum over them divides into blocks of ``longest``; None: it is one block."""
    sizes = [size for _, size in loops]
    if math.prod(sizes) <= longest:
        return None
    return next(k for k in range(len(sizes)) if math.prod(sizes[k + 1 :]) <= longest)


def nest(emitter: Emitter, loops: Nest, inside: Callable[[], None]) -> None:
    """Emit ``inside`` in loops (name, size), the first outermost."""
    if not loops:
        inside()
        return
    (name, size), *rest = loops
    emitter.loop(_number(0), emitter.length(name, size), name, lambda: nest(emitter, rest, inside))


def _in_blocks(
    emitter: Emitter, loops: Nest, longest: int, inside: Callable[[], None], end_of_block: Callable[[], None]
) -> None:
    (name, size), *rest = loops
    if depth_of_blocks(loops, longest) != 0:
        count = emitter.length(name, size)
        emitter.loop(_number(0), count, name, lambda: _in_blocks(emitter, rest, longest, inside, end_of_block))
        return
    names = [name.removesuffix("_part") for name, _ in loops]

    def number(which: int) -> ll.Value:
        return emitter.size(_blocks(loops, longest, {})[which], *names, by=lambda sizes: _blocks(loops, longest, sizes)[which])

    def block(start: ll.Value, count: ll.Value) -> None:
        def step() -> None:
            emitter.define(name, emitter.builder.add(start, emitter.expression(lang.Name(f"{name}_step")).value))
            nest(emitter, rest, inside)

        emitter.loop(_number(0), count, f"{name}_step", step)
        end_of_block()

    def whole() -> None:
        place = emitter.expression(lang.Name(f"{name}_block")).value
        block(emitter.builder.mul(place, number(0)), number(0))

    emitter.loop(_number(0), number(1), f"{name}_block", whole)
    if not isinstance(number(3), ll.Constant) or number(3).constant:
        block(number(2), number(3))


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
