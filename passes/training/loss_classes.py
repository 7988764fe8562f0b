"""Losses over classes for the ``loss`` pass: softmax cross-entropy and negative log-likelihood."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError, nearest
from graphc.ir.builder import Builder
from graphc.ir.facts import Dim, array_of, describe_value, dims, dtype_of, input_of, is_float, rank, required
from graphc.ir.ops.losses import class_count
from graphc.passes.training.loss_axis import axes_that_fit, class_axis
from graphc.passes.training.loss_request import (
    LossRequest,
    Sums,
    fitted,
    hits,
    over_elements,
    positions_of,
    producer_behind_views,
    same_shape,
)

LABEL_KINDS = ("auto", "class", "probabilities")


def softmax_cross_entropy(request: LossRequest) -> Sums:
    op, options = request.op, request.options
    smoothing = float(options.get("label_smoothing", 0.0))
    if not 0 <= smoothing <= 1:
        raise UsageError(f"label_smoothing={smoothing} must lie between 0 and 1")
    kind = options.get("label_kind", "auto")
    if kind not in LABEL_KINDS:
        raise UsageError(f"label_kind={kind!r}{nearest(kind, LABEL_KINDS)}; it is {', '.join(LABEL_KINDS)}")
    label = request.existing_label()
    if kind == "auto":
        kind = "probabilities" if label is not None and is_float(label) else "class"
    known = None if kind == "probabilities" else _label_shape(request, label)
    logits, axis = _without_softmax(request, request.scored("logits"), ("Softmax", "LogSoftmax"), known)
    if kind == "probabilities":
        return _probabilities(request, logits, label, axis, smoothing)
    logits, label = _match_labels(request, logits, label, axis)
    attributes = {"axis": axis, "ignore_index": options.get("ignore_index"), "label_smoothing": smoothing}
    class_weight = _class_weight(request, logits, axis)
    if "sample_weight" in options:
        log_prob = op.LogSoftmax(logits, axis=axis)
        total, weight = _weighted(request, log_prob, label, class_weight, axis, smoothing)
    else:
        total, weight, _ = op.graphc.SoftmaxCrossEntropy(logits, label, class_weight, **attributes)
    return Sums(total, weight, *_accuracy(request, logits, label, axis))


def negative_log_likelihood(request: LossRequest) -> Sums:
    value = request.scored("logits")
    if producer_behind_views(value, ("Softmax",)) is not None:
        raise UsageError(
            f"nll takes log-probabilities, but {value.name!r} is a Softmax: use softmax_cross_entropy, which absorbs it"
        )
    label = request.existing_label()
    scores, axis = _without_softmax(request, value, ("LogSoftmax",), _label_shape(request, label))
    fused = scores is not value
    scores, label = _match_labels(request, scores, label, axis)
    inputs = (scores, label, _class_weight(request, scores, axis))
    attributes = {"axis": axis, "ignore_index": request.options.get("ignore_index")}
    if "sample_weight" in request.options:
        log_prob = request.op.LogSoftmax(scores, axis=axis) if fused else scores
        total, weight = _weighted(request, log_prob, label, inputs[2], axis, 0.0)
    elif fused:
        total, weight, _ = request.op.graphc.SoftmaxCrossEntropy(*inputs, **attributes)
    else:
        total, weight = request.op.graphc.NegativeLogLikelihood(*inputs, **attributes)
    return Sums(total, weight, *_accuracy(request, scores, label, axis))


def _weighted(
    request: LossRequest, log_prob: ir.Value, label: ir.Value, class_weight: ir.Value | None, axis: int, smoothing: float
) -> tuple[ir.Value, ir.Value]:
    """Total and weight of class indices with a weight per sample; definitions as in ``graphc.SoftmaxCrossEntropy``."""
    op, ignore_index = request.op, request.options.get("ignore_index")
    index = op.Cast(label, to=int(ir.DataType.INT64))
    counts = None if ignore_index is None else op.Not(op.Equal(index, ignore_index))
    if counts is not None:
        index = op.Where(counts, index, op.const(np.array(0, dtype=np.int64)))
    picked = op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(index, [axis]), axis=axis), [axis])
    sample = required(request.sample_weight(picked))
    if counts is not None:
        sample = op.Mul(sample, op.cast_like(counts, sample))
    position = sample if class_weight is None else op.Mul(sample, op.Gather(class_weight, index))
    total = op.Neg(op.ReduceSum(op.Mul(picked, position), keepdims=0))
    if smoothing:
        spread = op.Mul(log_prob, _along(op, class_weight, axis, rank(log_prob))) if class_weight is not None else log_prob
        over_classes = op.ReduceSum(spread, np.array([axis], dtype=np.int64), keepdims=0)
        evenly = op.Neg(op.ReduceSum(op.Mul(over_classes, sample), keepdims=0))
        share = op.Div(op.scalar(smoothing, log_prob), class_count(op, log_prob, axis))
        total = op.Add(op.Mul(total, 1.0 - smoothing), op.Mul(evenly, share))
    return total, op.ReduceSum(position, keepdims=0)


def _along(op: Builder, class_weight: ir.Value, axis: int, count: int) -> ir.Value:
    """The class weights as a tensor of rank ``count`` that broadcasts along the class axis."""
    shape = np.ones(count, dtype=np.int64)
    shape[axis] = -1
    return op.Reshape(class_weight, shape)  # type: ignore[no-any-return]


def _probabilities(request: LossRequest, logits: ir.Value, label: ir.Value | None, axis: int, smoothing: float) -> Sums:
    """Cross-entropy with soft labels: −Σ_c class_weight_c · q_c · log softmax(logits)_c over the number of positions, as in
    PyTorch.
    """
    op = request.op
    if "ignore_index" in request.options:
        raise UsageError("ignore_index needs class indices as labels, not probabilities")
    if label is None:
        logits = _without_trailing_ones(op, logits, axis)
        label = request.new_label(dtype_of(logits), logits)
    elif rank(label) < rank(logits):
        logits = _without_trailing_ones(op, logits, axis)
    label = same_shape(request, label, logits, "logits")
    share = op.cast_like(label, logits)
    if smoothing:
        spread = op.Div(op.scalar(smoothing, logits), class_count(op, logits, axis))
        share = op.Add(op.Mul(share, 1.0 - smoothing), spread)
    class_weight = _class_weight(request, logits, axis)
    if class_weight is not None:
        share = op.Mul(share, _along(op, class_weight, axis, rank(logits)))
    sums = over_elements(request, op.Mul(share, op.LogSoftmax(logits, axis=axis)))
    total = op.Neg(sums.total)
    positions = op.Div(sums.weight, class_count(op, logits, axis))
    if not request.metrics:
        return Sums(total, positions)
    best = op.ArgMax(logits, axis=axis, keepdims=0), op.ArgMax(label, axis=axis, keepdims=0)
    return Sums(total, positions, hits(request, op.Equal(*best)), op.Cast(positions, to=int(ir.DataType.FLOAT)))


def _label_shape(request: LossRequest, label: ir.Value | None) -> Sequence[Dim] | None:
    """The shape of the label, or what ``label_shape`` says of a new one; None: nothing is known."""
    if label is not None:
        return dims(label)
    given = request.options.get("label_shape")
    return None if given is None else [None if size < 0 else size for size in given]


def _without_softmax(
    request: LossRequest, value: ir.Value, kinds: Sequence[str], label: Sequence[Dim] | None
) -> tuple[ir.Value, int]:
    """Return the input of a trailing Softmax and its class axis; without one, ``value`` and the requested or found axis."""
    axis = request.options.get("axis")
    if axis is not None:
        if not -rank(value) <= axis < rank(value):
            raise UsageError(f"axis={axis} does not exist in {describe_value(value)}")
        axis %= rank(value)
    softmax = producer_behind_views(value, kinds)
    if softmax is None:
        return value, class_axis(value, label) if axis is None else axis
    scores = input_of(softmax)
    own = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
    own %= rank(scores)
    if not _same_but_ones(value, scores):
        request.ctx.note(f"loss: {softmax.op_type} {softmax.name!r} is not absorbed, for a reshape follows it")
        return value, class_axis(value, label) if axis is None else axis
    if axis is not None and (dims(value) or ())[axis] != (dims(scores) or ())[own]:
        raise UsageError(
            f"{value.name!r} is the {softmax.op_type} over axis {own} of {describe_value(scores)}, but the loss is over"
            f" axis {axis}: leave axis out, or name logits={scores.name}"
        )
    request.ctx.note(f"loss: absorbed {softmax.op_type} {softmax.name!r}; the logits are {scores.name!r}")
    return scores, own


def _same_but_ones(a: ir.Value, b: ir.Value) -> bool:
    """Whether the known dimensions of two shapes agree, apart from dimensions of size one."""
    mine, other = ([d for d in dims(v) or () if d != 1] for v in (a, b))
    pairs = zip(mine, other, strict=False)
    return len(mine) == len(other) and not any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in pairs)


def _without_trailing_ones(op: Builder, scores: ir.Value, axis: int) -> ir.Value:
    """Reshape scores of (N, C, 1, 1), as many image classifiers end, to (N, C)."""
    sizes = dims(scores) or ()
    extra = list(range(axis + 1, len(sizes)))
    if not extra or axis == 0 or any(d != 1 for d in sizes[axis + 1 :]):
        return scores
    return op.Squeeze(scores, extra)  # type: ignore[no-any-return]


def _match_labels(request: LossRequest, scores: ir.Value, label: ir.Value | None, axis: int) -> tuple[ir.Value, ir.Value]:
    """Reshape scores and class indices until their shapes differ by the class axis only."""
    op = request.op
    given = request.options.get("label_shape") or ()
    if label is None and len(given) == rank(scores) and given[axis] == 1:
        label = request.new_label(ir.DataType.INT64, scores, axis, keepdims=True)
    if label is None:
        scores = _without_trailing_ones(op, scores, axis)
        return scores, _one_per_position(request, request.new_label(ir.DataType.INT64, scores, axis), scores, axis)
    if is_float(label):
        raise UsageError(f"label {describe_value(label)} is floating point: give class indices, or label_kind=probabilities")
    if rank(label) < rank(scores) - 1:
        scores = _without_trailing_ones(op, scores, axis)
    sizes = dims(label) or ()
    if len(sizes) == rank(scores) and sizes[axis] == 1:
        label = op.Squeeze(label, [axis])
    have, want = dims(label) or (), tuple(d for k, d in enumerate(dims(scores) or ()) if k != axis)
    clash = any(isinstance(h, int) and isinstance(w, int) and h != w for h, w in zip(have, want, strict=False))
    if len(have) != len(want) or clash:
        others = [f"axis={other}" for other in axes_that_fit(dims(scores) or (), have) if other != axis]
        hint = f"; it fits with {' or '.join(others)}" if others else "; its shape must be that of the logits without one axis"
        raise UsageError(
            f"label {describe_value(label)} does not fit logits {describe_value(scores)} with the classes on axis {axis}{hint}"
        )
    if label.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        label = op.Cast(label, to=int(ir.DataType.INT64))
    return scores, _one_per_position(request, label, scores, axis)


def _one_per_position(request: LossRequest, label: ir.Value, scores: ir.Value, axis: int) -> ir.Value:
    return fitted(request, label, scores, [k for k in range(rank(scores)) if k != axis])


def _accuracy(
    request: LossRequest, scores: ir.Value, label: ir.Value, axis: int
) -> tuple[ir.Value, ir.Value] | tuple[None, None]:
    """(number of positions where the best score is the label, number of positions that count), both float32."""
    if not request.metrics:
        return None, None
    op = request.op
    index = op.Cast(label, to=int(ir.DataType.INT64))
    hit = op.Equal(op.ArgMax(scores, axis=axis, keepdims=0), index)
    ignore_index = request.options.get("ignore_index")
    if ignore_index is None:
        return hits(request, hit), positions_of(request, index)
    counts = op.Not(op.Equal(index, ignore_index))
    return hits(request, op.And(hit, counts)), hits(request, counts)


def _class_weight(request: LossRequest, scores: ir.Value, axis: int) -> ir.Value | None:
    """The class weights as a constant of the scores' type; a named initializer is copied, so that it does not train."""
    given = request.options.get("class_weight")
    if given is None:
        return None
    if isinstance(given, str):
        if given not in request.graph.initializers:
            raise UsageError(f"class_weight={given!r} is not an initializer{nearest(given, request.graph.initializers)}")
        given = array_of(request.graph.initializers[given])
    weights = np.asarray(given).astype(dtype_of(scores).numpy())
    classes = (dims(scores) or ())[axis]
    if weights.ndim != 1 or (isinstance(classes, int) and len(weights) != classes):
        raise UsageError(f"class_weight has shape {list(weights.shape)}, but there are {classes} classes")
    return fitted(request, request.op.const(weights), scores, [axis], "class_weight")
