"""The functions of :mod:`.windows` as Numba's intrinsics."""

from __future__ import annotations

from typing import Any

from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

from graphc.backends.onnxruntime.vectors.functions import F32, I32, I64, LANES, POINTER, call
from graphc.backends.onnxruntime.vectors.intrinsics import folded, in_all_lanes, within
from graphc.backends.onnxruntime.vectors.pooling_intrinsics import masked


def weighted_sums(rows: int, vectors: int) -> Any:
    """See :func:`.windows.weighted_sums`."""

    @intrinsic
    def run(typing_context, w, w_row, x, offsets, depth, y, y_row):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            w, w_row, x, offsets, depth, y, y_row = (context.cast(builder, v, t, types.int64) for v, t in given)

            def load(address: Any, what: Any, align: int = 4) -> Any:
                return builder.load(builder.inttoptr(address, POINTER), typ=what, align=align)

            zero = ll.Constant(kind, [ll.Constant(F32, 0.0)] * LANES)
            behind = [builder.mul(w_row, I64(r)) for r in range(rows)]
            before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(I64)
            k.add_incoming(I64(0), before)
            sums = [[builder.phi(kind) for _ in range(vectors)] for _ in range(rows)]
            start = builder.add(x, load(builder.add(offsets, builder.shl(k, I64(3))), I64, 8))
            taken = [load(builder.add(start, I64(4 * LANES * v)), kind) for v in range(vectors)]
            column = builder.add(w, builder.shl(k, I64(2)))
            following = builder.add(k, I64(1))
            k.add_incoming(following, loop)
            made = []
            for r in range(rows):
                factor = in_all_lanes(builder, load(builder.add(column, behind[r]), F32))
                made.append([call(builder, "fma", kind, factor, taken[v], sums[r][v]) for v in range(vectors)])
                for v in range(vectors):
                    sums[r][v].add_incoming(zero, before)
                    sums[r][v].add_incoming(made[r][v], loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
            builder.position_at_end(after)
            for r in range(rows):
                row = builder.add(y, builder.mul(y_row, I64(r)))
                for v in range(vectors):
                    place = builder.inttoptr(builder.add(row, I64(4 * LANES * v)), POINTER)
                    builder.store(made[r][v], place, align=4)
            return context.get_dummy_value()

        return types.void(w, w_row, x, offsets, depth, y, y_row), emit

    return run


def padded_line(step: int) -> Any:
    """See :func:`.windows.padded_line`."""

    @intrinsic
    def run(typing_context, x, first, last, y, count):
        kind, whole = ll.VectorType(F32, LANES), ll.VectorType(I32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, first, last, y, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            zero = ll.Constant(kind, [ll.Constant(F32, 0.0)] * LANES)
            lanes = ll.Constant(whole, [I32(v) for v in range(LANES)])
            low, high = builder.mul(first, I64(step)), builder.add(builder.mul(builder.sub(last, I64(1)), I64(step)), I64(1))
            inner = builder.sub(high, I64(step * LANES))
            slot = cgutils.alloca_once(builder, kind)

            def store(vectors: list[Any]) -> None:
                """Of every ``step`` elements the first."""
                even = ll.Constant(whole, [I32(2 * v) for v in range(LANES)])
                while len(vectors) > 1:
                    vectors = [builder.shuffle_vector(a, b, even) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
                builder.store(vectors[0], slot)

            with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (at, _):
                starts = [builder.add(builder.mul(at, I64(step)), I64(LANES * part)) for part in range(step)]
                places = [builder.inttoptr(builder.add(x, builder.shl(start, I64(2))), POINTER) for start in starts]
                begun, goes_on = builder.icmp_signed(">=", starts[0], low), builder.icmp_signed("<=", starts[0], inner)
                with builder.if_else(builder.and_(begun, goes_on)) as (inside, at_an_end):
                    with inside:
                        store([builder.load(place, typ=kind, align=4) for place in places])
                    with at_an_end:
                        found = []
                        for start, place in zip(starts, places, strict=True):
                            bounds = (in_all_lanes(builder, builder.trunc(builder.sub(end, start), I32)) for end in (low, high))
                            above, below = next(bounds), next(bounds)
                            mask = builder.and_(builder.icmp_signed(">=", lanes, above), builder.icmp_signed("<", lanes, below))
                            found.append(masked(builder, "load", kind, [place, I32(4), mask, zero]))
                        store(found)
                builder.store(
                    builder.load(slot, typ=kind), builder.inttoptr(builder.add(y, builder.shl(at, I64(2))), POINTER), align=4
                )
            return context.get_dummy_value()

        return types.void(x, first, last, y, count), emit

    return run


def added_products(rows: int, taps: int) -> Any:
    """See :func:`.windows.added_products`."""

    @intrinsic
    def run(typing_context, a, a_row, x, offsets, vectors, sums, sums_row):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            a, a_row, x, offsets, vectors, sums, sums_row = (context.cast(builder, v, t, types.int64) for v, t in given)

            def load(address: Any, what: Any, align: int = 4) -> Any:
                return builder.load(builder.inttoptr(address, POINTER), typ=what, align=align)

            zero = ll.Constant(kind, [ll.Constant(F32, 0.0)] * LANES)
            starts = [builder.add(x, load(builder.add(offsets, I64(8 * t)), I64, 8)) for t in range(taps)]
            lines = [builder.add(a, builder.mul(a_row, I64(r))) for r in range(rows)]
            before, loop, after = builder.block, builder.append_basic_block("vectors"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(I64)
            k.add_incoming(I64(0), before)
            totals = [[builder.phi(kind) for _ in range(taps)] for _ in range(rows)]
            at = builder.mul(k, I64(4 * LANES))
            factors = [load(builder.add(line, at), kind) for line in lines]
            made: list[list[Any]] = [[] for _ in range(rows)]
            for t, start in enumerate(starts):
                taken = load(builder.add(start, at), kind)
                for r in range(rows):
                    made[r].append(call(builder, "fma", kind, factors[r], taken, totals[r][t]))
            following = builder.add(k, I64(1))
            k.add_incoming(following, loop)
            for r in range(rows):
                for t in range(taps):
                    totals[r][t].add_incoming(zero, before)
                    totals[r][t].add_incoming(made[r][t], loop)
            builder.cbranch(builder.icmp_signed("<", following, vectors), loop, after)
            builder.position_at_end(after)
            for r in range(rows):
                for t in range(taps):
                    place = builder.add(sums, builder.add(builder.mul(sums_row, I64(r)), I64(4 * t)))
                    place = builder.inttoptr(place, POINTER)
                    total = builder.fadd(builder.load(place, typ=F32, align=4), folded(builder, "add", made[r][t]))
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(a, a_row, x, offsets, vectors, sums, sums_row), emit

    return run


def banded_product(rows: int) -> Any:
    """See :func:`.windows.banded_product`."""

    @intrinsic
    def run(typing_context, x, x_row, w, depth, y, y_row, count):
        kind = ll.VectorType(F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, w, depth, y, y_row, count = (context.cast(builder, v, t, types.int64) for v, t in given)
            zero = ll.Constant(kind, [ll.Constant(F32, 0.0)] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]
            behind = [builder.mul(x_row, I64(r)) for r in range(rows)]
            for place in sums:
                builder.store(zero, place)
            with cgutils.for_range(builder, depth, intp=I64) as step:
                k = step.index
                factors = builder.load(
                    builder.inttoptr(builder.add(w, builder.mul(k, I64(4 * LANES))), POINTER), typ=kind, align=4
                )
                column = builder.add(x, builder.shl(k, I64(2)))
                for r in range(rows):
                    number = builder.load(builder.inttoptr(builder.add(column, behind[r]), POINTER), typ=F32, align=4)
                    added = call(builder, "fma", kind, in_all_lanes(builder, number), factors, builder.load(sums[r], typ=kind))
                    builder.store(added, sums[r])
            whole = builder.icmp_signed(">=", count, I64(LANES))
            for r in range(rows):
                found = builder.load(sums[r], typ=kind)
                place = builder.inttoptr(builder.add(y, builder.mul(y_row, I64(r))), POINTER)
                with builder.if_else(whole) as (all_lanes, some):
                    with all_lanes:
                        builder.store(found, place, align=4)
                    with some:
                        masked(builder, "store", ll.VoidType(), [found, place, I32(4), within(builder, I64(0), count)])
            return context.get_dummy_value()

        return types.void(x, x_row, w, depth, y, y_row, count), emit

    return run
