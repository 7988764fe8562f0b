"""Gradients of activation functions. At a kink the subgradient is the one PyTorch takes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.passes.gradients.elementwise import unary

unary("Relu", "y = max(x, 0);  ∂x = dy where y > 0, else 0", lambda op, dy, x, y: op.graphc.ReluGrad(dy, y))


@gradient("graphc::ReluGrad")
def relu_grad(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = dy where y > 0, else 0;  ∂dy = dz where y > 0, else 0"""
    return op.graphc.ReluGrad(dz, node.inputs[1])


unary(
    "LeakyRelu",
    "y = x where x > 0, else α·x;  ∂x = dy where x > 0, else α·dy",
    lambda op, dy, x, y, *, alpha=0.01: op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, alpha)),
)


@gradient("PRelu")
def prelu(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x where x > 0, else s·x;  ∂x = dy where x > 0, else s·dy;  ∂s = 0 where x > 0, else x·dy"""
    x, slope = node.inputs
    above = op.Greater(x, 0.0)
    return (
        lambda: op.Where(above, dy, op.Mul(dy, slope)),
        lambda: op.Where(above, op.scalar(0, dy), op.Mul(dy, x)),
    )


unary(
    "ThresholdedRelu",
    "y = x where x > α, else 0;  ∂x = dy where x > α, else 0",
    lambda op, dy, x, y, *, alpha=1.0: op.Where(op.Greater(x, alpha), dy, op.scalar(0, dy)),
)
unary(
    "Shrink",
    "y = x ± bias where |x| > λ, else 0;  ∂x = dy where |x| > λ, else 0",
    lambda op, dy, x, y, *, lambd=0.5: op.Where(op.Greater(op.Abs(x), lambd), dy, op.scalar(0, dy)),
)
unary(
    "Elu",
    "y = x where x > 0, else α(eˣ - 1);  ∂x = dy where x > 0, else dy·(y + α)",
    lambda op, dy, x, y, *, alpha=1.0: op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, op.Add(y, alpha))),
)
unary(
    "Selu",
    "y = γx where x > 0, else γα(eˣ - 1);  ∂x = γ·dy where x > 0, else dy·(y + γα)",
    lambda op, dy, x, y, *, alpha=1.6732631921768188, gamma=1.0507010221481323: op.Mul(
        dy, op.Where(op.Greater(x, 0.0), op.scalar(gamma, dy), op.Add(y, gamma * alpha))
    ),
)
unary(
    "Celu",
    "y = x where x > 0, else α(exp(x/α) - 1);  ∂x = dy where x > 0, else dy·(y/α + 1)",
    lambda op, dy, x, y, *, alpha=1.0: op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, op.Add(op.Mul(y, 1 / alpha), 1.0))),
)
unary("Sigmoid", "y = 1/(1 + e⁻ˣ);  ∂x = dy·y·(1 - y)", lambda op, dy, x, y: op.Mul(dy, op.Mul(y, op.Sub(1.0, y))))


def _hard_sigmoid(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, *, alpha: float = 0.2) -> Any:
    inside = op.And(op.Greater(y, 0.0), op.Less(y, 1.0))
    return op.Where(inside, op.Mul(dy, alpha), op.scalar(0, dy))


unary("HardSigmoid", "y = min(max(αx + β, 0), 1);  ∂x = α·dy where 0 < y < 1, else 0", _hard_sigmoid)


def _hard_swish(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value) -> Any:
    middle = op.Mul(dy, op.Add(op.Mul(x, 1 / 3), 0.5))
    return op.Where(op.Less(x, -3.0), op.scalar(0, dy), op.Where(op.LessOrEqual(x, 3.0), middle, dy))


unary("HardSwish", "y = x·min(max(x/6 + ½, 0), 1);  ∂x = 0 where x < -3, dy·(x/3 + ½) up to 3, dy beyond", _hard_swish)


def _swish(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, *, alpha: float = 1.0) -> Any:
    s = op.Sigmoid(op.Mul(x, alpha) if alpha != 1 else x)
    bend = op.Mul(y, op.Sub(1.0, s))
    return op.Mul(dy, op.Add(s, op.Mul(bend, alpha) if alpha != 1 else bend))


unary("Swish", "y = x·s, s = sigmoid(αx);  ∂x = dy·(s + α·y·(1 - s))", _swish)


def _mish(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value) -> Any:
    t = op.Tanh(op.Softplus(x))
    return op.Mul(dy, op.Add(t, op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(t, t)))))


unary("Mish", "y = x·t, t = tanh(softplus x);  ∂x = dy·(t + x·sigmoid(x)·(1 - t²))", _mish)
unary("Tanh", "y = tanh x;  ∂x = dy·(1 - y²)", lambda op, dy, x, y: op.Mul(dy, op.Sub(1.0, op.Mul(y, y))))
unary("Softplus", "y = ln(1 + eˣ);  ∂x = dy·sigmoid x", lambda op, dy, x, y: op.Mul(dy, op.Sigmoid(x)))


def _softsign(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value) -> Any:
    d = op.Add(op.Abs(x), 1.0)
    return op.Div(dy, op.Mul(d, d))


unary("Softsign", "y = x/(1 + |x|);  ∂x = dy/(1 + |x|)²", _softsign)
unary(
    "Gelu",
    "y = x·Φ(x), or its tanh approximation;  ∂x = dy·Gelu'(x)",
    lambda op, dy, x, y, *, approximate="none": op.graphc.GeluGrad(dy, x, approximate=approximate),
)
