"""BatchNormalization over the global batch, split where ``sync_batchnorm`` inserts AllReduces.

    count, total, squares = graphc.BatchMoments(x, live)                    ── AllReduce(sum) ──►
    mean, var, inv_std    = graphc.BatchStatistics(count, total, squares; epsilon)
    y                     = graphc.SharedNormalization(x, scale, bias, mean, inv_std, count, live; tag)
    dscale, dbias, product, slope = graphc.SharedNormalizationSums(dy, x, mean, inv_std)
                                                                            ── AllReduce(sum) of product, slope ──►
    dx                    = graphc.SharedNormalizationGrad(dy, x, scale, mean, inv_std, count, product, slope, live)

Sums are reduced over workers in float64. Merging (n, mean, M2) of two parts, as Chan, Golub and LeVeque do ("Updating formulae
and a pairwise algorithm for computing sample variances", 1979), means adding n, n·mean and M2 + n·mean². A float32 element
and its square are exact in float64, so the final subtraction loses nothing, and the division of the batch changes the result
by no more than float64 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, same_as, spec_of
from graphc.ir.ops.normalization import EPSILON, all_but_channels, elements_per_statistic, per_channel

DOUBLE = ir.DataType.DOUBLE


def _channels(value: ir.Value | None) -> ir.Shape | None:
    shape = spec_of(value)[1]
    return None if shape is None else ir.Shape([shape[1]])


def _moments(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    channels = _channels(inputs[0])
    return [(DOUBLE, ir.Shape([])), (DOUBLE, channels), (DOUBLE, channels)]


@declare("BatchMoments", inputs="x live", outputs="count total squares", infer=_moments)
def batch_moments(op: Builder, x: ir.Value, live: ir.Value) -> tuple[ir.Value, ...]:
    """count = elements per channel, total = Σ x, squares = Σ x²; all float64, and 0 where ``live`` is 0.

    ``x``: N × C × positions (none for rank 2); count: scalar; total and squares: C.
    """
    wide, axes = op.Cast(x, to=int(DOUBLE)), all_but_channels(x)
    total, squares = (op.ReduceSum(v, axes, keepdims=0) for v in (wide, op.Mul(wide, wide)))
    alive = op.Greater(live, 0.0)
    zero = op.scalar(0.0, total)
    found = (elements_per_statistic(op, x, total), total, squares)
    return tuple(op.Where(alive, value, zero) for value in found)


@declare(
    "BatchStatistics",
    inputs="count total squares",
    outputs="mean var inv_std",
    attributes={"epsilon": EPSILON, "dtype": int(ir.DataType.FLOAT)},
    infer=lambda inputs, attributes: [(ir.DataType(int(attributes["dtype"])), spec_of(inputs[1])[1])] * 3,
)
def batch_statistics(
    op: Builder, count: ir.Value, total: ir.Value, squares: ir.Value, *, epsilon: float, dtype: int
) -> tuple[ir.Value, ...]:
    """mean = total/count, var = squares/count − mean² (biased, at least 0), inv_std = 1/√(var + ε), as ``dtype``."""
    elements = op.Max(count, op.scalar(1.0, count))
    mean = op.Div(total, elements)
    var = op.Max(op.Sub(op.Div(squares, elements), op.Mul(mean, mean)), op.scalar(0.0, total))
    inv_std = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    return tuple(op.Cast(value, to=dtype) for value in (mean, var, inv_std))


@declare(
    "SharedNormalization",
    inputs="x scale bias mean inv_std count live",
    outputs="y",
    attributes={"tag": REQUIRED, "group": "data"},
    infer=same_as(0),
)
def shared_normalization(op: Builder, *operands: ir.Value, tag: str, group: str) -> ir.Value:
    """y = scale·(x − mean)·inv_std + bias with mean and inv_std of the batch of all ranks of ``group``.

    Its gradient includes the path through the statistics; ``count``, ``live`` and ``tag`` serve that gradient.
    """
    x, scale, bias, mean, inv_std, *_ = operands
    factor = op.Mul(op.cast_like(scale, mean), inv_std)
    centred = op.Sub(op.cast_like(x, mean), per_channel(op, mean, x))
    y = op.Add(op.Mul(centred, per_channel(op, factor, x)), per_channel(op, op.cast_like(bias, mean), x))
    return op.cast_like(y, x)


def _sums(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    narrow = spec_of(inputs[2])
    return [narrow, narrow, (DOUBLE, narrow[1]), (DOUBLE, narrow[1])]


@declare("SharedNormalizationSums", inputs="dy x mean inv_std", outputs="dscale dbias product slope", infer=_sums)
def shared_normalization_sums(
    op: Builder, dy: ir.Value, x: ir.Value, mean: ir.Value, inv_std: ir.Value
) -> tuple[ir.Value, ...]:
    """product = Σ dy·x̂ and slope = Σ dy over this rank's elements, in float64; dscale and dbias are the same, rounded."""
    axes = all_but_channels(x)
    centred = op.Sub(op.cast_like(x, mean), per_channel(op, mean, x))
    wide, centred = (op.Cast(v, to=int(DOUBLE)) for v in (dy, centred))
    product = op.Mul(op.ReduceSum(op.Mul(wide, centred), axes, keepdims=0), op.Cast(inv_std, to=int(DOUBLE)))
    slope = op.ReduceSum(wide, axes, keepdims=0)
    return op.cast_like(product, mean), op.cast_like(slope, mean), product, slope


@declare(
    "SharedNormalizationGrad",
    inputs="dy x scale mean inv_std count product slope live",
    outputs="dx",
    infer=same_as(1),
)
def shared_normalization_grad(op: Builder, *operands: ir.Value) -> ir.Value:
    """dx = scale·inv_std·(dy − slope/count − x̂·product/count), with count and sums over all ranks; 0 where ``live`` is 0."""
    dy, x, scale, mean, inv_std, count, product, slope, live = operands
    elements = op.Max(count, op.scalar(1.0, count))
    factor = op.Mul(op.cast_like(scale, mean), inv_std)
    level, tilt = (op.cast_like(op.Div(v, elements), mean) for v in (slope, product))
    centred = op.Sub(op.cast_like(x, mean), per_channel(op, mean, x))
    bent = op.Mul(centred, per_channel(op, op.Mul(inv_std, tilt), x))
    dx = op.Sub(op.Sub(op.cast_like(dy, mean), per_channel(op, level, x)), bent)
    dx = op.Mul(dx, per_channel(op, factor, x))
    return op.cast_like(op.Where(op.Greater(live, 0.0), dx, op.scalar(0.0, dx)), x)
