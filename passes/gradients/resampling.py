"""Gradients of ops that read an image at computed positions: Resize, GridSample, AffineGrid."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, rank
from graphc.ir.ops import sampling
from graphc.ir.ops.resampling import RESIZE
from graphc.passes.gradients.convolution import attributes_of
from graphc.passes.gradients.reverse_mode import through


@gradient("Resize")
def resize(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = M₁·x·M₂ᵀ, a matrix per axis;  ∂x = M₁ᵀ·dy·M₂"""
    (x,) = operands(node, 1)
    rest = [v if v is None or _size(v) != 0 else None for v in node.inputs[1:]]
    return op.graphc.ResizeGrad(dy, op.shape(x), *rest, **attributes_of(node, RESIZE))


def _size(value: ir.Value) -> int | None:
    """Number of elements of a constant; 0 stands for an absent operand."""
    known = constant(value)
    return known.size if known is not None else None


@gradient("graphc::ResizeGrad")
def resize_grad(op: Builder, node: ir.Node, g: ir.Value) -> Any:
    """linear in dy: ∂dy = Resize(g), with zeros where it extrapolates"""
    attributes = {**attributes_of(node, RESIZE), "extrapolation_value": 0.0}
    return lambda: op.Resize(g, *node.inputs[2:], **attributes)


@gradient("GridSample", selective=True)
def grid_sample(op: Builder, node: ir.Node, dy: ir.Value, needs: set[ir.Value]) -> Any:
    """y[n,c,o] = Σₖ w(grid[n,o] - k)·x[n,c,k];  ∂x adds dy·w at the taps k,  ∂grid = Σ dy·x·∂w"""
    return tuple(through(op, node, [dy], needs, lambda: (sampling.grid_sample(op, node),)))


@gradient("AffineGrid")
def affine_grid(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = base·θᵀ with base = (x, y, 1) of each place of the image;  ∂θ = dyᵀ·base"""
    theta, size = operands(node, 2)
    count = rank(dy) - 2
    one_image = op.Concat(op.const([1]), op.Slice(size, [1], [count + 2]), axis=0)
    unit = np.eye(count, count + 1)[None]
    base = op.AffineGrid(op.cast_like(op.const(unit), theta), op.Cast(one_image, to=7), **node.attributes)
    flat = op.Reshape(base, [-1, count])
    ones = op.ones_like(op.Slice(flat, [0], [1], [1]))
    rows = op.Reshape(dy, op.Concat(op.lengths((dy, 0)), op.const([-1, count]), axis=0))
    return op.MatMul(op.Transpose(rows, perm=[0, 2, 1]), op.Concat(flat, ones, axis=1))
