"""Gradients of pooling as single ops: a backend has kernels for them, other runtimes decompose them.

    dx = graphc.MaxPoolGrad(dy, x, y; attributes of MaxPool)             ─►  MaxPool's indices, ScatterElements(add)
    y, tap = graphc.MaxPoolTaps(x),  dx = graphc.MaxPoolTapsGrad(dy, tap, shape(x))  ─►  the same with channels last
    dx = graphc.AveragePoolGrad(dy, shape(x); attributes of AveragePool)  ─►  a small matrix product per axis
    dx = graphc.LpPoolGrad(dy, x, y; attributes of LpPool)               ─►  the same, with powers of x and y

Tensors are N × C × spatial axes (1 to 3 of them); all attributes mean the same as in the forward op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, same_as
from graphc.ir.facts import dtype_of, rank, required, shape_of_result
from graphc.ir.infer import infer_outputs
from graphc.ir.ops.channels_last import MAX_POOL, first, last, to_last
from graphc.ir.ops.convolution import POOL, Window, of_shape, same_padding, spatial, spatial_part

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@declare("MaxPoolGrad", inputs="dy x y", outputs="dx", infer=same_as(1), attributes=POOL)
def max_pool_grad(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, **attributes: Any) -> ir.Value:
    """Gradient of ``y = MaxPool(x)``: adds each dy to the element that was the maximum of its window.

    Among equal elements that is the first in row-major order; where y is NaN, the last NaN, as in PyTorch.
    """
    window = Window.of(attributes, spatial(x.shape))
    if window.pads is not None:
        attributes.update(window.attributes(), auto_pad=None)
    _, indices = op.MaxPool(x, **attributes, _outputs=2)
    wide = op.Cast(dy, to=int(ir.DataType.FLOAT)) if dy.dtype in HALVES else dy  # onnxruntime has no half-precision scatter
    flat = op.Expand(op.scalar(0, wide), op.Reshape(op.Size(x), [1]))
    dx = op.ScatterElements(flat, op.Reshape(indices, [-1]), op.Reshape(wide, [-1]), axis=0, reduction="add")
    return op.Reshape(op.cast_like(dx, dy), op.shape(x))  # type: ignore[no-any-return]


def _pooled_and_taps(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    known = {k: v for k, v in attributes.items() if v is not None}
    attrs = {attr.name: attr for attr in ir.convenience.convert_attributes(known)}
    ((type_, shape),) = infer_outputs(MAX_POOL, "", inputs, attrs, num_outputs=1)
    dtype = type_.dtype if type_ is not None else required(inputs[0]).dtype
    return [(required(dtype), shape), (ir.DataType.UINT8, shape)]


@declare("MaxPoolTaps", inputs="x", outputs="y tap", infer=_pooled_and_taps, attributes=POOL)
def max_pool_taps(op: Builder, x: ir.Value, **attributes: Any) -> tuple[ir.Value, ir.Value]:
    """MaxPool, and each maximum's position in its window (the first of ties, the last NaN): from 1, in row-major order.

    Positions go up to 255. x has a static shape, and windows have no dilations.
    """
    given = {name: value for name, value in attributes.items() if value is not None}
    y, tap = op.graphc.ChannelsLastMaxPoolTaps(last(op, x), **given, _outputs=2)
    return first(op, y), first(op, tap)


@declare("MaxPoolTapsGrad", inputs="dy tap shape", outputs="dx", infer=of_shape(0, 2), attributes=POOL)
def max_pool_taps_grad(op: Builder, dy: ir.Value, tap: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """Σ dy over the windows whose maximum is this element: the gradient of MaxPoolTaps."""
    given = {name: value for name, value in attributes.items() if value is not None}
    sizes = op.Gather(shape, np.array(to_last(rank(dy)), dtype=np.int64))
    return first(op, op.graphc.ChannelsLastMaxPoolTapsGrad(last(op, dy), last(op, tap), sizes, **given))


@declare(
    "AveragePoolGrad",
    inputs="dy shape",
    outputs="dx",
    infer=of_shape(0, 1),
    attributes={**POOL, "count_include_pad": 0},
)
def average_pool_grad(op: Builder, dy: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """Gradient of ``y = AveragePool(x)``; ``shape``: int64, the shape of x.

    Averaging is linear and separable by spatial axis: y = A₁·x·A₂ᵀ with small matrices A (out × in), so
    dx = A₁ᵀ·dy·A₂. That covers padding, dilation, ``ceil_mode`` and both ways to count.
    """
    window = Window.of(attributes, spatial(shape_of_result(shape)))
    dx = dy
    for axis, matrix in enumerate(_matrices(op, window, dy, shape, bool(attributes["count_include_pad"]))):
        dx = _apply_transposed(op, matrix, dx, axis, len(window.kernel))
    return dx


@declare("LpPoolGrad", inputs="dy x y", outputs="dx", infer=same_as(1), attributes={**POOL, "p": 2})
def lp_pool_grad(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, **attributes: Any) -> ir.Value:
    """Gradient of ``y = LpPool(x)``, y = (Σ|x|ᵖ)^(1/p) over a window: dx = sign(x)·|x|^(p-1) · Σ dy·y^(1-p) over x's windows.

    dx is zero where y is. The sum over windows transposes a sum over taps, which is separable by axis.
    """
    shape, p = op.shape(x), attributes["p"]
    window = Window.of(attributes, spatial(x.shape))
    flow = norm_flow(op, dy, y, p)
    for axis, matrix in enumerate(_matrices(op, window, flow, shape, False)):
        flow = _apply_transposed(op, op.Sign(matrix), flow, axis, len(window.kernel))
    return op.Mul(flow, norm_slope(op, x, p))  # type: ignore[no-any-return]


def norm_flow(op: Builder, dy: ir.Value, y: ir.Value, p: int) -> ir.Value:
    """dy·y^(1-p), and 0 where the p-norm y is 0."""
    if p == 1:
        return dy
    zero = op.Equal(y, 0.0)
    positive = op.Where(zero, op.scalar(1, y), y)
    ratio = op.Div(dy, positive if p == 2 else op.Pow(positive, float(p - 1)))
    return op.Where(zero, op.scalar(0, dy), ratio)  # type: ignore[no-any-return]


def norm_slope(op: Builder, x: ir.Value, p: int) -> ir.Value:
    """sign(x)·|x|^(p-1)."""
    if p == 1:
        return op.Sign(x)  # type: ignore[no-any-return]
    return x if p == 2 else op.Mul(x, op.Pow(op.Abs(x), float(p - 2)))


def _matrices(op: Builder, window: Window, dy: ir.Value, shape: ir.Value, include_pad: bool) -> Iterator[ir.Value]:
    """The averaging matrix (out × in) of each spatial axis, in dy's type; ``shape``: int64, that of the pool's input."""
    size, out = spatial(shape_of_result(shape)), spatial(dy.shape)
    begin = end = None
    if window.pads is None:
        begin, end = same_padding(op, window, spatial_part(op, shape))
    assert dy.dtype is not None
    for axis in range(len(window.kernel)):
        input_size, output_size = size[axis], out[axis]
        if window.begin is not None and input_size is not None and output_size is not None:
            matrix = averaging_matrix(window, axis, include_pad, input_size, output_size)
            yield op.const(matrix.astype(dy.dtype.numpy()))
        else:
            pads = None if begin is None or end is None else (op.Gather(begin, [axis]), op.Gather(end, [axis]))
            lengths = op.Gather(shape, [axis + 2]), op.Shape(dy, start=axis + 2, end=axis + 3)
            yield _averaging_matrix_at_run_time(op, window, axis, include_pad, *lengths, pads, dy)


def averaging_matrix(window: Window, axis: int, include_pad: bool, input_size: int, output_size: int) -> np.ndarray:
    """A (out × in, float64) with y = A·x along one axis: A[o, i] = 1 / count[o] where window o covers i."""
    assert window.begin is not None
    assert window.end is not None
    starts = np.arange(output_size)[:, None] * window.strides[axis] - window.begin[axis]
    covered = starts + np.arange(window.kernel[axis])[None, :] * window.dilations[axis]
    inside = (covered >= 0) & (covered < input_size)
    counted = covered < input_size + window.end[axis] if include_pad else inside
    matrix = np.zeros((output_size, input_size))
    rows, taps = np.nonzero(inside)
    matrix[rows, covered[rows, taps]] = 1.0
    return np.asarray(matrix / np.maximum(counted.sum(axis=1, keepdims=True), 1))


def _averaging_matrix_at_run_time(
    op: Builder,
    window: Window,
    axis: int,
    include_pad: bool,
    input_size: ir.Value,
    output_size: ir.Value,
    pads: tuple[ir.Value, ir.Value] | None,
    like: ir.Value,
) -> ir.Value:
    """Emit :func:`averaging_matrix` in ``like``'s type, for sizes (int64, one element) unknown at compile time."""
    if window.begin is not None and window.end is not None:
        begin, end = op.const([window.begin[axis]]), op.const([window.end[axis]])
    else:
        begin, end = required(pads)
    zero, one, scalar = np.array(0, dtype=np.int64), np.array(1, dtype=np.int64), np.array([], dtype=np.int64)
    windows = op.Range(op.const(zero), op.Reshape(output_size, scalar), op.const(one))
    positions = op.Range(op.const(zero), op.Reshape(input_size, scalar), op.const(one))
    starts = op.Unsqueeze(op.Sub(op.Mul(windows, window.strides[axis] * one), begin), [1])
    covered = op.Add(starts, np.arange(window.kernel[axis], dtype=np.int64)[None, :] * window.dilations[axis])
    to = int(dtype_of(like))
    hits = op.Cast(op.Equal(op.Unsqueeze(covered, [2]), positions), to=to)
    matrix = op.ReduceSum(hits, [1], keepdims=0)
    if include_pad:
        counted = op.Cast(op.Less(covered, op.Add(input_size, end)), to=to)
        count = op.ReduceSum(counted, [1], keepdims=1)
    else:
        count = op.ReduceSum(matrix, [1], keepdims=1)
    return op.Div(matrix, op.Max(count, 1.0))  # type: ignore[no-any-return]


def _apply_transposed(op: Builder, matrix: ir.Value, value: ir.Value, axis: int, n: int) -> ir.Value:
    """Multiply spatial axis ``axis`` of ``value`` (… × out × …) by ``matrix``ᵀ (in × out)."""
    if axis == n - 1:
        return op.MatMul(value, matrix)  # type: ignore[no-any-return]
    transposed = op.Transpose(matrix, perm=[1, 0])
    if axis == n - 2:
        return op.MatMul(transposed, value)  # type: ignore[no-any-return]
    flat = op.MatMul(transposed, op.Reshape(value, [0, 0, 0, -1]))
    behind = op.Shape(value, start=axis + 3)
    return op.Reshape(flat, op.Concat(op.const([0, 0, 0]), behind, axis=0))  # type: ignore[no-any-return]
