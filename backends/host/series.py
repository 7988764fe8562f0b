"""Elementary functions of float32 as sums of few terms, in LLVM instructions that work on vectors too.

eˣ, log, circular and hyperbolic functions and their inverses as in Cephes (S. Moshier), erf as by N. Juffa, Φ as in Abramowitz
and Stegun. Errors are below 1e-6 of the value; of sines and cosines beyond 2⁴⁵ they are absolute, below 4e-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir as ll

from graphc.backends.host.kinds import F32, F64, I32, I64


def intrinsic(module: ll.Module, name: str, kind: ll.Type, operands: int = 1) -> ll.Function:
    """LLVM's own function of one type."""
    return module.declare_intrinsic(name, [kind], ll.FunctionType(kind, [kind] * operands))


class Formulas:
    """Short names for instructions on numbers of one type, :attr:`kind`."""

    kind: ll.Type

    def __init__(self, find: Callable[[str], ll.Function], build: ll.IRBuilder) -> None:
        self.find, self.build = find, build

    def number(self, value: float) -> Any:
        return ll.Constant(self.kind, value)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.build.call(intrinsic(self.build.module, "llvm.fma", self.kind, 3), [a, self._of(b), self._of(c)])

    def _of(self, value: Any) -> Any:
        return self.number(value) if isinstance(value, float) else value

    def mul(self, a: Any, b: Any) -> Any:
        return self.build.fmul(a, self._of(b))

    def add(self, a: Any, b: Any) -> Any:
        return self.build.fadd(a, self._of(b))

    def polynomial(self, x: Any, *coefficients: float) -> Any:
        """Horner's rule, the highest power first."""
        total = self.number(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.fma(total, x, coefficient)
        return total

    def least(self, x: Any, bound: float) -> Any:
        """min(x, bound); NaN stays."""
        return self.build.select(self.build.fcmp_ordered(">", x, self.number(bound)), self.number(bound), x)

    def most(self, x: Any, bound: float) -> Any:
        """max(x, bound); NaN stays."""
        return self.build.select(self.build.fcmp_ordered("<", x, self.number(bound)), self.number(bound), x)

    def abs(self, x: Any) -> Any:
        return self.build.call(intrinsic(self.build.module, "llvm.fabs", self.kind), [x])

    def with_sign(self, x: Any, sign: Any) -> Any:
        return self.build.call(intrinsic(self.build.module, "llvm.copysign", self.kind, 2), [x, sign])

    def call(self, name: str, x: Any) -> Any:
        return self.build.call(self.find(name), [x])


class Float(Formulas):
    """Short names for float32 instructions."""

    kind = F32


_ROUNDING = 12582912.0  # 1.5 · 2^23: adding it rounds to a whole number, which is then in the low bits


def _exp(f: Float, x: Any, *, subnormal: bool = True) -> Any:
    """x = n·ln 2 + r; a polynomial in r, times 2ⁿ⁻¹, times 2, so that it reaches infinity.

    A subnormal result is rounded to a multiple of 2⁻¹⁴⁹ as a whole number, which is what its bits are: processors leave
    products that are subnormal to microcode. As a product, it made the exponentials of 8 × 600 × 600 scores, half of them
    masked with -100, take 26 ms instead of 3.

    Args:
        subnormal: whether results may be subnormal; else they are at least 1e-38.
    """
    build = f.build
    x = f.least(f.most(x, -105.0 if subnormal else -87.0), 89.0)
    shifted = f.fma(x, 1.4426950408889634, _ROUNDING)
    n = build.fsub(shifted, f.number(_ROUNDING))
    r = f.fma(n, -0.693359375, x)
    r = f.fma(n, 2.12194440e-4, r)
    p = f.polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    p = f.add(f.fma(p, f.mul(r, r), r), 1.0)
    power = build.shl(build.bitcast(shifted, I32), ll.Constant(I32, 23))  # the sum's last bits are n
    less = ll.Constant(I32, 126 << 23)
    if not subnormal:
        return f.mul(build.fmul(p, build.bitcast(build.add(power, less), F32)), 2.0)
    small = build.fcmp_ordered("<", n, f.number(-125.0))
    least = build.select(small, ll.Constant(I32, (126 + 149 << 23) - (1 << 32)), less)
    y = f.mul(build.fmul(p, build.bitcast(build.add(power, least), F32)), 2.0)
    bits = build.fptosi(build.select(small, f.add(y, 0.5), f.number(0.0)), I32)
    return build.select(small, build.bitcast(bits, F32), y)


_ROOT_HALF = 0x3F3504F3  # the bits of the largest float32 below √½


def _mantissa(f: Float, x: Any) -> tuple[Any, Any]:
    """(m, e) with x = m·2ᵉ and m in [√½, √2), by bits."""
    build = f.build
    shifted = build.sub(build.bitcast(x, I32), ll.Constant(I32, _ROOT_HALF))
    bits = build.add(build.and_(shifted, ll.Constant(I32, 0x007FFFFF)), ll.Constant(I32, _ROOT_HALF))
    return build.bitcast(bits, F32), build.ashr(shifted, ll.Constant(I32, 23))


def _log_of(f: Float, x: Any, m: Any, e: Any) -> Any:
    """log((1 + m)·2ᵉ), which is log x, by Cephes' polynomial; and what it is of zero, of infinity and of what has none."""
    build = f.build
    z = f.mul(m, m)
    p = f.polynomial(
        m, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    y = f.mul(f.mul(m, z), p)
    y = f.fma(e, -2.12194440e-4, y)
    y = f.fma(z, -0.5, y)
    result = f.fma(e, 0.693359375, f.build.fadd(m, y))
    result = build.select(build.fcmp_ordered("==", x, f.number(0.0)), f.number(float("-inf")), result)
    result = build.select(build.fcmp_ordered("<", x, f.number(0.0)), f.number(float("nan")), result)
    return build.select(
        build.fcmp_ordered("==", x, f.number(float("inf"))), x, build.select(build.fcmp_unordered("uno", x, x), x, result)
    )


def _log(f: Float, x: Any) -> Any:
    build = f.build
    small = build.fcmp_ordered("<", x, f.number(1.17549435e-38))
    mantissa, exponent = _mantissa(f, build.select(small, f.mul(x, 8388608.0), x))
    e = build.sitofp(exponent, F32)
    return _log_of(f, x, f.add(mantissa, -1.0), build.select(small, f.add(e, -23.0), e))


def _erf(f: Float, x: Any) -> Any:
    """Below 1 an odd series, above it 1 - exp of a polynomial (N. Juffa's erff)."""
    build = f.build
    a = f.abs(x)
    t = a
    s = f.mul(x, x)
    high = f.polynomial(t, -1.72853470e-5, 3.83197126e-4)
    u = f.polynomial(t, -3.88396438e-3, 2.42546219e-2)
    high = f.fma(high, s, u)
    high = f.fma(high, t, -1.06777877e-1)
    high = f.fma(high, t, -6.34846687e-1)
    high = f.fma(high, t, -1.28717512e-1)
    high = f.fma(high, t, build.fneg(t))
    high = build.fsub(f.number(1.0), f.call("normal_expf", high))
    high = f.with_sign(high, x)
    low = f.polynomial(s, -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
    low = f.fma(low, x, x)
    return build.select(build.fcmp_ordered(">", a, f.number(0.927734375)), high, low)


def _tanh(f: Float, x: Any) -> Any:
    """Below 0.625 Cephes' odd polynomial, above it 1 - 2 / (exp 2|x| + 1)."""
    build = f.build
    a, s = f.abs(x), f.mul(x, x)
    low = f.polynomial(s, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
    low = f.fma(f.mul(low, s), x, x)
    e = f.call("normal_expf", f.mul(a, 2.0))
    high = build.fsub(f.number(1.0), build.fdiv(f.number(2.0), f.add(e, 1.0)))
    return f.with_sign(build.select(build.fcmp_ordered("<", a, f.number(0.625)), low, high), x)  # -0 stays


def _log1p(f: Float, x: Any) -> Any:
    """The mantissa of 1 + x less 1 is x·2⁻ᵉ + (2⁻ᵉ - 1), which has the digits of x that the sum has lost."""
    build = f.build
    u = f.add(x, 1.0)
    mantissa, exponent = _mantissa(f, u)
    scale = build.bitcast(build.sub(ll.Constant(I32, 0x3F800000), build.shl(exponent, ll.Constant(I32, 23))), F32)
    large = build.fcmp_ordered(">", u, f.number(1e9))  # which loses nothing; 2⁻ᵉ may not be a normal number
    m = build.select(large, f.add(mantissa, -1.0), f.fma(x, scale, f.add(scale, -1.0)))
    return _log_of(f, u, m, build.sitofp(exponent, F32))


def _exp2(f: Float, x: Any) -> Any:
    return f.call("expf", f.mul(x, 0.6931471805599453))


def _normal(f: Float, x: Any) -> tuple[Any, Any]:
    """Φ(x) and exp(-x²/2), which both need one exponential (Abramowitz and Stegun, 7.1.26; error of Φ below 1e-7)."""
    build = f.build
    e = f.call("normal_expf", f.mul(f.mul(x, x), -0.5))
    t = build.fdiv(f.number(1.0), f.fma(f.abs(x), 0.3275911 * 0.7071067811865476, 1.0))
    series = f.polynomial(t, 1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    tail = f.mul(f.mul(f.mul(t, 0.5), series), e)
    above = build.fcmp_ordered(">=", x, f.number(0.0))
    return build.select(above, build.fsub(f.number(1.0), tail), tail), e


def _gelu(f: Float, x: Any) -> Any:
    """x·Φ(x)"""
    return f.mul(x, _normal(f, x)[0])


def _gelu_slope(f: Float, x: Any) -> Any:
    """Φ(x) + x·φ(x)"""
    cumulative, e = _normal(f, x)
    return f.fma(f.mul(x, e), 0.398942280, cumulative)


def _gelu_tanh_slope(f: Float, x: Any) -> Any:
    """s + x·s·(1 - s)·2u' with s = 1 / (1 + exp -2u)"""
    square = f.mul(x, x)
    inner = f.mul(x, f.fma(square, -0.0713548163, -1.59576912))
    s = f.build.fdiv(f.number(1.0), f.add(f.call("normal_expf", inner), 1.0))
    rest = f.mul(f.mul(x, s), f.build.fsub(f.number(1.0), s))
    return f.fma(rest, f.fma(square, 0.214064449, 1.59576912), s)


_TWO_OVER_PI = (0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041)
"""The first 192 bits of 2/π behind the point."""


def _double(value: float) -> Any:
    return ll.Constant(F64, value)


def _quadrant(f: Float, x: Any) -> tuple[Any, Any]:
    """x = n·π/2 + r: the last bits of n, and r as float32, of any finite x.

    Below 2⁴⁵ in float64, by π/2 in two parts. Beyond it, where x is m·2ᵉ with a whole m of 24 bits, m times those 64 bits of
    2ᵉ·2/π that matter modulo 4 (M. Payne, R. Hanek), to an absolute error of 4e-10.
    """
    build = f.build
    fma = intrinsic(build.module, "llvm.fma", F64, 3)

    wide = build.fpext(x, F64)
    shifted = build.call(fma, [wide, _double(0.6366197723675814), _double(6755399441055744.0)])
    n = build.trunc(build.bitcast(shifted, I64), I32)
    whole = build.fsub(shifted, _double(6755399441055744.0))
    rest = build.call(fma, [whole, _double(-1.5707963267948966), wide])
    rest = build.call(fma, [whole, _double(-6.123233995736766e-17), rest])

    bits = build.bitcast(f.abs(x), I32)
    mantissa = build.zext(build.or_(build.and_(bits, ll.Constant(I32, 0x7FFFFF)), ll.Constant(I32, 0x800000)), I64)
    first = build.zext(build.sub(build.lshr(bits, ll.Constant(I32, 23)), ll.Constant(I32, 152)), I64)
    later = build.icmp_unsigned(">=", first, ll.Constant(I64, 64))
    a, b, c = (ll.Constant(I64, word) for word in _TWO_OVER_PI)
    here, beside = build.select(later, b, a), build.select(later, c, b)
    by = build.and_(first, ll.Constant(I64, 63))
    beside = build.lshr(build.lshr(beside, ll.Constant(I64, 1)), build.xor(by, ll.Constant(I64, 63)))
    turn = build.mul(mantissa, build.or_(build.shl(here, by), beside))  # quadrants · 2⁶², modulo four of them
    far = build.trunc(build.lshr(build.add(turn, ll.Constant(I64, 1 << 61)), ll.Constant(I64, 62)), I32)
    angle = build.trunc(build.lshr(build.shl(turn, ll.Constant(I64, 2)), ll.Constant(I64, 32)), I32)
    beyond = build.fmul(build.sitofp(angle, F64), _double(1.5707963267948966 / 2**32))
    negative = build.fcmp_ordered("<", x, f.number(0.0))
    far = build.select(negative, build.neg(far), far)
    beyond = build.select(negative, build.fneg(beyond), beyond)

    near = build.fcmp_ordered("<", f.abs(x), f.number(35184372088832.0))
    return build.select(near, n, far), build.fptrunc(build.select(near, rest, beyond), F32)


def _circular(f: Float, x: Any, ahead: int) -> Any:
    """sin(x + ahead·π/2)"""
    build = f.build
    n, r = _quadrant(f, x)
    n = build.add(n, ll.Constant(I32, ahead))
    s = f.mul(r, r)
    sine = f.polynomial(s, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
    sine = f.fma(f.mul(sine, s), r, r)
    cosine = f.polynomial(s, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
    cosine = f.fma(f.mul(cosine, s), s, f.fma(s, -0.5, f.number(1.0)))
    odd = build.icmp_signed("!=", build.and_(n, ll.Constant(I32, 1)), ll.Constant(I32, 0))
    sign = build.shl(build.and_(n, ll.Constant(I32, 2)), ll.Constant(I32, 30))
    value = build.bitcast(build.xor(build.bitcast(build.select(odd, cosine, sine), I32), sign), F32)
    finite = build.fcmp_ordered("<", f.abs(x), f.number(float("inf")))
    value = build.select(finite, value, build.fsub(x, x))
    return value if ahead else build.select(build.fcmp_ordered("==", x, f.number(0.0)), x, value)  # -0 stays


def _tan(f: Float, x: Any) -> Any:
    return f.build.fdiv(f.call("sinf", x), f.call("cosf", x))


def _pow(f: Float, x: Any, y: Any) -> Any:
    """2 to the power of y·log2 x in float64, with the values that C prescribes for zero, infinity, NaN and negative x."""
    build = f.build
    fma = intrinsic(build.module, "llvm.fma", F64, 3)

    def polynomial(value: Any, coefficients: Sequence[float]) -> Any:
        total = _double(coefficients[0])
        for coefficient in coefficients[1:]:
            total = build.call(fma, [total, value, _double(coefficient)])
        return total

    def limited(value: Any, bound: float) -> Any:
        value = build.select(build.fcmp_ordered(">", value, _double(bound)), _double(bound), value)
        return build.select(build.fcmp_ordered("<", value, _double(-bound)), _double(-bound), value)

    size = f.abs(x)
    bits = build.bitcast(build.fpext(size, F64), I64)
    high = build.trunc(build.lshr(bits, ll.Constant(I64, 32)), I32)
    e = build.ashr(build.sub(high, ll.Constant(I32, 0x3FE6A09E)), ll.Constant(I32, 20))  # the mantissa from √½ to √2
    m = build.bitcast(build.sub(bits, build.shl(build.sext(e, I64), ll.Constant(I64, 52))), F64)
    s = build.fdiv(build.fadd(m, _double(-1.0)), build.fadd(m, _double(1.0)))
    series = polynomial(build.fmul(s, s), [2.8853900817779268 / k for k in (15, 13, 11, 9, 7, 5, 3, 1)])
    log = build.call(fma, [s, series, build.sitofp(e, F64)])
    log = build.select(build.fcmp_ordered("==", size, f.number(0.0)), _double(-1e300), log)
    log = build.select(build.fcmp_ordered("==", size, f.number(float("inf"))), _double(1e300), log)
    z = limited(build.fmul(limited(build.fpext(y, F64), 1e30), log), 300.0)
    shifted = build.fadd(z, _double(6755399441055744.0))
    n = build.trunc(build.bitcast(shifted, I64), I32)
    t = build.fmul(build.fsub(z, build.fsub(shifted, _double(6755399441055744.0))), _double(0.6931471805599453))
    power = polynomial(t, [1 / math.factorial(k) for k in range(9, -1, -1)])
    scale = build.shl(build.zext(build.add(n, ll.Constant(I32, 1023)), I64), ll.Constant(I64, 52))
    result = build.fptrunc(build.fmul(power, build.bitcast(scale, F64)), F32)

    whole = build.fcmp_ordered("==", build.call(intrinsic(build.module, "llvm.floor", F32), [y]), y)
    half = f.mul(y, 0.5)
    odd = build.and_(whole, build.fcmp_ordered("!=", build.call(intrinsic(build.module, "llvm.floor", F32), [half]), half))
    result = build.select(odd, f.with_sign(result, x), result)
    nan, one = f.number(float("nan")), f.number(1.0)
    root = build.and_(build.fcmp_ordered("<", x, f.number(0.0)), build.fcmp_ordered(">", x, f.number(float("-inf"))))
    infinite = build.fcmp_ordered("==", f.abs(y), f.number(float("inf")))
    root = build.and_(root, build.not_(build.or_(whole, infinite)))
    result = build.select(build.or_(root, build.fcmp_unordered("uno", x, y)), nan, result)
    sure = build.or_(build.fcmp_ordered("==", x, one), build.fcmp_ordered("==", y, f.number(0.0)))
    return build.select(sure, one, result)


def _sinh(f: Float, x: Any) -> Any:
    """Below 1 an odd polynomial, above it by exponentials, whose halved argument reaches as far as the result does."""
    a, s = f.abs(x), f.mul(x, x)
    low = f.polynomial(s, 2.03721912945e-4, 8.33028376239e-3, 1.66667160211e-1)
    low = f.fma(f.mul(low, s), x, x)
    root = f.call("normal_expf", f.mul(a, 0.5))
    high = f.build.fsub(f.mul(f.mul(root, 0.5), root), f.build.fdiv(f.number(0.5), f.mul(root, root)))
    return f.build.select(f.build.fcmp_ordered("<", a, f.number(1.0)), low, f.with_sign(high, x))


def _cosh(f: Float, x: Any) -> Any:
    root = f.call("normal_expf", f.mul(f.abs(x), 0.5))
    return f.add(f.mul(f.mul(root, 0.5), root), f.build.fdiv(f.number(0.5), f.mul(root, root)))


def _atan(f: Float, x: Any) -> Any:
    """An odd polynomial below tan π/8, after the arguments' sum formula."""
    build = f.build
    a = f.abs(x)
    far = build.fcmp_ordered(">", a, f.number(2.414213562373095))
    middle = build.fcmp_ordered(">", a, f.number(0.4142135623730950))
    turned = build.select(far, build.fdiv(f.number(-1.0), a), build.fdiv(f.add(a, -1.0), f.add(a, 1.0)))
    r = build.select(middle, turned, a)
    offset = build.select(far, f.number(math.pi / 2), build.select(middle, f.number(math.pi / 4), f.number(0.0)))
    s = f.mul(r, r)
    p = f.polynomial(s, 8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
    return f.with_sign(f.add(f.fma(f.mul(p, s), r, r), offset), x)


def _small_asin(f: Float, x: Any, s: Any) -> Any:
    """asin x for |x| ≤ ½; s = x²"""
    p = f.polynomial(s, 4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
    return f.fma(f.mul(p, s), x, x)


def _inverse_sine(f: Float, x: Any) -> tuple[Any, Any]:
    """|x| > ½;  asin √((1 - |x|)/2) there, where asin |x| = π/2 - twice that, and asin |x| elsewhere"""
    build = f.build
    a = f.abs(x)
    far = build.fcmp_ordered(">", a, f.number(0.5))
    s = build.select(far, f.fma(a, -0.5, f.number(0.5)), f.mul(a, a))
    root = build.call(intrinsic(build.module, "llvm.sqrt", F32), [s])
    return far, _small_asin(f, build.select(far, root, a), s)


def _asin(f: Float, x: Any) -> Any:
    far, value = _inverse_sine(f, x)
    return f.with_sign(f.build.select(far, f.fma(value, -2.0, f.number(math.pi / 2)), value), x)


def _acos(f: Float, x: Any) -> Any:
    far, value = _inverse_sine(f, x)
    build = f.build
    positive = build.fcmp_ordered(">", x, f.number(0.0))
    double = f.mul(value, 2.0)
    outer = build.select(positive, double, build.fsub(f.number(math.pi), double))
    return build.select(far, outer, build.fsub(f.number(math.pi / 2), f.with_sign(value, x)))


def _asinh(f: Float, x: Any) -> Any:
    """log(|x| + √(x² + 1)) by what exceeds 1; where x² is too large, log 2|x|."""
    build = f.build
    a = f.abs(x)
    s = f.mul(a, a)
    root = build.call(intrinsic(build.module, "llvm.sqrt", F32), [f.add(s, 1.0)])
    near = f.call("log1pf", build.fadd(a, build.fdiv(s, f.add(root, 1.0))))
    far = f.add(f.call("logf", a), math.log(2))
    return f.with_sign(build.select(build.fcmp_ordered(">", a, f.number(1e9)), far, near), x)


def _acosh(f: Float, x: Any) -> Any:
    build = f.build
    t = f.add(x, -1.0)
    root = build.call(intrinsic(build.module, "llvm.sqrt", F32), [f.fma(t, t, f.mul(t, 2.0))])
    near, far = f.call("log1pf", build.fadd(t, root)), f.add(f.call("logf", x), math.log(2))
    value = build.select(build.fcmp_ordered(">", x, f.number(1e9)), far, near)
    return build.select(build.fcmp_ordered("<", x, f.number(1.0)), f.number(float("nan")), value)


def _atanh(f: Float, x: Any) -> Any:
    """½·log((1 + |x|) / (1 - |x|)) by what exceeds 1"""
    a = f.abs(x)
    excess = f.build.fdiv(f.mul(a, 2.0), f.build.fsub(f.number(1.0), a))
    return f.with_sign(f.mul(f.call("log1pf", excess), 0.5), x)


SERIES: dict[str, Callable[..., Any]] = {
    "expf": _exp,
    "normal_expf": partial(_exp, subnormal=False),
    "logf": _log,
    "erff": _erf,
    "tanhf": _tanh,
    "log1pf": _log1p,
    "exp2f": _exp2,
    "sinf": partial(_circular, ahead=0),
    "cosf": partial(_circular, ahead=1),
    "tanf": _tan,
    "asinf": _asin,
    "acosf": _acos,
    "atanf": _atan,
    "sinhf": _sinh,
    "coshf": _cosh,
    "asinhf": _asinh,
    "acoshf": _acosh,
    "atanhf": _atanh,
    "powf": _pow,
    "geluf": _gelu,
    "gelu_slopef": _gelu_slope,
    "gelu_tanh_slopef": _gelu_tanh_slope,
}
