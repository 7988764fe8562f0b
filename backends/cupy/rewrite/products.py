"""Decomposes products that no library runs directly: vectors, partly broadcast batches, integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.libraries.registry import special
from graphc.backends.fusion.rules.table import is_float, operand, optional, rule
from graphc.ir.builder import Builder
from graphc.ir.facts import shape_of, size_of


@rule("MatMul")
def matmul(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """MatMul: vectors become matrices and batches equal; a kernel multiplies and sums integers."""
    if special(node) is not None:
        return None
    a, b = operand(node, 0), operand(node, 1)
    shape = list(shape_of(node.outputs[0]))
    if not size_of(a) or not size_of(b):
        return [op.Expand(op.scalar(0, a), op.const(np.array(shape, np.int64)))]
    a = op.Unsqueeze(a, [0]) if len(shape_of(a)) == 1 else a
    b = op.Unsqueeze(b, [1]) if len(shape_of(b)) == 1 else b
    outer = list(np.broadcast_shapes(shape_of(a)[:-2], shape_of(b)[:-2]))
    if is_float(a):
        a, b = (op.Expand(x, op.const([*outer, *shape_of(x)[-2:]])) for x in (a, b))
        return [op.Reshape(op.MatMul(a, b), op.const(np.array(shape, np.int64)))]
    products = op.Mul(op.Unsqueeze(a, [-1]), op.Unsqueeze(b, [-3]))
    return [op.Reshape(op.ReduceSum(products, [-2], keepdims=0), op.const(np.array(shape, np.int64)))]


@rule("Gemm")
def gemm(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """Gemm of integers; α and β, which are floats, are 1."""
    if special(node) is not None or is_float(operand(node, 0)):
        return None
    a, b, c = operand(node, 0), operand(node, 1), optional(node, 2)
    a = op.Transpose(a, perm=[1, 0]) if node.attributes.get_int("transA", 0) else a
    b = op.Transpose(b, perm=[1, 0]) if node.attributes.get_int("transB", 0) else b
    product = op.MatMul(a, b)
    return [product if c is None else op.Add(product, c)]


@rule("MatMulInteger")
def matmul_integer(op: Builder, node: ir.Node) -> Sequence[Any]:
    """(A − zero point of each row) · (B − zero point of each column), in int32."""
    a, b = (_centred(op, operand(node, k), optional(node, k + 2), column=bool(k)) for k in range(2))
    return [op.MatMul(a, b)]


@rule("QLinearMatMul")
def quantised_matmul(op: Builder, node: ir.Node) -> Sequence[Any]:
    """The integer product, scaled and quantised."""
    a, scale_a, zero_a, b, scale_b, zero_b, scale, zero = (operand(node, k) for k in range(8))
    total = op.MatMul(_centred(op, a, zero_a), _centred(op, b, zero_b, column=True))
    scales = [_along(op, s, len(shape_of(x)), column=c) for s, x, c in ((scale_a, a, False), (scale_b, b, True))]
    factor = op.Mul(*(op.Cast(s, to=int(ir.DataType.FLOAT)) for s in scales))
    value = op.Mul(op.Cast(total, to=int(ir.DataType.FLOAT)), factor)
    return [op.QuantizeLinear(value, op.Cast(scale, to=int(ir.DataType.FLOAT)), zero)]


@rule("QLinearConv")
def quantised_conv(op: Builder, node: ir.Node) -> Sequence[Any]:
    """The integer convolution, scaled and quantised."""
    x, scale_x, zero_x, w, scale_w, zero_w, scale, zero = (operand(node, k) for k in range(8))
    total = op.emit("ConvInteger", [x, w, zero_x, zero_w], dict(node.attributes))[0]
    others = list(range(1, len(shape_of(x)) - 1))
    bias = optional(node, 8)
    if bias is not None:
        total = op.Add(total, op.Unsqueeze(bias, others) if others else bias)
    scale_w = op.Unsqueeze(scale_w, others) if len(shape_of(scale_w)) == 1 and size_of(scale_w) > 1 else scale_w
    value = op.Mul(op.Cast(total, to=int(ir.DataType.FLOAT)), op.Mul(scale_x, scale_w))
    return [op.QuantizeLinear(value, scale, zero)]


def _along(op: Builder, value: Any, rank: int, *, column: bool) -> Any:
    """A scale or zero point: one in all, or one per row (of A) or column (of B)."""
    if column or len(shape_of(value)) != 1 or size_of(value) == 1 or rank < 2:
        return value
    return op.Unsqueeze(value, [1])


def _centred(op: Builder, x: Any, zero: Any, *, column: bool = False) -> Any:
    whole = op.Cast(x, to=int(ir.DataType.INT32))
    if zero is None:
        return whole
    return op.Sub(whole, op.Cast(_along(op, zero, len(shape_of(x)), column=column), to=int(ir.DataType.INT32)))
