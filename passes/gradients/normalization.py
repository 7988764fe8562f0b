"""Gradient rules of normalisation layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient, operands, refuse_gradient
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import dims, holds_only, rank, required, same_dims
from graphc.ir.infer import apply
from graphc.ir.names import BUCKET
from graphc.ir.ops.normalization import EPSILON, all_but_channels, batch_normalized, normalization_grad, per_channel
from graphc.passes.gradients.collectives import fresh_tag
from graphc.passes.gradients.reverse_mode import through

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _widen(op: Builder, value: ir.Value) -> ir.Value:
    """Convert half precision to float32: sums over many elements need it (``stash_type`` in ONNX)."""
    return op.Cast(value, to=int(ir.DataType.FLOAT)) if value.dtype in HALVES else value


@gradient("BatchNormalization", selective=True)
def batch_normalization(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """y = scale·(x - mean)·r + b, r = 1/√(var + ε) per channel

    ∂x = dy·scale·r,  ∂scale = r·Σ dy·(x - mean),  ∂b = Σ dy,  ∂mean = -scale·r·∂b,  ∂var = -½·scale·r²·∂scale
    In training mode the statistics are those of the batch: see graphc.BatchNormalizationTrainingGrad.
    """
    return tuple(through(op, node, dys, needs, lambda: _batch_normalization(op, node)))


def _batch_normalization(op: Builder, node: ir.Node) -> tuple[ir.Value, ...]:
    """The outputs of a BatchNormalization, from the batch statistics in training mode."""
    x, scale, bias, *running = operands(node, 5)
    mean, var = running
    epsilon, momentum = _attribute(node, "epsilon", EPSILON), _attribute(node, "momentum", 0.9)
    if _attribute(node, "training_mode", 0):
        y, *batch, _ = op.graphc.BatchNormalizationTraining(x, scale, bias, epsilon=epsilon)
        mixed = (
            op.Add(op.Mul(old, momentum), op.Mul(op.cast_like(new, old), 1 - momentum))
            for old, new in zip(running, batch, strict=True)
        )
        return y, *mixed
    factor = op.Mul(op.cast_like(scale, var), op.Reciprocal(op.Sqrt(op.Add(var, epsilon))))
    centred = op.Sub(op.cast_like(x, var), per_channel(op, mean, x))
    scaled = op.cast_like(op.Mul(centred, per_channel(op, factor, x)), x)
    return (op.Add(scaled, per_channel(op, op.cast_like(bias, x), x)),)


@gradient("graphc::BatchNormalizationTraining", selective=True)
def batch_normalization_training(
    op: Builder, node: ir.Node, dy: ir.Value | None, *statistics: ir.Value | None, needs: set[ir.Value]
) -> Any:
    """∂x = scale·r·(dy - mean(dy) - x̂·mean(dy·x̂)),  ∂scale = Σ dy·x̂,  ∂bias = Σ dy

    Adjoints of the statistics appear in gradients of gradients only, which go through the formula.
    """
    x, scale, bias = operands(node, 3)
    if dy is None or any(d is not None for d in statistics):
        epsilon = _attribute(node, "epsilon", EPSILON)
        return tuple(through(op, node, (dy, *statistics), needs, lambda: batch_normalized(op, x, scale, bias, 1, epsilon)))
    _, mean, _, inv_std = node.outputs
    return tuple(op.graphc.BatchNormalizationTrainingGrad(dy, x, scale, mean, inv_std))


@gradient("graphc::SharedNormalization")
def shared_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """As BatchNormalizationTraining, with both sums over all ranks; ∂scale and ∂bias are this rank's part.

    ∂x includes the path through the statistics, so nothing flows back to them.
    """
    x, scale, _, mean, inv_std, count, live = operands(node, 7)

    @cache
    def sums() -> tuple[ir.Value, ...]:
        return tuple(op.graphc.SharedNormalizationSums(dy, x, mean, inv_std))

    def dx() -> ir.Value:
        tag = fresh_tag(op.graph, f"{node.attributes['tag'].as_string()}::grad")
        attributes = {"tag": tag, "group": node.attributes.get_string("group", "data"), "reduce": "sum", BUCKET: tag}
        product, slope = op.emit("AllReduce", sums()[2:], attributes, domain=DOMAIN)
        return op.graphc.SharedNormalizationGrad(dy, x, scale, mean, inv_std, count, product, slope, live)  # type: ignore[no-any-return]

    return dx, lambda: sums()[0], lambda: sums()[1]


refuse_gradient(  # the rule of SharedNormalization omits terms that a second derivative needs
    "graphc::SharedNormalizationSums",
    "graphc::SharedNormalizationGrad",
    "graphc::BatchStatistics",
    reason="after sync_batchnorm the loss cannot be differentiated twice, nor with respect to batch statistics;"
    " leave sync_batchnorm out",
    origin=__name__,
)


@gradient("LayerNormalization", selective=True)
def layer_normalization(
    op: Builder, node: ir.Node, dy: ir.Value | None, *statistics: ir.Value | None, needs: set[ir.Value]
) -> Any:
    """x̂ = (x - mean)·r, y = scale·x̂ + b;  ∂x = r·(ĝ - mean(ĝ) - x̂·mean(ĝ·x̂)) with ĝ = dy·scale,  ∂scale = Σ dy·x̂,  ∂b = Σ dy

    Adjoints of the statistics appear in gradients of gradients only, which go through the formula.
    """
    if dy is None or any(d is not None for d in statistics):
        return tuple(through(op, node, (dy, *statistics), needs, lambda: _layer_normalization(op, node)))
    x, scale = operands(node, 2)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    axis, epsilon = _attribute(node, "axis", -1), _attribute(node, "epsilon", EPSILON)

    @cache
    def gradients() -> tuple[ir.Value, ...]:
        statistics = _layer_statistics(op, node, x, axis, epsilon)
        return tuple(op.graphc.LayerNormalizationGrad(dy, x, scale, *statistics, axis=axis, epsilon=epsilon))

    def dbias() -> ir.Value | None:
        return gradients()[2] if same_dims(dims(required(bias)), dims(scale)) else dy  # the engine sums dy to the bias's shape

    return lambda: gradients()[0], lambda: gradients()[1], dbias


def _layer_normalization(op: Builder, node: ir.Node) -> tuple[ir.Value, ...]:
    """The outputs of a LayerNormalization: y, the mean and the inverse deviation."""
    x, scale, *bias = (v for v in node.inputs if v is not None)
    wide = _widen(op, x)
    mean, inv_std = _row_statistics(op, wide, _attribute(node, "axis", -1), _attribute(node, "epsilon", EPSILON))
    y = op.Mul(op.cast_like(op.Mul(op.Sub(wide, mean), inv_std), x), scale)
    return op.Add(y, *bias) if bias else y, mean, inv_std


def _row_statistics(op: Builder, x: ir.Value, axis: int, epsilon: float) -> tuple[ir.Value, ir.Value]:
    axes = list(range(axis % rank(x), rank(x)))
    mean = op.ReduceMean(x, axes, keepdims=1)
    centred = op.Sub(x, mean)
    return mean, op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1), epsilon)))


def _layer_statistics(op: Builder, node: ir.Node, x: ir.Value, axis: int, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """Mean and InvStdDev: outputs of the forward node, added if absent.

    In float64 they are recomputed, because ONNX returns them in float32 only.
    """
    if x.dtype == ir.DataType.DOUBLE:
        return _row_statistics(op, x, axis, epsilon)
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for value, suffix in zip(node.outputs[1:], ("mean", "inv_std"), strict=True):
        if not value.name:
            value.name = op.unique(f"{node.outputs[0].name}.{suffix}", value=True)
    apply(node)
    return node.outputs[1], node.outputs[2]


@gradient("RMSNormalization")
def rms_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """x̂ = x·r, r = 1/√(mean(x²) + ε), y = scale·x̂;  ∂x = r·(ĝ - x̂·mean(ĝ·x̂)) with ĝ = dy·scale,  ∂scale = dy·x̂"""
    x, scale = operands(node, 2)
    axes = list(range(_attribute(node, "axis", -1) % rank(x), rank(x)))
    epsilon = _attribute(node, "epsilon", EPSILON)

    @cache
    def common() -> tuple[ir.Value, ir.Value, ir.Value]:
        wide = _widen(op, x)
        r = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon)))
        return op.cast_like(dy, wide), op.Mul(wide, r), r

    def dx() -> ir.Value:
        slope, normal, r = common()
        g = op.Mul(slope, op.cast_like(scale, slope))
        tilt = op.ReduceMean(op.Mul(g, normal), axes, keepdims=1)
        return op.cast_like(op.Mul(op.Sub(g, op.Mul(normal, tilt)), r), x)

    def dscale() -> ir.Value:
        slope, normal, _ = common()
        return op.cast_like(op.Mul(slope, normal), scale)

    return dx, dscale


@gradient("InstanceNormalization")
def instance_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = scale·x̂ + b per channel, x̂ normalised over the positions of one sample and channel"""
    return _channelwise(op, node, dy, groups=None)


@gradient("GroupNormalization")
def group_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = scale·x̂ + b per channel, x̂ normalised over the positions and channels of one sample and group"""
    return _channelwise(op, node, dy, groups=_attribute(node, "num_groups", 1))


def _channelwise(op: Builder, node: ir.Node, dy: ir.Value, groups: int | None) -> Any:
    """∂x = r·(ĝ - mean(ĝ) - x̂·mean(ĝ·x̂)) with ĝ = dy·scale,  ∂scale = Σ dy·x̂,  ∂b = Σ dy

    Statistics are over axis 2 of N × groups × rest; ``groups=None`` means one group per channel. Where y is x̂, as in the form
    in which exporters write GroupNorm, r is computed in front of the node: the backward pass needs no x.
    """
    x, scale, bias = operands(node, 3)
    blocks = [0, 0 if groups is None else groups, -1]
    is_normal = holds_only(scale, 1.0) and holds_only(bias, 0.0) and x.dtype not in HALVES

    @cache
    def slope() -> ir.Value:
        return _widen(op, dy)

    @cache
    def common() -> tuple[ir.Value, ir.Value]:
        following = op.before
        op.before = node if is_normal else following
        rows = op.Reshape(_widen(op, x), blocks)
        centred = op.Sub(rows, op.ReduceMean(rows, [2], keepdims=1))
        var = op.ReduceMean(op.Mul(centred, centred), [2], keepdims=1)
        r = op.Reciprocal(op.Sqrt(op.Add(var, _attribute(node, "epsilon", EPSILON))))
        op.before = following
        return op.Reshape(node.outputs[0], blocks) if is_normal else op.Mul(centred, r), r

    def dx() -> ir.Value:
        normal, r = common()
        g = op.Mul(slope(), op.cast_like(per_channel(op, scale, x), slope()))
        return op.cast_like(op.reshape_like(normalization_grad(op, op.Reshape(g, blocks), normal, r, [2]), x), x)

    def dscale() -> ir.Value:
        product = op.Mul(slope(), op.reshape_like(common()[0], x))
        return op.cast_like(op.ReduceSum(product, all_but_channels(x), keepdims=0), scale)

    return dx, dscale, lambda: op.cast_like(op.ReduceSum(slope(), all_but_channels(x), keepdims=0), scale)


@gradient("LpNormalization")
def lp_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x/‖x‖ₚ, p = 1 or 2;  ∂x = (dy - u·Σ dy·y)/‖x‖ₚ with u = sign(x) for p = 1 and y for p = 2; zero where x is"""
    (x,) = operands(node, 1)
    y, axis, p = node.outputs[0], _attribute(node, "axis", -1), _attribute(node, "p", 2)

    def dx() -> ir.Value:
        norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, [axis], keepdims=1)
        along = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
        full = op.Div(op.Sub(dy, op.Mul(op.Sign(x) if p == 1 else y, along)), norm)
        zero = op.scalar(0, x)
        return op.Where(op.Equal(norm, zero), zero, full)  # type: ignore[no-any-return]

    return dx


@gradient("LRN")
def lrn(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x·s^-β, s = bias + α/size·Σ x² over neighbouring channels; see graphc.LRNGrad"""
    (x,) = operands(node, 1)
    attributes = {name: node.attributes[name].value for name in ("alpha", "beta", "bias", "size") if name in node.attributes}
    return lambda: op.graphc.LRNGrad(dy, x, node.outputs[0], **attributes)
