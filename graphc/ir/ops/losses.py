"""Losses: the reported mean, softmax cross-entropy and negative log-likelihood over class indices.

A loss over samples is two sums (docs/internals-graph.md, "Exact averaging"): the **total** and the **weight** that divides
it. Class indices outside the range give NaN here, never an access out of bounds. A trainer rejects them by name before the
step runs, with the limits that :func:`label_checks` reads from the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, same_as, spec_of
from graphc.ir.facts import FLOATS, Dim, describe_value, dims, input_of, required
from graphc.ir.index_operands import behind_views

OVER_CLASSES: Mapping[str, Any] = {"axis": 1, "ignore_index": None}
"""Attributes of a loss over classes: the class axis and the ignored label (None: every label counts)."""

SMOOTHED: Mapping[str, Any] = {**OVER_CLASSES, "label_smoothing": 0.0}


@declare(
    "Mean", inputs="total weight?", outputs="loss", attributes={"name": "loss"}, infer=same_as(0), reduces={0: "sum", 1: "sum"}
)
def mean(op: Builder, total: ir.Value, weight: ir.Value | None = None, *, name: str) -> ir.Value:
    """loss = total / weight, or total without a weight (``reduction=sum``).

    total and weight are rank-0 sums over this rank's samples. Data-parallel training sums both over the ranks first, so
    that the mean over the global batch is exact for uneven shares. 0/0 (every label ignored) is NaN, as in PyTorch.
    """
    return op.Identity(total) if weight is None else op.Div(total, weight)  # type: ignore[no-any-return]


def _infer_over_classes(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> list[Spec]:
    dtype, shape = spec_of(inputs[0])
    label_dtype, label_shape = spec_of(inputs[1])
    if dtype not in FLOATS:
        raise ValueError(f"scores must be floating point, not {dtype}")
    if label_dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        raise ValueError(f"labels must be int32 or int64, not {label_dtype}")
    if shape is not None:
        if not -len(shape) <= attributes["axis"] < len(shape):
            raise ValueError(f"class axis {attributes['axis']} does not exist in scores of rank {len(shape)}")
        if label_shape is not None and len(label_shape) != len(shape) - 1:
            raise ValueError(f"labels of rank {len(label_shape)} do not fit scores of rank {len(shape)}: one less is needed")
        _check_labels(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None, attributes["axis"])
    return [(dtype, ir.Shape([])), (dtype, ir.Shape([])), (dtype, shape)]


def _check_labels(scores: ir.Value | None, label: ir.Value | None, class_weight: ir.Value | None, axis: int) -> None:
    """Check that there is a label for every position of the scores, and a weight for every class, as far as sizes are known.

    Raises:
        ValueError: another number of labels or weights: a kernel would read beyond their ends.
    """
    classes = dims(required(scores))
    if classes is None:
        return
    axis %= len(classes)
    positions = (*classes[:axis], *classes[axis + 1 :])
    for value, name, wanted in ((label, "labels", positions), (class_weight, "class weights", classes[axis : axis + 1])):
        have = None if value is None else dims(value)
        if have is not None and (len(have) != len(wanted) or any(map(_differ, have, wanted))):
            raise ValueError(
                f"{name} {describe_value(required(value))} do not fit scores {describe_value(required(scores))}"
                f" with the classes on axis {axis}"
            )


def _differ(a: Dim, b: Dim) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _infer_over_classes_grad(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> list[Spec]:
    _check_labels(inputs[1], inputs[2], inputs[3] if len(inputs) > 3 else None, attributes["axis"])
    return [spec_of(inputs[1])]


def _infer_elementwise(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> list[Spec]:
    scores, label = required(inputs[0]), required(inputs[1])
    have, wanted = dims(label), dims(scores)
    if have is not None and wanted is not None and (len(have) != len(wanted) or any(map(_differ, have, wanted))):
        raise ValueError(f"the label {describe_value(label)} needs the shape of the logits {describe_value(scores)}")
    return [spec_of(scores)]


@declare(
    "SoftmaxCrossEntropy",
    inputs="logits label class_weight?",
    outputs="total weight log_prob",
    attributes=SMOOTHED,
    infer=_infer_over_classes,
)
def softmax_cross_entropy(
    op: Builder,
    logits: ir.Value,
    label: ir.Value,
    class_weight: ir.Value | None = None,
    *,
    axis: int,
    ignore_index: int | None,
    label_smoothing: float,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``torch.nn.functional.cross_entropy`` for class indices, as two sums.

    logits: float (N, C, d1, …) with the classes along ``axis``; label: int (N, d1, …) in [0, C) or ``ignore_index``;
    class_weight: (C,) in the type of the logits. With q = (1 − s)·onehot(label) + s/C (s = ``label_smoothing``):

        total = −Σ_positions Σ_c class_weight_c · q_c · log softmax(logits)_c      weight = Σ_positions class_weight_label

    over positions that are not ignored. log_prob is the log-softmax, kept for the gradient.
    """
    log_prob = op.LogSoftmax(logits, axis=axis)
    at, counts, ignored = picks(op, log_prob, label, class_weight, axis, ignore_index)
    picked = _blank(op, op.GatherElements(log_prob, at, axis=axis), ignored)
    total = op.Neg(_sum(op, op.Mul(picked, counts)))
    if label_smoothing:
        weighted = log_prob if class_weight is None else op.Mul(log_prob, _along(op, class_weight, log_prob, axis))
        spread = _blank(op, op.ReduceSum(weighted, [axis], keepdims=1), ignored)
        share = op.Div(op.scalar(label_smoothing, logits), class_count(op, log_prob, axis))
        total = op.Sub(op.Mul(total, 1.0 - label_smoothing), op.Mul(share, _sum(op, spread)))
    return total, _sum(op, counts), log_prob


@declare(
    "SoftmaxCrossEntropyGrad",
    inputs="dtotal log_prob label class_weight?",
    outputs="dlogits",
    attributes=SMOOTHED,
    infer=_infer_over_classes_grad,
)
def softmax_cross_entropy_grad(
    op: Builder,
    dtotal: ir.Value,
    log_prob: ir.Value,
    label: ir.Value,
    class_weight: ir.Value | None = None,
    *,
    axis: int,
    ignore_index: int | None,
    label_smoothing: float,
) -> ir.Value:
    """dlogits = dtotal · (softmax · Σ_c r_c − r),  r_c = class_weight_c · q_c, and 0 at ignored positions."""
    at, counts, ignored = picks(op, log_prob, label, class_weight, axis, ignore_index)
    hit = op.Mul(counts, dtotal)
    if label_smoothing:
        hit = op.Mul(hit, 1.0 - label_smoothing)
    scale, spread = hit, None
    if label_smoothing:
        scale, spread = _smoothed(op, log_prob, class_weight, axis, ignored, label_smoothing)
        scale, spread = op.Add(hit, op.Mul(scale, dtotal)), op.Mul(spread, dtotal)
    dense = op.Mul(op.Exp(log_prob), scale)
    if spread is not None:
        dense = op.Sub(dense, spread)
    at_label = op.Sub(op.GatherElements(dense, at, axis=axis), hit)  # ScatterElements cannot add in every type
    return op.ScatterElements(dense, at, at_label, axis=axis)  # type: ignore[no-any-return]


@declare(
    "NegativeLogLikelihood",
    inputs="log_prob label class_weight?",
    outputs="total weight",
    attributes=OVER_CLASSES,
    infer=lambda inputs, attributes: _infer_over_classes(inputs, attributes)[:2],
)
def negative_log_likelihood(
    op: Builder,
    log_prob: ir.Value,
    label: ir.Value,
    class_weight: ir.Value | None = None,
    *,
    axis: int,
    ignore_index: int | None,
) -> tuple[ir.Value, ir.Value]:
    """``torch.nn.functional.nll_loss`` as two sums; inputs as those of ``SoftmaxCrossEntropy``, with log-probabilities.

    total = −Σ class_weight_label · log_prob_label      weight = Σ class_weight_label
    """
    at, counts, ignored = picks(op, log_prob, label, class_weight, axis, ignore_index)
    picked = _blank(op, op.GatherElements(log_prob, at, axis=axis), ignored)
    return op.Neg(_sum(op, op.Mul(picked, counts))), _sum(op, counts)


@declare("BinaryCrossEntropyWithLogits", inputs="logits label", outputs="losses", infer=_infer_elementwise)
def binary_cross_entropy_with_logits(op: Builder, logits: ir.Value, label: ir.Value) -> ir.Value:
    """losses = (1 − label)·logits + log(1 + exp(−logits)), elementwise and without overflow; one shape and type for all.

    The logarithm is max(−x, 0) + log(1 + exp(−|x|)). Its derivative at 0 needs the closed form, so this is an op of its own.
    """
    tail = op.Log(op.Add(op.Exp(op.Neg(op.Abs(logits))), 1.0))
    return op.Add(op.Mul(op.Sub(1.0, label), logits), op.Add(op.Relu(op.Neg(logits)), tail))  # type: ignore[no-any-return]


def picks(
    op: Builder, scores: ir.Value, label: ir.Value, class_weight: ir.Value | None, axis: int, ignore_index: int | None
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """What each label selects, all with size 1 along ``axis``.

    Returns:
        at: int64 indices, always inside the classes (0 where the label is outside).
        counts: weight of each position, in the type of ``scores``: its class weight or 1, 0 where ignored, NaN where the
            label is outside the classes and not ignored.
        ignored: bool, or None when no label is ignored.
    """
    axis += op.rank(scores) if axis < 0 else 0
    index = op.Cast(op.Unsqueeze(label, [axis]), to=int(ir.DataType.INT64))
    classes = op.Cast(class_count(op, scores, axis), to=int(ir.DataType.INT64))
    inside = op.And(op.GreaterOrEqual(index, 0), op.Less(index, classes))
    at = op.Where(inside, index, op.scalar(0, index))
    one = op.scalar(1.0, scores) if class_weight is None else op.Gather(class_weight, at)
    counts = op.Where(inside, one, op.scalar(np.nan, scores))
    if ignore_index is None:
        return at, counts, None
    ignored = op.Equal(index, ignore_index)
    return at, op.Where(ignored, op.scalar(0.0, scores), counts), ignored


def onnx_class_loss(op: Builder, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """ONNX's SoftmaxCrossEntropyLoss or NegativeLogLikelihoodLoss in other ops: the loss, and the log-probabilities."""
    log_prob, label, class_weight = (*node.inputs, None)[:3]
    assert log_prob is not None
    assert label is not None
    if node.op_type == "SoftmaxCrossEntropyLoss":
        log_prob = op.LogSoftmax(log_prob, axis=1)
    ignore = node.attributes["ignore_index"].as_int() if "ignore_index" in node.attributes else None
    at, counts, ignored = picks(op, log_prob, label, class_weight, 1, ignore)
    loss = op.Neg(op.Mul(op.GatherElements(log_prob, at, axis=1), counts))
    if ignored is not None:
        loss = op.Where(ignored, op.scalar(0, loss), loss)
    reduction = node.attributes.get_string("reduction", "mean")
    if reduction == "none":
        return op.Squeeze(loss, [1]), log_prob
    total = op.ReduceSum(loss, keepdims=0)
    return op.Div(total, op.ReduceSum(counts, keepdims=0)) if reduction == "mean" else total, log_prob


def class_count(op: Builder, scores: ir.Value, axis: int) -> ir.Value:
    """The number of classes as a rank-0 value of the type of ``scores``; a constant when that dimension is static."""
    axis += op.rank(scores) if axis < 0 else 0
    size = (dims(scores) or ())[axis]
    if isinstance(size, int):
        return op.scalar(size, scores)
    return op.cast_like(op.Squeeze(op.Shape(scores, start=axis, end=axis + 1), [0]), scores)


@declare(
    "ClassIndices",
    inputs="label",
    outputs="index",
    attributes={"classes": REQUIRED, "ignore_index": None},
    infer=same_as(0),
)
def class_indices(op: Builder, label: ir.Value, *, classes: int, ignore_index: int | None) -> ir.Value:
    """index = label, each in [0, ``classes``) or ``ignore_index``: where the loss itself has only a part of the classes."""
    return op.Identity(label)  # type: ignore[no-any-return]


_OVER_CLASSES = frozenset(
    {
        (DOMAIN, "SoftmaxCrossEntropy"),
        (DOMAIN, "NegativeLogLikelihood"),
        ("", "SoftmaxCrossEntropyLoss"),
        ("", "NegativeLogLikelihoodLoss"),
    }
)


def label_checks(graph: ir.Graph) -> dict[str, tuple[int, int, int | None]]:
    """The class indices that the losses of ``graph`` accept, read from its nodes.

    Returns:
        graph input → (low, high, ignore_index): every label must lie in [low, high) or equal ``ignore_index``.
    """
    found = {name: (0, size, ignored) for name, size, ignored in _class_counts(graph) if isinstance(size, int)}
    return found | {name: (ENDS_ROWS, size, None) for name, size in _sequences(graph) if isinstance(size, int)}


ENDS_ROWS = -(1 << 31)
"""The lowest label of sequences: a negative one ends its row."""


def label_range(low: int, high: int) -> str:
    """What labels in [low, high) are, for a reader."""
    return f"{low} … {high - 1}" if low >= 0 else f"0 … {high - 1} (a negative number ends a row)"


def _sequences(graph: ir.Graph) -> Iterator[tuple[str, Dim]]:
    """Labels of sequences that are graph inputs, and how many classes there are."""
    for node in graph:
        if (node.domain, node.op_type) == (DOMAIN, "CTCLoss"):
            label = behind_views(input_of(node, 1))
            if label is not None and label.is_graph_input():
                yield label.name or "", (dims(required(node.inputs[0])) or (None,))[-1]


def symbolic_classes(graph: ir.Graph) -> dict[str, tuple[str, int | None]]:
    """Graph input → (number of classes, ignore_index) of labels whose number of classes is a symbol: samples of a batch."""
    return {name: (size, ignored) for name, size, ignored in _class_counts(graph) if isinstance(size, str)}


def _class_counts(graph: ir.Graph) -> Iterator[tuple[str, Dim, int | None]]:
    for node in graph:
        if node.op_type == "ClassIndices" and node.domain == DOMAIN:
            source = behind_views(input_of(node))
            if source is not None and source.is_graph_input():
                ignored = node.attributes["ignore_index"].as_int() if "ignore_index" in node.attributes else None
                yield source.name or "", node.attributes["classes"].as_int(), ignored
        if (node.domain, node.op_type) not in _OVER_CLASSES:
            continue
        scores, label = node.inputs[0], behind_views(node.inputs[1])
        if scores is None or label is None or not label.is_graph_input() or label.name is None:
            continue
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        sizes = dims(scores)
        if sizes is not None:
            ignored = node.attributes["ignore_index"].as_int() if "ignore_index" in node.attributes else None
            yield label.name, sizes[axis], ignored


def _smoothed(
    op: Builder, log_prob: ir.Value, class_weight: ir.Value | None, axis: int, ignored: ir.Value | None, smoothing: float
) -> tuple[ir.Value, ir.Value]:
    """(Σ_c s/C · class_weight_c, s/C · class_weight_c): the terms of label smoothing, 0 at ignored positions."""
    share = op.Div(op.scalar(smoothing, log_prob), class_count(op, log_prob, axis))
    if class_weight is None:
        scale, spread = op.scalar(smoothing, log_prob), share
    else:
        scale = op.Mul(share, _sum(op, class_weight))
        spread = op.Mul(share, _along(op, class_weight, log_prob, axis))
    return _blank(op, scale, ignored), _blank(op, spread, ignored)


def _blank(op: Builder, value: ir.Value, ignored: ir.Value | None) -> ir.Value:
    if ignored is None:
        return value
    return op.Where(ignored, op.scalar(0.0, value), value)  # type: ignore[no-any-return]


def _sum(op: Builder, value: ir.Value) -> ir.Value:
    return op.ReduceSum(value, keepdims=0)  # type: ignore[no-any-return]


def _along(op: Builder, vector: ir.Value, like: ir.Value, axis: int) -> ir.Value:
    """A vector over classes, reshaped to the rank of ``like``."""
    shape = np.ones(op.rank(like), dtype=np.int64)
    shape[axis] = -1
    return op.Reshape(vector, shape)  # type: ignore[no-any-return]
