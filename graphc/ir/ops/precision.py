"""Mixed precision ops: the scaled loss, the overflow check of gradients, the dynamic loss scale.

Half-precision gradients underflow: float16 ends at 6e-8. So the differentiated loss is multiplied by ``scale``, the
divisor of every update removes the factor, and a step whose gradients overflow is skipped and halves the scale
(P. Micikevicius et al., "Mixed precision training", ICLR 2018; the schedule is that of ``torch.amp.GradScaler``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import Role, Spec, declare, same_as, spec_of


@declare("ScaleLoss", inputs="total scale", outputs="same_total", infer=same_as(0))
def scale_loss(op: Builder, total: ir.Value, scale: ir.Value) -> ir.Value:
    """y = total, with a gradient ``scale`` times as large: the reported loss does not change."""
    return op.Identity(total)  # type: ignore[no-any-return]


def _flag(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType.BOOL, ir.Shape([]))]


@declare("AnyNonFinite", inputs="*x", outputs="skip", infer=_flag, combine="max")
def any_non_finite(op: Builder, *x: ir.Value) -> ir.Value:
    """Whether any element of any x is NaN or infinite: x − x is 0 for a finite number and NaN for every other."""
    sums = [op.Cast(op.ReduceSum(op.Sub(v, v), keepdims=0), to=int(ir.DataType.FLOAT)) for v in x]
    return op.IsNaN(op.Sum(*sums))  # type: ignore[no-any-return]


@declare("AnyNonFiniteOr", inputs="before *x", outputs="skip", infer=_flag)
def any_non_finite_or(op: Builder, before: ir.Value, *x: ir.Value) -> ir.Value:
    """``before``, or whether any element of any x is NaN or infinite: a flag that stays set."""
    return op.Or(before, op.graphc.AnyNonFinite(*x))  # type: ignore[no-any-return]


@declare("Tally", inputs="count flag", outputs="next_count", infer=same_as(0), next_value={0: 0}, roles={0: Role.COUNTER})
def tally(op: Builder, count: ir.Value, flag: ir.Value) -> ir.Value:
    """count' = count + 1 in a step whose flag is true"""
    return op.Add(count, op.cast_like(flag, count))  # type: ignore[no-any-return]


def _scale_spec(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [spec_of(inputs[0]), spec_of(inputs[1])]


@declare(
    "LossScale",
    inputs="scale good_steps skip",
    outputs="next_scale next_good_steps",
    attributes={"growth": 2.0, "backoff": 0.5, "growth_interval": 2000, "minimum": 1.0, "maximum": 16777216.0},
    infer=_scale_spec,
    next_value={0: 0, 1: 1},
    roles={0: Role.SCALE, 1: Role.COUNTER},
)
def loss_scale(
    op: Builder,
    scale: ir.Value,
    good_steps: ir.Value,
    skip: ir.Value,
    *,
    growth: float,
    backoff: float,
    growth_interval: int,
    minimum: float,
    maximum: float,
) -> tuple[ir.Value, ir.Value]:
    """The next scale, and the number of consecutive good steps.

    skipped step: scale' = max(scale · backoff, minimum), good' = 0;  otherwise good' = good + 1, and every
    ``growth_interval`` good steps scale' = min(scale · growth, maximum) and good' = 0.
    """
    count = op.Add(good_steps, 1)
    full = op.GreaterOrEqual(count, growth_interval)
    lower = op.Max(op.Mul(scale, backoff), op.scalar(minimum, scale))
    higher = op.Min(op.Mul(scale, growth), op.scalar(maximum, scale))
    following = op.Where(skip, lower, op.Where(full, higher, scale))
    return following, op.Where(op.Or(skip, full), op.scalar(0, good_steps), count)
