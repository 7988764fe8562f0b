"""Elementwise ops as C expressions, and the C types of element types.

Half precisions are kept in memory as 16 bits and computed with in float; a value is rounded where it is stored and where a
Cast says so, not between the ops of one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

STORAGE: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "half_bits",
    ir.DataType.BFLOAT16: "bfloat_bits",
    ir.DataType.INT8: "signed char",
    ir.DataType.INT16: "short",
    ir.DataType.INT32: "int",
    ir.DataType.INT64: "long long",
    ir.DataType.UINT8: "unsigned char",
    ir.DataType.UINT16: "unsigned short",
    ir.DataType.UINT32: "unsigned int",
    ir.DataType.UINT64: "unsigned long long",
    ir.DataType.BOOL: "unsigned char",
    ir.DataType.FLOAT8E4M3FN: "unsigned char",
    ir.DataType.FLOAT8E4M3FNUZ: "unsigned char",
    ir.DataType.FLOAT8E5M2: "unsigned char",
    ir.DataType.FLOAT8E5M2FNUZ: "unsigned char",
    ir.DataType.FLOAT8E8M0: "unsigned char",
    ir.DataType.FLOAT4E2M1: "unsigned char",
    ir.DataType.INT4: "signed char",
    ir.DataType.UINT4: "unsigned char",
    ir.DataType.INT2: "signed char",
    ir.DataType.UINT2: "unsigned char",
}
"""Element type → type of its memory."""

HALVES = {ir.DataType.FLOAT16: "half", ir.DataType.BFLOAT16: "bfloat"}

SMALL = {
    ir.DataType.FLOAT8E4M3FN: "e4m3fn", ir.DataType.FLOAT8E4M3FNUZ: "e4m3fnuz", ir.DataType.FLOAT8E5M2: "e5m2",
    ir.DataType.FLOAT8E5M2FNUZ: "e5m2fnuz", ir.DataType.FLOAT8E8M0: "e8m0", ir.DataType.FLOAT4E2M1: "e2m1",
}  # fmt: skip
"""Floats of a byte or less, which are computed with in float (:mod:`.functions`)."""

BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT2: 2, ir.DataType.UINT2: 2}
"""Whole numbers of less than a byte, each in a byte of its own, as numpy holds them."""


NARROW = dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16), "int")
NARROW[ir.DataType.UINT32] = "long long"
"""Whole numbers to which a float comes by way of wider ones, so that what is too large or negative keeps its low bits."""


def compute_type(dtype: ir.DataType) -> str:
    """The C type in which values of ``dtype`` are computed."""
    if dtype in HALVES or dtype in SMALL:
        return "float"
    return "bool" if dtype == ir.DataType.BOOL else "int" if dtype in BITS else STORAGE[dtype]


def stored_bytes(dtype: ir.DataType) -> int:
    """Bytes of an element in memory."""
    return max(1, int(dtype.itemsize))


def load(dtype: ir.DataType, place: str) -> str:
    """The value at ``place``."""
    if dtype in HALVES:
        return f"{HALVES[dtype]}_load({place})"
    if dtype in SMALL:
        return f"{SMALL[dtype]}::load({place})"
    if dtype in BITS:
        return wrapped(dtype, f"(int){place}")
    return f"({place} != 0)" if dtype == ir.DataType.BOOL else place


def stored(dtype: ir.DataType, value: str) -> str:
    """``value`` as it lies in memory."""
    if dtype in HALVES:
        return f"{HALVES[dtype]}_store({value})"
    return f"{SMALL[dtype]}::store({value}, false)" if dtype in SMALL else f"({STORAGE[dtype]}){value}"


def wrapped(dtype: ir.DataType, value: str) -> str:
    """The low bits of ``value`` as a number of so many bits."""
    shift = 32 - BITS[dtype]
    if STORAGE[dtype] == "signed char":
        return f"((int)((unsigned int)({value}) << {shift}) >> {shift})"
    return f"(({value}) & {(1 << BITS[dtype]) - 1})"


def store(dtype: ir.DataType, place: str, value: str) -> str:
    """The statement that writes ``value``."""
    return f"{place} = {stored(dtype, value) if dtype in HALVES or dtype in SMALL else value};"


def literal(dtype: ir.DataType, value: Any) -> str:
    """A number as a C literal of the compute type."""
    if dtype == ir.DataType.BOOL:
        return "true" if value else "false"
    if not dtype.is_floating_point():
        whole = int(value)
        suffix = {"long long": "LL", "unsigned long long": "ULL", "unsigned int": "U"}.get(compute_type(dtype), "")
        return f"({whole + 1}{suffix} - 1)" if whole == np.iinfo(np.int64).min else f"({whole}{suffix})"
    number, single = float(value), compute_type(dtype) == "float"
    if math.isnan(number):
        return "NAN_VALUE" if single else "((double)NAN_VALUE)"
    if math.isinf(number):
        sign = "-" if number < 0 else ""
        return f"({sign}INFINITY_VALUE)" if single else f"({sign}(double)INFINITY_VALUE)"
    return f"({float(np.float32(number))!r}f)" if single else f"({number!r})"


Rule = Callable[[Sequence[str], ir.Node, ir.DataType], str]


def _f(name: str, dtype: ir.DataType) -> str:
    """The C function of ``name`` for the compute type."""
    return name if compute_type(dtype) == "double" else f"{name}f"


def _call(name: str) -> Rule:
    return lambda a, node, dtype: f"{_f(name, dtype)}({', '.join(a)})"


def _infix(sign: str) -> Rule:
    return lambda a, node, dtype: f"({a[0]} {sign} {a[1]})"


def _fold(rule: Rule) -> Rule:
    """A variadic op as a chain of binary ones, from the left."""

    def chain(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        total = a[0]
        for other in a[1:]:
            total = rule([total, other], node, dtype)
        return total

    return chain


def _attribute(node: ir.Node, name: str, default: float) -> float:
    return node.attributes[name].as_float() if name in node.attributes else default


def _number(dtype: ir.DataType, value: float) -> str:
    return literal(dtype, value)


def _extreme(sign: str) -> Rule:
    def rule(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        x, y = a
        if dtype.is_floating_point():  # NaN wins, as in numpy
            return f"(({x} {sign} {y} || {x} != {x}) ? {x} : {y})"
        return f"({x} {sign} {y} ? {x} : {y})"

    return rule


def _div(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"({a[0]} / {a[1]})"


def _mod(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    fmod = node.attributes.get_int("fmod", 0)
    if dtype.is_floating_point():
        call = f"{_f('fmod', dtype)}({a[0]}, {a[1]})"
        return call if fmod else f"floor_mod({a[0]}, {a[1]})"
    return f"({a[0]} % {a[1]})" if fmod else f"floor_mod<{compute_type(dtype)}>({a[0]}, {a[1]})"


def _pow(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    if not dtype.is_floating_point():  # pow of a GPU may be off by its last bit, so that 5³ becomes 124
        return f"whole_power<{compute_type(dtype)}>({a[0]}, {a[1]})"
    exponent = a[1].strip("()").rstrip("f")
    try:
        power = float(exponent)
    except ValueError:
        power = math.nan
    if power == 2.0:
        return f"({a[0]} * {a[0]})"
    if power == 0.5:
        return f"{_f('sqrt', dtype)}({a[0]})"
    return f"{_f('pow', dtype)}({a[0]}, ({compute_type(dtype)}){a[1]})"


def _sigmoid(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"({_number(dtype, 1)} / ({_number(dtype, 1)} + {_f('exp', dtype)}(-{a[0]})))"


def _softplus(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    zero = _number(dtype, 0)
    return f"(({a[0]} > {zero} ? {a[0]} : {zero}) + {_f('log1p', dtype)}({_f('exp', dtype)}(-{_f('fabs', dtype)}({a[0]}))))"


def _gelu(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    x = a[0]
    half, one = _number(dtype, 0.5), _number(dtype, 1)
    if node.attributes.get_string("approximate", "none") == "tanh":
        inner = f"{_number(dtype, math.sqrt(2 / math.pi))} * ({x} + {_number(dtype, 0.044715)} * {x} * {x} * {x})"
        return f"({x} / ({one} + {_f('exp', dtype)}({_number(dtype, -2)} * ({inner}))))"  # (1 + tanh u) / 2 = 1 / (1 + exp -2u)
    return f"({half} * {x} * ({one} + {_f('erf', dtype)}({x} * {_number(dtype, math.sqrt(0.5))})))"


def _clip(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    value = a[0]
    if len(a) > 1 and a[1]:
        value = f"({value} < {a[1]} ? {a[1]} : {value})"
    if len(a) > 2 and a[2]:
        value = f"({value} > {a[2]} ? {a[2]} : {value})"
    return value


def _where(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"({a[0]} ? {a[1]} : {a[2]})"


def _scaled_exponential(alpha: float, gamma: float) -> Rule:
    def rule(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        scale, slope = _attribute(node, "gamma", gamma), _attribute(node, "alpha", alpha)
        negative = f"{_number(dtype, slope)} * ({_f('exp', dtype)}({a[0]}) - {_number(dtype, 1)})"
        return f"({_number(dtype, scale)} * ({a[0]} > {_number(dtype, 0)} ? {a[0]} : {negative}))"

    return rule


def _leaky(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"({a[0]} >= {_number(dtype, 0)} ? {a[0]} : {_number(dtype, _attribute(node, 'alpha', 0.01))} * {a[0]})"


def _hard_sigmoid(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    line = f"{_number(dtype, _attribute(node, 'alpha', 0.2))} * {a[0]} + {_number(dtype, _attribute(node, 'beta', 0.5))}"
    zero, one = _number(dtype, 0), _number(dtype, 1)
    return f"({line} < {zero} ? {zero} : {line} > {one} ? {one} : {line})"


def _mean(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"(({' + '.join(a)}) / {_number(dtype, len(a))})"


def _sign(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    kind = compute_type(dtype)
    if dtype.is_floating_point():
        return f"({a[0]} != {a[0]} ? {a[0]} : ({kind})(({a[0]} > 0) - ({a[0]} < 0)))"
    return f"(({kind})(({a[0]} > 0) - ({a[0]} < 0)))"


def _abs(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"{_f('fabs', dtype)}({a[0]})" if dtype.is_floating_point() else f"({a[0]} < 0 ? -{a[0]} : {a[0]})"


def _isinf(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    sides = [f"{a[0]} == (INFINITY_VALUE)"] if node.attributes.get_int("detect_positive", 1) else []
    sides += [f"{a[0]} == (-INFINITY_VALUE)"] if node.attributes.get_int("detect_negative", 1) else []
    return f"({' || '.join(sides) or 'false'})"


def _shift(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    left = node.attributes.get_string("direction", "") == "LEFT"
    return f"({a[0]} {'<<' if left else '>>'} {a[1]})"


RULES: Mapping[str, Rule] = {
    "Identity": lambda a, node, dtype: a[0],
    "Add": _infix("+"), "Sub": _infix("-"), "Mul": _infix("*"), "Div": _div, "Mod": _mod, "Pow": _pow,
    "Sum": _fold(_infix("+")), "Mean": _mean, "Max": _fold(_extreme(">")), "Min": _fold(_extreme("<")),
    "Neg": lambda a, node, dtype: f"(-{a[0]})",
    "Abs": _abs, "Sign": _sign,
    "Reciprocal": lambda a, node, dtype: f"({_number(dtype, 1)} / {a[0]})",
    "Sqrt": _call("sqrt"), "Exp": _call("exp"), "Log": _call("log"), "Erf": _call("erf"),
    "Sin": _call("sin"), "Cos": _call("cos"), "Tan": _call("tan"),
    "Asin": _call("asin"), "Acos": _call("acos"), "Atan": _call("atan"),
    "Sinh": _call("sinh"), "Cosh": _call("cosh"), "Tanh": _call("tanh"),
    "Asinh": _call("asinh"), "Acosh": _call("acosh"), "Atanh": _call("atanh"),
    "Floor": _call("floor"), "Ceil": _call("ceil"), "Round": _call("rint"),
    "Sigmoid": _sigmoid, "Softplus": _softplus, "Gelu": _gelu, "Clip": _clip, "Where": _where,
    "Relu": lambda a, node, dtype: f"({a[0]} < {_number(dtype, 0)} ? {_number(dtype, 0)} : {a[0]})",
    "LeakyRelu": _leaky, "HardSigmoid": _hard_sigmoid,
    "Elu": _scaled_exponential(1.0, 1.0),
    "Selu": _scaled_exponential(1.67326319217681884765625, 1.05070102214813232421875),
    "Softsign": lambda a, node, dtype: f"({a[0]} / ({_number(dtype, 1)} + {_f('fabs', dtype)}({a[0]})))",
    "ThresholdedRelu": lambda a, node, dtype: (
        f"({a[0]} > {_number(dtype, _attribute(node, 'alpha', 1.0))} ? {a[0]} : {_number(dtype, 0)})"
    ),
    "PRelu": lambda a, node, dtype: f"({a[0]} < {_number(dtype, 0)} ? {a[0]} * {a[1]} : {a[0]})",
    "Equal": _infix("=="), "Greater": _infix(">"), "GreaterOrEqual": _infix(">="), "Less": _infix("<"),
    "LessOrEqual": _infix("<="), "And": _infix("&&"), "Or": _infix("||"), "Xor": _infix("!="),
    "Not": lambda a, node, dtype: f"(!{a[0]})",
    "BitwiseAnd": _infix("&"), "BitwiseOr": _infix("|"), "BitwiseXor": _infix("^"),
    "BitwiseNot": lambda a, node, dtype: f"(~{a[0]})", "BitShift": _shift,
    "IsNaN": lambda a, node, dtype: f"({a[0]} != {a[0]})", "IsInf": _isinf,
}  # fmt: skip
"""Op → C expression of its operands, the node, and the element type of the first operand (of the second for Where)."""


def cast(source: ir.DataType, target: ir.DataType, value: str, node: ir.Node) -> str:
    """``value`` of compute type ``source`` as that of ``target``; ``node``: the Cast, which says how to round."""
    if source == target:
        return value
    if target == ir.DataType.BOOL:
        return f"({value} != 0)"
    if target in HALVES:
        return f"{HALVES[target]}_round((float){value})"
    saturate = "true" if node.attributes.get_int("saturate", 1) else "false"
    if target == ir.DataType.FLOAT8E8M0:
        way = ("up", "down", "nearest").index(node.attributes.get_string("round_mode", "up"))
        return f"e8m0::load(e8m0::rounded((float){value}, {saturate}, {way}))"
    if target in SMALL:
        return f"{SMALL[target]}::round((float){value}, {saturate})"
    if target in BITS:
        return wrapped(target, f"(int){value}")
    if source.is_floating_point() and target in NARROW:  # as on CPUs; CUDA's own conversion ends at 0 and the greatest
        value = f"({NARROW[target]}){value}"
    return f"(({compute_type(target)}){value})"
