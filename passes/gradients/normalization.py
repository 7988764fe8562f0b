"""Gradient rules of normalisation layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient, refuse_gradient
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import dims, rank, required, same_dims
from graphc.ir.infer import apply
from graphc.ir.names import BUCKET
from graphc.ir.ops.normalization import EPSILON, all_but_channels, elements_per_statistic, normalization_grad, per_channel
from graphc.passes.gradients.collectives import fresh_tag
from graphc.passes.gradients.reverse_mode import through

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _operands(node: ir.Node, count: int) -> list[ir.Value]:
    """The first ``count`` inputs, all required by the op."""
    return [v for v in node.inputs[:count] if v is not None]


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _widen(op: Builder, value: ir.Value) -> ir.Value:
    """Convert half precision to float32: sums over many elements need it (``stash_type`` in ONNX)."""
    return op.Cast(value, to=int(ir.DataType.FLOAT)) if value.dtype in HALVES else value


def _through_statistics(
    op: Builder,
    x: ir.Value,
    mean: ir.Value,
    inv_std: ir.Value,
    dmean: ir.Value | None,
    dvar: ir.Value | None,
    dinv_std: ir.Value | None,
) -> ir.Value | None:
    """Contribution to ∂x of the adjoints of statistics over n elements (broadcast to x); None without such adjoints.

    (∂mean + (x - mean)·(2·∂var - inv_std³·∂inv_std))/n. It appears in gradients of gradients, which use the statistics.
    """
    count = elements_per_statistic(op, x, mean)
    parts = []
    if dmean is not None:
        parts.append(op.expand_like(op.Div(dmean, count), x))
    tilts = []
    if dvar is not None:
        tilts.append(op.Mul(dvar, 2.0))
    if dinv_std is not None:
        tilts.append(op.Neg(op.Mul(dinv_std, op.Mul(inv_std, op.Mul(inv_std, inv_std)))))
    if tilts:
        tilt = op.Div(op.Add(*tilts) if len(tilts) == 2 else tilts[0], count)
        parts.append(op.Mul(op.Sub(op.cast_like(x, mean), mean), tilt))
    if not parts:
        return None
    return op.cast_like(op.Add(*parts) if len(parts) == 2 else parts[0], x)


def _sum(op: Builder, *terms: ir.Value | None) -> ir.Value | None:
    """The sum of the values that are not None."""
    present = [t for t in terms if t is not None]
    return op.Add(*present) if len(present) == 2 else present[0] if present else None


@gradient("BatchNormalization", selective=True)
def batch_normalization(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """y = scale·(x - mean)·r + b, r = 1/√(var + ε) per channel

    ∂x = dy·scale·r,  ∂scale = r·Σ dy·(x - mean),  ∂b = Σ dy,  ∂mean = -scale·r·∂b,  ∂var = -½·scale·r²·∂scale
    In training mode the statistics are those of the batch: see graphc.BatchNormalizationTrainingGrad.
    """
    return tuple(through(op, node, dys, needs, lambda: _batch_normalization(op, node)))


def _batch_normalization(op: Builder, node: ir.Node) -> tuple[ir.Value, ...]:
    """The outputs of a BatchNormalization, from the batch statistics in training mode."""
    x, scale, bias, *running = _operands(node, 5)
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


@gradient("graphc::BatchNormalizationTraining")
def batch_normalization_training(
    op: Builder,
    node: ir.Node,
    dy: ir.Value | None,
    dmean: ir.Value | None,
    dvar: ir.Value | None,
    dinv_std: ir.Value | None,
) -> Any:
    """∂x = scale·r·(dy - mean(dy) - x̂·mean(dy·x̂)),  ∂scale = Σ dy·x̂,  ∂bias = Σ dy"""
    x, scale = _operands(node, 2)
    _, mean, _, inv_std = node.outputs

    @cache
    def gradients() -> tuple[ir.Value | None, ...]:
        if dy is None:
            return None, None, None
        return tuple(op.graphc.BatchNormalizationTrainingGrad(dy, x, scale, mean, inv_std))

    def dx() -> ir.Value | None:
        statistics = [mean, inv_std, dmean, dvar, dinv_std]
        if all(s is None for s in statistics[2:]):
            return gradients()[0]
        shaped = [None if s is None else per_channel(op, s, x) for s in statistics]
        return _sum(op, gradients()[0], _through_statistics(op, x, *shaped))  # type: ignore[arg-type]

    return dx, lambda: gradients()[1], lambda: gradients()[2]


@gradient("graphc::SharedNormalization")
def shared_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """As BatchNormalizationTraining, with both sums over all ranks; ∂scale and ∂bias are this rank's part.

    ∂x includes the path through the statistics, so nothing flows back to them.
    """
    x, scale, _, mean, inv_std, count, live = _operands(node, 7)

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


@gradient("LayerNormalization")
def layer_normalization(
    op: Builder, node: ir.Node, dy: ir.Value | None, dmean: ir.Value | None = None, dinv_std: ir.Value | None = None
) -> Any:
    """x̂ = (x - mean)·r, y = scale·x̂ + b;  ∂x = r·(ĝ - mean(ĝ) - x̂·mean(ĝ·x̂)) with ĝ = dy·scale,  ∂scale = Σ dy·x̂,  ∂b = Σ dy"""
    x, scale = _operands(node, 2)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    axis, epsilon = _attribute(node, "axis", -1), _attribute(node, "epsilon", EPSILON)

    @cache
    def statistics() -> tuple[ir.Value, ir.Value]:
        return _layer_statistics(op, node, x, axis, epsilon)

    @cache
    def gradients() -> tuple[ir.Value | None, ...]:
        if dy is None:
            return None, None, None
        return tuple(op.graphc.LayerNormalizationGrad(dy, x, scale, *statistics(), axis=axis, epsilon=epsilon))

    def dx() -> ir.Value | None:
        if dmean is None and dinv_std is None:
            return gradients()[0]
        mean, inv_std = statistics()
        adjoints = [None if d is None else op.cast_like(d, mean) for d in (dmean, dinv_std)]
        return _sum(op, gradients()[0], _through_statistics(op, x, mean, inv_std, adjoints[0], None, adjoints[1]))

    def dbias() -> ir.Value | None:
        return gradients()[2] if same_dims(dims(required(bias)), dims(scale)) else dy  # the engine sums dy to the bias's shape

    return dx, lambda: gradients()[1], dbias


def _layer_statistics(op: Builder, node: ir.Node, x: ir.Value, axis: int, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """Mean and InvStdDev: outputs of the forward node, added if absent.

    In float64 they are recomputed, because ONNX returns them in float32 only.
    """
    if x.dtype == ir.DataType.DOUBLE:
        axes = list(range(axis % rank(x), rank(x)))
        mean = op.ReduceMean(x, axes, keepdims=1)
        centred = op.Sub(x, mean)
        var = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
        return mean, op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
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
    x, scale = _operands(node, 2)
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
    x, scale, _ = _operands(node, 3)
    return _channelwise(op, x, scale, dy, _attribute(node, "epsilon", EPSILON), groups=None)


@gradient("GroupNormalization")
def group_normalization(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = scale·x̂ + b per channel, x̂ normalised over the positions and channels of one sample and group"""
    x, scale, _ = _operands(node, 3)
    return _channelwise(op, x, scale, dy, _attribute(node, "epsilon", EPSILON), groups=_attribute(node, "num_groups", 1))


def _channelwise(op: Builder, x: ir.Value, scale: ir.Value, dy: ir.Value, epsilon: float, groups: int | None) -> Any:
    """∂x = r·(ĝ - mean(ĝ) - x̂·mean(ĝ·x̂)) with ĝ = dy·scale,  ∂scale = Σ dy·x̂,  ∂b = Σ dy

    Statistics are over axis 2 of N × groups × rest; ``groups=None`` means one group per channel.
    """
    blocks = [0, 0 if groups is None else groups, -1]

    @cache
    def slope() -> ir.Value:
        return _widen(op, dy)

    @cache
    def common() -> tuple[ir.Value, ir.Value]:
        rows = op.Reshape(_widen(op, x), blocks)
        centred = op.Sub(rows, op.ReduceMean(rows, [2], keepdims=1))
        var = op.ReduceMean(op.Mul(centred, centred), [2], keepdims=1)
        r = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
        return op.Mul(centred, r), r

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
    (x,) = _operands(node, 1)
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
    (x,) = _operands(node, 1)
    attributes = {name: node.attributes[name].value for name in ("alpha", "beta", "bias", "size") if name in node.attributes}
    return lambda: op.graphc.LRNGrad(dy, x, node.outputs[0], **attributes)
