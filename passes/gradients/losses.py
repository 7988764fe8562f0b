"""Gradients of the loss ops. Labels and class weights are data and get no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.declare import required_declaration
from graphc.ir.facts import input_of
from graphc.ir.ops.losses import picks


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
        return op.ScatterElements(op.zeros_like(log_prob), at, updates, axis=axis)  # type: ignore[no-any-return]

    return dlog_prob, None, None


@gradient("graphc::BinaryCrossEntropyWithLogits")
def binary_cross_entropy_with_logits(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """∂logits = dy·(σ(logits) − label),  ∂label = −dy·logits"""
    logits, label = node.inputs
    return lambda: op.Mul(dy, op.Sub(op.Sigmoid(logits), label)), lambda: op.Neg(op.Mul(dy, logits))


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op: Builder, node: ir.Node, dloss: ir.Value | None, dlog_prob: ir.Value | None = None) -> Any:
    """ONNX's loss: ∂scores = d·weight_label·(softmax − onehot) + dlog_prob − softmax·Σ_c dlog_prob, d = dloss a position"""
    scores = input_of(node, 0)

    def dscores() -> ir.Value:
        softmax, parts = op.Softmax(scores, axis=1), []
        if dloss is not None:
            at, amount = _each_position(op, node, dloss)
            dense = op.Mul(softmax, amount)
            at_label = op.Sub(op.GatherElements(dense, at, axis=1), amount)
            parts.append(op.ScatterElements(dense, at, at_label, axis=1))
        if dlog_prob is not None:
            parts.append(op.Sub(dlog_prob, op.Mul(softmax, op.ReduceSum(dlog_prob, [1], keepdims=1))))
        return parts[0] if len(parts) == 1 else op.Add(*parts)  # type: ignore[no-any-return]

    return dscores, None, lambda: _class_weights(op, node, dloss, lambda: op.LogSoftmax(scores, axis=1))


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op: Builder, node: ir.Node, dloss: ir.Value) -> Any:
    """ONNX's loss: ∂log_prob = −d·weight_label at each label, 0 elsewhere, d = dloss a position"""
    log_prob = input_of(node, 0)

    def dlog_prob() -> ir.Value:
        at, amount = _each_position(op, node, dloss)
        return op.ScatterElements(op.zeros_like(log_prob), at, op.Neg(amount), axis=1)  # type: ignore[no-any-return]

    return dlog_prob, None, lambda: _class_weights(op, node, dloss, lambda: log_prob)


def _reduction(node: ir.Node) -> str:
    return node.attributes["reduction"].as_string() if "reduction" in node.attributes else "mean"


def _picks(op: Builder, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """The label of each position, its class weight, and whether it is ignored; see :func:`picks`."""
    scores, label = input_of(node, 0), input_of(node, 1)
    ignore = node.attributes["ignore_index"].as_int() if "ignore_index" in node.attributes else None
    return picks(op, scores, label, _optional(node, 2), 1, ignore)


def _each_position(op: Builder, node: ir.Node, dloss: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The label and dloss times its class weight at each position, by the ``reduction`` of an ONNX loss over classes."""
    at, counts, _ = _picks(op, node)
    if _reduction(node) == "none":
        return at, op.Mul(counts, op.Unsqueeze(dloss, [1]))
    if _reduction(node) == "mean":
        dloss = op.Div(dloss, op.ReduceSum(counts, keepdims=0))
    return at, op.Mul(counts, dloss)


def _class_weights(op: Builder, node: ir.Node, dloss: ir.Value | None, log_prob: Callable[[], ir.Value]) -> ir.Value | None:
    """∂weight_c = −Σ dloss·log_prob over the positions of label c; a mean is −Σ (log_prob + loss)/Σ weight there"""
    weight = _optional(node, 2)
    if dloss is None or weight is None:
        return None
    at, counts, ignored = _picks(op, node)
    share = op.Neg(op.GatherElements(log_prob(), at, axis=1))
    if _reduction(node) == "mean":
        share = op.Div(op.Sub(share, node.outputs[0]), op.ReduceSum(counts, keepdims=0))
    share = op.Mul(share, op.Unsqueeze(dloss, [1]) if _reduction(node) == "none" else dloss)
    if ignored is not None:
        share = op.Where(ignored, op.scalar(0, weight), share)
    flat = op.const([-1])
    return op.ScatterElements(op.zeros_like(weight), op.Reshape(at, flat), op.Reshape(share, flat), reduction="add")  # type: ignore[no-any-return]
