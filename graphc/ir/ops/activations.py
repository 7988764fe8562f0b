"""Gradients of activations as single ops, which a backend computes in one sweep over memory."""

from __future__ import annotations

import math

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import declare, same_as


@declare("ReluGrad", inputs="dy y", outputs="dx", infer=same_as(0))
def relu_grad(op: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    """dx = dy where y > 0, else 0. ``y`` is Relu's output (or its input)."""
    zero = op.scalar(0, y)
    return op.Where(op.Greater(y, zero), dy, op.scalar(0, dy))  # type: ignore[no-any-return]


@declare("GeluGrad", inputs="dy x", outputs="dx", infer=same_as(0), attributes={"approximate": "none"})
def gelu_grad(op: Builder, dy: ir.Value, x: ir.Value, *, approximate: str) -> ir.Value:
    """dx = dy · Gelu'(x), with ``approximate`` as in ONNX's Gelu.

    ``none``: Gelu(x) = x·Φ(x), so Gelu'(x) = Φ(x) + x·φ(x) with the normal distribution Φ and its density φ.
    ``tanh``: Gelu(x) = ½x(1 + t), t = tanh(u), u = √(2/π)(x + 0.044715x³), so Gelu'(x) = ½(1 + t) + ½x(1 - t²)u'.
    """
    square = op.Mul(x, x)
    if approximate == "none":
        cumulative = op.Mul(op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0), 0.5)
        density = op.Mul(op.Exp(op.Mul(square, -0.5)), 1.0 / math.sqrt(2.0 * math.pi))
        slope = op.Add(cumulative, op.Mul(x, density))
    elif approximate == "tanh":
        scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
        t = op.Tanh(op.Mul(x, op.Add(op.Mul(square, scale * cubic), scale)))
        inner = op.Add(op.Mul(square, 3.0 * scale * cubic), scale)
        bend = op.Mul(op.Mul(x, inner), op.Sub(1.0, op.Mul(t, t)))
        slope = op.Mul(op.Add(op.Add(t, bend), 1.0), 0.5)
    else:
        raise ModelError(f"Gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return op.Mul(dy, slope)  # type: ignore[no-any-return]


@declare("SoftmaxGrad", inputs="dy y", outputs="dx", infer=same_as(0), attributes={"axis": -1})
def softmax_grad(op: Builder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    """dx = y·(dy − Σ dy·y) over ``axis``; ``y`` is Softmax's output."""
    return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)))  # type: ignore[no-any-return]
