"""The functions of :mod:`.functions` as Numba's intrinsics."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

from graphc.backends.onnxruntime.vectors.functions import (
    BOOL,
    F32,
    F64,
    I32,
    I64,
    LANES,
    POINTER,
    Vector,
    call,
    prefetch,
)


def row_function(rows: int, body: Callable[[Vector], None]) -> Any:
    """See :func:`.functions.row_function`."""

    @intrinsic
    def run(typing_context, n, addresses):
        if not isinstance(addresses, types.UniTuple) or addresses.count != rows:
            return None

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            length = context.cast(builder, arguments[0], signature.args[0], types.int64)
            places = cgutils.unpack_tuple(builder, arguments[1], rows)
            whole = builder.mul(builder.sdiv(length, I64(LANES)), I64(LANES))
            for first, last, lanes in ((I64(0), whole, LANES), (whole, length, 1)):
                with cgutils.for_range_slice(builder, first, last, I64(lanes), I64) as (at, _):
                    body(Vector(builder, places, length, at, lanes))
            return context.get_dummy_value()

        return types.void(n, addresses), emit

    return run


def tile_function(rows: int, vectors: int, adds: bool, wide: bool = False) -> Any:
    """See :func:`.functions.tile_function`."""
    number, lanes, size = (F64, LANES // 2, 8) if wide else (F32, LANES, 4)

    @intrinsic
    def run(typing_context, a, a_row, a_step, b, b_row, depth, c, c_row):
        kind = ll.VectorType(number, lanes)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            a, a_row, a_step, b, b_row, depth, c, c_row = (context.cast(builder, v, t, types.int64) for v, t in given)
            offsets = [builder.mul(a_row, I64(r)) for r in range(rows)]
            targets = [
                [builder.inttoptr(builder.add(row, I64(4 * LANES * v)), POINTER) for v in range(vectors)]
                for row in (builder.add(c, builder.mul(c_row, I64(r))) for r in range(rows))
            ]
            zero = ll.Constant(kind, [ll.Constant(number, 0.0)] * lanes)
            if adds:
                for place in itertools.chain(*targets):
                    prefetch(builder, place, writes=True)
            before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(I64)
            k.add_incoming(I64(0), before)
            sums = [[builder.phi(kind) for _ in range(vectors)] for _ in range(rows)]
            start = builder.add(b, builder.mul(k, b_row))
            taken = [
                builder.load(builder.inttoptr(builder.add(start, I64(4 * LANES * v)), POINTER), typ=kind, align=size)
                for v in range(vectors)
            ]
            column = builder.add(a, builder.mul(k, a_step))
            made = []
            for r in range(rows):
                value = builder.load(builder.inttoptr(builder.add(column, offsets[r]), POINTER), typ=number, align=size)
                same = in_all_lanes(builder, value)
                made.append([call(builder, "fma", kind, same, taken[v], sums[r][v]) for v in range(vectors)])
            following = builder.add(k, I64(1))
            end = builder.block
            k.add_incoming(following, end)
            for r in range(rows):
                for v in range(vectors):
                    sums[r][v].add_incoming(zero, before)
                    sums[r][v].add_incoming(made[r][v], end)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
            builder.position_at_end(after)
            for r in range(rows):
                for v in range(vectors):
                    total = made[r][v]
                    if adds:  # last, when c has come: sums that start with it would wait for memory
                        total = builder.fadd(total, builder.load(targets[r][v], typ=kind, align=size))
                    builder.store(total, targets[r][v], align=size)
            return context.get_dummy_value()

        return types.void(a, a_row, a_step, b, b_row, depth, c, c_row), emit

    return run


def two_sided_function(matrix: Sequence[Sequence[float]], rounding: float, small: float) -> Any:
    """See :func:`.functions.two_sided_function`."""
    height, width = len(matrix), len(matrix[0])

    @intrinsic
    def run(typing_context, x, x_row, x_column, y, y_row, y_column):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, x_column, y, y_row, y_column = (context.cast(builder, v, t, types.int64) for v, t in given)

            def place(base: Any, row: Any, i: int, column: Any, j: int) -> Any:
                offset = builder.add(builder.mul(row, I64(i)), builder.mul(column, I64(j)))
                return builder.inttoptr(builder.add(base, offset), POINTER)

            def combined(factors: Sequence[float], terms: Sequence[Any]) -> Any:
                total = None
                for factor, term in zip(factors, terms, strict=True):
                    if abs(factor) not in (0.0, 1.0):
                        term = builder.fmul(term, ll.Constant(kind, [ll.Constant(F32, abs(factor))] * LANES))
                    if factor > 0:
                        total = term if total is None else builder.fadd(total, term)
                    elif factor < 0:
                        total = builder.fneg(term) if total is None else builder.fsub(total, term)
                return total

            def same(number: float) -> Any:
                return ll.Constant(kind, [ll.Constant(F32, number)] * LANES)

            half: list[list[Any]] = [[] for _ in range(height)]
            largest, some = None, ll.Constant(ll.VectorType(BOOL, LANES), [BOOL(0)] * LANES)
            for j in range(width):
                column = [builder.load(place(x, x_row, i, x_column, j), typ=kind, align=4) for i in range(width)]
                for i in range(height):
                    half[i].append(combined(matrix[i], column))
                for value in column if rounding else ():
                    size = call(builder, "fabs", kind, value)
                    above = builder.fcmp_ordered(">", largest, size) if largest is not None else None
                    largest = size if above is None else builder.select(above, largest, size)
            for i in range(height):
                for j in range(height):
                    value = combined(matrix[j], half[i])
                    if rounding:
                        size = call(builder, "fabs", kind, value)
                        below = builder.fcmp_ordered("<", size, builder.fmul(largest, same(rounding)))
                        few = builder.fcmp_ordered("<", size, builder.fmul(largest, same(small)))
                        value, some = builder.select(below, same(0.0), value), builder.or_(some, builder.xor(few, below))
                    builder.store(value, place(y, y_row, i, y_column, j), align=4)
            lanes = ll.IntType(LANES)
            return builder.icmp_unsigned("!=", builder.bitcast(some, lanes), lanes(0))

        return types.boolean(x, x_row, x_column, y, y_row, y_column), emit

    return run


def transpose_square() -> Any:
    """See :data:`.functions.transpose_square`."""

    @intrinsic
    def run(typing_context, x, x_row, y, y_row):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, y, y_row = (context.cast(builder, v, t, types.int64) for v, t in given)

            def place(base: Any, row: Any, r: int) -> Any:
                return builder.inttoptr(builder.add(base, builder.mul(row, I64(r))), POINTER)

            rows = [builder.load(place(x, x_row, r), typ=kind, align=4) for r in range(LANES)]
            step = 1
            while step < LANES:  # exchanges the two off-diagonal squares of each square of 2 · step
                upper = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                lower = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                masks = [ll.Constant(ll.VectorType(I32, LANES), [ll.Constant(I32, n) for n in m]) for m in (upper, lower)]
                for r in range(LANES):
                    if not r & step:
                        a, b = rows[r], rows[r + step]
                        rows[r], rows[r + step] = (builder.shuffle_vector(a, b, mask) for mask in masks)
                step *= 2
            for r, row in enumerate(rows):
                builder.store(row, place(y, y_row, r), align=4)
            return context.get_dummy_value()

        return types.void(x, x_row, y, y_row), emit

    return run


def copy_function(vectors: int) -> Any:
    """See :func:`.functions.copy_function`."""

    @intrinsic
    def run(typing_context, x, x_row, y, y_row, rows):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, y, y_row, rows = (context.cast(builder, v, t, types.int64) for v, t in given)
            with cgutils.for_range(builder, rows, intp=I64) as loop:
                source, target = (builder.add(a, builder.mul(loop.index, row)) for a, row in ((x, x_row), (y, y_row)))
                for v in range(vectors):
                    here, there = (builder.inttoptr(builder.add(a, I64(4 * LANES * v)), POINTER) for a in (source, target))
                    builder.store(builder.load(here, typ=kind, align=4), there, align=4)
            return context.get_dummy_value()

        return types.void(x, x_row, y, y_row, rows), emit

    return run


def floats_at() -> Any:
    """See :data:`.functions.floats_at`."""
    return _pointer_to(types.float32)


def doubles_at() -> Any:
    """See :data:`.functions.doubles_at`."""
    return _pointer_to(types.float64)


def _pointer_to(number: Any) -> Any:
    @intrinsic
    def run(typing_context, address):

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = context.cast(builder, arguments[0], signature.args[0], types.int64)
            return builder.inttoptr(word, context.get_value_type(signature.return_type))

        return types.CPointer(number)(address), emit

    return run


def array_of() -> Any:
    """See :data:`.functions.array_of`."""
    return numba.carray  # type: ignore[attr-defined]


def scratch_function(count: int) -> Any:
    """See :func:`.functions.scratch_function`."""

    @intrinsic
    def run(typing_context):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = cgutils.alloca_once(builder, ll.ArrayType(F32, count))
            place.align = 4 * LANES
            return builder.ptrtoint(place, I64)

        return types.intp(), emit

    return run


def taps_function(taps: int) -> Any:
    """See :func:`.functions.taps_function`."""

    @intrinsic
    def run(typing_context, x, x_row, offsets, dy, dy_row, rows, blocks, sums):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, offsets, dy, dy_row, rows, blocks, sums = (context.cast(builder, v, t, types.int64) for v, t in given)

            def vector(address: Any) -> Any:
                return builder.load(builder.inttoptr(address, POINTER), typ=kind, align=4)

            slots = [cgutils.alloca_once(builder, kind) for _ in range(taps)]
            places = []
            for j, slot in enumerate(slots):
                builder.store(ll.Constant(kind, [ll.Constant(F32, 0.0)] * LANES), slot)
                places.append(builder.load(builder.inttoptr(builder.add(offsets, I64(8 * j)), POINTER), typ=I64))
            with cgutils.for_range_slice(builder, I64(0), rows, I64(1), I64) as (r, _):
                of_x, of_dy = builder.add(x, builder.mul(r, x_row)), builder.add(dy, builder.mul(r, dy_row))
                with cgutils.for_range_slice(builder, I64(0), blocks, I64(1), I64) as (q, _):
                    at = builder.mul(q, I64(4 * LANES))
                    slope, start = vector(builder.add(of_dy, at)), builder.add(of_x, at)
                    for place, slot in zip(places, slots, strict=True):
                        total = builder.load(slot, typ=kind)
                        builder.store(call(builder, "fma", kind, vector(builder.add(start, place)), slope, total), slot)
            for j, slot in enumerate(slots):
                address = builder.add(sums, I64(4 * LANES * j))
                total = builder.fadd(vector(address), builder.load(slot, typ=kind))
                builder.store(total, builder.inttoptr(address, POINTER), align=4)
            return context.get_dummy_value()

        return types.void(x, x_row, offsets, dy, dy_row, rows, blocks, sums), emit

    return run


def highest_of_row() -> Any:
    """See :data:`.functions.highest_of_row`."""

    @intrinsic
    def run(typing_context, x, count):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, count = (context.cast(builder, v, t, types.int64) for v, t in zip(arguments, signature.args, strict=True))
            lowest, kind = _vector_of(float("-inf")), ll.VectorType(F32, LANES)
            best = cgutils.alloca_once_value(builder, lowest)
            with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (at, _):
                found = Vector(builder, [x], count, at, LANES).load(0)
                found = builder.select(within(builder, at, count), found, lowest)
                builder.store(call(builder, "maximum", kind, builder.load(best, typ=kind), found), best)
            return folded(builder, "maximum", builder.load(best, typ=kind))

        return types.float32(x, count), emit

    return run


def exponentials() -> Any:
    """See :data:`.functions.exponentials`."""

    @intrinsic
    def run(typing_context, x, count, top):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, count = (
                context.cast(builder, v, t, types.int64) for v, t in zip(arguments[:2], signature.args[:2], strict=True)
            )
            highest = in_all_lanes(builder, context.cast(builder, arguments[2], signature.args[2], types.float32))
            zero, kind = _vector_of(0.0), ll.VectorType(F32, LANES)
            total = cgutils.alloca_once_value(builder, zero)
            with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (at, _):
                vector = Vector(builder, [x], count, at, LANES)
                below = vector.sub(vector.load(0), highest)
                counts = builder.fcmp_unordered(">=", below, vector.number(-87.0))
                counts = builder.and_(counts, within(builder, at, count))
                value = builder.select(counts, vector.exp(below), zero)
                vector.store(value, 0)
                builder.store(vector.add(builder.load(total, typ=kind), value), total)
            return folded(builder, "add", builder.load(total, typ=kind))

        return types.float32(x, count, top), emit

    return run


def within(builder: ll.IRBuilder, at: Any, count: Any) -> Any:
    """The lanes of the vector at position ``at`` that are among ``count``."""
    kind = ll.VectorType(I32, LANES)
    left = builder.trunc(builder.sub(count, at), I32)
    return builder.icmp_signed("<", ll.Constant(kind, [I32(k) for k in range(LANES)]), in_all_lanes(builder, left))


def _vector_of(number: float) -> Any:
    return ll.Constant(ll.VectorType(F32, LANES), [ll.Constant(F32, number)] * LANES)


def in_all_lanes(builder: ll.IRBuilder, value: Any) -> Any:
    lanes = LANES // 2 if value.type == F64 else LANES
    kind = ll.VectorType(value.type, lanes)
    lane = builder.insert_element(ll.Constant(kind, ll.Undefined), value, I32(0))
    return builder.shuffle_vector(lane, ll.Constant(kind, ll.Undefined), ll.Constant(ll.VectorType(I32, lanes), None))


def folded(builder: ll.IRBuilder, how: str, vector: Any) -> Any:
    """The sum or the maximum over the lanes of a vector, halves first."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                vector, ll.Constant(vector.type, ll.Undefined), ll.Constant(ll.VectorType(I32, width), order)
            )
            for order in ([I32(k) for k in range(width)], [I32(width + k) for k in range(width)])
        ]
        vector = builder.fadd(*halves) if how == "add" else call(builder, how, halves[0].type, *halves)
    return builder.extract_element(vector, I32(0))


def butterfly_function(points: int) -> Any:
    """See :func:`.functions.butterfly_function`."""

    @intrinsic
    def run(typing_context, x, x_step, y, y_step, count, factors):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_step, y, y_step, count, factors = (context.cast(builder, v, t, types.int64) for v, t in given)

            def place(base: Any, step: Any, k: int) -> list[Any]:
                start = builder.add(base, builder.mul(step, I64(k)))
                return [builder.inttoptr(builder.add(start, I64(4 * LANES * part)), POINTER) for part in range(2)]

            numbers = [
                builder.load(builder.inttoptr(builder.add(factors, I64(4 * n)), POINTER), typ=F32, align=4)
                for n in range(2 * points - 2)
            ]
            same = [in_all_lanes(builder, number) for number in numbers]
            with cgutils.for_range(builder, count, intp=I64) as loop:
                at = builder.mul(loop.index, I64(8 * LANES))
                source, target = builder.add(x, at), builder.add(y, at)
                taken = [
                    _Complex(builder, *(builder.load(p, typ=kind, align=4) for p in place(source, x_step, k)))
                    for k in range(points)
                ]
                for j, made in enumerate(_transformed(taken)):
                    turned = made if j == 0 else made.times(same[2 * j - 2], same[2 * j - 1])
                    for value, where in zip((turned.real, turned.imaginary), place(target, y_step, j), strict=True):
                        builder.store(value, where, align=4)
            return context.get_dummy_value()

        return types.void(x, x_step, y, y_step, count, factors), emit

    return run


class _Complex:
    """Complex numbers in the lanes of two vectors."""

    def __init__(self, builder: ll.IRBuilder, real: Any, imaginary: Any) -> None:
        self.build, self.real, self.imaginary = builder, real, imaginary

    def __add__(self, other: _Complex) -> _Complex:
        build = self.build
        return _Complex(build, build.fadd(self.real, other.real), build.fadd(self.imaginary, other.imaginary))

    def __sub__(self, other: _Complex) -> _Complex:
        build = self.build
        return _Complex(build, build.fsub(self.real, other.real), build.fsub(self.imaginary, other.imaginary))

    def times(self, real: Any, imaginary: Any) -> _Complex:
        build, kind = self.build, self.real.type
        across = build.fneg(build.fmul(self.imaginary, imaginary)), build.fmul(self.real, imaginary)
        first = call(build, "fma", kind, self.real, real, across[0])
        return _Complex(build, first, call(build, "fma", kind, self.imaginary, real, across[1]))

    def plus(self, other: _Complex, factor: float) -> _Complex:
        """self + factor · other"""
        build, kind = self.build, self.real.type
        many = ll.Constant(kind, [ll.Constant(F32, factor)] * kind.count)
        first = call(build, "fma", kind, other.real, many, self.real)
        return _Complex(build, first, call(build, "fma", kind, other.imaginary, many, self.imaginary))

    def clockwise(self) -> _Complex:
        """-i · self"""
        return _Complex(self.build, self.imaginary, self.build.fneg(self.real))


def _transformed(a: list[_Complex]) -> list[_Complex]:
    """yⱼ = Σₖ aₖ·e^(-2πi·jk/n) for n = 2, 4 or an odd number."""
    n = len(a)
    if n == 2:
        return [a[0] + a[1], a[0] - a[1]]
    if n == 4:
        even, odd = (a[0] + a[2], a[0] - a[2]), (a[1] + a[3], (a[1] - a[3]).clockwise())
        return [even[0] + odd[0], even[1] + odd[1], even[0] - odd[0], even[1] - odd[1]]
    half = range(1, n // 2 + 1)
    sums, differences = [a[k] + a[n - k] for k in half], [a[k] - a[n - k] for k in half]
    y = [functools.reduce(lambda total, term: total + term, sums, a[0])] * n
    zero = ll.Constant(a[0].real.type, [ll.Constant(F32, 0.0)] * LANES)
    for j in half:
        angles = [2 * math.pi * (j * k % n) / n for k in half]
        along, across = a[0], _Complex(a[0].build, zero, zero)
        for angle, total, difference in zip(angles, sums, differences, strict=True):
            along, across = along.plus(total, math.cos(angle)), across.plus(difference, math.sin(angle))
        y[j], y[n - j] = along + across.clockwise(), along - across.clockwise()
    return y
