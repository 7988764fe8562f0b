"""The loss of label sequences whose places in time are not known."""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.facts import describe_value, dims, input_of
from graphc.ir.names import find_value
from graphc.passes.training.loss_request import LossRequest, Sums, over_elements, producer_behind_views


def connectionist(request: LossRequest) -> Sums:
    """Build ``ctc``: Σ loss / labels of each sample, or Σ loss of a sum, over the samples."""
    op, options = request.op, request.options
    scores = request.scored("logits")
    if len(dims(scores) or ()) != 3:
        raise UsageError(f"ctc: scores {describe_value(scores)} must have three axes: time, batch and classes")
    scores = _behind_softmax(request, scores)
    time_axis = _time_axis(request, scores)
    samples = (scores.shape or ir.Shape([None] * 3))[1 - time_axis]
    label = request.existing_label()
    if label is None:
        label = _new_input(request, options.get("label", "label"), [samples, None])
    lengths = options.get("lengths")
    counted = None if lengths is None else _existing(request, lengths) or _new_input(request, lengths, [samples])
    blank, zero_infinity = options.get("blank", 0), int(options.get("zero_infinity", False))
    losses, _ = op.graphc.CTCLoss(scores, label, counted, time_axis=time_axis, blank=blank, zero_infinity=zero_infinity)
    if request.reduction == "mean":
        ended = op.CumSum(op.Cast(op.Less(op.Cast(label, to=int(ir.DataType.INT64)), 0), to=int(ir.DataType.INT64)), 1)
        count = op.ReduceSum(op.cast_like(op.Equal(ended, 0), losses), [1], keepdims=0)
        losses = op.Div(losses, op.Max(count, 1.0))
    return over_elements(request, losses)


def _behind_softmax(request: LossRequest, scores: ir.Value) -> ir.Value:
    """What a Softmax at the end reads, turned as its result is: probabilities are no logits."""
    op, turn = request.op, producer_behind_views(scores, ("Transpose",))
    softmax = producer_behind_views(scores if turn is None else input_of(turn, 0), ("Softmax",))
    if softmax is None:
        return scores
    logits = input_of(softmax, 0)
    request.ctx.note(f"loss: absorbed Softmax {softmax.name!r}; the logits are {logits.name!r}")
    if turn is not None:
        logits = op.Transpose(op.reshape_like(logits, input_of(turn, 0)), perm=list(turn.attributes["perm"].as_ints()))
    return op.reshape_like(logits, scores)


def _time_axis(request: LossRequest, scores: ir.Value) -> int:
    given = request.options.get("time_axis")
    if given is not None:
        if given not in (0, 1):
            raise UsageError(f"ctc: time_axis={given} is neither 0 nor 1")
        return int(given)
    batches = {sizes[0] for value in request.graph.inputs if (sizes := dims(value)) and isinstance(sizes[0], str)}
    found = [axis for axis in (0, 1) if (dims(scores) or ())[axis] in batches]
    if len(found) != 1:
        raise UsageError(f"ctc: which axis of {describe_value(scores)} is the time? Say time_axis=0 or time_axis=1")
    return 1 - found[0]


def _existing(request: LossRequest, name: str) -> ir.Value | None:
    try:
        return find_value(request.graph, name)
    except UsageError:
        return None


def _new_input(request: LossRequest, name: str, sizes: list[int | ir.SymbolicDim | None]) -> ir.Value:
    value = ir.Value(
        name=request.op.unique(name, value=True), type=ir.TensorType(ir.DataType.INT64), shape=request.batch_first(sizes)
    )
    if value.name != name:
        raise UsageError(f"the model computes a value {name!r}: give the input of the loss another name")
    request.graph.inputs.append(value)
    return value
