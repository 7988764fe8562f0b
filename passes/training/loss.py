"""loss: append a loss to a model and mark the total that ``autodiff`` differentiates.

    before   x ─► … ─► Softmax ─► probabilities
    after    x ─► … ─► SoftmaxCrossEntropy(·, label) ─► total, weight        Mean(total, weight) ─► loss

The total is marked (metadata ``graphc.loss_total``); ``loss`` is the graph's output. A Softmax, LogSoftmax or Sigmoid at
the end of the file is absorbed: the loss takes its input and stays exact where probabilities would underflow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError, nearest
from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of
from graphc.ir.names import KEPT_OUTPUTS, LIVE, LOSS_TOTAL
from graphc.ir.state import scalar
from graphc.passes.training.loss_classes import negative_log_likelihood, softmax_cross_entropy
from graphc.passes.training.loss_ctc import connectionist
from graphc.passes.training.loss_request import (
    LossRequest,
    Sums,
    fitted,
    hits,
    over_elements,
    producer_behind_views,
    same_shape,
)
from graphc.passes.training.loss_scalar import model_output, other_model
from graphc.pipeline import Context, graph_pass

ELEMENTWISE = ("prediction", "label", "sample_weight")
OVER_CLASSES = ("logits", "label", "label_shape", "axis", "ignore_index", "class_weight", "sample_weight")

OPTIONS: Mapping[str, Sequence[str]] = {
    "softmax_cross_entropy": (*OVER_CLASSES, "label_smoothing", "label_kind"),
    "nll": OVER_CLASSES,
    "ctc": ("logits", "label", "lengths", "time_axis", "blank", "zero_infinity", "sample_weight"),
    "bce_with_logits": ("logits", "label", "sample_weight"),
    "mse": ELEMENTWISE,
    "l1": ELEMENTWISE,
    "huber": (*ELEMENTWISE, "delta"),
    "output": ("name", "weight"),
    "model": ("path", "weight"),
}
"""Kind of loss → its options besides ``reduction``, ``metrics`` and ``keep_outputs``."""


@graph_pass("loss", requires=("legalize",), changes="training")
def loss(
    model: ir.Model,
    ctx: Context,
    *,
    kind: str = "softmax_cross_entropy",
    logits: str | None = None,
    prediction: str | None = None,
    label: str | None = None,
    name: str | None = None,
    path: str | None = None,
    weight: str | None = None,
    reduction: str = "mean",
    axis: int | None = None,
    label_shape: Sequence[int] | None = None,
    ignore_index: int | None = None,
    label_smoothing: float | None = None,
    class_weight: Sequence[float] | str | None = None,
    label_kind: str | None = None,
    delta: float | None = None,
    lengths: str | None = None,
    time_axis: int | None = None,
    blank: int | None = None,
    zero_infinity: bool | None = None,
    sample_weight: str | None = None,
    metrics: bool = False,
    keep_outputs: bool = False,
) -> bool:
    """Append a loss and make it the model's output.

    Args:
        kind: softmax_cross_entropy, nll, ctc, bce_with_logits, mse, l1, huber, output (a scalar of the graph) or model
            (the scalar output of another ONNX file).
        logits, prediction: the scored value; default: the model's only output.
        label: a value of the graph, or the name of a new input; default ``label``.
        name: of the scalar, for ``output``; default: the model's only output.
        path: of the ONNX file, for ``model``. Its inputs are matched by name to values of this graph.
        weight: of output and model: a scalar that the loss of a share was divided by, such as a number of tokens; default:
            what the last ops before the scalar divide by, else the samples of the share.
        reduction: ``mean`` (over what counts: samples, elements) or ``sum``. An output that is evidently a sum over the batch
            is summed in either case.
        axis: the class axis; default: that of an absorbed Softmax, or the one that fits the label (see :mod:`.loss_axis`).
        label_shape: sizes of a new label, −1 where they vary; only the search for the class axis reads them.
        ignore_index: label that does not count (PyTorch's default is -100; here none).
        label_smoothing: share in [0, 1] of the label spread evenly over the classes.
        class_weight: a number per class, or the name of an initializer that holds them; constant in either case.
        label_kind: ``class``, ``probabilities`` or ``auto``: probabilities if the label exists and is floating point.
        delta: of huber, where it turns from square to linear; default 1.
        lengths: of ctc: a value of the graph, or the name of a new int64 input (N,), the frames of each sample that count.
        time_axis: of ctc: 0 or 1; default: the axis beside the free batch.
        blank: of ctc: the class that stands for no label; default 0.
        zero_infinity: of ctc: labels that fit into no path cost 0 instead of infinity.
        sample_weight: a value of the graph, or the name of a new float32 input (N,): each sample's loss is multiplied by it, a
            mean divides by the sum of the weights, and metrics are weighted too. Losses over samples only.
        metrics: also report ``accuracy`` (losses over classes, and bce_with_logits at a threshold of 0).
        keep_outputs: keep the model's outputs behind the loss; their names stand in the model's metadata.

    Raises:
        UsageError: an unknown kind, an option the kind lacks, a value that does not exist, or shapes that do not fit.
    """
    given = {
        "logits": logits, "prediction": prediction, "label": label, "name": name, "path": path, "weight": weight, "axis": axis,
        "label_shape": label_shape, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
        "class_weight": class_weight, "label_kind": label_kind, "delta": delta, "lengths": lengths,
        "time_axis": time_axis, "blank": blank, "zero_infinity": zero_infinity, "sample_weight": sample_weight,
    }  # fmt: skip
    options = {key: value for key, value in given.items() if value is not None}
    if kind not in OPTIONS:
        raise UsageError(f"unknown loss {kind!r}{nearest(kind, OPTIONS)}; known are {', '.join(OPTIONS)}")
    for key in options:
        if key not in OPTIONS[kind]:
            raise UsageError(f"loss {kind!r} has no option {key!r}; its options are {', '.join(OPTIONS[kind])}")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction={reduction!r}{nearest(reduction, ('mean', 'sum'))}; it is mean or sum")
    op = Builder(model.graph, scope="loss")
    sums = _where_live(model.graph, op, _KINDS[kind](LossRequest(model.graph, ctx, op, kind, options, metrics, reduction)))
    reduction = "sum" if sums.summed else reduction
    kept = list(model.graph.outputs) if keep_outputs else []
    _finish(model.graph, ctx, op, sums, reduction, kept)
    if kept:
        model.metadata_props[KEPT_OUTPUTS] = json.dumps([value.name for value in kept])
    ctx.note(f"loss: {kind} ({reduction})")
    return True


def _where_live(graph: ir.Graph, op: Builder, sums: Sums) -> Sums:
    """Set the sums to 0 if this rank's share of the batch is empty, whatever its stand-in samples gave (NaN included)."""
    alive = op.Greater(scalar(graph, LIVE, 1, np.float32), 0.0)

    def gate(value: ir.Value) -> ir.Value:
        return op.Where(alive, value, op.scalar(0.0, value))  # type: ignore[no-any-return]

    found = replace(sums, total=gate(sums.total), weight=gate(sums.weight))
    if sums.correct is not None and sums.counted is not None:
        found = replace(found, correct=gate(sums.correct), counted=gate(sums.counted))
    return found


def _finish(graph: ir.Graph, ctx: Context, op: Builder, sums: Sums, reduction: str, kept: Sequence[ir.Value]) -> None:
    """Mark the total, name the reported values, make them the graph's outputs."""
    sums.total.metadata_props[LOSS_TOTAL] = "1"
    names = ["loss", "accuracy"] if sums.correct is not None else ["loss"]
    for name in names:
        _free(graph, ctx, op, name)
    (reported,) = op.emit(
        "Mean", [sums.total, sums.weight if reduction == "mean" else None], domain="graphc", outputs=["loss"], name="loss/mean"
    )
    outputs = [reported]
    if sums.correct is not None:
        inputs, attributes = [sums.correct, sums.counted], {"name": "accuracy"}
        outputs += op.emit("Mean", inputs, attributes, domain="graphc", outputs=["accuracy"], name="loss/accuracy")
    graph.outputs.clear()
    graph.outputs.extend([*outputs, *kept])


def _free(graph: ir.Graph, ctx: Context, op: Builder, name: str) -> None:
    """Free the name of a reported value: another value of that name is renamed."""
    if any(v.name == name for v in graph.inputs) or name in graph.initializers:
        raise UsageError(f"the model has an input or initializer {name!r}, which is the name of a reported value; rename it")
    for node in graph:
        for value in node.outputs:
            if value.name == name:
                value.name = op.unique(f"{name}.before", value=True)
                ctx.note(f"loss: the model's own {name!r} is now called {value.name!r}")


def _bce_with_logits(request: LossRequest) -> Sums:
    op, value = request.op, request.scored("logits")
    sigmoid = producer_behind_views(value, ("Sigmoid",))
    if sigmoid is not None and sigmoid.inputs[0] is not None:
        request.ctx.note(f"loss: absorbed Sigmoid {sigmoid.name!r}; the logits are {sigmoid.inputs[0].name!r}")
        value = op.reshape_like(sigmoid.inputs[0], value)
    label = _regression_label(request, value, "logits")
    losses = op.graphc.BinaryCrossEntropyWithLogits(value, label)
    sums = over_elements(request, losses)
    if not request.metrics:
        return sums
    hit = op.Equal(op.Greater(value, 0.0), op.Greater(label, 0.5))
    return Sums(sums.total, sums.weight, hits(request, hit), op.Cast(sums.weight, to=int(ir.DataType.FLOAT)))


def _elementwise(formula: Callable[[LossRequest, ir.Value], ir.Value]) -> Callable[[LossRequest], Sums]:
    """Build a loss that is Σ formula(prediction − label) divided by the number of elements."""

    def build(request: LossRequest) -> Sums:
        value = request.scored("prediction")
        difference = request.op.Sub(value, _regression_label(request, value, "prediction"))
        return over_elements(request, formula(request, difference))

    return build


def _huber(request: LossRequest, difference: ir.Value) -> ir.Value:
    """c·(|d| − c/2) with c = min(|d|, δ): d²/2 inside, δ·(|d| − δ/2) outside"""
    op, delta = request.op, float(request.options.get("delta", 1.0))
    if not delta > 0:
        raise UsageError(f"delta={delta} must be above 0")
    size = op.Abs(difference)
    clipped = op.Min(size, delta)
    return op.Mul(clipped, op.Sub(size, op.Mul(clipped, 0.5)))  # type: ignore[no-any-return]


def _regression_label(request: LossRequest, value: ir.Value, option: str) -> ir.Value:
    label = request.existing_label()
    if label is None:
        return fitted(request, request.new_label(dtype_of(value), value), value)
    return request.op.cast_like(same_shape(request, label, value, option), value)


_KINDS: Mapping[str, Callable[[LossRequest], Sums]] = {
    "softmax_cross_entropy": softmax_cross_entropy,
    "nll": negative_log_likelihood,
    "ctc": connectionist,
    "bce_with_logits": _bce_with_logits,
    "mse": _elementwise(lambda request, difference: request.op.Mul(difference, difference)),
    "l1": _elementwise(lambda request, difference: request.op.Abs(difference)),
    "huber": _elementwise(_huber),
    "output": model_output,
    "model": other_model,
}
