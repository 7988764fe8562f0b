"""Decomposes normalisations and ops that are reductions in other terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.rules.table import axis_of, iota, operand, optional, rule, single
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, rank, shape_of
from graphc.ir.ops.normalization import EPSILON, batch_normalized

GREATEST = np.iinfo(np.int64).max


@rule("Softmax", first=True)
def softmax(op: Builder, node: ir.Node) -> Sequence[Any]:
    source = operand(node, 0)
    x, axis = single(op, source), axis_of(node, -1)
    e = op.Exp(op.Sub(x, op.ReduceMax(x, [axis])))
    return [op.cast_like(op.Div(e, op.ReduceSum(e, [axis])), source)]


@rule("LogSoftmax", first=True)
def log_softmax(op: Builder, node: ir.Node) -> Sequence[Any]:
    source = operand(node, 0)
    x, axis = single(op, source), axis_of(node, -1)
    shifted = op.Sub(x, op.ReduceMax(x, [axis]))
    return [op.cast_like(op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), [axis]))), source)]


@rule("ReduceLogSumExp", first=True)
def log_sum_exp(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    x, axes = operand(node, 0), optional(node, 1)
    if axes is not None and constant(axes) is None:
        return None
    wide = single(op, x)
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    most = op.ReduceMax(wide, axes, keepdims=1, noop_with_empty_axes=noop)
    total = op.ReduceSum(op.Exp(op.Sub(wide, most)), axes, keepdims=1, noop_with_empty_axes=noop)
    found = op.Add(op.Log(total), most)
    if not node.attributes.get_int("keepdims", 1):
        found = op.Reshape(found, op.shape(node.outputs[0]))
    return [op.cast_like(found, x)]


@rule("LayerNormalization", first=True)
def layer_normalization(op: Builder, node: ir.Node) -> Sequence[Any]:
    source, scale, bias = operand(node, 0), operand(node, 1), optional(node, 2)
    x = single(op, source)
    axes = list(range(axis_of(node, -1), rank(source)))
    mean = op.ReduceMean(x, axes)
    centred = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))
    normal = op.cast_like(op.Mul(centred, inverse), source)
    y = op.Mul(normal, scale)
    if bias is not None:
        y = op.Add(y, bias)
    return [y, mean, inverse][: len(node.outputs)]


@rule("RMSNormalization", first=True)
def rms_normalization(op: Builder, node: ir.Node) -> Sequence[Any]:
    source, scale = operand(node, 0), operand(node, 1)
    x = single(op, source)
    axes = list(range(axis_of(node, -1), rank(source)))
    mean = op.ReduceMean(op.Mul(x, x), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, node.attributes.get_float("epsilon", 1e-5))))
    return [op.Mul(op.cast_like(op.Mul(x, inverse), source), scale)]


@rule("BatchNormalization", first=True)
def batch_normalization(op: Builder, node: ir.Node) -> Sequence[Any]:
    source, scale, bias, mean, variance = (operand(node, k) for k in range(5))
    x, count = single(op, source), rank(source)
    others = list(range(1, count - 1))

    def along(value: ir.Value) -> Any:
        return op.cast_like(op.Unsqueeze(value, others), x) if others else op.cast_like(value, x)

    results: list[Any] = []
    m, v = along(mean), along(variance)
    if node.attributes.get_int("training_mode", 0):
        axes = [0, *range(2, count)]
        m = op.ReduceMean(x, axes)
        centred = op.Sub(x, m)
        v = op.ReduceMean(op.Mul(centred, centred), axes)
        momentum = node.attributes.get_float("momentum", 0.9)
        for running, batch in ((mean, m), (variance, v)):
            now = op.Reshape(op.cast_like(batch, running), op.shape(running))
            results.append(op.Add(op.Mul(running, momentum), op.Mul(now, 1.0 - momentum)))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    factor = op.Mul(op.Reciprocal(op.Sqrt(op.Add(v, epsilon))), along(scale))
    y = op.Add(op.Mul(op.Sub(x, m), factor), along(bias))
    return [op.cast_like(y, source), *results][: len(node.outputs)]


@rule("graphc::BatchNormalizationTraining", first=True)
def batch_normalization_training(op: Builder, node: ir.Node) -> Sequence[Any]:
    x, scale, bias = (v for v in node.inputs if v is not None)
    return batch_normalized(op, x, scale, bias, 1, node.attributes.get_float("epsilon", EPSILON))


@rule("InstanceNormalization")
def instance_normalization(op: Builder, node: ir.Node) -> Sequence[Any]:
    """(x − mean) ÷ √(variance + ε) · scale + bias, over the spatial axes of each sample and channel."""
    source, scale, bias = (operand(node, k) for k in range(3))
    axes = list(range(2, len(shape_of(source))))
    x = single(op, source)
    centred = op.Sub(x, op.ReduceMean(x, axes))
    variance = op.ReduceMean(op.Mul(centred, centred), axes)
    normal = op.Mul(centred, op.Reciprocal(op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5)))))
    others = [k - 1 for k in axes]
    scale, bias = (op.cast_like(op.Unsqueeze(v, others) if others else v, x) for v in (scale, bias))
    return [op.cast_like(op.Add(op.Mul(normal, scale), bias), source)]


@rule("LpNormalization")
def lp_normalization(op: Builder, node: ir.Node) -> Sequence[Any]:
    """x ÷ ‖x‖ₚ along one axis; 0 if the norm is 0."""
    source = operand(node, 0)
    x, axis = single(op, source), axis_of(node, -1)
    reduce = op.ReduceL1 if node.attributes.get_int("p", 2) == 1 else op.ReduceL2
    norm = reduce(x, [axis])
    zero = op.Equal(norm, 0.0)
    ratio = op.Div(x, op.Where(zero, op.scalar(1, norm), norm))
    return [op.cast_like(op.Where(zero, op.scalar(0, x), ratio), source)]


@rule("LRN")
def local_response_normalization(op: Builder, node: ir.Node) -> Sequence[Any]:
    """x ÷ (bias + α/size · Σ x² over neighbouring channels)^β."""
    source = operand(node, 0)
    x, size = single(op, source), node.attributes["size"].as_int()
    channels = shape_of(source)[1]
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = op.Mul(x, x)
    padded = op.Pad(squares, [before, after], None, [1])
    total = None
    for k in range(size):
        part = op.Slice(padded, [k], [k + channels], [1])
        total = part if total is None else op.Add(total, part)
    alpha, beta = node.attributes.get_float("alpha", 1e-4), node.attributes.get_float("beta", 0.75)
    base = op.Add(op.Mul(total, alpha / size), node.attributes.get_float("bias", 1.0))
    return [op.cast_like(op.Div(x, op.Pow(base, op.scalar(beta, base))), source)]


@rule("GlobalAveragePool")
def global_average_pool(op: Builder, node: ir.Node) -> Sequence[Any]:
    source = operand(node, 0)
    return [op.cast_like(op.ReduceMean(single(op, source), list(range(2, len(shape_of(source))))), source)]


@rule("GlobalLpPool")
def global_lp_pool(op: Builder, node: ir.Node) -> Sequence[Any]:
    source = operand(node, 0)
    x, p = op.Abs(single(op, source)), float(node.attributes.get_int("p", 2))
    total = op.ReduceSum(op.Pow(x, op.scalar(p, x)), list(range(2, len(shape_of(source)))))
    return [op.cast_like(op.Pow(total, op.scalar(1 / p, total)), source)]


@rule("GlobalMaxPool")
def global_max_pool(op: Builder, node: ir.Node) -> Sequence[Any]:
    source = operand(node, 0)
    return [op.ReduceMax(source, list(range(2, len(shape_of(source)))))]


@rule("ArgMax", "ArgMin")
def extreme_position(op: Builder, node: ir.Node) -> Sequence[Any]:
    """The first (or last) index at which x equals its extreme; NaN counts as the extreme."""
    x, axis = operand(node, 0), axis_of(node, 0)
    rank, size = len(shape_of(x)), shape_of(x)[axis]
    best = (op.ReduceMax if node.op_type == "ArgMax" else op.ReduceMin)(x, [axis])
    hits = op.Equal(x, best)
    if x.dtype.is_floating_point():
        hits = op.Or(hits, op.IsNaN(x))
    last = bool(node.attributes.get_int("select_last_index", 0))
    place = op.Where(hits, iota(op, size, axis, rank), np.int64(-1 if last else GREATEST))
    keep = node.attributes.get_int("keepdims", 1)
    return [(op.ReduceMax if last else op.ReduceMin)(place, [axis], keepdims=keep)]


@rule("Hardmax")
def hardmax(op: Builder, node: ir.Node) -> Sequence[Any]:
    """1 at the first maximum along an axis, 0 elsewhere."""
    x, axis = operand(node, 0), axis_of(node, -1)
    best = op.ArgMax(x, axis=axis, keepdims=1)
    return [op.cast_like(op.Equal(iota(op, shape_of(x)[axis], axis, len(shape_of(x))), best), x)]


@rule("Dropout")
def dropout(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """Dropout: the identity, unless it draws random numbers; training graphs use ``DropoutMask`` for that."""
    x, training = operand(node, 0), constant(optional(node, 2))
    if optional(node, 2) is not None and (training is None or bool(training.reshape(-1)[0])):
        ratio = constant(optional(node, 1)) if optional(node, 1) is not None else np.array(0.5)
        if ratio is None or float(ratio.reshape(-1)[0]) != 0.0:
            return None
    mask = op.Expand(op.const(np.array(True)), op.shape(x)) if len(node.outputs) > 1 else None
    return [op.Identity(x), mask][: len(node.outputs)]
