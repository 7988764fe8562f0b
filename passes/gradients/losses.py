"""Gradients of the loss ops. Labels and class weights are data: nothing flows back to them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.ir.ops.losses import picks, softmax_scale


def _attributes(node: ir.Node) -> dict[str, Any]:
    declaration = declaration_of(node)
    assert declaration is not None
    return declaration.attribute_values(node)


def _class_weight(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


@gradient("graphc::Mean")
def mean(op: Builder, node: ir.Node, dloss: ir.Value) -> Any:
    """loss = total/weight;  ∂total = dloss/weight,  ∂weight = −dloss·loss/weight"""
    weight = _class_weight(node, 1)
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
            through_total = op.graphc.SoftmaxCrossEntropyGrad(dtotal, log_prob, label, _class_weight(node, 2), **values)
        if dlog_prob is not None:
            summed = op.ReduceSum(dlog_prob, [values["axis"]], keepdims=1)
            through_log_prob = op.Sub(dlog_prob, op.Mul(op.Exp(log_prob), summed))
        if through_total is None or through_log_prob is None:
            return through_log_prob if through_total is None else through_total
        return op.Add(through_total, through_log_prob)  # type: ignore[no-any-return]

    return dlogits, None, None


@gradient("graphc::SoftmaxCrossEntropyGrad")
def softmax_cross_entropy_grad(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = dtotal·(softmax·Σr − r);  ∂dtotal = Σ dy·(softmax·Σr − r),  ∂log_prob = dy·dtotal·softmax·Σr"""
    dtotal, log_prob, label, *_ = node.inputs
    class_weight, values = _class_weight(node, 3), _attributes(node)

    def ddtotal() -> ir.Value:
        assert dtotal is not None
        unit = op.graphc.SoftmaxCrossEntropyGrad(op.ones_like(dtotal), log_prob, label, class_weight, **values)
        return op.ReduceSum(op.Mul(dy, unit), keepdims=0)  # type: ignore[no-any-return]

    def dlog_prob() -> ir.Value:
        assert log_prob is not None
        assert label is not None
        scale = op.Mul(softmax_scale(op, log_prob, label, class_weight, **values), dtotal)
        return op.Mul(dy, op.Mul(op.Exp(log_prob), scale))  # type: ignore[no-any-return]

    return ddtotal, dlog_prob, None, None


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
        at, counts, _ = picks(op, log_prob, label, _class_weight(node, 2), axis, ignore_index)
        updates = op.Neg(op.Mul(counts, dtotal))
        return op.ScatterElements(op.zeros_like(log_prob), at, updates, axis=axis)  # type: ignore[no-any-return]

    return dlog_prob, None, None


@gradient("graphc::BinaryCrossEntropyWithLogits")
def binary_cross_entropy_with_logits(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """∂logits = dy·(σ(logits) − label),  ∂label = −dy·logits"""
    logits, label = node.inputs
    return lambda: op.Mul(dy, op.Sub(op.Sigmoid(logits), label)), lambda: op.Neg(op.Mul(dy, logits))
