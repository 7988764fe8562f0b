"""Normalisation ops: batch statistics for training, and fused gradients.

    y, mean, var, inv_std = graphc.BatchNormalizationTraining(x, scale, bias; epsilon)
    dx, dscale, dbias     = graphc.BatchNormalizationTrainingGrad(dy, x, scale, mean, inv_std)
    dx, dscale, dbias     = graphc.LayerNormalizationGrad(dy, x, scale, mean, inv_std; axis, epsilon)
    dx                    = graphc.LRNGrad(dy, x, y; alpha, beta, bias, size)

The gradient of x̂ = (x - mean(x))·inv_std is dx = inv_std·(dx̂ - mean(dx̂) - x̂·mean(dx̂·x̂)); means are over the
normalised axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare, same_as, spec_of
from graphc.ir.facts import dims, rank, same_dims, static_dims

EPSILON = 1e-5


def per_channel(op: Builder, value: ir.Value, x: ir.Value) -> ir.Value:
    """A vector of C entries, reshaped to broadcast along axis 1 of ``x``."""
    behind = rank(x) - 2
    return op.Unsqueeze(value, np.arange(1, 1 + behind, dtype=np.int64)) if behind > 0 else value


def all_but_channels(x: ir.Value) -> list[int]:
    """The batch axis and the position axes."""
    return [0, *range(2, rank(x))]


@declare(
    "BatchNormalizationTraining",
    inputs="x scale bias",
    outputs="y mean var inv_std",
    infer=lambda inputs, attributes: [spec_of(inputs[0]), *[spec_of(inputs[1])] * 3],
    attributes={"epsilon": EPSILON},
)
def batch_normalization_training(
    op: Builder, x: ir.Value, scale: ir.Value, bias: ir.Value, *, epsilon: float
) -> tuple[ir.Value, ...]:
    """y = scale·(x - mean)·inv_std + bias with the mean and the biased variance of this batch, inv_std = 1/√(var + ε).

    ``x``: N × C × positions (none for rank 2), all others: C. Other nodes update the running statistics.
    """
    axes = all_but_channels(x)
    first = op.Slice(x, [0] * len(axes), [1] * len(axes), axes)
    # Without momentum the "running" statistics are those of the batch. onnxruntime writes them over their inputs, which
    # must therefore be two buffers without other readers: no constants, and no equal expressions.
    zero = op.Mul(op.cast_like(op.Reshape(first, [-1]), scale), 0.0)
    y, mean, var = op.BatchNormalization(
        x, scale, bias, zero, op.Neg(zero), epsilon=epsilon, momentum=0.0, training_mode=1, _outputs=3
    )
    return y, mean, var, op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))


def batch_normalized(
    op: Builder, x: ir.Value, scale: ir.Value, bias: ir.Value, axis: int, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """:func:`batch_normalization_training` for channels along ``axis``, with statistics from one pass over x.

    Sums x − K and (x − K)² in at least float32; K, the channel's first element, keeps both small.
    """
    axes = [k for k in range(rank(x)) if k != axis]
    wide = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    first = op.Slice(x, [0] * len(axes), [1] * len(axes), axes)
    x32, first = (op.Cast(v, to=int(ir.DataType.FLOAT)) if wide else v for v in (x, first))
    moved = op.Sub(x32, first)
    shift, spread = op.ReduceMean(moved, axes, keepdims=0), op.ReduceMean(op.Mul(moved, moved), axes, keepdims=0)
    mean = op.cast_like(op.Add(op.Reshape(first, [-1]), shift), scale)
    variance = op.Relu(op.cast_like(op.Sub(spread, op.Mul(shift, shift)), scale))
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    factor = op.Mul(inverse, scale)
    offset = op.Sub(bias, op.Mul(mean, factor))
    shape = [-1, *[1] * (rank(x) - 1 - axis)]
    by, plus = (op.cast_like(op.Reshape(v, shape), x32) for v in (factor, offset))
    return op.cast_like(op.Add(op.Mul(x32, by), plus), x), mean, variance, inverse


@declare(
    "BatchNormalizationTrainingGrad",
    inputs="dy x scale mean inv_std",
    outputs="dx dscale dbias",
    infer=same_as(1, 2, 2),
)
def batch_normalization_training_grad(
    op: Builder, dy: ir.Value, x: ir.Value, scale: ir.Value, mean: ir.Value, inv_std: ir.Value
) -> tuple[ir.Value, ...]:
    """Gradient of BatchNormalizationTraining with m = elements per channel:

    dbias = Σ dy,  dscale = Σ dy·x̂,  dx = scale·inv_std·(dy - dbias/m - x̂·dscale/m)
    """
    axes = all_but_channels(x)
    slope = op.cast_like(dy, mean)
    centred = op.Sub(op.cast_like(x, mean), per_channel(op, mean, x))
    dbias = op.ReduceSum(slope, axes, keepdims=0)
    dscale = op.Mul(op.ReduceSum(op.Mul(slope, centred), axes, keepdims=0), inv_std)
    count = elements_per_statistic(op, x, mean)
    factor = op.Mul(op.cast_like(scale, mean), inv_std)
    share = op.Neg(op.Div(factor, count))
    bend = op.Mul(op.Mul(share, inv_std), dscale)
    dx = op.Add(op.Mul(slope, per_channel(op, factor, x)), op.Mul(centred, per_channel(op, bend, x)))
    dx = op.Add(dx, per_channel(op, op.Mul(share, dbias), x))
    return op.cast_like(dx, x), op.cast_like(dscale, scale), op.cast_like(dbias, scale)


def elements_per_statistic(op: Builder, x: ir.Value, statistic: ir.Value) -> ir.Value:
    """Number of elements of ``x`` behind one entry of a mean or variance, as a scalar of the statistic's type."""
    whole, entries = static_dims(x), static_dims(statistic)
    if whole is not None and entries is not None:
        return op.scalar(float(np.prod(whole)) / float(np.prod(entries)), statistic)
    return op.cast_like(op.Div(op.Size(x), op.Size(statistic)), statistic)


@declare(
    "LayerNormalizationGrad",
    inputs="dy x scale mean inv_std",
    outputs="dx dscale dbias",
    infer=same_as(1, 2, 2),
    attributes={"axis": -1, "epsilon": EPSILON},
)
def layer_normalization_grad(op: Builder, *operands: ir.Value, axis: int, epsilon: float) -> tuple[ir.Value, ...]:
    """Gradient of LayerNormalization over axes ``axis`` to the last, with dx̂ = dy·scale:

        dx = inv_std·(dx̂ - mean(dx̂) - x̂·mean(dx̂·x̂)),  dscale = Σ dy·x̂,  dbias = Σ dy

    ``mean`` and ``inv_std`` are the forward op's outputs (reduced axes kept, of size 1) and include ``epsilon``
    already. ``scale`` broadcasts to x, and the bias has its shape.
    """
    dy, x, scale, mean, inv_std = operands
    first = axis % rank(x)
    axes = list(range(first, rank(x)))
    slope = op.cast_like(dy, mean)
    normal = op.Mul(op.Sub(op.cast_like(x, mean), mean), inv_std)
    dx = normalization_grad(op, op.Mul(slope, op.cast_like(scale, mean)), normal, inv_std, axes)
    dscale = _sum_to_scale(op, op.Mul(slope, normal), scale, first)
    dbias = _sum_to_scale(op, slope, scale, first)
    return op.cast_like(dx, x), op.cast_like(dscale, scale), op.cast_like(dbias, scale)


def normalization_grad(op: Builder, slope: ir.Value, normal: ir.Value, inv_std: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Gradient of ``normal`` = x̂ = (x - mean)·inv_std over ``axes``, for dx̂ = ``slope``."""
    level = op.ReduceMean(slope, list(axes), keepdims=1)
    tilt = op.ReduceMean(op.Mul(slope, normal), list(axes), keepdims=1)
    return op.Mul(op.Sub(op.Sub(slope, level), op.Mul(normal, tilt)), inv_std)  # type: ignore[no-any-return]


def _sum_to_scale(op: Builder, value: ir.Value, scale: ir.Value, first: int) -> ir.Value:
    have, want = dims(value), dims(scale)
    if have is not None and same_dims(have[first:], want):
        return op.ReduceSum(value, list(range(first)), keepdims=0) if first else value
    return op.graphc.ReduceSumTo(value, op.shape(scale))  # type: ignore[no-any-return]


@declare(
    "LRNGrad",
    inputs="dy x y",
    outputs="dx",
    infer=same_as(1),
    attributes={"alpha": 1e-4, "beta": 0.75, "bias": 1.0, "size": REQUIRED},
)
def lrn_grad(
    op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, *, alpha: float, beta: float, bias: float, size: int
) -> ir.Value:
    """Gradient of y = x·s^-β, s = bias + α/size · Σ x² over ``size`` neighbouring channels:

    dx = dy·s^-β - 2αβ/size · x · Σ dy·y/s, summed over the channels whose window contains this one
    """
    before, after = (size - 1) // 2, size // 2
    s = op.Add(op.Mul(_mean_over_channels(op, op.Mul(x, x), size, before, after), alpha), bias)
    crossed = _mean_over_channels(op, op.Div(op.Mul(dy, y), s), size, after, before)
    return op.Sub(op.Mul(dy, op.Pow(s, -beta)), op.Mul(op.Mul(x, 2.0 * alpha * beta), crossed))  # type: ignore[no-any-return]


def _mean_over_channels(op: Builder, value: ir.Value, size: int, before: int, after: int) -> ir.Value:
    """Σ / size over a window of channels: an average pooling of the image with C rows and all positions as columns."""
    image = op.Unsqueeze(op.Reshape(value, [0, 0, -1]), [1])
    pooled = op.AveragePool(image, kernel_shape=[size, 1], pads=[before, 0, after, 0], strides=[1, 1], count_include_pad=1)
    return op.Reshape(pooled, op.shape(value))  # type: ignore[no-any-return]
