"""Gradient of Resize as a single op, which can wait until a plan knows symbolic sizes.

    dx = graphc.ResizeGrad(dy, shape(x), roi, scales, sizes; attributes of Resize)   ─►   a small matrix product per axis

Resize is linear and separable by axis: y = M₁·x·M₂ᵀ with matrices M (out × in), so dx = M₁ᵀ·dy·M₂. With static
sizes M is a constant, built by ONNX's own definition; else Resize of the identity computes it at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.declare import declare
from graphc.ir.facts import constant, dims, rank, shape_of_result
from graphc.ir.ops.convolution import of_shape

RESIZE: Mapping[str, Any] = {
    "antialias": 0,
    "axes": None,
    "coordinate_transformation_mode": "half_pixel",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "extrapolation_value": 0.0,
    "keep_aspect_ratio_policy": "stretch",
    "mode": "nearest",
    "nearest_mode": "round_prefer_floor",
}

_ROUNDED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """One axis of a Resize: sizes before and after, scale (not always their ratio), and cropped region."""

    before: int
    after: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


def interpolation_matrix(axis: ResizedAxis, attributes: Mapping[str, Any], dtype: Any = np.float64) -> np.ndarray:
    """M (after × before, float64) with y = M·x along one axis, as ONNX defines Resize.

    Args:
        attributes: all of :data:`RESIZE`.
        dtype: type of coordinate arithmetic, which decides the choice of the nearest neighbour.
    """
    taps, weights = interpolation_taps(axis, attributes, dtype)
    matrix = np.zeros((axis.after, axis.before))
    rows = np.broadcast_to(np.arange(axis.after)[:, None], taps.shape)
    np.add.at(matrix, (rows, taps), weights)
    return matrix


def interpolation_taps(
    axis: ResizedAxis, attributes: Mapping[str, Any], dtype: Any = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """The elements of x that make each element of y along one axis, and their weights (after × taps each).

    Taps beyond the edges are those at the edges, so that one may stand there several times. Arguments as of
    :func:`interpolation_matrix`.
    """
    x, outside = _source(axis, attributes["coordinate_transformation_mode"], dtype)
    if attributes["mode"] == "nearest":
        taps = _ROUNDED[attributes["nearest_mode"]](x).astype(np.int64)[:, None]
        weights = np.ones(taps.shape)
    else:
        taps, weights = _kernel(x.astype(np.float64), axis.scale, attributes)
    if attributes["exclude_outside"]:
        weights = np.where((taps >= 0) & (taps < axis.before), weights, 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return np.clip(taps, 0, axis.before - 1), np.where(outside[:, None], 0.0, weights)


def _source(axis: ResizedAxis, mode: str, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The coordinate in x of each element of y, and whether it lies outside (used by ``tf_crop_and_resize`` only)."""
    y = np.arange(axis.after).astype(dtype)
    scale, last = dtype(axis.scale), dtype(axis.before - 1)
    length = dtype(axis.scale * axis.before)  # as in the definition: not always whole
    inside = np.zeros(axis.after, dtype=bool)
    if mode == "align_corners":
        return (np.zeros_like(y) if length == 1 else y * last / (length - 1)), inside
    if mode == "asymmetric":
        return y / scale, inside
    if mode == "tf_crop_and_resize":
        start, end = (dtype(r) for r in axis.roi)
        width = (end - start) * last
        x = start * last + (np.full_like(y, width / 2) if length == 1 else y * width / (length - 1))
        return x, (x < 0) | (x > last)
    if mode == "pytorch_half_pixel" and length == 1:
        return np.full_like(y, -0.5), inside
    x = (y + dtype(0.5)) / scale - dtype(0.5)
    if mode == "half_pixel_symmetric":
        x = x + dtype(axis.before / 2) * (1 - axis.after / length)
    return x, inside


def _kernel(x: np.ndarray, scale: float, attributes: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The neighbours of each coordinate and their weights; antialiasing widens the kernel when the image shrinks."""
    narrow = min(scale, 1.0) if attributes["antialias"] else 1.0
    reach = 1 if attributes["mode"] == "linear" else 2
    width = int(np.ceil(reach / narrow))
    taps = np.floor(x).astype(np.int64)[:, None] + np.arange(1 - width, width + 1)
    t = np.abs(taps - x[:, None]) * narrow
    if reach == 1:
        weights = np.maximum(1 - t, 0)
    else:
        a = float(np.float32(attributes["cubic_coeff_a"]))
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        weights = np.where(t <= 1, near, np.where(t < 2, far, 0.0))
    return taps, weights / weights.sum(axis=1, keepdims=True) if attributes["antialias"] else weights


@declare("ResizeGrad", inputs="dy shape roi? scales? sizes?", outputs="dx", infer=of_shape(0, 1), attributes=RESIZE)
def resize_grad(
    op: Builder,
    dy: ir.Value,
    shape: ir.Value,
    roi: ir.Value | None = None,
    scales: ir.Value | None = None,
    sizes: ir.Value | None = None,
    **attributes: Any,
) -> ir.Value:
    """Gradient of ``y = Resize(x, roi, scales, sizes)``; ``shape``: int64, the shape of x."""
    axes = resized_axes(dy, attributes)
    known = static_axes(shape_of_result(shape), dy, roi, scales, sizes, attributes)
    policy = attributes["keep_aspect_ratio_policy"]
    if known is None and scales is None and policy != "stretch":
        raise UnsupportedOpError(
            f"the gradient of a Resize with keep_aspect_ratio_policy={policy!r} needs static sizes: "
            f"{dy.name!r} has {dims(dy)}; make the model's spatial dimensions static"
        )
    dx = dy
    for k, axis in enumerate(axes):
        if known is None:
            size = op.Gather(shape, [axis])
            pick = [op.Gather(v, n) if v is not None else None for v, n in ((roi, [k, k + len(axes)]), (scales, [k]))]
            after = op.Shape(dy, start=axis, end=axis + 1) if scales is None else None
            dx = _apply_transposed(op, _matrix_at_run_time(op, size, (*pick, after), dy, attributes), dx, axis, size)
            continue
        assert dy.dtype is not None
        matrix, before = interpolation_matrix(known[k], attributes, precision_of(dy, attributes)), known[k].before
        repeats = known[k].after // max(before, 1)
        if np.array_equal(matrix, np.eye(before)):
            continue
        if np.array_equal(matrix, np.repeat(np.eye(before), repeats, axis=0)):
            dx = _sum_blocks(op, dx, axis, before, repeats)
        else:
            dx = _apply_transposed(op, op.const(matrix.astype(dy.dtype.numpy())), dx, axis, op.const([before]))
    return dx


def resized_axes(y: ir.Value, attributes: Mapping[str, Any]) -> list[int]:
    """The axes that a Resize changes, in the order of its operands."""
    width = rank(y)
    return [axis % width for axis in attributes["axes"] or range(width)]


def precision_of(y: ir.Value, attributes: Mapping[str, Any]) -> Any:
    """The type of coordinate arithmetic: onnxruntime computes coordinates in float32."""
    return np.float32 if attributes["mode"] == "nearest" and y.dtype != ir.DataType.DOUBLE else np.float64


def static_axes(
    shape: ir.Shape | None,
    y: ir.Value,
    roi: ir.Value | None,
    scales: ir.Value | None,
    sizes: ir.Value | None,
    attributes: Mapping[str, Any],
) -> list[ResizedAxis] | None:
    """The known facts of each resized axis of a Resize from ``shape`` to y; None unless all are known."""
    after_all = dims(y)
    if shape is None or after_all is None:
        axes: list[int] = []
    else:
        axes = resized_axes(y, attributes)
    policy, count = attributes["keep_aspect_ratio_policy"], len(axes)
    before = [d for d in (shape[a] for a in axes) if isinstance(d, int)] if shape is not None else []
    after = [d for d in (after_all[a] for a in axes) if isinstance(d, int)] if after_all is not None else []
    crops, factors, wanted = constant(roi), constant(scales), constant(sizes)
    crop = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    complete = count > 0 and len(before) == len(after) == count and (scales is None or factors is not None)
    complete &= not crop or roi is None or crops is not None
    complete &= scales is not None or policy == "stretch" or wanted is not None
    if not complete:
        return None
    if factors is not None:
        ratios = [float(f) for f in factors]
    elif policy == "stretch" or wanted is None:
        ratios = [a / b for a, b in zip(after, before, strict=True)]
    else:
        choose = min if policy == "not_larger" else max
        ratios = [choose(float(w) / b for w, b in zip(wanted, before, strict=True))] * count
    parts = [(float(crops[k]), float(crops[k + count])) if crop and crops is not None else (0.0, 1.0) for k in range(count)]
    return [ResizedAxis(*entry) for entry in zip(before, after, ratios, parts, strict=True)]


def _matrix_at_run_time(
    op: Builder, size: Any, operands: tuple[Any, ...], like: ir.Value, attributes: Mapping[str, Any]
) -> Any:
    """M by resizing the identity along its first axis; ``size``: int64, one element."""
    assert like.dtype is not None
    one_axis = {**attributes, "axes": [0], "extrapolation_value": 0.0}
    zeros = op.Expand(op.scalar(0, like), op.Concat(size, size, axis=0))
    return op.Resize(op.EyeLike(zeros), *operands, **one_axis)


def _sum_blocks(op: Builder, value: Any, axis: int, before: int, repeats: int) -> Any:
    """Gradient of repetition: sums dy over the copies of each element of x."""
    lead, tail = op.Shape(value, start=0, end=axis), op.Shape(value, start=axis + 1)
    blocks = op.Reshape(value, op.Concat(lead, op.const([before, repeats]), tail, axis=0))
    return op.ReduceSum(blocks, [axis + 1], keepdims=0)


def _apply_transposed(op: Builder, matrix: Any, value: Any, axis: int, size: Any) -> Any:
    """Multiply one axis of ``value`` by ``matrix``ᵀ (``size`` × out); ``size``: int64, one element."""
    width = rank(value)
    if axis == width - 1 and width > 1:
        return op.MatMul(value, matrix)
    transposed = op.Transpose(matrix, perm=[1, 0])
    if axis == width - 2:
        return op.MatMul(transposed, value)
    lead, tail = op.Shape(value, start=0, end=axis), op.Shape(value, start=axis + 1)
    rows = op.Reshape(value, op.Concat(lead, op.Shape(value, start=axis, end=axis + 1), op.const([-1]), axis=0))
    return op.Reshape(op.MatMul(transposed, rows), op.Concat(lead, size, tail, axis=0))
