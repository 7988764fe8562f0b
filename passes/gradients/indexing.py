"""Gradients of gathers and scatters. What several indices name is added up."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe, rank
from graphc.passes.gradients.shape import lengths, pad_to, scatter_back

zero_gradient("NonZero", "NonMaxSuppression", origin=__name__)


@gradient("Gather")
def gather(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[…, indices, …] on one axis;  ∂x = dy added at the indices"""
    x, indices = operands(node, 2)
    axis = node.attributes.get_int("axis", 0) % rank(x)
    known = constant(indices)
    if known is not None and known.size == 1:
        return _one_slice(op, x, axis, int(known.reshape(-1)[0]), dy)
    width = rank(indices)
    columns = op.Unsqueeze(indices, [-1])
    if axis == 0:
        return op.ScatterND(op.zeros_like(x), columns, dy, reduction="add")
    order = [axis, *(k for k in range(rank(x)) if k != axis)]
    front = op.Transpose(dy, perm=[*range(axis, axis + width), *range(axis), *range(axis + width, rank(dy))])
    zeros = op.Expand(op.scalar(0, x), lengths(op, *((x, k) for k in order)))
    moved = op.ScatterND(zeros, columns, front, reduction="add")
    return op.Transpose(moved, perm=[int(k) for k in np.argsort(order)])


def _one_slice(op: Builder, x: ir.Value, axis: int, index: int, dy: ir.Value) -> Any:
    """Zeros of the shape of x, with dy at one constant index of an axis."""
    piece = op.Reshape(dy, lengths(op, *((x, k) if k != axis else 1 for k in range(rank(x)))))
    size = lengths(op, (x, axis))
    whole = constant(size)
    if whole is not None:
        before = index % int(whole[0])
        pads = op.const([before, int(whole[0]) - 1 - before])
    elif index >= 0:
        pads = op.Concat(op.const([index]), op.Sub(size, op.const([index + 1])), axis=0)
    else:
        pads = op.Concat(op.Add(size, op.const([index])), op.const([-1 - index]), axis=0)
    return pad_to(op, x, piece, pads, [axis])


@gradient("GatherElements")
def gather_elements(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[indices] element by element on one axis;  ∂x = dy added at the indices"""
    x, indices = operands(node, 2)
    axis = node.attributes.get_int("axis", 0)
    return op.ScatterElements(op.zeros_like(x), indices, dy, axis=axis, reduction="add")


@gradient("GatherND")
def gather_nd(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[index tuples];  ∂x = dy added at the index tuples"""
    x, indices = operands(node, 2)
    batch = node.attributes.get_int("batch_dims", 0)
    if batch:
        return scatter_back(op, x, dy, lambda positions: op.GatherND(positions, indices, batch_dims=batch))
    return op.ScatterND(op.zeros_like(x), indices, dy, reduction="add")


@gradient("ScatterElements")
def scatter_elements(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with updates at the indices;  ∂x = dy, zero where replaced;  ∂updates = dy at the indices"""
    _, indices, updates = operands(node, 3)
    axis = node.attributes.get_int("axis", 0)
    kept = lambda: op.ScatterElements(dy, indices, op.zeros_like(updates), axis=axis)  # noqa: E731
    return dy if _adds(node) else kept, None, lambda: op.GatherElements(dy, indices, axis=axis)


@gradient("ScatterND")
def scatter_nd(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with updates at the index tuples;  ∂x = dy, zero where replaced;  ∂updates = dy at the index tuples"""
    _, indices, updates = operands(node, 3)
    kept = lambda: op.ScatterND(dy, indices, op.zeros_like(updates))  # noqa: E731
    return dy if _adds(node) else kept, None, lambda: op.GatherND(dy, indices)


def _adds(node: ir.Node) -> bool:
    reduction = node.attributes.get_string("reduction", "none")
    if reduction not in ("none", "add"):
        raise UnsupportedOpError(f"no gradient for {node.op_type} with reduction={reduction!r}: {describe(node)}")
    return reduction == "add"


@gradient("OneHot")
def one_hot(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = off + (on - off)·hot;  ∂(off, on) = (Σdy·(1 - hot), Σdy·hot)"""
    indices, depth, values = operands(node, 3)

    def dvalues() -> Any:
        hot = op.OneHot(indices, depth, op.cast_like(op.const([0, 1]), values), axis=node.attributes.get_int("axis", -1))
        on, total = op.ReduceSum(op.Mul(dy, hot), keepdims=0), op.ReduceSum(dy, keepdims=0)
        return op.Concat(op.Unsqueeze(op.Sub(total, on), [0]), op.Unsqueeze(on, [0]), axis=0)

    return None, None, dvalues
