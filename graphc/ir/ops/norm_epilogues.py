"""Batch norms with what follows them: a sum, an activation.

    y, mean, var, inv_std = graphc.FusedBatchNormalization(x, scale, bias, residual?; epsilon, activation, alpha, beta)
    dx, dscale, dbias = graphc.FusedBatchNormalizationGrad(dy, x, scale, bias, mean, inv_std; activation, alpha, beta, closed)

The ``norm_epilogues`` pass makes them, for backends whose kernels compute it in the same pass over memory. The gradient
computes from x what the activation met, so that nothing keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.ops.epilogues import ACTIVATIONS
from graphc.ir.ops.normalization import EPSILON, per_channel

Slope: TypeAlias = Callable[[Builder, ir.Value, ir.Value, Mapping[str, Any]], Any]


def _between(op: Builder, dy: ir.Value, x: ir.Value, attributes: Mapping[str, Any]) -> Any:
    closed, relu = attributes["closed"], attributes["activation"] == "relu"
    low, high = (op.scalar(0.0 if relu else attributes[name], x) for name in ("alpha", "beta"))
    inside = op.GreaterOrEqual(x, low) if closed else op.Greater(x, low)
    if not relu:
        inside = op.And(inside, op.LessOrEqual(x, high) if closed else op.Less(x, high))
    return op.Where(inside, dy, op.scalar(0, dy))


def _leaky_relu(op: Builder, dy: ir.Value, x: ir.Value, attributes: Mapping[str, Any]) -> Any:
    return op.Where(op.Greater(x, op.scalar(0, x)), dy, op.Mul(dy, attributes["alpha"]))


def _hard_swish(op: Builder, dy: ir.Value, x: ir.Value, attributes: Mapping[str, Any]) -> Any:
    bent = op.Where(op.LessOrEqual(x, op.scalar(3.0, x)), op.Mul(dy, op.Add(op.Mul(x, 1 / 3), 0.5)), dy)
    return op.Where(op.Less(x, op.scalar(-3.0, x)), op.scalar(0, dy), bent)


def _silu(op: Builder, dy: ir.Value, x: ir.Value, attributes: Mapping[str, Any]) -> Any:
    s = op.Sigmoid(x)
    return op.Mul(dy, op.Add(s, op.Mul(op.Mul(x, s), op.Sub(1.0, s))))


SLOPES: Mapping[str, Slope] = {
    "relu": _between,
    "clip": _between,
    "leaky_relu": _leaky_relu,
    "hard_swish": _hard_swish,
    "silu": _silu,
}
"""The gradients of activations by name. ``alpha`` is the slope of a LeakyRelu, ``alpha`` and ``beta`` the bounds of a Clip."""


def _check(attributes: Mapping[str, Any], *others: str) -> None:
    if attributes["activation"] not in (*SLOPES, *others):
        raise ModelError(f"the activation behind a batch norm is one of {', '.join(SLOPES)}, not {attributes['activation']!r}")


def _infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    _check(attributes, "")
    return [spec_of(inputs[0]), *[spec_of(inputs[1])] * 3]


@declare(
    "FusedBatchNormalization",
    inputs="x scale bias residual?",
    outputs="y mean var inv_std",
    infer=_infer,
    attributes={"epsilon": EPSILON, "activation": "", "alpha": 0.0, "beta": 0.0},
)
def fused_batch_normalization(
    op: Builder,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    residual: ir.Value | None = None,
    *,
    epsilon: float,
    activation: str,
    alpha: float,
    beta: float,
) -> tuple[ir.Value, ...]:
    """y = activation(BatchNormalizationTraining(x, scale, bias) + residual), and the statistics."""
    y, *statistics = op.graphc.BatchNormalizationTraining(x, scale, bias, epsilon=epsilon)
    y = y if residual is None else op.Add(y, residual)
    return op.Mul(y, op.Sigmoid(y)) if activation == "silu" else ACTIVATIONS[activation](op, y, alpha, beta), *statistics


def _infer_grad(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    _check(attributes)
    return [spec_of(inputs[k]) for k in (1, 2, 2)]


@declare(
    "FusedBatchNormalizationGrad",
    inputs="dy x scale bias mean inv_std",
    outputs="dx dscale dbias",
    infer=_infer_grad,
    attributes={"activation": REQUIRED, "alpha": 0.0, "beta": 0.0, "closed": 0},
)
def fused_batch_normalization_grad(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    mean: ir.Value,
    inv_std: ir.Value,
    *,
    activation: str,
    alpha: float,
    beta: float,
    closed: int,
) -> tuple[ir.Value, ...]:
    """Gradient of FusedBatchNormalization without a residual. What equals a bound has a slope where it is ``closed``."""
    factor = op.Mul(scale, inv_std)
    shift = op.Sub(bias, op.Mul(mean, factor))
    result = op.Add(op.Mul(x, per_channel(op, factor, x)), per_channel(op, shift, x))
    attributes = {"activation": activation, "alpha": alpha, "beta": beta, "closed": closed}
    slope = SLOPES[activation](op, dy, result, attributes)
    return tuple(op.graphc.BatchNormalizationTrainingGrad(slope, x, scale, mean, inv_std))
