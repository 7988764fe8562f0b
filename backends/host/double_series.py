"""Elementary functions of float64 as sums of few terms, in LLVM instructions that work on vectors too.

log, sines and cosines as in fdlibm (Sun Microsystems), tanh and erf as in Cephes (S. Moshier). Errors are below 1e-15 of the
value; of sines and cosines they are absolute, below 4e-16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir as ll

from graphc.backends.host.kinds import F64, I64
from graphc.backends.host.series import Formulas, intrinsic


class Double(Formulas):
    """Short names for float64 instructions."""

    kind = F64


def _word(value: int) -> Any:
    return ll.Constant(I64, value & (1 << 64) - 1)


_ROUNDING = 6755399441055744.0
"""1.5 · 2⁵²: adding it rounds to a whole number, which is then in the low bits."""
_ROUNDING_BITS = 0x4338000000000000


def _rounded(f: Double, x: Any, factor: float) -> tuple[Any, Any]:
    """x · factor rounded to a whole number: as int64 and as float64."""
    shifted = f.fma(x, factor, _ROUNDING)
    return f.build.sub(f.build.bitcast(shifted, I64), _word(_ROUNDING_BITS)), f.add(shifted, -_ROUNDING)


def _exp(f: Double, x: Any) -> Any:
    """x = n·ln 2 + r; a polynomial in r, times 2ⁿ in two factors, of which either is a normal number."""
    build = f.build
    x = f.least(f.most(x, -746.0), 710.0)
    n, whole = _rounded(f, x, 1 / math.log(2))
    r = f.fma(whole, -0.6931471805599453, x)
    r = f.fma(whole, -2.3190468138462996e-17, r)
    p = f.polynomial(r, *(1 / math.factorial(k) for k in range(13, -1, -1)))
    half = build.sub(build.lshr(build.add(n, _word(2048)), _word(1)), _word(1024))
    for power in (half, build.sub(n, half)):
        p = build.fmul(p, build.bitcast(build.shl(build.add(power, _word(1023)), _word(52)), F64))
    return p


_ROOT_HALF = 0x3FE6A09E667F3BCC  # the bits of the largest float64 below √½


def _mantissa(f: Double, x: Any) -> tuple[Any, Any]:
    """(m, e) with x = m·2ᵉ and m in [√½, √2), by bits; e as float64."""
    build = f.build
    shifted = build.sub(build.bitcast(x, I64), _word(_ROOT_HALF - (1024 << 52)))
    bits = build.add(build.and_(shifted, _word((1 << 52) - 1)), _word(_ROOT_HALF))
    raised = build.or_(build.lshr(shifted, _word(52)), _word(0x4330000000000000))  # 2⁵² and the exponent
    return build.bitcast(bits, F64), f.add(build.bitcast(raised, F64), -(2.0**52 + 1024))


_LOG = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
)  # fmt: skip
"""Of log m = 2s + s·z·(…) with s = (m - 1) / (m + 1) and z = s²."""
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""log 2; a whole number times the first part is without an error."""


def _log(f: Double, x: Any) -> Any:
    build = f.build
    small = build.fcmp_ordered("<", x, f.number(2.2250738585072014e-308))
    m, e = _mantissa(f, build.select(small, f.mul(x, 2.0**54), x))
    e = build.select(small, f.add(e, -54.0), e)
    m = f.add(m, -1.0)
    s = build.fdiv(m, f.add(m, 2.0))
    z = f.mul(s, s)
    half = f.mul(f.mul(m, 0.5), m)
    low = f.fma(e, _LN2_LOW, f.mul(s, f.fma(z, f.polynomial(z, *_LOG), half)))
    result = f.fma(e, _LN2_HIGH, build.fsub(m, build.fsub(half, low)))
    result = build.select(build.fcmp_ordered("==", x, f.number(0.0)), f.number(float("-inf")), result)
    result = build.select(build.fcmp_ordered("<", x, f.number(0.0)), f.number(float("nan")), result)
    # infinity and NaN are their own logarithms
    return build.select(build.fcmp_unordered("ult", x, f.number(float("inf"))), build.select(_is_nan(f, x), x, result), x)


def _is_nan(f: Double, x: Any) -> Any:
    return f.build.fcmp_unordered("uno", x, x)


def _log1p(f: Double, x: Any) -> Any:
    """log u + (x - (u - 1)) / u with u = 1 + x, whose last term is what u has lost."""
    build = f.build
    u = f.add(x, 1.0)
    lost = build.fdiv(build.fsub(x, f.add(u, -1.0)), u)
    finite = build.fcmp_ordered("<", f.abs(x), f.number(1e300))
    usual = build.and_(finite, build.fcmp_ordered("!=", u, f.number(0.0)))
    value = build.fadd(f.call("log", u), build.select(usual, lost, f.number(0.0)))
    return build.select(build.fcmp_ordered("==", u, f.number(1.0)), x, value)


def _tanh(f: Double, x: Any) -> Any:
    """Below 0.625 Cephes' quotient of polynomials, above it 1 - 2 / (exp 2|x| + 1)."""
    build = f.build
    a, s = f.abs(x), f.mul(x, x)
    above = f.polynomial(s, -9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
    below = f.polynomial(s, 1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)
    low = f.fma(f.mul(build.fdiv(above, below), s), x, x)
    high = build.fsub(f.number(1.0), build.fdiv(f.number(2.0), f.add(f.call("exp", f.mul(a, 2.0)), 1.0)))
    return f.with_sign(build.select(build.fcmp_ordered("<", a, f.number(0.625)), low, high), x)  # -0 stays


def _erf(f: Double, x: Any) -> Any:
    """Below 1 an odd quotient of polynomials, above it 1 - exp(-x²) times one."""
    build = f.build
    a, s = f.abs(x), f.mul(x, x)
    above = f.polynomial(
        s, 9.60497373987051638749, 9.00260197203842689217e1, 2.23200534594684319226e3, 7.00332514112805075473e3,
        5.55923013010394962768e4,
    )  # fmt: skip
    below = f.polynomial(
        s, 1.0, 3.35617141647503099647e1, 5.21357949780152679795e2, 4.59432382970980127987e3, 2.26290000613890934246e4,
        4.92673942608635921086e4,
    )  # fmt: skip
    low = f.mul(build.fdiv(above, below), x)
    far = f.least(a, 6.0)  # where the rest is below 2e-17
    above = f.polynomial(
        far, 2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687, 4.86371970985681366614e1,
        1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
        5.57535335369399327526e2,
    )  # fmt: skip
    below = f.polynomial(
        far, 1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2,
        1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2,
    )  # fmt: skip
    rest = f.mul(f.call("exp", build.fneg(f.mul(far, far))), build.fdiv(above, below))
    high = f.with_sign(build.fsub(f.number(1.0), rest), x)
    return build.select(build.fcmp_ordered(">", a, f.number(1.0)), high, low)


_WORDS = 20


@cache
def _two_over_pi() -> tuple[int, ...]:
    """A word of zeros and the first bits of 2/π behind the point, 64 in a word; π by Machin's formula."""
    bits = 64 * _WORDS + 64

    def arctangent_of_inverse(n: int) -> int:
        term = total = (1 << bits) // n
        for k in range(1, bits):
            term //= -n * n
            if term in (0, -1):
                break
            total += term // (2 * k + 1)
        return total

    pi = 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))
    number = (2 << bits + bits) // pi >> bits - 64 * _WORDS
    return (0, *(number >> 64 * k & (1 << 64) - 1 for k in range(_WORDS - 1, -1, -1)))


def _table(module: ll.Module) -> ll.GlobalVariable:
    name = "graphc.two_over_pi"
    known = module.globals.get(name)
    if known is None:
        words = _two_over_pi()
        kind = ll.ArrayType(I64, len(words))
        known = ll.GlobalVariable(module, kind, name)
        known.linkage, known.global_constant = "internal", True
        known.initializer = ll.Constant(kind, [_word(word) for word in words])
    return known


_FAR = 2.0**50
"""Where n of x = n·π/2 + r gets too long for a sum with :data:`_ROUNDING`."""


def _quadrant(f: Double, x: Any) -> tuple[Any, Any]:
    """x = n·π/2 + r: the last bits of n, and r, of any finite x.

    Below 2⁵⁰ by π/2 in three parts. Beyond it, where x is m·2ᵉ with a whole m of 53 bits, m times those 128 bits of 2ᵉ·2/π
    that matter modulo 4 (M. Payne, R. Hanek).
    """
    build = f.build
    n, whole = _rounded(f, x, 2 / math.pi)
    near = f.fma(whole, -1.5707963267948966, x)  # without an error
    near = f.fma(whole, -6.123233995736766e-17, near)
    near = f.fma(whole, 1.4973849048591833e-33, near)

    bits = build.bitcast(f.abs(x), I64)
    m = build.or_(build.and_(bits, _word((1 << 52) - 1)), _word(1 << 52))
    e = build.sub(build.lshr(bits, _word(52)), _word(1075))
    far = build.fcmp_ordered(">=", f.abs(x), f.number(_FAR))
    first = build.select(far, build.add(e, _word(62)), _word(0))  # bit of the table, of weight 2 in x·2/π
    infinite = build.fcmp_unordered("uge", f.abs(x), f.number(float("inf")))
    first = build.select(infinite, _word(0), first)
    at, by = build.lshr(first, _word(6)), build.and_(first, _word(63))
    table, zero = _table(build.module), _word(0)
    a, b, c = (build.load(build.gep(table, [zero, build.add(at, _word(k))], inbounds=True), typ=I64) for k in range(3))
    back = build.xor(by, _word(63))
    high, low = (
        build.or_(build.shl(left, by), build.lshr(build.lshr(right, _word(1)), back)) for left, right in ((a, b), (b, c))
    )
    turn = build.add(build.mul(m, high), _upper_half(build, m, low))  # quadrants · 2⁶², modulo four of them
    quadrants = build.lshr(build.add(turn, _word(1 << 61)), _word(62))
    rest = build.sub(turn, build.shl(quadrants, _word(62)))
    beyond = f.mul(build.sitofp(rest, F64), math.pi / 2 / 2**62)
    negative = build.fcmp_ordered("<", x, f.number(0.0))
    quadrants = build.select(negative, build.neg(quadrants), quadrants)
    beyond = build.select(negative, build.fneg(beyond), beyond)
    return build.select(far, quadrants, n), build.select(far, beyond, near)


def _upper_half(build: ll.IRBuilder, a: Any, b: Any) -> Any:
    """The upper 64 bits of a · b."""
    half, mask = _word(32), _word((1 << 32) - 1)
    a1, a0, b1, b0 = build.lshr(a, half), build.and_(a, mask), build.lshr(b, half), build.and_(b, mask)
    low = build.lshr(build.mul(a0, b0), half)
    middle = build.add(build.mul(a1, b0), low)
    other = build.add(build.mul(a0, b1), build.and_(middle, mask))
    return build.add(build.mul(a1, b1), build.add(build.lshr(middle, half), build.lshr(other, half)))


def _circular(f: Double, x: Any, ahead: int) -> Any:
    """sin(x + ahead·π/2)"""
    build = f.build
    n, r = _quadrant(f, x)
    n = build.add(n, _word(ahead))
    s = f.mul(r, r)
    sine = f.polynomial(
        s, 1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
        8.33333333332248946124e-03, -1.66666666666666324348e-01,
    )  # fmt: skip
    sine = f.fma(f.mul(sine, s), r, r)
    cosine = f.polynomial(
        s, -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
        -1.38888888888741095749e-03, 4.16666666666666019037e-02,
    )  # fmt: skip
    half = f.mul(s, 0.5)
    most = build.fsub(f.number(1.0), half)
    lost = build.fsub(build.fsub(f.number(1.0), most), half)
    cosine = build.fadd(most, f.fma(f.mul(s, s), cosine, lost))
    odd = build.icmp_signed("!=", build.and_(n, _word(1)), _word(0))
    sign = build.shl(build.and_(n, _word(2)), _word(62))
    value = build.bitcast(build.xor(build.bitcast(build.select(odd, cosine, sine), I64), sign), F64)
    finite = build.fcmp_ordered("<", f.abs(x), f.number(float("inf")))
    value = build.select(finite, value, build.fsub(x, x))
    return value if ahead else build.select(build.fcmp_ordered("==", x, f.number(0.0)), x, value)  # -0 stays


def _pow(f: Double, x: Any, y: Any) -> Any:
    """exp(y·log |x|) with what the logarithm and the product lose, and the values that C prescribes for special operands."""
    build = f.build
    size, infinity, one, zero = f.abs(x), f.number(float("inf")), f.number(1.0), f.number(0.0)
    small = build.fcmp_ordered("<", size, f.number(2.2250738585072014e-308))
    m, e = _mantissa(f, build.select(small, f.mul(size, 2.0**54), size))
    e = build.select(small, f.add(e, -54.0), e)
    above, below = f.add(m, -1.0), f.add(m, 1.0)
    left = build.fsub(m, f.add(below, -1.0))  # of the sum
    s = build.fdiv(above, below)
    rest = build.fdiv(build.fsub(f.fma(build.fneg(s), below, above), f.mul(s, left)), below)
    z = f.mul(s, s)
    rest = f.fma(f.mul(s, z), f.polynomial(z, *_LOG), f.mul(rest, 2.0))
    twice, large = f.mul(s, 2.0), f.mul(e, _LN2_HIGH)
    log = build.fadd(large, twice)
    other = build.fsub(log, large)
    lost = build.fadd(build.fsub(large, build.fsub(log, other)), build.fsub(twice, other))
    rest = f.fma(e, _LN2_LOW, build.fadd(rest, lost))
    log = build.select(build.fcmp_ordered("==", size, zero), f.number(float("-inf")), log)
    log = build.select(build.fcmp_ordered("==", size, infinity), infinity, log)
    log, rest = build.fadd(log, rest), build.fsub(rest, build.fsub(build.fadd(log, rest), log))
    z = f.most(f.least(build.fmul(y, log), 1e4), -1e4)
    lost = f.fma(y, rest, f.fma(y, log, build.fneg(z)))
    lost = build.select(build.fcmp_ordered("<", f.abs(z), f.number(1e3)), lost, zero)
    power = f.call("exp", z)
    result = build.select(build.fcmp_ordered("<", power, infinity), f.fma(power, lost, power), power)

    floor = intrinsic(build.module, "llvm.floor", F64)
    whole, half = build.fcmp_ordered("==", build.call(floor, [y]), y), f.mul(y, 0.5)
    odd = build.and_(whole, build.fcmp_ordered("!=", build.call(floor, [half]), half))
    result = build.select(odd, f.with_sign(result, x), result)
    root = build.and_(build.fcmp_ordered("<", x, zero), build.fcmp_ordered("<", size, infinity))
    root = build.and_(root, build.not_(build.or_(whole, build.fcmp_ordered("==", f.abs(y), infinity))))
    result = build.select(build.or_(root, build.fcmp_unordered("uno", x, y)), f.number(float("nan")), result)
    even = build.and_(build.fcmp_ordered("==", size, one), build.fcmp_ordered("==", f.abs(y), infinity))
    sure = build.or_(build.fcmp_ordered("==", x, one), build.or_(build.fcmp_ordered("==", y, zero), even))
    return build.select(sure, one, result)


SERIES: dict[str, Callable[..., Any]] = {
    "exp": _exp,
    "log": _log,
    "log1p": _log1p,
    "tanh": _tanh,
    "erf": _erf,
    "sin": partial(_circular, ahead=0),
    "cos": partial(_circular, ahead=1),
    "pow": _pow,
}
"""Name in C → what emits it."""
