"""ONNX forms of PyTorch's losses that its exporter lacks, or writes down with another meaning (seen in 2.13).

    cross_entropy(x, labels, label_smoothing=ε)  →  (1 − ε) SoftmaxCrossEntropyLoss(x, labels) − ε/C Σ LogSoftmax(x)

The exporter drops ``label_smoothing`` without a word, takes probabilities for labels, and has another sum for
``multilabel_margin_loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from graphc.frontends.torch_export.forms import INT64, fixed_length, like, opset, typed
from graphc.ir.facts import FLOATS


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` of ``torch.onnx.export``."""
    import torch
    from onnxscript import INT64 as I
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat as X
    from onnxscript.function_libs.torch_lib.tensor_typing import TReal

    aten, weight = torch.ops.aten, Optional[X]  # noqa: UP045 (the exporter takes no other form)
    entropy = {"x": X, "target": TReal, "weight": weight, "reduction": int, "ignore_index": int, "label_smoothing": float}
    margin = {"x": X, "target": I, "reduction": int}
    return {
        aten.cross_entropy_loss.default: typed(_cross_entropy, {"return": X} | entropy),
        aten.multilabel_margin_loss_forward.default: typed(_multilabel_margin, {"return": X} | margin),
    }


_NONE, _MEAN, _SUM = 0, 1, 2
"""Reductions of PyTorch's losses."""


def _cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """With the smoothing of labels, and for probabilities as targets, which PyTorch's exporter both leaves out."""
    op = opset()
    if target.dtype in FLOATS:
        return _cross_entropy_of_probabilities(x, target, weight, reduction, label_smoothing)
    if len(x.shape) == 1:
        x, target = op.Unsqueeze(x, [0]), op.Unsqueeze(target, [0])
        return op.Squeeze(_cross_entropy(x, target, weight, reduction, ignore_index, label_smoothing))
    kind = {_NONE: "none", _MEAN: "mean", _SUM: "sum"}[reduction]
    if reduction and not label_smoothing:
        return op.SoftmaxCrossEntropyLoss(x, target, weight, reduction=kind, ignore_index=ignore_index)[0]
    scores = op.LogSoftmax(x, axis=1)  # its gradient reads the result: no kernel computes it again
    picked = op.NegativeLogLikelihoodLoss(scores, target, weight, reduction=kind, ignore_index=ignore_index)
    if not label_smoothing:
        return picked
    counts = op.CastLike(op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target))), x)
    every = op.Mul(op.Neg(_over_classes(x, scores, weight)), counts)
    if reduction:
        every = op.ReduceSum(every, keepdims=0)
    if reduction == _MEAN:
        if weight is not None:
            labels = op.Mul(target, op.CastLike(counts, target))
            counts = op.Mul(counts, op.Gather(weight, labels))
        every = op.Div(every, op.ReduceSum(counts, keepdims=0))
    share = label_smoothing / fixed_length(x, 1, "cross_entropy with label_smoothing")
    return op.Add(op.Mul(picked, like(1 - label_smoothing, x)), op.Mul(every, like(share, x)))


def _over_classes(x: Any, terms: Any, weight: Any) -> Any:
    """The sum of ``terms``, weighted, over the classes of the scores ``x``."""
    op, axis = opset(), min(1, len(x.shape) - 1)
    if weight is not None:
        terms = op.Mul(terms, op.Reshape(weight, [-1 if k == axis else 1 for k in range(len(x.shape))]))
    return op.ReduceSum(terms, [axis], keepdims=0)


def _cross_entropy_of_probabilities(x: Any, target: Any, weight: Any, reduction: int, label_smoothing: float) -> Any:
    op, axis = opset(), min(1, len(x.shape) - 1)
    if label_smoothing:
        share = label_smoothing / fixed_length(x, axis, "cross_entropy with label_smoothing")
        target = op.Add(op.Mul(target, like(1 - label_smoothing, target)), like(share, target))
    return _reduced(op.Neg(_over_classes(x, op.Mul(op.LogSoftmax(x, axis=axis), target), weight)), reduction)


def _reduced(losses: Any, reduction: int) -> Any:
    op = opset()
    if reduction == _NONE:
        return op.Identity(losses)
    return (op.ReduceMean if reduction == _MEAN else op.ReduceSum)(losses, keepdims=0)


def _multilabel_margin(x: Any, target: Any, reduction: int) -> Any:
    """Each label before the first negative one against each class that is none of them."""
    op = opset()
    classes, zero = fixed_length(x, -1, "multilabel_margin_loss"), like(0.0, x)
    ended = op.CumSum(op.Cast(op.Less(target, op.Constant(value_int=0)), to=INT64), op.Constant(value_int=-1))
    counts = op.Equal(ended, op.Constant(value_int=0))
    labels = op.Where(counts, target, op.Constant(value_int=-1))
    hits = op.Equal(op.Unsqueeze(labels, [-1]), op.Constant(value_ints=list(range(classes))))
    mine = op.CastLike(op.ReduceMax(op.Cast(hits, to=INT64), [-2], keepdims=0), x)
    wanted = op.GatherElements(x, op.Where(counts, target, op.Constant(value_int=0)), axis=-1)
    margins = op.Sub(like(1.0, x), op.Sub(op.Unsqueeze(wanted, [-1]), op.Unsqueeze(x, [-2])))
    others = op.And(op.Unsqueeze(counts, [-1]), op.Equal(op.Unsqueeze(mine, [-2]), zero))
    losses = op.ReduceSum(op.Where(others, op.Max(margins, zero), zero), [-2, -1], keepdims=0)
    losses = op.Div(losses, like(float(classes), x))
    return _reduced(losses, reduction), mine
