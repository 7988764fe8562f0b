"""Elementary functions as LLVM IR, so that loops that call them become vectors.

Those of float32 are in :mod:`.series`, the usual ones of float64 in :mod:`.double_series`; others of float64 call the C
library, one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir as ll

from graphc.backends.host import double_series
from graphc.backends.host.kinds import F32, F64, I16, I32, Typed
from graphc.backends.host.language import LanguageError
from graphc.backends.host.series import SERIES, Float, intrinsic

To: TypeAlias = Callable[[str, Typed], Any]
"""Converts a value to a C type."""

INTRINSICS = {"sqrt": "llvm.sqrt", "fabs": "llvm.fabs", "floor": "llvm.floor", "ceil": "llvm.ceil", "rint": "llvm.rint"}
LIBRARY = frozenset(
    "exp log erf tanh pow sin cos tan asin acos atan sinh cosh asinh acosh atanh fmod log1p exp2".split()  # noqa: SIM905
)


class Mathematics:
    """The functions of one module."""

    def __init__(self, module: ll.Module) -> None:
        self._module = module
        self._made: dict[str, ll.Function] = {}

    def call(self, build: ll.IRBuilder, to: To, name: str, a: Sequence[Typed]) -> Typed:
        """Emit a call.

        Raises:
            LanguageError: no such function.
        """
        plain = name.removesuffix("f")
        kind = "float" if name.endswith("f") or all(x.kind == "float" for x in a) else "double"
        if name in ("erf", "exp", "log", "sqrt", "pow", "floor", "ceil", "rint", "fabs", "tanh", "sin", "cos"):
            plain, kind = name, "double"
        if name in SERIES:
            return Typed(build.call(self.series(name, len(a)), [to("float", x) for x in a]), "float")
        if name == "gelu" and a[0].kind == "double":
            x = a[0].value
            erf = build.call(self.series("erf"), [build.fmul(x, ll.Constant(F64, 0.5**0.5))])
            half = build.fmul(x, ll.Constant(F64, 0.5))
            return Typed(build.fmul(half, build.fadd(erf, ll.Constant(F64, 1.0))), "double")
        if name in ("gelu", "gelu_slope", "gelu_tanh_slope"):
            if a[0].kind != "float":
                raise LanguageError(f"{name} of {a[0].kind}")
            return Typed(build.call(self.series(f"{name}f"), [a[0].value]), "float")
        if kind == "double" and plain in double_series.SERIES:
            return Typed(build.call(self.series(plain, len(a)), [to(kind, x) for x in a]), kind)
        wide = F32 if kind == "float" else F64
        given = [to(kind, x) for x in a]
        if plain in INTRINSICS:
            return Typed(build.call(intrinsic(self._module, INTRINSICS[plain], wide), given), kind)
        if plain in LIBRARY:
            symbol = f"{plain}f" if kind == "float" else plain
            return Typed(build.call(self._library(symbol, wide, len(given)), given), kind)
        if name in ("half_load", "half_store", "half_round", "bfloat_store", "bfloat_round", "bfloat_exact"):
            return _half(build, to, name, a[0])
        raise LanguageError(f"unknown function {name!r}")

    def _library(self, symbol: str, kind: ll.Type, count: int) -> ll.Function:
        if symbol not in self._made:
            self._made[symbol] = ll.Function(self._module, ll.FunctionType(kind, [kind] * count), symbol)
        return self._made[symbol]

    def series(self, name: str, operands: int = 1) -> ll.Function:
        """A function of float32 or float64 that is put into its callers."""
        if name not in self._made:
            short = name in SERIES
            kind, emit = (F32, SERIES[name]) if short else (F64, double_series.SERIES[name])
            function = ll.Function(self._module, ll.FunctionType(kind, [kind] * operands), f"graphc.{name}")
            function.linkage = "internal"
            function.attributes.add("alwaysinline")
            self._made[name] = function
            build = ll.IRBuilder(function.append_basic_block())
            formulas = (Float if short else double_series.Double)(self.series, build)
            build.ret(emit(formulas, *function.args))
        return self._made[name]


def _half(build: ll.IRBuilder, to: To, name: str, x: Typed) -> Typed:
    """Conversions of 16-bit floats."""
    half = ll.HalfType()
    if name == "half_load":
        return Typed(build.fpext(build.bitcast(x.value, half), F32), "float")
    if name in ("half_store", "half_round"):
        short = build.fptrunc(to("float", x), half)
        if name == "half_round":
            return Typed(build.fpext(short, F32), "float")
        return Typed(build.bitcast(short, I16), "half_bits")
    bits = build.bitcast(to("float", x), I32)
    sixteen = ll.Constant(I32, 16)
    if name == "bfloat_exact":
        return Typed(build.trunc(build.lshr(bits, sixteen), I16), "bfloat_bits")
    odd = build.and_(build.lshr(bits, sixteen), ll.Constant(I32, 1))
    rounded = build.add(build.add(bits, ll.Constant(I32, 0x7FFF)), odd)
    nan = build.or_(bits, ll.Constant(I32, 0x400000))
    chosen = build.select(build.fcmp_unordered("uno", x.value, x.value), nan, rounded)
    if name == "bfloat_round":
        return Typed(build.bitcast(build.and_(chosen, ll.Constant(I32, 0xFFFF0000)), F32), "float")
    return Typed(build.trunc(build.lshr(chosen, sixteen), I16), "bfloat_bits")
