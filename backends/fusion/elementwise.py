"""C expressions of the elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from graphc.backends.fusion.expressions import compute_type, literal

Expression: TypeAlias = Callable[[Sequence[str], ir.Node, ir.DataType], str]
"""(operands as C text, node, compute type) → C text of one element."""


def _f(name: str, dtype: ir.DataType) -> str:
    """The C function of ``name`` for the compute type."""
    return name if compute_type(dtype) == "double" else f"{name}f"


def call(name: str) -> Expression:
    return lambda a, node, dtype: f"{_f(name, dtype)}({', '.join(a)})"


def formula(text: str) -> Expression:
    """C text with operands as ``{0}``, ``{1}`` and so on, ``{zero}``, ``{one}``, and functions of the compute type."""

    def rule(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        functions = {name: _f(name, dtype) for name in ("exp", "fabs", "log1p")}
        return text.format(*a, zero=literal(dtype, 0), one=literal(dtype, 1), **functions)

    return rule


sigmoid = formula("({one} / ({one} + {exp}(-{0})))")
softplus = formula("(({0} > {zero} ? {0} : {zero}) + {log1p}({exp}(-{fabs}({0}))))")
softsign = formula("({0} / ({one} + {fabs}({0})))")
relu = formula("({0} < {zero} ? {zero} : {0})")
prelu = formula("({0} < {zero} ? {0} * {1} : {0})")
reciprocal = formula("({one} / {0})")
where = formula("({0} ? {1} : {2})")


def infix(sign: str) -> Expression:
    return lambda a, node, dtype: f"({a[0]} {sign} {a[1]})"


def fold(rule: Expression) -> Expression:
    """Expand a variadic op into a chain of binary ones, from left to right."""

    def chain(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        total = a[0]
        for other in a[1:]:
            total = rule([total, other], node, dtype)
        return total

    return chain


def _attribute(node: ir.Node, name: str, default: float) -> float:
    return node.attributes[name].as_float() if name in node.attributes else default


def extreme(sign: str) -> Expression:
    def rule(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        x, y = a
        if dtype.is_floating_point():  # NaN propagates, as in numpy
            return f"(({x} {sign} {y} || {x} != {x}) ? {x} : {y})"
        return f"({x} {sign} {y} ? {x} : {y})"

    return rule


def modulo(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    fmod = node.attributes.get_int("fmod", 0)
    if dtype.is_floating_point():
        call = f"{_f('fmod', dtype)}({a[0]}, {a[1]})"
        return call if fmod else f"floor_mod({a[0]}, {a[1]})"
    return f"({a[0]} % {a[1]})" if fmod else f"floor_mod<{compute_type(dtype)}>({a[0]}, {a[1]})"


def power(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    if not dtype.is_floating_point():  # a GPU's pow may be off in the last bit: 5³ would become 124
        return f"whole_power<{compute_type(dtype)}>({a[0]}, {a[1]})"
    exponent = a[1].strip("()").rstrip("f")
    try:
        power = float(exponent)
    except ValueError:
        power = math.nan
    x, root, one = a[0], f"{_f('sqrt', dtype)}({a[0]})", literal(dtype, 1)
    short = {
        4.0: f"(({x} * {x}) * ({x} * {x}))",
        3.0: f"({x} * {x} * {x})",
        2.5: f"({x} * {x} * {root})",
        2.0: f"({x} * {x})",
        1.5: f"({x} * {root})",
        0.5: root,
        -0.5: f"({one} / {root})",
        -1.0: f"({one} / {x})",
        -1.5: f"({one} / {x} / {root})",
        -2.0: f"({one} / ({x} * {x}))",
    }
    if power in short:  # pow is a logarithm and an exponential in float64; the root of -inf is NaN, not what C's pow has
        return short[power]
    return f"{_f('pow', dtype)}({a[0]}, ({compute_type(dtype)}){a[1]})"


def gelu(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    x, one = a[0], literal(dtype, 1)
    if node.attributes.get_string("approximate", "none") == "tanh":
        inner = f"{literal(dtype, math.sqrt(2 / math.pi))} * ({x} + {literal(dtype, 0.044715)} * {x} * {x} * {x})"
        return f"({x} / ({one} + {_f('exp', dtype)}({literal(dtype, -2)} * ({inner}))))"  # (1 + tanh u) / 2 = 1 / (1 + exp -2u)
    return f"gelu({x})"


def clip(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    value = a[0]
    if len(a) > 1 and a[1]:
        value = f"({value} < {a[1]} ? {a[1]} : {value})"
    if len(a) > 2 and a[2]:
        value = f"({value} > {a[2]} ? {a[2]} : {value})"
    return value


def scaled_exponential(alpha: float, gamma: float) -> Expression:
    def rule(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
        scale, slope = _attribute(node, "gamma", gamma), _attribute(node, "alpha", alpha)
        negative = f"{literal(dtype, slope)} * ({_f('exp', dtype)}({a[0]}) - {literal(dtype, 1)})"
        return f"({literal(dtype, scale)} * ({a[0]} > {literal(dtype, 0)} ? {a[0]} : {negative}))"

    return rule


def leaky_relu(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"({a[0]} >= {literal(dtype, 0)} ? {a[0]} : {literal(dtype, _attribute(node, 'alpha', 0.01))} * {a[0]})"


def hard_sigmoid(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    line = f"{literal(dtype, _attribute(node, 'alpha', 0.2))} * {a[0]} + {literal(dtype, _attribute(node, 'beta', 0.5))}"
    zero, one = literal(dtype, 0), literal(dtype, 1)
    return f"({line} < {zero} ? {zero} : {line} > {one} ? {one} : {line})"


def mean(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"(({' + '.join(a)}) / {literal(dtype, len(a))})"


def sign(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    kind = compute_type(dtype)
    if dtype.is_floating_point():
        return f"({a[0]} != {a[0]} ? {a[0]} : ({kind})(({a[0]} > 0) - ({a[0]} < 0)))"
    return f"(({kind})(({a[0]} > 0) - ({a[0]} < 0)))"


def absolute(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"{_f('fabs', dtype)}({a[0]})" if dtype.is_floating_point() else f"({a[0]} < 0 ? -{a[0]} : {a[0]})"


def is_infinite(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    sides = [f"{a[0]} == (INFINITY_VALUE)"] if node.attributes.get_int("detect_positive", 1) else []
    sides += [f"{a[0]} == (-INFINITY_VALUE)"] if node.attributes.get_int("detect_negative", 1) else []
    return f"({' || '.join(sides) or 'false'})"


def bit_shift(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    left = node.attributes.get_string("direction", "") == "LEFT"
    return f"({a[0]} {'<<' if left else '>>'} {a[1]})"


def thresholded_relu(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    return f"({a[0]} > {literal(dtype, _attribute(node, 'alpha', 1.0))} ? {a[0]} : {literal(dtype, 0)})"


def celu(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    alpha = literal(dtype, _attribute(node, "alpha", 1.0))
    negative = f"{alpha} * ({_f('exp', dtype)}({a[0]} / {alpha}) - {literal(dtype, 1)})"
    return f"({a[0]} > {literal(dtype, 0)} ? {a[0]} : {negative})"


def hard_swish(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    line, zero, one = f"({a[0]} / {literal(dtype, 6)} + {literal(dtype, 0.5)})", literal(dtype, 0), literal(dtype, 1)
    return f"({a[0]} * ({line} < {zero} ? {zero} : {line} > {one} ? {one} : {line}))"


def mish(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    """x·tanh(log(1 + eˣ)) = x·n/(n + 2), n = eˣ·(eˣ + 2); beyond 20 the factor is 1 in float64 too."""
    most, two = literal(dtype, 20), literal(dtype, 2)
    power = f"{_f('exp', dtype)}({a[0]} > {most} ? {most} : {a[0]})"
    n = f"({power} * ({power} + {two}))"
    return f"({a[0]} * ({n} / ({n} + {two})))"


def shrink(a: Sequence[str], node: ir.Node, dtype: ir.DataType) -> str:
    edge, bias = literal(dtype, _attribute(node, "lambd", 0.5)), literal(dtype, _attribute(node, "bias", 0.0))
    return f"({a[0]} < -{edge} ? {a[0]} + {bias} : {a[0]} > {edge} ? {a[0]} - {bias} : {literal(dtype, 0)})"
