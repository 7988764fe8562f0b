"""The functions of :mod:`.pooling` as Numba's intrinsics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

from graphc.backends.onnxruntime.vectors.functions import F32, I32, I64, LANES, POINTER, call
from graphc.backends.onnxruntime.vectors.intrinsics import in_all_lanes, within

KIND = ll.VectorType(F32, LANES)
_LOWEST = ll.Constant(KIND, [ll.Constant(F32, float("-inf"))] * LANES)


def masked(builder: ll.IRBuilder, name: str, result: Any, operands: list[Any]) -> Any:
    """Emit a masked load or store (``name``) of a vector of floats."""
    symbol = f"llvm.masked.{name}.v{LANES}f32.p0"
    known = builder.module.globals.get(symbol)
    kind = ll.FunctionType(result, [operand.type for operand in operands])
    return builder.call(known or ll.Function(builder.module, kind, symbol), operands)


def _larger(builder: ll.IRBuilder, a: Any, b: Any, *, exact: bool) -> Any:
    """The larger of each two; NaN if one is where ``exact``."""
    if exact:
        return call(builder, "maximum", KIND, a, b)
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def highest_of_rows(rows: int, exact: bool) -> Any:
    """See :func:`.pooling.highest_of_rows`."""

    @intrinsic
    def run(typing_context, x, offsets, width, y):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, offsets, width, y = (context.cast(builder, v, t, types.int64) for v, t in given)
            zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)
            seen = cgutils.alloca_once_value(builder, zero)
            places = [builder.inttoptr(builder.add(offsets, I64(8 * r)), POINTER) for r in range(rows)]
            starts = [builder.add(x, builder.load(place, typ=I64)) for place in places]

            def block(at: Any, mask: Any) -> None:
                offset, best = builder.shl(at, I64(2)), None
                for start in starts:
                    place = builder.inttoptr(builder.add(start, offset), POINTER)
                    if mask is None:
                        found = builder.load(place, typ=KIND, align=4)
                    else:
                        found = masked(builder, "load", KIND, [place, I32(4), mask, zero])
                    best = found if best is None else _larger(builder, best, found, exact=exact)
                    if not exact:  # 0 · ∞ is NaN
                        builder.store(call(builder, "fma", KIND, found, zero, builder.load(seen, typ=KIND)), seen)
                if mask is not None:
                    best = builder.select(mask, best, _LOWEST)
                builder.store(best, builder.inttoptr(builder.add(y, offset), POINTER), align=4)

            whole = builder.and_(width, I64(-LANES))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (at, _):
                block(at, None)
            with builder.if_then(builder.icmp_signed("<", whole, width)):
                block(whole, within(builder, whole, width))
            found, lanes = builder.load(seen, typ=KIND), ll.IntType(LANES)
            return builder.icmp_unsigned("!=", builder.bitcast(builder.fcmp_unordered("uno", found, found), lanes), lanes(0))

        return types.boolean(x, offsets, width, y), emit

    return run


def _each_part(builder: ll.IRBuilder, count: Any, block: Callable[[Any, Any], None]) -> None:
    """``block(offset in bytes, mask of a part of a vector or None)`` for each vector of ``count`` floats."""
    whole = builder.and_(count, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (at, _):
        block(builder.shl(at, I64(2)), None)
    with builder.if_then(builder.icmp_signed("<", whole, count)):
        block(builder.shl(whole, I64(2)), within(builder, whole, count))


def loaded(builder: ll.IRBuilder, base: Any, offset: Any, mask: Any, otherwise: Any) -> Any:
    place = builder.inttoptr(builder.add(base, offset), POINTER)
    if mask is None:
        return builder.load(place, typ=KIND, align=4)
    return masked(builder, "load", KIND, [place, I32(4), mask, otherwise])


def copied_row() -> Any:
    """See :func:`.pooling.copied_row`."""

    @intrinsic
    def run(typing_context, x, width, y):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, width, y = (context.cast(builder, v, t, types.int64) for v, t in zip(arguments, signature.args, strict=True))
            zero, nan = (ll.Constant(KIND, [ll.Constant(F32, value)] * LANES) for value in (0.0, float("nan")))
            seen = cgutils.alloca_once_value(builder, zero)

            def block(offset: Any, mask: Any) -> None:
                found = loaded(builder, x, offset, mask, zero)
                builder.store(call(builder, "fma", KIND, found, zero, builder.load(seen, typ=KIND)), seen)  # 0 · ∞ is NaN
                if mask is not None:
                    found = builder.select(mask, found, nan)
                builder.store(found, builder.inttoptr(builder.add(y, offset), POINTER), align=4)

            _each_part(builder, width, block)
            found, lanes = builder.load(seen, typ=KIND), ll.IntType(LANES)
            return builder.icmp_unsigned("!=", builder.bitcast(builder.fcmp_unordered("uno", found, found), lanes), lanes(0))

        return types.boolean(x, width, y), emit

    return run


def copied_bytes() -> Any:
    """See :func:`.pooling.copied_bytes`."""

    @intrinsic
    def run(typing_context, x, count, y):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, count, y = (context.cast(builder, v, t, types.int64) for v, t in zip(arguments, signature.args, strict=True))
            kind = ll.FunctionType(ll.VoidType(), (POINTER, POINTER, I64, ll.IntType(1)))
            known = builder.module.globals.get("llvm.memcpy.p0.p0.i64")
            copy = known or ll.Function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
            builder.call(copy, (builder.inttoptr(y, POINTER), builder.inttoptr(x, POINTER), count, ll.IntType(1)(0)))
            return context.get_dummy_value()

        return types.void(x, count, y), emit

    return run


_BYTES = ll.VectorType(ll.IntType(8), LANES)


def _numbers_at(builder: ll.IRBuilder, address: Any, count: int) -> list[Any]:
    """The int64 numbers at an address."""
    return [builder.load(builder.inttoptr(builder.add(address, I64(8 * k)), POINTER), typ=I64) for k in range(count)]


def highest_taps(rows: int, taps: int, stride: int) -> Any:
    """See :func:`.pooling.highest_taps`."""

    @intrinsic
    def run(typing_context, x, offsets, y, at, count):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, offsets, y, at, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            starts = [builder.add(x, offset) for offset in _numbers_at(builder, offsets, rows)]

            def block(offset: Any, mask: Any) -> None:
                q = builder.lshr(offset, I64(2))
                highest, found = _LOWEST, ll.Constant(_BYTES, [ll.IntType(8)(0)] * LANES)
                for row in reversed(range(rows)):
                    values = list(_values_of_taps(builder, starts[row], q, taps, stride, 1))
                    for tap in reversed(range(taps)):  # so that the first of equal ones is the last to be taken
                        number = ll.Constant(_BYTES, [ll.IntType(8)(row * taps + tap + 1)] * LANES)
                        higher = builder.fcmp_ordered(">=", values[tap], highest)
                        highest = builder.select(higher, values[tap], highest)
                        found = builder.select(higher, number, found)
                place, into = (builder.inttoptr(builder.add(*pair), POINTER) for pair in ((y, offset), (at, q)))
                if mask is None:
                    builder.store(highest, place, align=4)
                    builder.store(found, into, align=1)
                else:
                    masked(builder, "store", ll.VoidType(), [highest, place, I32(4), mask])
                    symbol = f"llvm.masked.store.v{LANES}i8.p0"
                    kind = ll.FunctionType(ll.VoidType(), (_BYTES, POINTER, I32, mask.type))
                    known = builder.module.globals.get(symbol)
                    store = known or ll.Function(builder.module, kind, symbol)
                    builder.call(store, (found, into, I32(1), mask))

            _each_part(builder, count, block)
            return context.get_dummy_value()

        return types.void(x, offsets, y, at, count), emit

    return run


def sums_at_taps(rows: int, taps: int, stride: int) -> Any:
    """See :func:`.pooling.sums_at_taps`."""

    @intrinsic
    def run(typing_context, at, values, offsets, numbers, line, count):
        zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            at, values, offsets, numbers, line, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            places = _numbers_at(builder, offsets, rows)
            of_bytes = [builder.add(at, place) for place in places]
            of_floats = [builder.add(values, builder.shl(place, I64(2))) for place in places]
            wanted = [
                [in_all_lanes(builder, builder.trunc(builder.add(number, I64(tap)), ll.IntType(8))) for tap in range(taps)]
                for number in _numbers_at(builder, numbers, rows)
            ]
            with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (q, _):
                sums: list[Any] = [zero] * stride
                for row, shift in itertools.product(range(rows), range((taps - 1) // stride + 1)):
                    window = builder.sub(q, I64(shift))
                    found = builder.load(builder.inttoptr(builder.add(of_bytes[row], window), POINTER), typ=_BYTES, align=1)
                    value = loaded(builder, of_floats[row], builder.shl(window, I64(2)), None, zero)
                    for phase in range(min(stride, taps - shift * stride)):
                        here = builder.icmp_unsigned("==", found, wanted[row][shift * stride + phase])
                        sums[phase] = builder.fadd(sums[phase], builder.select(here, value, zero))
                into = builder.add(line, builder.shl(builder.mul(q, I64(stride)), I64(2)))
                for part in range(stride):
                    place = builder.inttoptr(builder.add(into, I64(4 * LANES * part)), POINTER)
                    builder.store(in_turns(builder, sums, part), place, align=4)
            return context.get_dummy_value()

        return types.void(at, values, offsets, numbers, line, count), emit

    return run


def in_turns(builder: ll.IRBuilder, vectors: list[Any], part: int) -> Any:
    """The vector ``part`` of those that hold the first element of each of the vectors, then the second of each, and so on."""
    made = vectors[0]
    if len(vectors) > 1:
        turns = [divmod(part * LANES + lane, len(vectors)) for lane in range(LANES)]
        for k, source in enumerate(vectors):
            order = [I32(LANES + element if turn == k else lane) for lane, (element, turn) in enumerate(turns)]
            made = builder.shuffle_vector(made, source, ll.Constant(ll.VectorType(I32, LANES), order))
    return made


def highest_of_windows(taps: int, stride: int, dilation: int, exact: bool) -> Any:
    """See :func:`.pooling.highest_of_windows`."""

    @intrinsic
    def run(typing_context, x, y, count):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, y, count = (context.cast(builder, v, t, types.int64) for v, t in zip(arguments, signature.args, strict=True))

            def block(at: Any, mask: Any) -> Any:
                return of_windows(builder, x, at, taps, stride, dilation, lambda a, b: _larger(builder, a, b, exact=exact))

            each_vector(builder, y, count, block)
            return context.get_dummy_value()

        return types.void(x, y, count), emit

    return run


def each_vector(builder: ll.IRBuilder, y: Any, count: Any, block: Callable[[Any, Any], Any]) -> None:
    """Store ``block(first element, mask of a part of a vector or None)`` for each vector of ``count`` floats at y."""
    whole = builder.and_(count, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (at, _):
        builder.store(block(at, None), builder.inttoptr(builder.add(y, builder.shl(at, I64(2))), POINTER), align=4)
    with builder.if_then(builder.icmp_signed("<", whole, count)):
        mask = within(builder, whole, count)
        place = builder.inttoptr(builder.add(y, builder.shl(whole, I64(2))), POINTER)
        masked(builder, "store", ll.VoidType(), [block(whole, mask), place, I32(4), mask])


def places_in_windows(taps: int, stride: int, dilation: int) -> Any:
    """See :func:`.pooling.places_in_windows`."""

    @intrinsic
    def run(typing_context, x, wanted, first, at, count):
        whole_numbers = ll.VectorType(I32, LANES)
        steps = ll.Constant(whole_numbers, [I32(stride * lane) for lane in range(LANES)])

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, wanted, first, at, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)
            with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (q, _):
                offset = builder.shl(q, I64(2))
                place = builder.inttoptr(builder.add(wanted, offset), POINTER)
                value = masked(builder, "load", KIND, [place, I32(4), within(builder, q, count), zero])
                into = builder.inttoptr(builder.add(at, offset), POINTER)
                found = builder.load(into, typ=whole_numbers, align=4)
                start = builder.trunc(builder.add(first, builder.mul(q, I64(stride))), I32)
                base = builder.add(in_all_lanes(builder, start), steps)
                values = list(_values_of_taps(builder, x, q, taps, stride, dilation))
                for tap in reversed(range(taps)):
                    moved = builder.add(base, ll.Constant(whole_numbers, [I32(tap * dilation)] * LANES))
                    found = builder.select(builder.fcmp_ordered("==", values[tap], value), moved, found)
                builder.store(found, into, align=4)
            return context.get_dummy_value()

        return types.void(x, wanted, first, at, count), emit

    return run


def of_windows(
    builder: ll.IRBuilder, x: Any, at: Any, taps: int, stride: int, dilation: int, combine: Callable[[Any, Any], Any]
) -> Any:
    """A vector of what ``combine`` makes of x[q·stride + tap·dilation], tap after tap, for q from ``at`` on."""
    return functools.reduce(combine, _values_of_taps(builder, x, at, taps, stride, dilation))


def _values_of_taps(builder: ll.IRBuilder, x: Any, at: Any, taps: int, stride: int, dilation: int) -> Iterator[Any]:
    """For each tap the vector of x[q·stride + tap·dilation] for q from ``at`` on."""
    start = builder.add(x, builder.mul(at, I64(4 * stride)))

    def vector(offset: int) -> Any:
        return builder.load(builder.inttoptr(builder.add(start, I64(4 * offset)), POINTER), typ=KIND, align=4)

    def every(loads: list[Any], phase: int) -> Any:
        """Elements phase, phase + stride … of vectors that lie one behind another, put together vector by vector."""
        places = [divmod(lane * stride + phase, LANES) for lane in range(LANES)]
        made = loads[0]
        for k, load in enumerate(loads[:stride]):
            order = [I32(LANES + within_load if source == k else lane) for lane, (source, within_load) in enumerate(places)]
            made = builder.shuffle_vector(made, load, ll.Constant(ll.VectorType(I32, LANES), order))
        return made

    shifts: dict[int, list[Any]] = {}
    for tap in range(taps):
        shift, phase = divmod(tap * dilation, stride)
        if shift not in shifts:
            shifts[shift] = [vector(shift * stride + k * LANES) for k in range(stride)]
        yield every(shifts[shift], phase)
