"""Losses that are one scalar: of the model itself, or of another ONNX file.

Every worker computes the scalar over its own share of the batch. So that they give together what one worker gives on the whole
batch, the scalar becomes a total and a weight, which are summed over the shares and divided once:

    a mean over the samples                  total = scalar · samples      weight = samples
    Σ a / b, where b counts something        total = Σ a                   weight = b
    cross-entropy with reduction mean        Σ over labels that count      their number, or Σ of their class weights
    weight=NAME given by the user            total = scalar · NAME         weight = NAME
    a sum over the batch                     total = scalar                none: it is summed
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.batch import batched_input
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe_value, dims, input_of, inputs_of, is_float, is_parameter, static_dims
from graphc.ir.names import find_value
from graphc.ir.subgraphs import captured
from graphc.passes.gradients.reverse_mode import descendants
from graphc.passes.training.loss_model import inline_model
from graphc.passes.training.loss_request import LossRequest, Sums, count_elements

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def model_output(request: LossRequest) -> Sums:
    """Loss ``output``: a scalar that the model computes; ``weight`` names what it was divided by."""
    value, name = request.scored("name"), request.options.get("weight")
    return scalar_sums(request, value, None if name is None else find_value(request.graph, name))


def other_model(request: LossRequest) -> Sums:
    """Loss ``model``: the scalar output of an ONNX file; ``weight`` names a second output, what it was divided by."""
    if "path" not in request.options:
        raise UsageError("loss 'model' needs path=FILE.onnx")
    path, name = request.options["path"], request.options.get("weight")
    outputs = inline_model(request.graph, request.ctx, request.op, path)
    if name is not None and name not in outputs:
        raise UsageError(f"weight={name}: {path} has no such output; its outputs are {', '.join(outputs)}")
    weight = outputs.pop(name) if name is not None else None
    if len(outputs) != 1:
        raise UsageError(f"a loss model has one output, and the one that weight= names; {path} has {', '.join(outputs)}")
    return scalar_sums(request, next(iter(outputs.values())), weight)


def scalar_sums(request: LossRequest, value: ir.Value, weight: ir.Value | None) -> Sums:
    """Split a scalar into the total and weight of this worker's share.

    Raises:
        UsageError: not a computed floating-point scalar, or a weight that is no scalar.
    """
    op = request.op
    if not is_float(value) or static_dims(value) not in ((), (1,), (1, 1)):
        raise UsageError(f"{describe_value(value)} is not a floating-point scalar: reduce it, or choose another loss")
    if value.producer() is None or constant(value) is not None:
        raise UsageError(f"{describe_value(value)} is not computed by the model")
    if request.reduction == "sum":
        if weight is not None:
            raise UsageError("reduction=sum has no weight; leave one of the two out")
        return Sums(_scalar(op, value), op.scalar(1.0, value))
    if weight is not None:
        if static_dims(weight) not in ((), (1,), (1, 1)):
            raise UsageError(f"weight {describe_value(weight)} must be one number: what the loss of this share was divided by")
        return _weighed(op, value, weight)
    found = _Analysis(request).of(value)
    if found.kind is Kind.SUM:
        request.ctx.note(f"loss: {value.name!r} is a sum over the batch, so workers add theirs; say reduction=sum to be clear")
        return Sums(_scalar(op, value), op.scalar(1.0, value), summed=True)
    if found.kind is Kind.MEAN and found.total is not None and found.weight is not None:
        request.ctx.note(f"loss: {value.name!r} is a mean; workers add what it sums and what it divides by")
        return Sums(_scalar(op, found.total), _scalar(op, op.cast_like(found.weight, found.total)))
    batch = batched_input(request.graph)
    if batch is None:
        return Sums(_scalar(op, value), op.scalar(1.0, value))
    request.ctx.note(f"loss: {value.name!r} counts as a mean over samples: workers weigh theirs by their samples")
    return _weighed(op, value, op.Gather(op.shape(batch), op.const(np.array(0, np.int64))))


def _weighed(op: Builder, value: ir.Value, weight: ir.Value) -> Sums:
    total = _scalar(op, value)
    if total.dtype in _HALF:
        total = op.Cast(total, to=int(ir.DataType.FLOAT))  # a half ends at 65504
    count = _scalar(op, op.cast_like(weight, total))
    return Sums(op.Mul(total, count), count)


def _scalar(op: Builder, value: ir.Value) -> ir.Value:
    return value if static_dims(value) == () else op.Reshape(value, np.array([], dtype=np.int64))


class Kind(enum.Enum):
    """How the scalars of two shares become the scalar of both."""

    FIXED = enum.auto()
    """It does not depend on the batch."""
    MEAN = enum.auto()
    """Their mean, weighted by samples or by a weight that is known."""
    SUM = enum.auto()
    """Their sum."""


@dataclass(frozen=True)
class _Part:
    """A scalar of the graph; ``total`` and ``weight`` where a mean is weighted by something else than samples."""

    kind: Kind
    total: ir.Value | None = None
    weight: ir.Value | None = None


class _Analysis:
    """Reads from the last ops before a scalar how it depends on the size of the batch."""

    def __init__(self, request: LossRequest) -> None:
        graph = request.graph
        self._op, nodes = request.op, list(graph)
        self._from_data = _reached(nodes, graph.inputs)
        self._from_parameters = descendants(nodes, [v for v in graph.initializers.values() if is_parameter(v)])
        batch = batched_input(graph)
        self._batch = None if batch is None else (dims(batch) or (None,))[0]

    def of(self, value: ir.Value) -> _Part:
        node = value.producer()
        if value not in self._from_data or node is None:
            return _Part(Kind.FIXED)
        if node.domain != "" or value.index():
            return _Part(Kind.MEAN)
        match node.op_type:
            case "Identity" | "Reshape" | "Squeeze" | "Unsqueeze" | "Neg" | "Cast":
                part = self.of(input_of(node))
                return self._negated(part) if node.op_type == "Neg" else part
            case "Mul" | "Div":
                return self._product(node)
            case "Add" | "Sub":
                return self._of_two(node)
            case "ReduceSum":
                return self._sum(input_of(node)) if self._is_whole(node) else _Part(Kind.MEAN)
            case "ReduceMean":
                return self._mean(input_of(node)) if self._is_whole(node) else _Part(Kind.MEAN)
            case "SoftmaxCrossEntropyLoss" | "NegativeLogLikelihoodLoss":
                return self._of_labels(node)
        return _Part(Kind.MEAN)

    def _negated(self, part: _Part) -> _Part:
        return part if part.total is None else replace(part, total=self._op.Neg(part.total))

    def _product(self, node: ir.Node) -> _Part:
        a, b = inputs_of(node)[:2]
        first, second = self.of(a), self.of(b)
        if node.op_type == "Div" and first.kind is Kind.SUM and self._counts(b):
            return _Part(Kind.MEAN, a, b)
        if second.kind is Kind.FIXED:
            kept, factor = first, b
        elif first.kind is Kind.FIXED and node.op_type == "Mul":
            kept, factor = second, a
        else:
            return _Part(Kind.MEAN)
        if kept.total is None:
            return kept
        scaled = self._op.emit(node.op_type, [kept.total, self._op.cast_like(_scalar(self._op, factor), kept.total)], {})
        return replace(kept, total=scaled[0])

    def _of_two(self, node: ir.Node) -> _Part:
        op, (a, b) = self._op, inputs_of(node)[:2]
        first, second = self.of(a), self.of(b)
        if Kind.SUM in (first.kind, second.kind):
            return _Part(Kind.SUM) if first.kind is second.kind else _Part(Kind.MEAN)
        for mean, other, k in ((first, second, 0), (second, first, 1)):
            if mean.total is not None and mean.weight is not None and other.kind is Kind.FIXED:
                fixed = op.Mul(op.cast_like(_scalar(op, (b, a)[k]), mean.total), op.cast_like(mean.weight, mean.total))
                pair = (mean.total, fixed) if k == 0 else (fixed, mean.total)
                return replace(mean, total=op.emit(node.op_type, list(pair), {})[0])
        if first.total is not None and second.total is not None and first.weight is second.weight:
            return replace(first, total=op.emit(node.op_type, [first.total, second.total], {})[0])
        return _Part(Kind.MEAN)

    def _sum(self, value: ir.Value) -> _Part:
        """Σ over all of ``value``: a sum over the batch, unless that was divided by a count before."""
        if not self._spans_batch(value):
            return _Part(Kind.MEAN)
        node = value.producer()
        if node is not None and node.op_type == "Div" and node.domain == "" and self._counts(input_of(node, 1)):
            return _Part(Kind.MEAN, self._op.ReduceSum(input_of(node), keepdims=0), input_of(node, 1))
        return _Part(Kind.SUM)

    def _mean(self, value: ir.Value) -> _Part:
        """Mean over all of ``value``: weighted by samples, unless another dimension may differ between the shares."""
        others = [d for d in dims(value) or () if d != self._batch]
        if not self._spans_batch(value) or all(isinstance(d, int) for d in others):
            return _Part(Kind.MEAN)
        op = self._op
        return _Part(Kind.MEAN, op.ReduceSum(value, keepdims=0), count_elements(op, value))

    def _of_labels(self, node: ir.Node) -> _Part:
        reduction = node.attributes.get_string("reduction", "mean")
        if reduction != "mean":
            return _Part(Kind.SUM if reduction == "sum" else Kind.MEAN)
        ignore = node.attributes.get("ignore_index")
        attributes = {"ignore_index": None if ignore is None else ignore.as_int()}
        if node.op_type == "SoftmaxCrossEntropyLoss":
            attributes["axis"] = 1
            total, weight, _ = self._op.graphc.SoftmaxCrossEntropy(*node.inputs, **attributes)
        else:
            total, weight = self._op.graphc.NegativeLogLikelihood(*node.inputs, **attributes, axis=1)
        return _Part(Kind.MEAN, total, weight)

    def _is_whole(self, node: ir.Node) -> bool:
        """Whether a reduction leaves one element."""
        sizes = dims(node.outputs[0])
        return sizes is not None and all(d == 1 for d in sizes)

    def _spans_batch(self, value: ir.Value) -> bool:
        sizes = dims(value)
        return sizes is None or any(not isinstance(d, int) or d == self._batch for d in sizes)

    def _counts(self, value: ir.Value) -> bool:
        """Whether a scalar counts something in the batch: it depends on the data and not on parameters."""
        single = all(d == 1 for d in dims(value) or ())
        return single and value.shape is not None and value in self._from_data and value not in self._from_parameters


def _reached(nodes: Sequence[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that depend on ``sources`` in any way."""
    found = set(sources)
    for node in nodes:
        if any(value in found for value in (*node.inputs, *captured(node))):
            found.update(node.outputs)
    return found
