"""Batch norms with what follows them: a sum, an activation that cuts results off at bounds.

    y, mean, var, inv_std = graphc.FusedBatchNormalization(x, scale, bias, residual?; epsilon, activation, alpha, beta)
    dx, dscale, dbias = graphc.FusedBatchNormalizationGrad(dy, x, scale, bias, mean, inv_std; activation, alpha, beta, closed)

The ``norm_epilogues`` pass makes them, for backends whose kernels compute it in the same pass over memory. The gradient learns
from x on which side of a bound a result lies, so that nothing keeps the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.ops.normalization import EPSILON, per_channel

BOUNDED = ("relu", "clip")
"""Activations that leave what lies between two bounds as it is: those of a Clip are ``alpha`` and ``beta``."""


def _check(attributes: Mapping[str, Any], *others: str) -> None:
    if attributes["activation"] not in (*BOUNDED, *others):
        raise ModelError(f"the activation behind a batch norm is one of {', '.join(BOUNDED)}, not {attributes['activation']!r}")


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
    if activation == "relu":
        y = op.Relu(y)
    elif activation == "clip":
        y = op.Clip(y, op.scalar(alpha, y), op.scalar(beta, y))
    return y, *statistics


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
    """Gradient of FusedBatchNormalization without a residual. What equals a bound has one too where this is ``closed``."""
    factor = op.Mul(scale, inv_std)
    shift = op.Sub(bias, op.Mul(mean, factor))
    result = op.Add(op.Mul(x, per_channel(op, factor, x)), per_channel(op, shift, x))
    low, high = (op.scalar(value, x) for value in ((0.0, 0.0) if activation == "relu" else (alpha, beta)))
    inside = op.GreaterOrEqual(result, low) if closed else op.Greater(result, low)
    if activation == "clip":
        inside = op.And(inside, op.LessOrEqual(result, high) if closed else op.Less(result, high))
    slope = op.Where(inside, dy, op.scalar(0, dy))
    return tuple(op.graphc.BatchNormalizationTrainingGrad(slope, x, scale, mean, inv_std))
