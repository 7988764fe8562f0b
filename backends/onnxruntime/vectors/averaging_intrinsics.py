"""The functions of :mod:`.averaging` as Numba's intrinsics."""

from __future__ import annotations

from typing import Any

from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

from graphc.backends.onnxruntime.vectors.functions import F32, I32, I64, LANES, POINTER, call
from graphc.backends.onnxruntime.vectors.intrinsics import in_all_lanes, within
from graphc.backends.onnxruntime.vectors.pooling_intrinsics import KIND, each_vector, in_turns, loaded, masked, of_windows


def sum_of_rows() -> Any:
    """See :func:`.averaging.sum_of_rows`."""

    @intrinsic
    def run(typing_context, x, offsets, weights, count, width, y):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, offsets, weights, count, width, y = (context.cast(builder, v, t, types.int64) for v, t in given)
            total = cgutils.alloca_once(builder, KIND)

            def block(at: Any, mask: Any) -> Any:
                offset = builder.shl(at, I64(2))
                _add_rows(builder, total, x, offsets, weights, count, offset, mask)
                return builder.inttoptr(builder.add(y, offset), POINTER)

            whole = builder.and_(width, I64(-LANES))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (at, _):
                into = block(at, None)
                builder.store(builder.load(total, typ=KIND), into, align=4)
            with builder.if_then(builder.icmp_signed("<", whole, width)):
                mask = within(builder, whole, width)
                into = block(whole, mask)
                masked(builder, "store", ll.VoidType(), [builder.load(total, typ=KIND), into, I32(4), mask])
            return context.get_dummy_value()

        return types.void(x, offsets, weights, count, width, y), emit

    return run


def _add_rows(
    builder: ll.IRBuilder, total: Any, x: Any, offsets: Any, weights: Any, count: Any, offset: Any, mask: Any
) -> None:
    """total = Σ weight · row of the vectors ``offset`` bytes behind the starts of ``count`` rows."""
    zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)
    builder.store(zero, total)
    with cgutils.for_range(builder, count, intp=I64) as row:
        of_start, of_weight = builder.shl(row.index, I64(3)), builder.shl(row.index, I64(2))
        start = builder.load(builder.inttoptr(builder.add(offsets, of_start), POINTER), typ=I64)
        weight = builder.load(builder.inttoptr(builder.add(weights, of_weight), POINTER), typ=F32)
        found = loaded(builder, builder.add(x, start), offset, mask, zero)
        added = call(builder, "fma", KIND, found, in_all_lanes(builder, weight), builder.load(total, typ=KIND))
        builder.store(added, total)


def spread_over_windows(taps: int, stride: int) -> Any:
    """See :func:`.averaging.spread_over_windows`."""

    @intrinsic
    def run(typing_context, x, offsets, weights, count, shares, width, y, columns, y_row, copies):
        zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)
        operands = (x, offsets, weights, count, shares, width, y, columns, y_row, copies)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, offsets, weights, count, shares, width, y, columns, y_row, copies = (
                context.cast(builder, v, t, types.int64) for v, t in given
            )
            total = cgutils.alloca_once(builder, KIND)

            def block(q: Any, partly: bool) -> None:
                mask = within(builder, q, width) if partly else None
                _add_rows(builder, total, x, offsets, weights, count, builder.shl(q, I64(2)), mask)
                share = loaded(builder, shares, builder.shl(q, I64(2)), mask, zero)
                value = builder.fmul(builder.load(total, typ=KIND), share)
                e = builder.mul(q, I64(stride))
                for part in range(stride):
                    made = in_turns(builder, [value] * taps + [zero] * (stride - taps), part)
                    first = builder.add(e, I64(part * LANES))
                    inside = within(builder, first, columns) if partly else None
                    with cgutils.for_range(builder, copies, intp=I64) as row:
                        start = builder.add(y, builder.mul(row.index, y_row))
                        place = builder.inttoptr(builder.add(start, builder.shl(first, I64(2))), POINTER)
                        if partly:
                            masked(builder, "store", ll.VoidType(), [made, place, I32(4), inside])
                        else:
                            builder.store(made, place, align=4)

            both = [builder.udiv(columns, I64(stride)), width]
            fewest = builder.select(builder.icmp_signed("<", *both), *both)
            whole = builder.and_(fewest, I64(-LANES))
            last = builder.udiv(builder.add(columns, I64(stride - 1)), I64(stride))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (q, _):
                block(q, partly=False)
            with cgutils.for_range_slice(builder, whole, last, I64(LANES), I64) as (q, _):
                block(q, partly=True)
            return context.get_dummy_value()

        return types.void(*operands), emit

    return run


def sums_of_windows(taps: int, stride: int, dilation: int, weighted: bool) -> Any:
    """See :func:`.averaging.sums_of_windows`."""

    @intrinsic
    def run(typing_context, x, weights, y, count):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, weights, y, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)

            def block(at: Any, mask: Any) -> Any:
                total = of_windows(builder, x, at, taps, stride, dilation, builder.fadd)
                if not weighted:
                    return total
                place = builder.inttoptr(builder.add(weights, builder.shl(at, I64(2))), POINTER)
                if mask is None:
                    return builder.fmul(total, builder.load(place, typ=KIND, align=4))
                return builder.fmul(total, masked(builder, "load", KIND, [place, I32(4), mask, zero]))

            each_vector(builder, y, count, block)
            return context.get_dummy_value()

        return types.void(x, weights, y, count), emit

    return run


def sums_over_windows(taps: int, stride: int) -> Any:
    """See :func:`.averaging.sums_over_windows`."""

    @intrinsic
    def run(typing_context, values, line, count):
        zero = ll.Constant(KIND, [ll.Constant(F32, 0.0)] * LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            values, line, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            step = I64(stride * LANES)

            def block(e: Any, masks: Any) -> None:
                q = builder.udiv(e, I64(stride))
                sums: list[Any] = [zero] * stride
                for shift in range((taps - 1) // stride + 1):
                    value = loaded(builder, values, builder.shl(builder.sub(q, I64(shift)), I64(2)), None, zero)
                    for phase in range(min(stride, taps - shift * stride)):
                        sums[phase] = builder.fadd(sums[phase], value) if shift else value
                into = builder.add(line, builder.shl(e, I64(2)))
                for part in range(stride):
                    place, made = (
                        builder.inttoptr(builder.add(into, I64(4 * LANES * part)), POINTER),
                        in_turns(builder, sums, part),
                    )
                    if masks is None:
                        builder.store(made, place, align=4)
                    else:
                        masked(builder, "store", ll.VoidType(), [made, place, I32(4), masks[part]])

            rest = builder.urem(count, step)
            whole = builder.sub(count, rest)
            with cgutils.for_range_slice(builder, I64(0), whole, step, I64) as (e, _):
                block(e, None)
            with builder.if_then(builder.icmp_signed("<", whole, count)):
                block(whole, [within(builder, builder.add(whole, I64(part * LANES)), count) for part in range(stride)])
            return context.get_dummy_value()

        return types.void(values, line, count), emit

    return run
