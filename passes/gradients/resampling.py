"""Gradients of ops that read an image at computed positions: Resize, GridSample, AffineGrid."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe, rank
from graphc.ir.ops.resampling import RESIZE
from graphc.passes.gradients.convolution import attributes_of
from graphc.passes.gradients.reverse_mode import through
from graphc.passes.gradients.sampling import KERNELS, extent, interpolate
from graphc.passes.gradients.shape import lengths


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
    return tuple(through(op, node, [dy], needs, lambda: (_grid_sample(op, node),)))


def _grid_sample(op: Builder, node: ir.Node) -> Any:
    x, grid = operands(node, 2)
    mode = node.attributes.get_string("mode", "linear")
    padding = node.attributes.get_string("padding_mode", "zeros")
    corners = bool(node.attributes.get_int("align_corners", 0))
    count = rank(x) - 2
    if mode not in KERNELS:
        raise UnsupportedOpError(f"GridSample knows the modes {', '.join(KERNELS)}, not {mode!r}: {describe(node)}")
    coordinates = []
    for axis in range(count):
        given = op.Flatten(op.Gather(grid, np.int64(count - 1 - axis), axis=count + 1), axis=1)
        size = extent(op, x, axis + 2, grid)
        if corners:
            c = op.Mul(op.Add(given, 1.0), op.Mul(op.Sub(size, 1.0), 0.5))
        else:
            c = op.Sub(op.Mul(op.Add(given, 1.0), op.Mul(size, 0.5)), 0.5)
        coordinates.append(_bring_inside(op, op.Round(c) if mode == "nearest" else c, size, padding, corners))
    images = op.Range(np.int64(0), op.Squeeze(lengths(op, (x, 0)), [0]), np.int64(1))
    if padding == "reflection" and corners:
        padding = "reflection at corners"
    sampled = interpolate(op, x, images, coordinates, KERNELS[mode], padding)  # N, Q, C
    return op.reshape_like(op.Transpose(sampled, perm=[0, 2, 1]), node.outputs[0])


def _bring_inside(op: Builder, c: Any, size: Any, padding: str, corners: bool) -> Any:
    """Move coordinates beyond the border (half an element outside, unless corners are aligned) as padding requires."""
    if padding == "zeros":
        return c
    last = op.Sub(size, 1.0)
    low, high = (op.scalar(0, c), last) if corners else (op.scalar(-0.5, c), op.Sub(size, 0.5))
    outside = op.Or(op.Less(c, low), op.Greater(c, high))
    if padding == "border":
        return op.Where(outside, op.Max(op.Min(c, last), 0.0), c)
    span = op.Sub(high, low)
    phase = op.Mod(op.Abs(op.Sub(c, low)), op.Max(op.Mul(span, 2.0), 1.0), fmod=1)
    mirrored = op.Sub(high, op.Abs(op.Sub(phase, span)))
    return op.Where(outside, mirrored, c)


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
    rows = op.Reshape(dy, op.Concat(lengths(op, (dy, 0)), op.const([-1, count]), axis=0))
    return op.MatMul(op.Transpose(rows, perm=[0, 2, 1]), op.Concat(flat, ones, axis=1))
