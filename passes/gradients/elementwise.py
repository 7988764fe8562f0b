"""Gradients of elementwise ops. At a kink the subgradient is the one PyTorch takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe

zero_gradient("Sign", "Floor", "Ceil", "Round", origin=__name__)
zero_gradient("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN", origin=__name__)
zero_gradient("And", "Or", "Xor", "Not", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", origin=__name__)
zero_gradient("BitCast", origin=__name__)

# Arithmetic -----------------------------------------------------------------------------------------------------------


@gradient("Add", "Sum")
def add(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a + b + …;  ∂a = ∂b = … = dz"""
    return (dz,) * len(node.inputs)


@gradient("Sub")
def sub(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a - b;  ∂a = dz,  ∂b = -dz"""
    return dz, lambda: op.Neg(dz)


@gradient("Mul")
def mul(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a·b;  ∂a = dz·b,  ∂b = dz·a"""
    a, b = node.inputs
    return lambda: op.Mul(dz, b), lambda: op.Mul(dz, a)


@gradient("Div")
def div(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a/b;  ∂a = dz/b,  ∂b = -z·dz/b"""
    (z,) = node.outputs
    da = op.Div(dz, node.inputs[1])
    return da, lambda: op.Neg(op.Mul(da, z))


@gradient("Mod")
def mod(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a - b·q with an integer q;  ∂a = dz,  ∂b = -q·dz"""
    (a, b), (z,) = node.inputs, node.outputs
    return dz, lambda: op.Mul(dz, op.Div(op.Sub(z, a), b))


@gradient("Mean")
def mean(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = (a + b + …)/n;  ∂a = ∂b = … = dz/n"""
    n = len(node.inputs)
    return (op.Mul(dz, 1 / n) if n > 1 else dz,) * n


@gradient("Max", "Min")
def extremum(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = max(a, b, …);  ∂a = dz where a = z, shared evenly among the inputs that tie"""
    (z,) = node.outputs
    if len(node.inputs) == 1:
        return dz
    hits = [op.cast_like(op.Equal(x, z), dz) for x in node.inputs]
    share = op.Div(dz, op.Sum(*hits))
    return tuple(functools.partial(op.Mul, share, hit) for hit in hits)


@gradient("Pow")
def power(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = aᵇ;  ∂a = dz·b·aᵇ⁻¹ (0 where b = 0),  ∂b = dz·z·ln a (0 where a = 0 ≤ b)"""
    (a, index), (z,) = operands(node, 2), node.outputs
    exponent = constant(index)
    if exponent is not None and exponent.size == 1:
        return functools.partial(_power_by_constant, op, a, z, dz, float(exponent.reshape(-1)[0].astype(np.float64)))
    b = op.cast_like(index, a)

    def of_base() -> Any:
        return op.Where(op.Equal(b, 0.0), op.scalar(0, a), op.Mul(dz, op.Mul(b, op.Pow(a, op.Sub(b, 1.0)))))

    def of_index() -> Any:
        silent = op.And(op.Equal(a, 0.0), op.GreaterOrEqual(b, 0.0))
        return op.cast_like(op.Where(silent, op.scalar(0, a), op.Mul(dz, op.Mul(z, op.Log(a)))), index)

    return of_base, of_index


def _power_by_constant(op: Builder, a: ir.Value, z: ir.Value, dz: ir.Value, b: float) -> Any:
    if b == 0:
        return None
    if b == 1:
        return dz
    if b == 2:
        return op.Mul(dz, op.Mul(a, 2.0))
    if b == 0.5:
        return op.Div(op.Mul(dz, 0.5), z)
    if b == -1:
        return op.Neg(op.Mul(dz, op.Mul(z, z)))
    slope = op.Mul(op.Mul(a, a), 3.0) if b == 3 else op.Mul(op.Pow(a, b - 1), b)
    return op.Mul(dz, slope)


# Choice, copies and conversions ---------------------------------------------------------------------------------------


@gradient("Where")
def where(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a where c, else b;  ∂a = dz where c, else 0;  ∂b the other way round"""
    c, zero = node.inputs[0], op.scalar(0, dz)
    return None, lambda: op.Where(c, dz, zero), lambda: op.Where(c, zero, dz)


def _number(value: ir.Value | None) -> float | None:
    """What a scalar holds, if it is a constant, or a constant of another type."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type in ("Cast", "CastLike"):
        return _number(node.inputs[0])
    known = constant(value) if value is not None else None
    return float(known.item()) if known is not None and known.size == 1 else None


@gradient("Clip")
def clip(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = min(max(x, low), high);  ∂x = dz where low ≤ x ≤ high,  ∂low = dz where x < low ≤ high,  ∂high = dz elsewhere

    What equals a bound has the gradient, as in PyTorch's clamp; but not between 0 and 6, which is how files write ReLU6.
    """
    x, low, high = (*node.inputs, None, None)[:3]
    zero = op.scalar(0, dz)
    relu6 = (_number(low), _number(high)) == (0, 6)

    def inside() -> Any:
        if relu6:
            return op.Where(op.And(op.Greater(x, low), op.Less(x, high)), dz, zero)
        tests = [op.GreaterOrEqual(x, low)] if low is not None else []
        tests += [op.LessOrEqual(x, high)] if high is not None else []
        if not tests:
            return dz
        return op.Where(op.And(*tests) if len(tests) == 2 else tests[0], dz, zero)

    def of_low() -> Any:
        below = op.Less(x, low)
        return op.Where(below if high is None else op.And(below, op.LessOrEqual(low, high)), dz, zero)

    def of_high() -> Any:
        return op.Where(op.Greater(x if low is None else op.Max(x, low), high), dz, zero)

    return inside, of_low, of_high


@gradient("Identity")
def identity(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = x;  ∂x = dz"""
    return dz


@gradient("Cast", "CastLike")
def cast(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = x in another float type;  ∂x = dz in the type of x, or as it is where x is a quantised tensor"""
    (x,) = operands(node, 1)
    return op.cast_like(dz, x) if op.is_float(x) else dz


@gradient("Dropout")
def dropout(op: Builder, node: ir.Node, dz: ir.Value, dmask: None = None) -> Any:
    """Outside training z = x;  ∂x = dz. In training z = x·mask/(1 - ratio), with the mask drawn by the node itself.

    The ``train_mode`` pass replaces such a Dropout by one whose mask is the same on every replay; this rule is for graphs
    without it.
    """
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is None:
        return dz
    known = constant(training)
    if known is None:
        raise UnsupportedOpError(f"run the pass 'train_mode' before 'autodiff': {describe(node)} may be in training mode")
    if not known.any():
        return dz
    if len(node.outputs) < 2:
        node.resize_outputs(2)
        mask = node.outputs[1]
        mask.name, mask.type, mask.shape = op.unique(f"{node.name}.mask", value=True), ir.TensorType(ir.DataType.BOOL), dz.shape
    ratio = node.inputs[1] if node.inputs[1] is not None else op.scalar(0.5, dz)
    return op.Mul(op.Where(node.outputs[1], dz, op.scalar(0, dz)), op.Reciprocal(op.Sub(1.0, op.cast_like(ratio, dz))))


# Functions of one variable --------------------------------------------------------------------------------------------


def _arcsine(op: Builder, dy: ir.Value, x: ir.Value) -> Any:
    """dy/√(1 - x²), factored, for x² loses the digits that count near the ends."""
    return op.Div(dy, op.Sqrt(op.Mul(op.Sub(1.0, x), op.Add(x, 1.0))))


def unary(op_type: str, doc: str, formula: Callable[..., Any]) -> None:
    """Register ``formula(op, dy, x, y, **attributes)``; keyword defaults are those of the ONNX attributes."""
    defaults = formula.__kwdefaults__ or {}

    def rule(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
        given = {name: node.attributes[name].value for name in defaults if name in node.attributes}
        return formula(op, dy, node.inputs[0], node.outputs[0], **{**defaults, **given})

    rule.__doc__, rule.__module__ = doc, formula.__module__
    gradient(op_type)(rule)


unary("Neg", "y = -x;  ∂x = -dy", lambda op, dy, x, y: op.Neg(dy))
unary("Abs", "y = |x|;  ∂x = dy·sign x", lambda op, dy, x, y: op.Mul(dy, op.Sign(x)))
unary("Reciprocal", "y = 1/x;  ∂x = -dy·y²", lambda op, dy, x, y: op.Neg(op.Mul(dy, op.Mul(y, y))))
unary("Sqrt", "y = √x;  ∂x = dy/2y", lambda op, dy, x, y: op.Div(op.Mul(dy, 0.5), y))
unary("Exp", "y = eˣ;  ∂x = dy·y", lambda op, dy, x, y: op.Mul(dy, y))
unary("Log", "y = ln x;  ∂x = dy/x", lambda op, dy, x, y: op.Div(dy, x))
unary(
    "Erf",
    "y = erf x;  ∂x = dy·2/√π·exp(-x²)",
    lambda op, dy, x, y: op.Mul(dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2 / math.sqrt(math.pi))),
)
unary("Sin", "y = sin x;  ∂x = dy·cos x", lambda op, dy, x, y: op.Mul(dy, op.Cos(x)))
unary("Cos", "y = cos x;  ∂x = -dy·sin x", lambda op, dy, x, y: op.Neg(op.Mul(dy, op.Sin(x))))
unary("Tan", "y = tan x;  ∂x = dy·(1 + y²)", lambda op, dy, x, y: op.Mul(dy, op.Add(op.Mul(y, y), 1.0)))
unary(
    "Asin",
    "y = arcsin x;  ∂x = dy/√(1 - x²), factored, for x² loses the digits that count near the ends",
    lambda op, dy, x, y: _arcsine(op, dy, x),
)
unary("Acos", "y = arccos x;  ∂x = -dy/√(1 - x²)", lambda op, dy, x, y: op.Neg(_arcsine(op, dy, x)))
unary("Atan", "y = arctan x;  ∂x = dy/(1 + x²)", lambda op, dy, x, y: op.Div(dy, op.Add(op.Mul(x, x), 1.0)))
unary("Sinh", "y = sinh x;  ∂x = dy·cosh x", lambda op, dy, x, y: op.Mul(dy, op.Cosh(x)))
unary("Cosh", "y = cosh x;  ∂x = dy·sinh x", lambda op, dy, x, y: op.Mul(dy, op.Sinh(x)))
unary("Asinh", "y = arsinh x;  ∂x = dy/√(x² + 1)", lambda op, dy, x, y: op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1.0))))
unary(
    "Acosh",
    "y = arcosh x;  ∂x = dy/√(x² - 1)",
    lambda op, dy, x, y: op.Div(dy, op.Sqrt(op.Mul(op.Sub(x, 1.0), op.Add(x, 1.0)))),
)
unary("Atanh", "y = artanh x;  ∂x = dy/(1 - x²)", lambda op, dy, x, y: op.Div(dy, op.Mul(op.Sub(1.0, x), op.Add(x, 1.0))))
