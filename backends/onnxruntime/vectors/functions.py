"""Loops over vector registers for compiled kernels: a function of rows, and small matrix products.

LLVM does not vectorise a loop over many arrays, since it would have to compare all their addresses. :func:`row_function` writes
the vectors itself, as functions that Numba puts into the calling code. Operands are addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir as ll

from graphc.backends.host.processor import processor
from graphc.backends.onnxruntime.vectors.deferred import Deferred

LANES = processor().lanes
"""float32 numbers in a vector; two registers where these hold four."""
PANEL = 2 * LANES
"""Columns of a matrix that one tile of a product computes."""
TILE = 6
"""Most rows of a tile: 12 sums stay in registers, as many multiplications as hide their latency."""
WIDE_PANEL = 4 * LANES if LANES == 16 else PANEL
"""Columns of the widest panel: AVX-512 has registers for 24 sums, and loads fewer numbers for each multiplication.

GFLOP/s for 16 rows of 256 by 1024 in one thread whose peak is 150: 146, and 117 to 126 with panels of two vectors.
"""

I64, I32, BOOL, POINTER = ll.IntType(64), ll.IntType(32), ll.IntType(1), ll.PointerType()
F32, F64 = ll.FloatType(), ll.DoubleType()
_ROUNDING = 12582912.0  # 1.5 · 2^23: adding it rounds to a whole number, which is then in the low bits


class Vector:
    """Emits instructions on vectors of ``lanes`` floats at position ``at`` of rows of ``n`` elements."""

    def __init__(self, builder: ll.IRBuilder, rows: Sequence[Any], n: Any, at: Any, lanes: int) -> None:
        self._build, self._rows, self._n, self._at, self._lanes = builder, rows, n, at, lanes
        self._type = ll.VectorType(F32, lanes) if lanes > 1 else F32
        self._whole = ll.VectorType(I32, lanes) if lanes > 1 else I32

    def load(self, row: int, part: int = 0) -> Any:
        """Elements of row ``row``, which holds parts of n elements each."""
        return self._build.load(self._place(row, part), typ=self._type, align=4)

    def store(self, value: Any, row: int, part: int = 0) -> None:
        self._build.store(value, self._place(row, part), align=4)

    def fetch(self, row: int, part: int = 0) -> None:
        """Bring elements of a row that is read soon into the nearest cache. It may lie behind the end of its array."""
        prefetch(self._build, self._place(row, part))

    def _place(self, row: int, part: int) -> Any:
        build = self._build
        index = build.add(build.mul(self._n, I64(part)), self._at)
        return build.inttoptr(build.add(self._rows[row], build.shl(index, I64(2))), POINTER)

    def number(self, value: float) -> Any:
        return ll.Constant(self._type, [ll.Constant(F32, value)] * self._lanes if self._lanes > 1 else value)

    def add(self, a: Any, b: Any) -> Any:
        return self._build.fadd(a, b)

    def sub(self, a: Any, b: Any) -> Any:
        return self._build.fsub(a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self._build.fmul(a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once."""
        return call(self._build, "fma", self._type, a, b, c)

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
        return ll.Constant(self._whole, [ll.Constant(I32, value)] * self._lanes if self._lanes > 1 else value)

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
        size = call(build, "fabs", self._type, x)
        e = self.exp(self.add(size, size))
        far = self.sub(self.number(1.0), build.fdiv(self.number(2.0), self.add(e, self.number(1.0))))
        far = call(build, "copysign", self._type, far, x)
        z = self.mul(x, x)
        p = self._polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
        near = self.fma(self.mul(p, z), x, x)
        return build.select(build.fcmp_ordered("<", size, self.number(0.625)), near, far)


def call(build: ll.IRBuilder, name: str, kind: Any, *operands: Any) -> Any:
    """Emit a call of LLVM's intrinsic ``name`` on numbers or vectors of them."""
    vector = isinstance(kind, ll.VectorType)
    number = "f64" if (kind.element if vector else kind) == F64 else "f32"
    suffix = f"v{kind.count}{number}" if vector else number
    function = ll.FunctionType(kind, [kind] * len(operands))
    symbol = f"llvm.{name}.{suffix}"
    known = build.module.globals.get(symbol)
    return build.call(ll.Function(build.module, function, symbol) if known is None else known, operands)


def prefetch(build: ll.IRBuilder, place: Any, *, writes: bool = False) -> None:
    """Bring the cache line of an address into the nearest cache, to be read or written."""
    kind = ll.FunctionType(ll.VoidType(), (POINTER, I32, I32, I32))
    known = build.module.globals.get("llvm.prefetch.p0")
    build.call(known or ll.Function(build.module, kind, "llvm.prefetch.p0"), (place, I32(int(writes)), I32(3), I32(1)))


_INTRINSICS = "graphc.backends.onnxruntime.vectors.intrinsics"
"""The module that makes them; it imports Numba."""


def row_function(rows: int, body: Callable[[Vector], None]) -> Any:
    """A function ``f(n, (address, …))`` of ``rows`` rows for compiled code: ``body`` for each vector of n elements."""
    return Deferred(_INTRINSICS, "row_function", rows, body)


def tile_function(rows: int, columns: int = PANEL, *, adds: bool = False, wide: bool = False) -> Any:
    """A function ``f(a, a_row, a_step, b, b_row, depth, c, c_row)`` for compiled code: ``rows`` rows of c = a·b, or c += a·b,
    for one panel of b and c.

    ``a_row``, ``b_row`` and ``c_row`` are the bytes from one row to the next, and ``a_step`` those from one column of a to the
    next. The ``columns`` of b and c, a multiple of LANES, are contiguous. ``depth`` is 1 or more. ``wide`` functions are of
    float64, of which a vector holds half as many.
    """
    if wide:
        return Deferred(_INTRINSICS, "tile_function", rows, columns // (LANES // 2), adds, wide)
    return Deferred(_INTRINSICS, "tile_function", rows, columns // LANES, adds)


def two_sided_function(matrix: Sequence[Sequence[float]], rounding: float = 0.0, small: float = 0.0) -> Any:
    """A function ``f(x, x_row, x_column, y, y_row, y_column)`` for compiled code: y = matrix · x · matrixᵀ, in every lane.

    x and y are small matrices of vectors; ``_row`` and ``_column`` are the bytes from one row and column to the next. What is
    below ``rounding`` times the largest of x in its lane becomes 0; f returns whether anything else is below ``small`` of it.
    """
    return Deferred(_INTRINSICS, "two_sided_function", matrix, rounding, max(rounding, small))


transpose_square = Deferred(_INTRINSICS, "transpose_square")
"""``f(x, x_row, y, y_row)`` for compiled code: y = xᵀ for LANES × LANES floats at an address; ``_row`` is the bytes from one
row to the next."""


def copy_function(vectors: int) -> Any:
    """A function ``f(x, x_row, y, y_row, rows)`` for compiled code: copies ``vectors`` vectors of each of ``rows`` rows.

    ``_row`` is the bytes from one row to the next. Rows are copied in turn; one may overlap the one before.
    """
    return Deferred(_INTRINSICS, "copy_function", vectors)


highest_of_row = Deferred(_INTRINSICS, "highest_of_row")
"""``f(x, count)`` for compiled code: the maximum of ``count`` floats at an address; NaN if one is. Reads whole vectors."""

exponentials = Deferred(_INTRINSICS, "exponentials")
"""``f(x, count, top)`` for compiled code: x = exp(x - top), in place, and the sum, for ``count`` floats that are at most top.

What is below e⁻⁸⁷ becomes 0. Reads and writes whole vectors: the rest of the last one becomes 0.
"""

floats_at = Deferred(_INTRINSICS, "floats_at")
"""``f(address)`` for compiled code: the address, as a pointer to float32 that :data:`array_of` takes."""

doubles_at = Deferred(_INTRINSICS, "doubles_at")
"""``f(address)`` for compiled code: as :data:`floats_at`, for float64."""

array_of = Deferred(_INTRINSICS, "array_of")
"""``f(pointer, shape)`` for compiled code: what lies there, as an array."""


def scratch_function(count: int) -> Any:
    """A function ``f()`` for compiled code: the address of ``count`` floats that last until the calling function returns."""
    return Deferred(_INTRINSICS, "scratch_function", count)


def taps_function(taps: int) -> Any:
    """A function ``f(x, x_row, offsets, dy, dy_row, rows, blocks, sums)`` for compiled code: for each of ``taps`` offsets, adds
    Σ x[offset + position] · dy[position] to a vector of ``sums``.

    Positions are ``rows`` rows of ``blocks`` vectors; ``x_row`` and ``dy_row`` are the bytes from one row to the next, and
    ``offsets`` the address of the taps' offsets in bytes.
    """
    return Deferred(_INTRINSICS, "taps_function", taps)


def butterfly_function(points: int) -> Any:
    """A function ``f(x, x_step, y, y_step, count, factors)`` for compiled code: a Fourier transform of ``points`` complex
    numbers in every lane, each result multiplied by a factor; ``count`` times.

    A complex number is a vector of real parts and one of imaginary parts behind it. The operands of one transform lie
    ``x_step`` bytes apart, its results ``y_step`` bytes; those of the next transform follow at once. ``factors`` is the address
    of ``points - 1`` complex numbers: the factor of the first result is 1.
    """
    return Deferred(_INTRINSICS, "butterfly_function", points)
