"""Straight-through gradients of quantisation: rounding counts as identity, saturation as constant.

The adjoint of a quantised tensor is a float tensor of its shape. So a gradient flows from a ``DequantizeLinear`` through
ops that only move numbers (``Reshape``, ``Transpose`` …) to the ``QuantizeLinear`` in front; together the two rules
give the gradient of the scale of "Learned Step Size Quantization" (S. Esser et al., ICLR 2020).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, dtype_of, rank


@gradient("DequantizeLinear")
def dequantize_linear(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = (q - z)·s;  ∂q = dy·s,  ∂s = Σ dy·(q - z)"""
    q, scale = operands(node, 2)
    zero = node.inputs[2] if len(node.inputs) > 2 else None

    def dscale() -> Any:
        steps = op.cast_like(q, scale)
        if zero is not None:
            steps = op.Sub(steps, _spread(op, node, op.cast_like(zero, scale), q))
        return _gather(op, node, op.Mul(op.cast_like(dy, scale), steps), scale)

    return lambda: op.Mul(dy, op.cast_like(_spread(op, node, scale, q), dy)), dscale


@gradient("QuantizeLinear")
def quantize_linear(op: Builder, node: ir.Node, dq: ir.Value) -> Any:
    """q = clamp(round(x/s) + z);  ∂x = dq/s and ∂s = -Σ dq·x/s² where nothing was clamped, else 0"""
    x, scale = operands(node, 2)
    zero = node.inputs[2] if len(node.inputs) > 2 else None

    @functools.cache
    def through() -> tuple[Any, Any]:
        wide = op.cast_like(_spread(op, node, scale, x), dq)
        ratio = op.Div(op.cast_like(x, dq), wide)
        low, high = quantised_range(node)
        level = op.Round(ratio)
        if zero is not None:
            level = op.Add(level, _spread(op, node, op.cast_like(zero, dq), x))
        inside = op.And(op.GreaterOrEqual(level, float(low)), op.LessOrEqual(level, float(high)))
        return op.Div(op.Where(inside, dq, op.scalar(0, dq)), wide), ratio

    def dx() -> Any:
        return op.cast_like(through()[0], x)

    def dscale() -> Any:
        flow, ratio = through()
        return _gather(op, node, op.cast_like(op.Neg(op.Mul(flow, ratio)), scale), scale)

    return dx, dscale


def quantised_range(node: ir.Node) -> tuple[float, float]:
    """The smallest and the largest number of the quantised type."""
    dtype = dtype_of(node.outputs[0])
    known = {ir.DataType.INT4: (-8, 7), ir.DataType.UINT4: (0, 15), ir.DataType.INT2: (-2, 1), ir.DataType.UINT2: (0, 3)}
    if dtype in known:
        return known[dtype]
    if dtype.is_floating_point():
        import ml_dtypes

        high = float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]
        return -high, high
    limits = np.iinfo(dtype.numpy())
    return int(limits.min), int(limits.max)


def _block(node: ir.Node) -> int:
    return node.attributes.get_int("block_size", 0)


def _along(node: ir.Node, x: ir.Value) -> int:
    return node.attributes.get_int("axis", 1) % max(rank(x), 1)


def _spread(op: Builder, node: ir.Node, value: ir.Value, x: ir.Value) -> Any:
    """Reshape a scale or zero point (one number, one per slice or one per block) to broadcast against x."""
    if _block(node):
        axis, size = _along(node, x), _block(node)
        wide = op.Unsqueeze(value, [axis + 1])
        parts: list[Any] = [(value, k) for k in range(axis + 1)] + [size] + [(value, k) for k in range(axis + 1, rank(value))]
        repeated = op.Expand(wide, op.lengths(*parts))
        flat = op.Reshape(repeated, op.lengths(*(-1 if k == axis else (value, k) for k in range(rank(value)))))
        return op.Slice(flat, [0], op.lengths((x, axis)), [axis])
    if rank(value) != 1 or rank(x) <= 1 or dims(value) == (1,):
        return value if rank(value) <= rank(x) else op.Reshape(value, op.const(np.zeros(0, np.int64)))
    axis = _along(node, x)
    return op.Unsqueeze(value, [k for k in range(rank(x)) if k != axis])


def _gather(op: Builder, node: ir.Node, value: Any, scale: ir.Value) -> Any:
    """The sum of ``value`` over all elements that share a scale, in the shape of the scale."""
    (x,) = operands(node, 1)
    axis = _along(node, x)
    if _block(node):
        size = (dims(x) or (None,) * rank(x))[axis]
        if not isinstance(size, int):
            raise UnsupportedOpError(f"the size of the quantised axis must be known: {describe(node)}")
        blocks = -(-size // _block(node))
        padded = op.Pad(value, op.const([0, blocks * _block(node) - size]), None, op.const([axis]))
        parts: list[Any] = [(x, k) for k in range(axis)] + [blocks, _block(node)] + [(x, k) for k in range(axis + 1, rank(x))]
        return op.ReduceSum(op.Reshape(padded, op.lengths(*parts)), [axis + 1], keepdims=0)
    if rank(scale) != 1 or rank(x) <= 1 or dims(scale) == (1,):
        total = op.ReduceSum(value, keepdims=0)
        return op.reshape_like(total, scale)
    return op.ReduceSum(value, [k for k in range(rank(x)) if k != axis], keepdims=0)
