"""Loops over vector registers for compiled kernels: a function of rows, and small matrix products.

LLVM does not vectorise a loop over many arrays, since it would have to compare all their addresses. :func:`row_function` writes
the vectors itself, as functions that Numba puts into the calling code. Operands are addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
"""float32 numbers in a vector; two registers where these hold four."""
PANEL = 2 * LANES
"""Columns of a matrix that one tile of a product computes."""
TILE = 6
"""Most rows of a tile: 12 sums stay in registers, as many multiplications as hide their latency."""

_I64, _I32, _F32, _POINTER = ll.IntType(64), ll.IntType(32), ll.FloatType(), ll.PointerType()
_ROUNDING = 12582912.0  # 1.5 · 2^23: adding it rounds to a whole number, which is then in the low bits


class Vector:
    """Emits instructions on vectors of ``lanes`` floats at position ``at`` of rows of ``n`` elements."""

    def __init__(self, builder: ll.IRBuilder, rows: Sequence[Any], n: Any, at: Any, lanes: int) -> None:
        self._build, self._rows, self._n, self._at, self._lanes = builder, rows, n, at, lanes
        self._type = ll.VectorType(_F32, lanes) if lanes > 1 else _F32
        self._whole = ll.VectorType(_I32, lanes) if lanes > 1 else _I32

    def load(self, row: int, part: int = 0) -> Any:
        """Elements of row ``row``, which holds parts of n elements each."""
        return self._build.load(self._place(row, part), typ=self._type, align=4)

    def store(self, value: Any, row: int, part: int = 0) -> None:
        self._build.store(value, self._place(row, part), align=4)

    def _place(self, row: int, part: int) -> Any:
        build = self._build
        index = build.add(build.mul(self._n, _I64(part)), self._at)
        return build.inttoptr(build.add(self._rows[row], build.shl(index, _I64(2))), _POINTER)

    def number(self, value: float) -> Any:
        return ll.Constant(self._type, [ll.Constant(_F32, value)] * self._lanes if self._lanes > 1 else value)

    def add(self, a: Any, b: Any) -> Any:
        return self._build.fadd(a, b)

    def sub(self, a: Any, b: Any) -> Any:
        return self._build.fsub(a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self._build.fmul(a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once."""
        return _call(self._build, "fma", self._type, a, b, c)

    def rest(self, a: Any) -> Any:
        """1 - a"""
        return self.sub(self.number(1.0), a)

    def slope(self, s: Any) -> Any:
        """s · (1 - s), the derivative of a sigmoid"""
        return self.mul(s, self.rest(s))

    def bend(self, t: Any) -> Any:
        """1 - t², the derivative of a tanh"""
        return self.fma(self._build.fneg(t), t, self.number(1.0))

    def where_positive(self, a: Any, value: Any) -> Any:
        """``value`` where a > 0 or a is NaN, else 0"""
        return self._build.select(self._build.fcmp_unordered(">", a, self.number(0.0)), value, self.number(0.0))

    def exp(self, x: Any) -> Any:
        """eˣ for x within ±87, e^±87 beyond (Cephes' expf, S. Moshier); NaN stays NaN."""
        build = self._build
        for sign, bound in ((">", 87.0), ("<", -87.0)):
            x = build.select(build.fcmp_ordered(sign, x, self.number(bound)), self.number(bound), x)
        shifted = self.fma(x, self.number(1.4426950408889634), self.number(_ROUNDING))
        n = self.sub(shifted, self.number(_ROUNDING))
        r = self.fma(n, self.number(-0.693359375), x)
        r = self.fma(n, self.number(2.12194440e-4), r)
        p = self._polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
        p = self.add(self.fma(p, self.mul(r, r), r), self.number(1.0))
        power = build.add(build.shl(build.bitcast(shifted, self._whole), self._integer(23)), self._integer(127 << 23))
        return self.mul(p, build.bitcast(power, self._type))

    def _integer(self, value: int) -> Any:
        return ll.Constant(self._whole, [ll.Constant(_I32, value)] * self._lanes if self._lanes > 1 else value)

    def _polynomial(self, x: Any, *coefficients: float) -> Any:
        total = self.number(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.fma(total, x, self.number(coefficient))
        return total

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e⁻ˣ)"""
        return self._build.fdiv(self.number(1.0), self.add(self.number(1.0), self.exp(self._build.fneg(x))))

    def tanh(self, x: Any) -> Any:
        """Cephes' tanhf: a polynomial below 0.625, else 1 - 2 / (e²ˣ + 1)."""
        build = self._build
        size = _call(build, "fabs", self._type, x)
        e = self.exp(self.add(size, size))
        far = self.sub(self.number(1.0), build.fdiv(self.number(2.0), self.add(e, self.number(1.0))))
        far = _call(build, "copysign", self._type, far, x)
        z = self.mul(x, x)
        p = self._polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
        near = self.fma(self.mul(p, z), x, x)
        return build.select(build.fcmp_ordered("<", size, self.number(0.625)), near, far)


def _call(build: ll.IRBuilder, name: str, kind: Any, *operands: Any) -> Any:
    suffix = f"v{kind.count}f32" if isinstance(kind, ll.VectorType) else "f32"
    function = ll.FunctionType(kind, [kind] * len(operands))
    symbol = f"llvm.{name}.{suffix}"
    return build.call(cgutils.get_or_insert_function(build.module, function, symbol), operands)


def row_function(rows: int, body: Callable[[Vector], None]) -> Any:
    """A function ``f(n, (address, …))`` of ``rows`` rows for compiled code: ``body`` for each vector of n elements."""

    @intrinsic
    def run(typing_context, n, addresses):
        if not isinstance(addresses, types.UniTuple) or addresses.count != rows:
            return None

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            length = context.cast(builder, arguments[0], signature.args[0], types.int64)
            places = cgutils.unpack_tuple(builder, arguments[1], rows)
            whole = builder.mul(builder.sdiv(length, _I64(LANES)), _I64(LANES))
            for first, last, lanes in ((_I64(0), whole, LANES), (whole, length, 1)):
                with cgutils.for_range_slice(builder, first, last, _I64(lanes), _I64) as (at, _):
                    body(Vector(builder, places, length, at, lanes))
            return context.get_dummy_value()

        return types.void(n, addresses), emit

    return run


def tile_function(rows: int, *, adds: bool = False) -> Any:
    """A function ``f(a, a_row, a_step, b, b_row, depth, c, c_row)`` for compiled code: ``rows`` rows of c = a·b, or c += a·b,
    for one panel of b and c.

    ``a_row``, ``b_row`` and ``c_row`` are the bytes from one row to the next, and ``a_step`` those from one column of a to the
    next. The PANEL columns of b and c are contiguous. ``depth`` is 1 or more.
    """

    @intrinsic
    def run(typing_context, a, a_row, a_step, b, b_row, depth, c, c_row):
        kind = ll.VectorType(_F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            a, a_row, a_step, b, b_row, depth, c, c_row = (context.cast(builder, v, t, types.int64) for v, t in given)
            offsets = [builder.mul(a_row, _I64(r)) for r in range(rows)]
            targets = [
                [builder.inttoptr(builder.add(row, _I64(4 * LANES * v)), _POINTER) for v in range(2)]
                for row in (builder.add(c, builder.mul(c_row, _I64(r))) for r in range(rows))
            ]
            zero = ll.Constant(kind, [ll.Constant(_F32, 0.0)] * LANES)
            first = [[builder.load(place, typ=kind, align=4) if adds else zero for place in row] for row in targets]
            before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_I64)
            k.add_incoming(_I64(0), before)
            sums = [[builder.phi(kind) for _ in range(2)] for _ in range(rows)]
            start = builder.add(b, builder.mul(k, b_row))
            taken = [
                builder.load(builder.inttoptr(builder.add(start, _I64(4 * LANES * v)), _POINTER), typ=kind, align=4)
                for v in range(2)
            ]
            column = builder.add(a, builder.mul(k, a_step))
            made = []
            for r in range(rows):
                value = builder.load(builder.inttoptr(builder.add(column, offsets[r]), _POINTER), typ=_F32, align=4)
                lane = builder.insert_element(ll.Constant(kind, ll.Undefined), value, _I32(0))
                same = builder.shuffle_vector(
                    lane, ll.Constant(kind, ll.Undefined), ll.Constant(ll.VectorType(_I32, LANES), None)
                )
                made.append([_call(builder, "fma", kind, same, taken[v], sums[r][v]) for v in range(2)])
            following = builder.add(k, _I64(1))
            end = builder.block
            k.add_incoming(following, end)
            for r in range(rows):
                for v in range(2):
                    sums[r][v].add_incoming(first[r][v], before)
                    sums[r][v].add_incoming(made[r][v], end)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
            builder.position_at_end(after)
            for r in range(rows):
                for v in range(2):
                    builder.store(made[r][v], targets[r][v], align=4)
            return context.get_dummy_value()

        return types.void(a, a_row, a_step, b, b_row, depth, c, c_row), emit

    return run


def two_sided_function(matrix: Sequence[Sequence[float]]) -> Any:
    """A function ``f(x, x_row, x_column, y, y_row, y_column)`` for compiled code: y = matrix · x · matrixᵀ, in every lane.

    x and y are small matrices of vectors; ``_row`` and ``_column`` are the bytes from one row and column to the next.
    """
    height, width = len(matrix), len(matrix[0])

    @intrinsic
    def run(typing_context, x, x_row, x_column, y, y_row, y_column):
        kind = ll.VectorType(_F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, x_column, y, y_row, y_column = (context.cast(builder, v, t, types.int64) for v, t in given)

            def place(base: Any, row: Any, i: int, column: Any, j: int) -> Any:
                offset = builder.add(builder.mul(row, _I64(i)), builder.mul(column, _I64(j)))
                return builder.inttoptr(builder.add(base, offset), _POINTER)

            def combined(factors: Sequence[float], terms: Sequence[Any]) -> Any:
                total = None
                for factor, term in zip(factors, terms, strict=True):
                    if abs(factor) not in (0.0, 1.0):
                        term = builder.fmul(term, ll.Constant(kind, [ll.Constant(_F32, abs(factor))] * LANES))
                    if factor > 0:
                        total = term if total is None else builder.fadd(total, term)
                    elif factor < 0:
                        total = builder.fneg(term) if total is None else builder.fsub(total, term)
                return total

            half: list[list[Any]] = [[] for _ in range(height)]
            for j in range(width):
                column = [builder.load(place(x, x_row, i, x_column, j), typ=kind, align=4) for i in range(width)]
                for i in range(height):
                    half[i].append(combined(matrix[i], column))
            for i in range(height):
                for j in range(height):
                    builder.store(combined(matrix[j], half[i]), place(y, y_row, i, y_column, j), align=4)
            return context.get_dummy_value()

        return types.void(x, x_row, x_column, y, y_row, y_column), emit

    return run


@intrinsic
def transpose_square(typing_context, x, x_row, y, y_row):
    """y = xᵀ for LANES × LANES floats at an address; ``_row`` is the bytes from one row to the next."""
    kind = ll.VectorType(_F32, LANES)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = zip(arguments, signature.args, strict=True)
        x, x_row, y, y_row = (context.cast(builder, v, t, types.int64) for v, t in given)

        def place(base: Any, row: Any, r: int) -> Any:
            return builder.inttoptr(builder.add(base, builder.mul(row, _I64(r))), _POINTER)

        rows = [builder.load(place(x, x_row, r), typ=kind, align=4) for r in range(LANES)]
        step = 1
        while step < LANES:  # exchanges the two off-diagonal squares of each square of 2 · step
            upper = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
            lower = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
            masks = [ll.Constant(ll.VectorType(_I32, LANES), [ll.Constant(_I32, n) for n in m]) for m in (upper, lower)]
            for r in range(LANES):
                if not r & step:
                    a, b = rows[r], rows[r + step]
                    rows[r], rows[r + step] = (builder.shuffle_vector(a, b, mask) for mask in masks)
            step *= 2
        for r, row in enumerate(rows):
            builder.store(row, place(y, y_row, r), align=4)
        return context.get_dummy_value()

    return types.void(x, x_row, y, y_row), emit


@intrinsic
def floats_at(typing_context, address):
    """The address, as a pointer to float32 that ``numba.carray`` takes."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = context.cast(builder, arguments[0], signature.args[0], types.int64)
        return builder.inttoptr(word, context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), emit


def taps_function(taps: int) -> Any:
    """A function ``f(x, x_row, offsets, dy, dy_row, rows, blocks, sums)`` for compiled code: for each of ``taps`` offsets, adds
    Σ x[offset + position] · dy[position] to a vector of ``sums``.

    Positions are ``rows`` rows of ``blocks`` vectors; ``x_row`` and ``dy_row`` are the bytes from one row to the next, and
    ``offsets`` the address of the taps' offsets in bytes.
    """

    @intrinsic
    def run(typing_context, x, x_row, offsets, dy, dy_row, rows, blocks, sums):
        kind = ll.VectorType(_F32, LANES)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, offsets, dy, dy_row, rows, blocks, sums = (context.cast(builder, v, t, types.int64) for v, t in given)

            def vector(address: Any) -> Any:
                return builder.load(builder.inttoptr(address, _POINTER), typ=kind, align=4)

            slots = [cgutils.alloca_once(builder, kind) for _ in range(taps)]
            places = []
            for j, slot in enumerate(slots):
                builder.store(ll.Constant(kind, [ll.Constant(_F32, 0.0)] * LANES), slot)
                places.append(builder.load(builder.inttoptr(builder.add(offsets, _I64(8 * j)), _POINTER), typ=_I64))
            with cgutils.for_range_slice(builder, _I64(0), rows, _I64(1), _I64) as (r, _):
                of_x, of_dy = builder.add(x, builder.mul(r, x_row)), builder.add(dy, builder.mul(r, dy_row))
                with cgutils.for_range_slice(builder, _I64(0), blocks, _I64(1), _I64) as (q, _):
                    at = builder.mul(q, _I64(4 * LANES))
                    slope, start = vector(builder.add(of_dy, at)), builder.add(of_x, at)
                    for place, slot in zip(places, slots, strict=True):
                        total = builder.load(slot, typ=kind)
                        builder.store(_call(builder, "fma", kind, vector(builder.add(start, place)), slope, total), slot)
            for j, slot in enumerate(slots):
                address = builder.add(sums, _I64(4 * LANES * j))
                total = builder.fadd(vector(address), builder.load(slot, typ=kind))
                builder.store(total, builder.inttoptr(address, _POINTER), align=4)
            return context.get_dummy_value()

        return types.void(x, x_row, offsets, dy, dy_row, rows, blocks, sums), emit

    return run
