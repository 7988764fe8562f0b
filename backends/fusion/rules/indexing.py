"""Decomposes ops that move elements into gathers and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.rules.table import axis_of, iota, operand, optional, rule
from graphc.backends.fusion.views import integers
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, shape_of
from graphc.ir.ops.convolution import Window
from graphc.ir.ops.resampling import RESIZE, ResizedAxis, interpolation_matrix

TAPS = 4
"""Neighbours per element up to which interpolation sums gathers; beyond, it is a matrix product."""


@rule("Range")
def range_of_known_length(op: Builder, node: ir.Node) -> Sequence[Any]:
    """Range: start + step · k."""
    start, step = operand(node, 0), operand(node, 2)
    steps = op.const(np.arange(shape_of(node.outputs[0])[0]).astype(start.dtype.numpy()))
    return [op.Add(op.Mul(steps, op.Reshape(step, op.const([1]))), op.Reshape(start, op.const([1])))]


@rule("Shape", "Size")
def known_shape(op: Builder, node: ir.Node) -> Sequence[Any]:
    shape = np.array(shape_of(node.inputs[0]), np.int64)
    if node.op_type == "Size":
        return [op.const(np.prod(shape, dtype=np.int64))]
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(shape))
    return [op.const(shape[start:end])]


@rule("ConstantOfShape")
def constant_of_shape(op: Builder, node: ir.Node) -> Sequence[Any]:
    value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    fill = op.const(np.asarray(value).reshape(()))
    return [op.Expand(fill, op.const(list(shape_of(node.outputs[0]))))]


@rule("Pad")
def pad_by_what_is_there(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """Pad with reflected, repeated or wrapped edges: one gather an axis by a table of indices."""
    mode = node.attributes.get_string("mode", "constant")
    pads, axes = integers(node, 1), integers(node, 3)
    if mode == "constant" or pads is None or (optional(node, 3) is not None and axes is None):
        return None
    value = operand(node, 0)
    shape = shape_of(value)
    for k, axis in enumerate(range(len(shape)) if axes is None else [a % len(shape) for a in axes]):
        before, after = pads[k], pads[k + len(pads) // 2]
        if before or after:
            inside = np.arange(max(before, 0) * -1, shape[axis] + max(after, 0))
            table = np.pad(np.arange(shape[axis]), (max(before, 0), max(after, 0)), mode=mode)  # type: ignore[call-overload]
            kept = (inside >= -before) & (inside < shape[axis] + after)
            value = op.Gather(value, op.const(table[kept].astype(np.int64)), axis=axis)
    return [op.Identity(value)]


@rule("ReverseSequence")
def reverse_sequence(op: Builder, node: ir.Node) -> Sequence[Any]:
    """ReverseSequence: the first ``length`` elements of each sample in reverse order."""
    x, lengths = operand(node, 0), operand(node, 1)
    shape = shape_of(x)
    time, batch = node.attributes.get_int("time_axis", 0), node.attributes.get_int("batch_axis", 1)
    place = iota(op, shape[time], time, len(shape))
    length = op.Reshape(lengths, op.const([shape[k] if k == batch else 1 for k in range(len(shape))]))
    source = op.Where(op.Less(place, length), op.Sub(op.Sub(length, np.int64(1)), place), place)
    return [op.GatherElements(x, op.Expand(source, op.const(np.array(shape, np.int64))), axis=time)]


@rule("TensorScatter")
def tensor_scatter(op: Builder, node: ir.Node) -> Sequence[Any]:
    """TensorScatter: a cache into which ``update`` is written from an index per sample."""
    cache, update, begins = operand(node, 0), operand(node, 1), optional(node, 2)
    shape, axis = shape_of(cache), node.attributes.get_int("axis", -2) % len(shape_of(cache))
    length, count = shape[axis], shape_of(update)[axis]
    place = iota(op, length, axis, len(shape))
    if begins is not None:
        place = op.Sub(place, op.Reshape(begins, op.const([shape[0], *[1] * (len(shape) - 1)])))
    if node.attributes.get_string("mode", "linear") == "circular":
        place = op.Mod(place, np.int64(length))
    inside = op.And(op.GreaterOrEqual(place, np.int64(0)), op.Less(place, np.int64(count)))
    chosen = op.Expand(op.Where(inside, place, np.int64(0)), op.const(np.array(shape, np.int64)))
    return [op.Where(inside, op.GatherElements(update, chosen, axis=axis), cache)]


@rule("Compress")
def compress(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """Compress: a gather, if the condition is known."""
    x, condition = operand(node, 0), constant(operand(node, 1))
    if condition is None:
        return None
    places = op.const(np.nonzero(condition.reshape(-1))[0].astype(np.int64))
    if "axis" in node.attributes:
        return [op.Gather(x, places, axis=axis_of(node, 0))]
    return [op.Gather(op.Reshape(x, [-1]), places, axis=0)]


@rule("MaxUnpool")
def max_unpool(op: Builder, node: ir.Node) -> Sequence[Any]:
    """MaxUnpool: each value at its index into the pooling's input; zeros pad the result to the given shape."""
    x, places = operand(node, 0), operand(node, 1)
    wanted, taps = shape_of(node.outputs[0]), len(shape_of(x)) - 2
    attributes = {k: list(a.as_ints()) for k, a in node.attributes.items()}
    window = Window.of(attributes, (None,) * taps)
    reach = zip(shape_of(x)[2:], window.strides, *window.padding, window.kernel, strict=True)
    shape = [*shape_of(x)[:2], *((size - 1) * stride - before - after + tap for size, stride, before, after, tap in reach)]
    zeros = op.Expand(op.scalar(0, x), op.const([int(np.prod(shape))]))
    whole = op.ScatterElements(zeros, op.Reshape(places, [-1]), op.Reshape(x, [-1]), axis=0)
    value = op.Reshape(whole, op.const(np.array(shape, np.int64)))
    pads = [0] * len(shape) + [w - s for w, s in zip(wanted, shape, strict=True)]
    return [op.Pad(value, op.const(pads)) if any(pads) else value]


@rule("Resize")
def resize(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """Resize each axis alone.

    An axis becomes a gather (nearest neighbour), a weighted sum of gathers, or a product with a small matrix.
    """
    return axis_by_axis(op, node, _interpolated)


def axis_by_axis(
    op: Builder, node: ir.Node, along: Callable[[Builder, Any, np.ndarray, int, int], Any]
) -> Sequence[Any] | None:
    """Resize each axis alone; None where a size is not known before a run, or ``along`` emits nothing.

    Args:
        along: emits a value of some rank with an axis multiplied by a matrix (after × before).
    """
    x = operand(node, 0)
    attributes: dict[str, Any] = {**RESIZE, **{k: a.value for k, a in node.attributes.items()}}
    attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
    found = _resized_axes(node, attributes)
    if found is None:
        return None
    value = op.Cast(x, to=int(ir.DataType.FLOAT)) if attributes["mode"] != "nearest" and x.dtype != ir.DataType.DOUBLE else x
    outside: list[Any] = []
    rank = len(shape_of(x))
    for axis, resized in found:
        precision = np.float32 if attributes["mode"] == "nearest" and x.dtype != ir.DataType.DOUBLE else np.float64
        matrix = interpolation_matrix(resized, attributes, precision)
        empty = ~matrix.any(axis=1)
        if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize" and empty.any():
            outside.append(op.const(empty.reshape([-1 if k == axis else 1 for k in range(rank)])))
        if not np.array_equal(matrix, np.eye(resized.before)):
            value = along(op, value, matrix, axis, rank)
        if value is None:
            return None
    for mask in outside:
        value = op.Where(mask, op.scalar(attributes["extrapolation_value"], value), value)
    return [op.cast_like(value, x)]


def _interpolated(op: Builder, value: Any, matrix: np.ndarray, axis: int, rank: int) -> Any:
    taps = int((matrix != 0).sum(axis=1).max(initial=1))
    if taps > TAPS:
        weights = op.const(matrix.astype(value.dtype.numpy()))
        moved = op.Transpose(value, perm=[*(k for k in range(rank) if k != axis), axis])
        product = op.MatMul(moved, op.Transpose(weights, perm=[1, 0]))
        back = [*range(axis), rank - 1, *range(axis, rank - 1)]
        return op.Transpose(product, perm=back)
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, : max(taps, 1)]
    factors = np.take_along_axis(matrix, order, axis=1)
    total = None
    for k in range(order.shape[1]):
        part = op.Gather(value, op.const(order[:, k].astype(np.int64)), axis=axis)
        if not np.array_equal(factors[:, k], np.ones(len(factors))):
            scale = factors[:, k].reshape([-1 if n == axis else 1 for n in range(rank)])
            part = op.Mul(part, op.const(scale.astype(value.dtype.numpy())))
        total = part if total is None else op.Add(total, part)
    return total


def _resized_axes(node: ir.Node, attributes: dict[str, Any]) -> list[tuple[int, ResizedAxis]] | None:
    before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    axes = [a % len(before) for a in attributes["axes"] or range(len(before))]
    scales, roi, sizes = (constant(optional(node, k)) for k in (2, 1, 3))
    crop = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    if (optional(node, 2) is not None and scales is None) or (crop and optional(node, 1) is not None and roi is None):
        return None
    if scales is not None and scales.size:
        ratios = [float(s) for s in scales.reshape(-1)]
    elif attributes["keep_aspect_ratio_policy"] == "stretch":
        ratios = [after[a] / before[a] for a in axes]
    elif sizes is None:
        return None
    else:
        choose = min if attributes["keep_aspect_ratio_policy"] == "not_larger" else max
        ratios = [choose(float(w) / before[a] for w, a in zip(sizes.reshape(-1), axes, strict=True))] * len(axes)
    parts = [(float(roi[k]), float(roi[k + len(axes)])) if crop and roi is not None else (0.0, 1.0) for k in range(len(axes))]
    return [(a, ResizedAxis(before[a], after[a], r, p)) for a, r, p in zip(axes, ratios, parts, strict=True)]
