"""Gradients of reductions, of normalisations along an axis such as Softmax, and of running sums."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, rank, static_dims

zero_gradient("ArgMax", "ArgMin", "Hardmax", origin=__name__)


def _axes(node: ir.Node) -> ir.Value | None:
    """The axes operand, or None when all axes are reduced."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    known = constant(axes)
    if known is not None and known.size == 0:
        return None
    return axes


def _untouched(node: ir.Node) -> bool:
    """Whether ``noop_with_empty_axes`` makes the node the identity."""
    return _axes(node) is None and node.attributes.get_int("noop_with_empty_axes", 0) == 1


def _kept(op: Builder, node: ir.Node, value: ir.Value) -> Any:
    """Reshape ``value`` from the node's output shape so that reduced axes have size one."""
    axes = _axes(node)
    if node.attributes.get_int("keepdims", 1) or axes is None:
        return value  # a scalar broadcasts against anything
    return op.Unsqueeze(value, axes)


def _reduce(op: Builder, node: ir.Node, value: ir.Value) -> Any:
    """``value`` summed over the node's reduced axes, which stay with size one."""
    return op.ReduceSum(value, _axes(node), keepdims=1)


@gradient("ReduceSum")
def reduce_sum(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = Σx;  ∂x = dy, repeated"""
    return op.expand_like(_kept(op, node, dy), *operands(node, 1))


@gradient("ReduceMean")
def reduce_mean(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = Σx/n;  ∂x = dy/n, repeated"""
    (x,), (y,) = operands(node, 1), node.outputs
    before, after = static_dims(x), static_dims(y)
    if before is not None and after is not None:
        share = op.Mul(dy, math.prod(after) / max(math.prod(before), 1))
    else:
        share = op.Div(dy, op.cast_like(op.Div(op.Size(x), op.Size(y)), dy))
    return op.expand_like(_kept(op, node, share), x)


@gradient("ReduceMax", "ReduceMin")
def reduce_extremum(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = max x;  ∂x = dy where x = y, shared evenly among ties"""
    if _untouched(node):
        return dy
    hits = op.cast_like(op.Equal(node.inputs[0], _kept(op, node, node.outputs[0])), dy)
    return op.Mul(hits, op.Div(_kept(op, node, dy), _reduce(op, node, hits)))


@gradient("ReduceProd")
def reduce_prod(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = Πx;  ∂xᵢ = dy·Π of the others, which is y/xᵢ but for zeros: only a single zero gets a gradient"""
    if _untouched(node):
        return dy
    x = node.inputs[0]
    zero = op.Equal(x, 0.0)
    others = op.Where(zero, op.scalar(1, dy), x)
    flow = op.Mul(_kept(op, node, dy), op.ReduceProd(others, _axes(node), keepdims=1))
    zeros = _reduce(op, node, op.cast_like(zero, dy))
    at_zero = op.Where(op.Equal(zeros, 1.0), flow, op.scalar(0, dy))
    elsewhere = op.Where(op.Equal(zeros, 0.0), flow, op.scalar(0, dy))
    return op.Where(zero, at_zero, op.Div(elsewhere, others))


@gradient("ReduceSumSquare")
def reduce_sum_square(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = Σx²;  ∂x = 2·dy·x"""
    return op.Mul(node.inputs[0], op.Mul(_kept(op, node, dy), 2.0))


@gradient("ReduceL1")
def reduce_l1(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = Σ|x|;  ∂x = dy·sign x"""
    return op.Mul(op.Sign(node.inputs[0]), _kept(op, node, dy))


@gradient("ReduceL2")
def reduce_l2(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = √Σx²;  ∂x = x·dy/y, and 0 where y = 0"""
    (y,) = node.outputs
    ratio = op.Where(op.Equal(y, 0.0), op.scalar(0, dy), op.Div(dy, y))
    return op.Mul(node.inputs[0], _kept(op, node, ratio))


@gradient("ReduceLogSum")
def reduce_log_sum(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = ln Σx;  ∂x = dy·e⁻ʸ, repeated"""
    scaled = op.Mul(dy, op.Exp(op.Neg(node.outputs[0])))
    return op.expand_like(_kept(op, node, scaled), *operands(node, 1))


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = ln Σeˣ;  ∂x = dy·exp(x - y)"""
    return op.Mul(op.Exp(op.Sub(node.inputs[0], _kept(op, node, node.outputs[0]))), _kept(op, node, dy))


@gradient("CumSum")
def cum_sum(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = running sum of x along an axis;  ∂x = running sum of dy from the other end"""
    reverse = node.attributes.get_int("reverse", 0)
    return op.CumSum(dy, node.inputs[1], exclusive=node.attributes.get_int("exclusive", 0), reverse=1 - reverse)


@gradient("Softmax")
def softmax(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = eˣ/Σeˣ;  ∂x = y·(dy - Σ(dy·y))"""
    return op.graphc.SoftmaxGrad(dy, node.outputs[0], axis=node.attributes.get_int("axis", -1))


@gradient("LogSoftmax")
def log_softmax(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x - ln Σeˣ;  ∂x = dy - eʸ·Σdy"""
    axis = node.attributes.get_int("axis", -1)
    return op.Sub(dy, op.Mul(op.Exp(node.outputs[0]), op.ReduceSum(dy, [axis], keepdims=1)))


@gradient("TopK")
def top_k(op: Builder, node: ir.Node, dvalues: ir.Value | None, dindices: ir.Value | None) -> Any:
    """values = x[indices] along an axis;  ∂x = dvalues at the indices, else 0"""
    (x,) = operands(node, 1)
    if dvalues is None:
        return None
    return op.ScatterElements(op.zeros_like(x), node.outputs[1], dvalues, axis=node.attributes.get_int("axis", -1) % rank(x))
