"""The functions of :mod:`.planes` as Numba's intrinsics."""

from __future__ import annotations

from typing import Any

from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

from graphc.backends.onnxruntime.vectors.functions import F32, I32, I64, LANES, POINTER, call
from graphc.backends.onnxruntime.vectors.intrinsics import in_all_lanes, within
from graphc.backends.onnxruntime.vectors.pooling_intrinsics import masked

_KIND, _WHOLE = ll.VectorType(F32, LANES), ll.VectorType(I32, LANES)
_ZERO = ll.Constant(_KIND, [ll.Constant(F32, 0.0)] * LANES)
_EVEN, _ODD = (ll.Constant(_WHOLE, [I32(2 * v + odd) for v in range(LANES)]) for odd in (0, 1))


def _place(builder: Any, address: Any, count: Any = None) -> Any:
    """A pointer to an address, or ``count`` floats behind it."""
    return builder.inttoptr(address if count is None else builder.add(address, builder.shl(count, I64(2))), POINTER)


class _Lines:
    """The lines of a plane that the windows of some rows read, zeros where there is none, and their vectors.

    Args:
        start: the first line, possibly before the plane.
        count: of lines.
    """

    def __init__(self, builder: Any, x: Any, line: Any, zeros: Any, height: Any, width: Any, start: Any, count: int) -> None:
        self._builder, self._width, self._addresses = builder, width, []
        for k in range(count):
            row = builder.add(start, I64(k))
            there = builder.icmp_unsigned("<", row, height)
            self._addresses.append(builder.select(there, builder.add(x, builder.mul(row, line)), zeros))

    def taps(self, k: int, first: Any, taps: int, step: int, *, inside: bool) -> list[Any]:
        """Of line ``k``, a vector for each tap: of the windows whose first pixels lie ``step`` apart from ``first`` on."""
        if step == 1:
            return [self._load(k, first, j, inside=inside) for j in range(taps)]
        found: list[Any] = []
        for j in range(0, taps, 2):
            pair = [self._load(k, first, j + LANES * part, inside=inside) for part in range(2)]
            found += [self._builder.shuffle_vector(*pair, order) for order in (_EVEN, _ODD)]
        return found[:taps]

    def _load(self, k: int, first: Any, offset: int, *, inside: bool) -> Any:
        builder = self._builder
        at = builder.add(first, I64(offset))
        place = _place(builder, self._addresses[k], at)
        if inside:
            return builder.load(place, typ=_KIND, align=4)
        lanes = ll.Constant(_WHOLE, [I32(v) for v in range(LANES)])
        low, high = (in_all_lanes(builder, builder.trunc(end, I32)) for end in (builder.neg(at), builder.sub(self._width, at)))
        mask = builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))
        return masked(builder, "load", _KIND, [place, I32(4), mask, _ZERO])

    def are_inside(self, first: Any, taps: int, step: int) -> Any:
        """Whether all that :meth:`taps` reads lies in the plane."""
        builder = self._builder
        reach = (taps - 1 if step == 1 else (taps - 1) // 2 * 2 + LANES) + LANES
        begun = builder.icmp_signed(">=", first, I64(0))
        return builder.and_(begun, builder.icmp_signed("<=", builder.add(first, I64(reach)), self._width))


def plane_windows(taps: int, step: int, rows: int) -> Any:
    """See :func:`.planes.plane_windows`."""

    @intrinsic
    def run(typing_context, x, line, zeros, sizes, top, begin, w, w_step, y, y_line, count, columns, follows, other):
        if not isinstance(sizes, types.UniTuple) or not isinstance(follows, types.UniTuple):
            return None

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            height, width = cgutils.unpack_tuple(builder, arguments[3], 2)
            vectors = [in_all_lanes(builder, value) for value in cgutils.unpack_tuple(builder, arguments[12], 4)]
            scale, shift, low, high = vectors
            plain = [(v, t) for k, (v, t) in enumerate(zip(arguments, signature.args, strict=True)) if k not in (3, 12)]
            x, line, zeros, top, begin, w, w_step, y, y_line, count, columns, other = (
                context.cast(builder, v, t, types.int64) for v, t in plain
            )
            places = [builder.add(w, builder.mul(w_step, I64(k))) for k in range(taps * taps)]
            factors = [in_all_lanes(builder, builder.load(_place(builder, p), typ=F32, align=4)) for p in places]
            lines = _Lines(builder, x, line, zeros, height, width, top, (rows - 1) * step + taps)
            slots = [cgutils.alloca_once(builder, _KIND) for _ in range(rows)]

            def add_up(first: Any, *, inside: bool) -> None:
                sums = [_ZERO] * rows
                for k in range((rows - 1) * step + taps):
                    found = lines.taps(k, first, taps, step, inside=inside)
                    for r in range(rows):
                        i = k - r * step
                        if 0 <= i < taps:
                            for j in range(taps):
                                sums[r] = call(builder, "fma", _KIND, factors[i * taps + j], found[j], sums[r])
                for slot, total in zip(slots, sums, strict=True):
                    builder.store(total, slot)

            with cgutils.for_range_slice(builder, I64(0), columns, I64(LANES), I64) as (at, _):
                first = builder.sub(builder.mul(at, I64(step)), begin)
                with builder.if_else(lines.are_inside(first, taps, step)) as (inside, at_an_end):
                    with inside:
                        add_up(first, inside=True)
                    with at_an_end:
                        add_up(first, inside=False)
                mask = within(builder, at, columns)
                for r in range(rows):
                    with builder.if_then(builder.icmp_signed("<", I64(r), count)):
                        behind = builder.mul(y_line, I64(r))
                        total = call(builder, "fma", _KIND, scale, builder.load(slots[r], typ=_KIND), shift)
                        builder.store(total, slots[r])
                        with builder.if_then(builder.icmp_signed("!=", other, I64(0))):
                            place = _place(builder, builder.add(other, behind), at)
                            more = masked(builder, "load", _KIND, [place, I32(4), mask, _ZERO])
                            builder.store(builder.fadd(total, more), slots[r])
                        total = builder.load(slots[r], typ=_KIND)
                        total = builder.select(builder.fcmp_ordered("<", total, low), low, total)
                        total = builder.select(builder.fcmp_ordered(">", total, high), high, total)
                        place = _place(builder, builder.add(y, behind), at)
                        masked(builder, "store", ll.VoidType(), [total, place, I32(4), mask])
            return context.get_dummy_value()

        return types.void(x, line, zeros, sizes, top, begin, w, w_step, y, y_line, count, columns, follows, other), emit

    return run


def plane_products(taps: int, step: int, rows: int) -> Any:
    """See :func:`.planes.plane_products`."""

    @intrinsic
    def run(typing_context, x, line, zeros, sizes, top, begin, dy, dy_line, columns, sums):
        if not isinstance(sizes, types.UniTuple):
            return None

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            height, width = cgutils.unpack_tuple(builder, arguments[3], 2)
            plain = [(v, t) for k, (v, t) in enumerate(zip(arguments, signature.args, strict=True)) if k != 3]
            x, line, zeros, top, begin, dy, dy_line, columns, sums = (
                context.cast(builder, v, t, types.int64) for v, t in plain
            )
            lines = _Lines(builder, x, line, zeros, height, width, top, (rows - 1) * step + taps)
            places = [_place(builder, builder.add(sums, I64(4 * LANES * k))) for k in range(taps * taps)]
            totals = [cgutils.alloca_once(builder, _KIND) for _ in places]
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(place, typ=_KIND, align=4), total)

            def add_up(at: Any, first: Any, *, inside: bool) -> None:
                mask = within(builder, at, columns)
                slopes = []
                for r in range(rows):
                    place = _place(builder, builder.add(dy, builder.mul(dy_line, I64(r))), at)
                    if inside:
                        slopes.append(builder.load(place, typ=_KIND, align=4))
                    else:
                        slopes.append(masked(builder, "load", _KIND, [place, I32(4), mask, _ZERO]))
                made = [builder.load(total, typ=_KIND) for total in totals]
                for k in range((rows - 1) * step + taps):
                    found = lines.taps(k, first, taps, step, inside=inside)
                    if not inside:  # what no window reads may be infinite
                        found = [builder.select(mask, value, _ZERO) for value in found]
                    for r in range(rows):
                        i = k - r * step
                        if 0 <= i < taps:
                            for j in range(taps):
                                n = i * taps + j
                                made[n] = call(builder, "fma", _KIND, slopes[r], found[j], made[n])
                for value, total in zip(made, totals, strict=True):
                    builder.store(value, total)

            with cgutils.for_range_slice(builder, I64(0), columns, I64(LANES), I64) as (at, _):
                first = builder.sub(builder.mul(at, I64(step)), begin)
                whole = builder.icmp_signed("<=", builder.add(at, I64(LANES)), columns)
                with builder.if_else(builder.and_(whole, lines.are_inside(first, taps, step))) as (inside, at_an_end):
                    with inside:
                        add_up(at, first, inside=True)
                    with at_an_end:
                        add_up(at, first, inside=False)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total, typ=_KIND), place, align=4)
            return context.get_dummy_value()

        return types.void(x, line, zeros, sizes, top, begin, dy, dy_line, columns, sums), emit

    return run


def plane_slopes(taps: int, odd_h: int, odd_w: int, rows: int) -> Any:
    """See :func:`.planes.plane_slopes`."""
    # of an even and an odd row (or column): its taps, and how far from half its number the slope lies that each one meets
    of_rows, of_columns = (
        [[(i, (a + odd - i) // 2) for i in range(taps) if (a + odd - i) % 2 == 0] for a in range(2)] for odd in (odd_h, odd_w)
    )
    lowest, highest = (bound(d for met in of_rows for _, d in met) for bound in (min, max))
    left, right = (bound(d for met in of_columns for _, d in met) for bound in (min, max))

    @intrinsic
    def run(typing_context, dy, line, zeros, sizes, top, begin, w, dx, dx_line, count, columns):
        if not isinstance(sizes, types.UniTuple):
            return None

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            height, width = cgutils.unpack_tuple(builder, arguments[3], 2)
            plain = [(v, t) for k, (v, t) in enumerate(zip(arguments, signature.args, strict=True)) if k != 3]
            dy, line, zeros, top, begin, w, dx, dx_line, count, columns = (
                context.cast(builder, v, t, types.int64) for v, t in plain
            )
            places = [_place(builder, w, I64(k)) for k in range(taps * taps)]
            factors = [in_all_lanes(builder, builder.load(place, typ=F32, align=4)) for place in places]
            number = rows + highest - lowest
            lines = _Lines(builder, dy, line, zeros, height, width, builder.add(top, I64(lowest)), number)
            slots = [[cgutils.alloca_once(builder, _KIND) for _ in range(2)] for _ in range(2 * rows)]

            def add_up(first: Any, *, inside: bool) -> None:
                sums = [[_ZERO] * 2 for _ in range(2 * rows)]
                for k in range(number):
                    found = lines.taps(k, builder.add(first, I64(left)), right - left + 1, 1, inside=inside)
                    for r in range(rows):
                        for a, b in ((a, b) for a in range(2) for b in range(2)):
                            for i in (i for i, d in of_rows[a] if r + d - lowest == k):
                                for j, d in of_columns[b]:
                                    total = sums[2 * r + a][b]
                                    sums[2 * r + a][b] = call(
                                        builder, "fma", _KIND, factors[i * taps + j], found[d - left], total
                                    )
                for pair, totals in zip(slots, sums, strict=True):
                    for slot, total in zip(pair, totals, strict=True):
                        builder.store(total, slot)

            with cgutils.for_range_slice(builder, I64(0), columns, I64(2 * LANES), I64) as (at, _):
                first = builder.add(builder.ashr(at, I64(1)), begin)
                begun = builder.icmp_signed(">=", builder.add(first, I64(left)), I64(0))
                ends = builder.icmp_signed("<=", builder.add(first, I64(right + LANES)), width)
                with builder.if_else(builder.and_(begun, ends)) as (inside, at_an_end):
                    with inside:
                        add_up(first, inside=True)
                    with at_an_end:
                        add_up(first, inside=False)
                for u, pair in enumerate(slots):
                    with builder.if_then(builder.icmp_signed("<", I64(u), count)):
                        even, odd = (builder.load(slot, typ=_KIND) for slot in pair)
                        row = builder.add(dx, builder.mul(dx_line, I64(u)))
                        for part in range(2):
                            half = [I32(part * LANES // 2 + v // 2 + (v % 2) * LANES) for v in range(LANES)]
                            column = builder.add(at, I64(part * LANES))
                            mixed = builder.shuffle_vector(even, odd, ll.Constant(_WHOLE, half))
                            operands = [mixed, _place(builder, row, column), I32(4), within(builder, column, columns)]
                            masked(builder, "store", ll.VoidType(), operands)
            return context.get_dummy_value()

        return types.void(dy, line, zeros, sizes, top, begin, w, dx, dx_line, count, columns), emit

    return run
