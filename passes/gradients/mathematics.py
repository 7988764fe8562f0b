"""Gradients of products along an axis and of Fourier transforms."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe, dims, input_of, rank

zero_gradient("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", origin=__name__)

_END = np.iinfo(np.int64).max


@gradient("CumProd")
def cum_prod(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = running product of x;  ∂x by products without each element"""
    x, axis = operands(node, 2)
    flags = {name: node.attributes.get_int(name, 0) for name in ("exclusive", "reverse")}
    return op.graphc.RunningProductGrad(dy, x, node.outputs[0], axis, **flags)


@gradient("graphc::RunningProduct")
def running_product(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """As of CumProd."""
    (x,) = operands(node, 1)
    axis = op.const(node.attributes.get_int("axis", 0))
    return op.graphc.RunningProductGrad(dy, x, node.outputs[0], axis)


@gradient("DFT")
def dft(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = F·x, cut or padded to L points;  ∂x = Fᴴ·dy, which is L·F⁻¹ forward, and F/L for the inverse transform

    A real x takes the real part. One side of a spectrum is the whole with zeros; of the inverse of one side,
    x̄ₖ = F(dy)ₖ·wₖ/L, where w is 1 for the frequencies that are their own mirror image and 2 for the others.
    """
    (x,) = operands(node, 1)
    inputs = (*node.inputs, None, None)
    length, axis = inputs[1], _axis(node, inputs[2], rank(x))
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    if length is not None:
        points = op.Reshape(length, [1]) if length.dtype == ir.DataType.INT64 else op.Cast(op.Reshape(length, [1]), to=7)
    elif inverse and onesided:
        points = op.lengths((dy, axis))
    else:
        points = op.lengths((x, axis))
    count = op.Squeeze(points, [0])
    scale = op.cast_like(count, x)
    if not inverse:
        whole = _fit(op, dy, axis, (dy, axis), points) if onesided else dy
        back = op.Mul(op.DFT(whole, count, op.const(axis), inverse=1), scale)
    elif onesided:
        back = op.Mul(op.DFT(dy, count, op.const(axis), onesided=1), _mirror_weights(op, points, axis, x))
    else:
        back = op.Div(op.DFT(dy, count, op.const(axis)), scale)
    bins = op.Add(op.Div(points, [2]), [1]) if inverse and onesided else points
    return _real_part(op, _fit(op, back, axis, (x, axis), bins, to_x=True), x)


def _axis(node: ir.Node, axis: ir.Value | None, width: int) -> int:
    known = constant(axis)
    if axis is not None and known is None:
        raise UnsupportedOpError(f"the axis of DFT must be a constant: {describe(node)}")
    return (int(known.reshape(-1)[0]) if known is not None else -2) % width


def _fit(op: Builder, value: Any, axis: int, of: tuple[Any, int], points: Any, *, to_x: bool = False) -> Any:
    """Crop or zero-pad ``value`` along an axis: to ``points``, or (``to_x``) from there to the size of ``of``."""
    size = op.lengths(of)
    have, want = (points, size) if to_x else (size, points)
    missing = op.Sub(want, have)
    known = constant(missing)
    if known is not None and int(known[0]) == 0:
        return value
    if known is not None and int(known[0]) < 0:
        return op.Slice(value, [0], want, [axis])
    return op.Pad(value, op.Concat(op.const([0]), missing, axis=0), None, op.const([axis]))  # a negative pad crops


def _real_part(op: Builder, value: Any, x: ir.Value) -> Any:
    parts = (dims(x) or (None,))[-1]
    return op.Slice(value, [0], [1], [-1]) if parts == 1 else value


def _mirror_weights(op: Builder, points: Any, axis: int, x: ir.Value) -> Any:
    """wₖ/L of the frequencies k = 0 … L/2: 1/L where k is 0 or L/2, else 2/L."""
    half = op.Add(op.Div(points, [2]), [1])
    k = op.Range(np.int64(0), op.Squeeze(half, [0]), np.int64(1))
    alone = op.Equal(op.Mod(op.Mul(k, [2]), points), [0])
    weights = op.Div(op.Where(alone, op.scalar(1, x), op.scalar(2, x)), op.cast_like(points, x))
    return op.Unsqueeze(weights, [d for d in range(rank(x)) if d != axis])


@gradient("STFT")
def stft(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y_f = F·(w·x_f) of overlapping frames x_f;  ∂w = Σ Re(Fᴴ·dy_f)·x_f,  ∂x = w·Fᴴ·dy_f, added where the frames lay"""
    signal, step = input_of(node, 0), input_of(node, 1)
    window, length = (*node.inputs, None, None)[2:4]
    onesided = bool(node.attributes.get_int("onesided", 1))
    if window is not None:
        size = op.lengths((window, 0))
    else:
        size = op.Reshape(op.Cast(length, to=7), [1]) if length is not None else op.lengths((signal, 1))
    count = op.Squeeze(size, [0])
    numbers = op.Range(np.int64(0), op.Squeeze(op.lengths((dy, 1)), [0]), np.int64(1))
    starts = op.Mul(numbers, op.Reshape(op.Cast(step, to=7), [1]))
    index = op.Add(op.Unsqueeze(starts, [1]), op.Unsqueeze(op.Range(np.int64(0), count, np.int64(1)), [0]))

    @functools.cache
    def windowed() -> Any:
        """The gradient of the windowed frames: batch, frame, place, real or complex."""
        whole = _fit(op, dy, 2, (dy, 2), size) if onesided else dy
        back = op.Mul(op.DFT(whole, count, op.const(2), inverse=1), op.cast_like(count, dy))
        return _real_part(op, back, signal)

    def dsignal() -> Any:
        frames = windowed() if window is None else op.Mul(windowed(), op.Unsqueeze(window, [1]))
        parts = (dims(signal) or (None,) * 3)[2]
        last: int | tuple[ir.Value, int] = parts if isinstance(parts, int) else (signal, 2)
        zeros = op.Expand(op.scalar(0, signal), op.lengths((signal, 1), (signal, 0), last))
        front = op.Transpose(frames, perm=[1, 2, 0, 3])
        added = op.ScatterND(zeros, op.Unsqueeze(index, [-1]), front, reduction="add")
        return op.Transpose(added, perm=[1, 0, 2])

    def dwindow() -> Any:
        return op.ReduceSum(op.Mul(windowed(), op.Gather(signal, index, axis=1)), [0, 1, 3], keepdims=0)

    return dsignal, None, dwindow
