"""Gradients of the loss ops. Labels and class weights are data and get no gradient."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.declare import required_declaration
from graphc.ir.facts import describe
from graphc.ir.ops.losses import onnx_class_loss, picks
from graphc.passes.gradients.reverse_mode import through


def _attributes(node: ir.Node) -> dict[str, Any]:
    return required_declaration(node).attribute_values(node)


def _optional(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


@gradient("graphc::Mean")
def mean(op: Builder, node: ir.Node, dloss: ir.Value) -> Any:
    """loss = total/weight;  ∂total = dloss/weight,  ∂weight = −dloss·loss/weight"""
    weight = _optional(node, 1)
    if weight is None:
        return (dloss,)
    return lambda: op.Div(dloss, weight), lambda: op.Neg(op.Div(op.Mul(dloss, node.outputs[0]), weight))


@gradient("graphc::MatchShape")
def match_shape(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x;  ∂x = dy"""
    return dy, None


@gradient("graphc::SoftmaxCrossEntropy")
def softmax_cross_entropy(
    op: Builder, node: ir.Node, dtotal: ir.Value | None, dweight: ir.Value | None, dlog_prob: ir.Value | None
) -> Any:
    """∂logits = SoftmaxCrossEntropyGrad(dtotal, log_prob) + dlog_prob − softmax·Σ_c dlog_prob"""
    label, log_prob, values = node.inputs[1], node.outputs[2], _attributes(node)

    def dlogits() -> ir.Value | None:
        through_total = through_log_prob = None
        if dtotal is not None:
            through_total = op.graphc.SoftmaxCrossEntropyGrad(dtotal, log_prob, label, _optional(node, 2), **values)
        if dlog_prob is not None:
            summed = op.ReduceSum(dlog_prob, [values["axis"]], keepdims=1)
            through_log_prob = op.Sub(dlog_prob, op.Mul(op.Exp(log_prob), summed))
        if through_total is None or through_log_prob is None:
            return through_log_prob if through_total is None else through_total
        return op.Add(through_total, through_log_prob)  # type: ignore[no-any-return]

    return dlogits, None, None


@gradient("graphc::NegativeLogLikelihood")
def negative_log_likelihood(op: Builder, node: ir.Node, dtotal: ir.Value | None, dweight: ir.Value | None) -> Any:
    """∂log_prob = −dtotal·class_weight_label at each label, 0 elsewhere"""
    log_prob, label, *_ = node.inputs
    if dtotal is None:
        return None, None, None

    def dlog_prob() -> ir.Value:
        assert log_prob is not None
        assert label is not None
        axis, ignore_index = _attributes(node)["axis"], _attributes(node)["ignore_index"]
        at, counts, _ = picks(op, log_prob, label, _optional(node, 2), axis, ignore_index)
        updates = op.Neg(op.Mul(counts, dtotal))
        return op.graphc.GatherElementsGrad(updates, at, op.shape(log_prob), axis=axis)  # type: ignore[no-any-return]

    return dlog_prob, None, None


@gradient("graphc::CTCLoss")
def ctc_loss(op: Builder, node: ir.Node, dlosses: ir.Value | None, dslope: ir.Value | None) -> Any:
    """∂logits = dlosses·slope"""
    if dslope is not None:
        raise UnsupportedOpError(f"CTCLoss has no second derivative: {describe(node)}")
    axes = [_attributes(node)["time_axis"], 2]
    return (None if dlosses is None else lambda: op.Mul(op.Unsqueeze(dlosses, axes), node.outputs[1])), None, None


@gradient("graphc::BinaryCrossEntropyWithLogits")
def binary_cross_entropy_with_logits(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """∂logits = dy·(σ(logits) − label),  ∂label = −dy·logits"""
    logits, label = node.inputs
    return lambda: op.Mul(dy, op.Sub(op.Sigmoid(logits), label)), lambda: op.Neg(op.Mul(dy, logits))


@gradient("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", selective=True)
def onnx_loss(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """ONNX's losses: ∂log_prob = −d·weight_label at each label, 0 elsewhere, d = dloss a position"""
    return tuple(through(op, node, dys, needs, lambda: onnx_class_loss(op, node)))
