"""Ops that take a shape: sums to a symbolic shape, gradients of gathers, and gradients that wait for a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.facts import constant, describe_value, dims, required, shape_of_result, static_dims


def _reduce_sum_to(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(spec_of(inputs[0])[0], shape_of_result(inputs[1]))]


@declare("ReduceSumTo", inputs="x shape", outputs="y", infer=_reduce_sum_to)
def reduce_sum_to(op: Builder, x: ir.Value, shape: ir.Value) -> ir.Value:
    """y = x summed over the axes along which a tensor of ``shape`` broadcasts to the shape of x."""
    want = constant(shape)
    have = static_dims(x)
    if want is not None and have is not None:
        target = [int(d) for d in want]
        lead = len(have) - len(target)
        axes = list(range(lead)) + [lead + k for k, d in enumerate(target) if d == 1 and have[lead + k] != 1]
        if not axes:
            return x
        summed = op.ReduceSum(x, axes, keepdims=1)
        return op.Reshape(summed, np.array(target, dtype=np.int64)) if lead else summed  # type: ignore[no-any-return]
    have_shape = op.Shape(x)
    missing = op.Sub(op.Shape(have_shape), op.Shape(shape))
    ones = op.Expand(op.const(np.array([1], dtype=np.int64)), missing)
    padded = op.Concat(ones, shape, axis=0)
    differ = op.Not(op.Equal(padded, have_shape))
    axes_value = op.Squeeze(op.NonZero(differ), [0])
    summed = op.ReduceSum(x, axes_value, keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(summed, shape)  # type: ignore[no-any-return]


def _of_shape(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(spec_of(inputs[0])[0], shape_of_result(inputs[2]))]


@declare("GatherGrad", inputs="dy indices shape", outputs="dx", infer=_of_shape)
def gather_grad(op: Builder, dy: ir.Value, indices: ir.Value, shape: ir.Value) -> ir.Value:
    """dx of y = Gather(x, indices; axis=0) for x of ``shape``: rows of dy added at their indices, zeros elsewhere."""
    zeros = op.Expand(op.scalar(0, dy), shape)
    wide = indices if indices.dtype == ir.DataType.INT64 else op.Cast(indices, to=int(ir.DataType.INT64))
    return op.ScatterND(zeros, op.Unsqueeze(wide, [-1]), dy, reduction="add")  # type: ignore[no-any-return]


@declare("GatherElementsGrad", inputs="dy indices shape", outputs="dx", attributes={"axis": REQUIRED}, infer=_of_shape)
def gather_elements_grad(op: Builder, dy: ir.Value, indices: ir.Value, shape: ir.Value, *, axis: int) -> ir.Value:
    """dx of y = GatherElements(x, indices; axis) for x of ``shape``: elements of dy added at their indices, zeros elsewhere.

    Of one index a line it is a choice, which kernels fuse with what comes before and after.
    """
    sizes, one = constant(shape), static_dims(indices)
    if sizes is not None and one == tuple(1 if k == axis % len(sizes) else int(n) for k, n in enumerate(sizes)):
        places = np.arange(sizes[axis], dtype=np.int64).reshape(
            [-1 if k == axis % len(sizes) else 1 for k in range(len(sizes))]
        )
        index = op.Cast(indices, to=int(ir.DataType.INT64))
        index = op.Where(op.Less(index, 0), op.Add(index, int(sizes[axis])), index)
        return op.Where(op.Equal(op.const(places), index), dy, op.scalar(0, dy))  # type: ignore[no-any-return]
    narrow = dy.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)  # which onnxruntime does not add here
    wide = op.Cast(dy, to=int(ir.DataType.FLOAT)) if narrow else dy
    added = op.ScatterElements(op.Expand(op.scalar(0, wide), shape), indices, wide, axis=axis, reduction="add")
    return op.cast_like(added, dy)


def _like_the_wanted(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [spec_of(inputs[k]) for k in attributes["wanted"]]


@declare(
    "LateGradient",
    inputs="*values",
    outputs="*gradients",
    attributes={"forward": REQUIRED, "wanted": REQUIRED, "given": REQUIRED},
    infer=_like_the_wanted,
)
def late_gradient(op: Builder, *values: ir.Value, forward: ir.Graph, wanted: list[int], given: list[int]) -> Any:
    """The gradients of a node whose rule needs a rank that only the shapes of the feeds tell.

    ``forward`` is the node as a body. ``values`` are its inputs, then the adjoints of its outputs ``given``; the gradients
    are those of the inputs ``wanted``. A plan, which knows all shapes, replaces the node by what the rule makes
    (``late_gradients``).
    """
    first = next(iter(forward))
    raise UnsupportedOpError(
        f"the gradient of {first.name!r} ({first.op_type}) needs shapes that are not known; fix those of the inputs with "
        "--shape (shapes=)"
    )


def _match_shape(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    x, like, axes = required(inputs[0]), required(inputs[1]), attributes["axes"]
    have, wanted = dims(x), dims(like)
    if have is not None and wanted is not None:
        wanted = wanted if axes is None else tuple(wanted[axis] for axis in axes)
        differ = any(isinstance(h, int) and isinstance(w, int) and h != w for h, w in zip(have, wanted, strict=False))
        if len(have) != len(wanted) or differ:
            of = "" if axes is None else f" along the axes {list(axes)}"
            what = attributes["what"] or x.name
            raise ValueError(f"{what!r} has shape {list(have)}, but {list(wanted)} is that of {describe_value(like)}{of}")
    return [spec_of(x)]


@declare("MatchShape", inputs="x like", outputs="y", attributes={"axes": None, "what": ""}, infer=_match_shape)
def match_shape(op: Builder, x: ir.Value, like: ir.Value, *, axes: Sequence[int] | None, what: str) -> ir.Value:
    """y = x, whose shape must be that of ``like``, or the sizes of ``like`` along ``axes``.

    A loss puts it before a label whose shape is not known to fit: once feeds give every size a number, one that differs is an
    error, where arithmetic would broadcast it silently. ``what`` names x in that error. Where sizes depend on data, the
    comparison runs with the graph: a wrong shape reads element 1 of a single one, which every runtime refuses.
    """
    if static_dims(x) is not None and static_dims(like) is not None:
        return x
    have, wanted = op.Shape(x), op.Shape(like)
    if axes is not None:
        wanted = op.Gather(wanted, op.const(np.array(axes, dtype=np.int64)), axis=0)
    differ = op.Cast(op.Not(op.Equal(have, wanted)), to=int(ir.DataType.INT64))
    nothing = op.Gather(op.const(np.zeros(1, dtype=np.int64)), differ, axis=0)
    return op.Reshape(x, op.Add(wanted, nothing))  # type: ignore[no-any-return]
