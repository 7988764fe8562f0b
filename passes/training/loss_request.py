"""The request that all kinds of the ``loss`` pass share, the sums they return, and helpers for scores and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.builder import Builder
from graphc.ir.dim_expressions import symbols
from graphc.ir.facts import constant, describe_value, dims, is_float, is_parameter, required, static_dims, unknown_rank
from graphc.ir.names import CLASSES, find_value
from graphc.passes.gradients.reverse_mode import ancestors
from graphc.pipeline import Context

LABELS = "labels"
"""Entry of ``Context.values``: name of a new label → (scores, class axis or None, whether the label keeps it with size 1)."""


DEFAULT = "label"
"""Name of the label that the losses have unless they are given another."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums that a loss returns, all scalars: Σ loss, its divisor, and the counts behind the accuracy (if any).

    Attributes:
        summed: the loss is a sum over the batch, whatever its ``reduction`` says.
    """

    total: ir.Value
    weight: ir.Value
    correct: ir.Value | None = None
    counted: ir.Value | None = None
    summed: bool = False


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A loss to build: the graph, the builder, and the options that were given."""

    graph: ir.Graph
    ctx: Context
    op: Builder
    kind: str
    options: Mapping[str, Any]
    metrics: bool
    reduction: str

    def scored(self, option: str) -> ir.Value:
        """The value that ``option`` names, by default the model's only output; floating point, of known rank."""
        if option in self.options:
            value = find_value(self.graph, self.options[option])
        elif len(self.graph.outputs) == 1:
            value = self.graph.outputs[0]
        else:
            names = ", ".join(v.name or "?" for v in self.graph.outputs)
            raise UsageError(f"the model has {len(self.graph.outputs)} outputs ({names}): say which with {option}=NAME")
        if not is_float(value):
            raise UsageError(f"{option} {describe_value(value)} is not floating point")
        if value.shape is None:
            raise unknown_rank(value)
        return value

    def existing_label(self) -> ir.Value | None:
        """The value of the graph that is the label, or None when the label will be a new input."""
        name = self.options.get("label", DEFAULT)
        if "label" not in self.options and not any(v.name == name for v in self.graph.inputs):
            return None
        try:
            value = find_value(self.graph, name)
        except UsageError:
            return None
        if value.shape is None:
            raise unknown_rank(value)
        self._refuse_own_answer(value)
        return value

    def _refuse_own_answer(self, label: ir.Value) -> None:
        """Refuse a label that the model computes with the weights that the loss trains, such as a classifier's ``label``.

        A target of floats under another name than the default was chosen on purpose: two views of one sample, say.
        """
        name, producer = label.name or "", label.producer()
        if producer is None or constant(label) is not None:
            return
        scores = self.scored("prediction" if "prediction" in self.options else "logits")
        if label is not scores:
            behind, shared = ancestors(self.graph, [label]), ancestors(self.graph, [scores])
            trained = any(value.is_initializer() and is_parameter(value) for value in behind & shared)
            if not (trained or scores in behind or producer is scores.producer()) or (is_float(label) and name != DEFAULT):
                return
        raise UsageError(
            f"the model computes {name!r} itself, with the weights that are to be trained, so that it cannot be the target:"
            f" give the label another name, such as label=target, and call its array so in the data"
        )

    def new_label(self, dtype: ir.DataType, scores: ir.Value, axis: int | None = None, *, keepdims: bool = False) -> ir.Value:
        """A new graph input for the label, in the shape of ``scores`` without the class axis, or with size 1 there.

        ``ctx.values["labels"]`` keeps (scores, axis, keepdims) under its name.
        """
        name = self.options.get("label", DEFAULT)
        sizes = list(required(scores.shape).dims)
        if axis is not None:
            sizes[axis : axis + 1] = [1] if keepdims else []
        shape = self.batch_first(sizes)
        value = ir.Value(name=self.op.unique(name, value=True), type=ir.TensorType(dtype), shape=shape)
        if value.name != name:
            raise UsageError(
                f"the model computes a value {name!r}: to use it say label={name}, else give the label another name"
            )
        if axis is not None and len(sizes) > 1 and "axis" not in self.options:
            value.metadata_props[CLASSES] = f"axis {axis} of {scores.name!r}"
        self.graph.inputs.append(value)
        self.ctx.values.setdefault(LABELS, {})[name] = (scores, axis, keepdims)
        return value

    def batch_first(self, sizes: Sequence[int | ir.SymbolicDim | None]) -> ir.Shape:
        """The shape of a new input. Its first size is unknown if its symbol is one that inference made up: no input has it.

        Feeds of unknown length are cut with the batch, and the loss checks that they fit the scores.
        """
        if not sizes or sizes[0] is None or isinstance(sizes[0], int):
            return ir.Shape(sizes)
        known = {word for v in self.graph.inputs for d in dims(v) or () if isinstance(d, str) for word in symbols(d)}
        fed = sizes[0].value is not None and known.issuperset(symbols(sizes[0].value))
        return ir.Shape([sizes[0] if fed else None, *sizes[1:]])

    def sample_weight(self, like: ir.Value) -> ir.Value | None:
        """The sample weights in the shape and type of ``like``, whose first axis is the sample; None: every sample weighs 1."""
        name = self.options.get("sample_weight")
        if name is None:
            return None
        if like.shape is None or len(like.shape) == 0:
            raise UsageError(f"sample_weight={name!r}: {describe_value(like)} has no axis of samples")
        op, graph = self.op, self.graph
        known = {v.name: v for v in graph.inputs} | {v.name: v for node in graph for v in node.outputs}
        weight = known.get(name)
        if weight is None:
            shape = self.batch_first(like.shape.dims[:1])
            weight = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
            graph.inputs.append(weight)
        if not is_float(weight) or weight.shape is None or len(weight.shape) != 1:
            raise UsageError(f"sample_weight {describe_value(weight)} must be floating point, one number per sample")
        weight = fitted(self, weight, like, [0])
        column = op.Unsqueeze(weight, list(range(1, len(like.shape)))) if len(like.shape) > 1 else weight
        return op.Expand(op.cast_like(column, like), op.shape(like))  # type: ignore[no-any-return]


def same_shape(request: LossRequest, label: ir.Value, value: ir.Value, option: str) -> ir.Value:
    """``label``, checked to have the shape of ``value``: now as far as sizes are known, else as soon as feeds give them.

    Raises:
        UsageError: shapes that differ, or that only broadcasting would make one.
    """
    have, want = dims(label), dims(value) or ()
    if (
        have is None
        or len(have) != len(want)
        or any(h != w and ((isinstance(h, int) and isinstance(w, int)) or 1 in (h, w)) for h, w in zip(have, want, strict=True))
    ):
        raise UsageError(f"label {describe_value(label)} and {option} {describe_value(value)} must have one shape")
    return fitted(request, label, value)


def fitted(
    request: LossRequest, x: ir.Value, like: ir.Value, axes: Sequence[int] | None = None, what: str | None = None
) -> ir.Value:
    """``x``, with a check of its shape against that of ``like`` (along ``axes``) unless the two are known to be one.

    Symbols that other inputs carry are compared when feeds arrive; any other symbol may get every size.
    """
    have, want = dims(x), dims(like)
    if have is not None and want is not None:
        want = want if axes is None else tuple(want[axis] for axis in axes)
        fed = {d for v in request.graph.inputs if v is not x for d in dims(v) or () if isinstance(d, str)}
        known = all(not isinstance(w, str) or fed.issuperset(symbols(w)) for w in want)
        if known and None not in want and have == want:
            return x
    return request.op.graphc.MatchShape(x, like, axes=axes, what=what or x.name)  # type: ignore[no-any-return]


def hits(request: LossRequest, flags: ir.Value) -> ir.Value:
    """Count true flags as float32, each weighted by its sample."""
    op = request.op
    found = op.Cast(flags, to=int(ir.DataType.FLOAT))
    weight = request.sample_weight(found)
    return op.ReduceSum(found if weight is None else op.Mul(found, weight), keepdims=0)  # type: ignore[no-any-return]


def over_elements(request: LossRequest, losses: ir.Value) -> Sums:
    """Σ of a loss per element, and the number of elements; weighted where samples are."""
    op, weight = request.op, request.sample_weight(losses)
    if weight is None:
        return Sums(op.ReduceSum(losses, keepdims=0), count_elements(op, losses))
    return Sums(op.ReduceSum(op.Mul(losses, weight), keepdims=0), op.ReduceSum(weight, keepdims=0))


def positions_of(request: LossRequest, index: ir.Value) -> ir.Value:
    """Count the positions of ``index`` as float32, each weighted by its sample."""
    op = request.op
    weight = request.sample_weight(op.Cast(index, to=int(ir.DataType.FLOAT)))
    if weight is not None:
        return op.ReduceSum(weight, keepdims=0)  # type: ignore[no-any-return]
    return op.Cast(count_elements(op, index), to=int(ir.DataType.FLOAT))  # type: ignore[no-any-return]


def count_elements(op: Builder, value: ir.Value) -> ir.Value:
    """The number of elements of ``value``, as a float scalar (of its type, or float32 for integers)."""
    dtype = value.dtype if is_float(value) and value.dtype is not None else ir.DataType.FLOAT
    sizes = static_dims(value)
    if sizes is not None:
        return op.const(np.asarray(np.prod(sizes), dtype=dtype.numpy()))
    return op.Cast(op.Size(value), to=int(dtype))  # type: ignore[no-any-return]


_VIEWS = ("Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze")


def producer_behind_views(value: ir.Value, kinds: Sequence[str]) -> ir.Node | None:
    """Find the node of one of ``kinds`` that made ``value``, through changes of shape; a Log of a Softmax is a LogSoftmax."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _VIEWS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Log" and "LogSoftmax" in kinds and node.inputs[0] is not None:
        inner = node.inputs[0].producer()
        return inner if inner is not None and inner.domain == "" and inner.op_type == "Softmax" else None
    return node if node.op_type in kinds else None
