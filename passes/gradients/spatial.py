"""Gradients of LpPool, unpooling, Col2Im, and of convolution and pooling at computed positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe, dims, dtype_of, rank
from graphc.ir.ops import sampling
from graphc.ir.ops.convolution import POOL
from graphc.ir.ops.pooling import norm_flow, norm_slope
from graphc.passes.gradients.convolution import canonical_attributes
from graphc.passes.gradients.reverse_mode import through


@gradient("LpPool")
def lp_pool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = (Σ|x|ᵖ)^(1/p) over a window;  ∂x = sign(x)·|x|^(p-1) · Σ dy·y^(1-p) over the windows that x is in"""
    (x,) = operands(node, 1)
    return op.graphc.LpPoolGrad(dy, x, node.outputs[0], **canonical_attributes(node, (*POOL, "p")))


@gradient("GlobalLpPool")
def global_lp_pool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = (Σ|x|ᵖ)^(1/p) over a channel;  ∂x = sign(x)·|x|^(p-1)·dy·y^(1-p)"""
    (x,), p = operands(node, 1), node.attributes.get_int("p", 2)
    return op.Mul(norm_slope(op, x, p), norm_flow(op, dy, node.outputs[0], p))


@gradient("MaxUnpool")
def max_unpool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y[I] = x, where I counts the places of an image as large as the windows reach;  ∂x = dy[I]"""
    x, indices = operands(node, 2)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        kernel = node.attributes["kernel_shape"].as_ints()
        n = len(kernel)
        pads = node.attributes.get_ints("pads", None) or [0] * (2 * n)
        strides = node.attributes.get_ints("strides", None) or [1] * n
        margin = [k - s - b - e for k, s, b, e in zip(kernel, strides, pads[:n], pads[n:], strict=True)]
        reach = op.Add(op.Mul(op.lengths(*((x, k + 2) for k in range(n))), list(strides)), margin)
        dy = op.Slice(dy, [0] * n, reach, list(range(2, n + 2)))
    return op.Gather(op.Reshape(dy, [-1]), indices)


@gradient("Col2Im")
def col2im(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y adds up the columns of x where their blocks lie;  ∂x = the blocks of dy as columns, an axis at a time"""
    x, _, block = operands(node, 3)
    taps_of = constant(block)
    if taps_of is None:
        raise UnsupportedOpError(f"the block shape must be a constant: {describe(node)}")
    kernel, n = [int(k) for k in taps_of.reshape(-1)], taps_of.size
    pads = list(node.attributes.get_ints("pads", ()) or [0] * (2 * n))
    strides = node.attributes.get_ints("strides", None) or [1] * n
    dilations = node.attributes.get_ints("dilations", None) or [1] * n
    columns: Any = op.Pad(dy, [0, 0, *pads[:n], 0, 0, *pads[n:]]) if any(pads) else dy
    for axis in range(n):
        where = 2 + 2 * axis  # each image axis is split into taps and blocks
        known = dims(columns)
        size = None if known is None else known[where]
        if isinstance(size, int) and kernel[axis] <= 16:  # slices, which are no pass over memory
            reach = size - dilations[axis] * (kernel[axis] - 1)
            starts = [tap * dilations[axis] for tap in range(kernel[axis])]
            pieces = [op.Slice(columns, [k], [k + reach], [where], [strides[axis]]) for k in starts]
            columns = op.Concat(*(op.Unsqueeze(piece, [where]) for piece in pieces), axis=where)
            continue
        last = op.Sub(op.lengths((columns, where)), [dilations[axis] * (kernel[axis] - 1) + 1])
        blocks = op.Add(op.Div(last, [strides[axis]]), [1])
        starts = op.Mul(op.Range(np.int64(0), op.Squeeze(blocks, [0]), np.int64(1)), [strides[axis]])
        places = np.arange(kernel[axis], dtype=np.int64)[:, None] * dilations[axis]
        columns = op.Gather(columns, op.Add(places, op.Unsqueeze(starts, [0])), axis=where)
    order = [0, 1, *range(2, 2 + 2 * n, 2), *range(3, 3 + 2 * n, 2)]
    return op.reshape_like(op.Transpose(columns, perm=order), x)


@gradient("CenterCropPad")
def center_crop_pad(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = the middle of x, or x amid zeros;  ∂x = dy brought to the shape of x by the same op, which halves alike both ways"""
    (x,) = operands(node, 1)
    axes = node.attributes.get_ints("axes", ())
    where = [a % rank(x) for a in axes] if axes else list(range(rank(x)))
    dx = op.CenterCropPad(dy, op.lengths(*((x, a) for a in where)), axes=where)
    dx.shape = ir.Shape(x.shape.dims) if x.shape is not None else None
    return dx


@gradient("DeformConv", selective=True)
def deform_conv(op: Builder, node: ir.Node, dy: ir.Value, needs: set[ir.Value]) -> Any:
    """y[n,m,o] = Σ w[m,c,t]·mask[n,t,o]·x[n,c,o·s + t·d - p + offset[n,t,o]] + b[m], x read between its elements"""
    return tuple(through(op, node, [dy], needs, lambda: (sampling.deform_conv(op, node),)))


@gradient("RoiAlign", selective=True)
def roi_align(op: Builder, node: ir.Node, dy: ir.Value, needs: set[ir.Value]) -> Any:
    """y = mean (or max) of x at a few places in each bin of a region, read between its elements"""
    return tuple(through(op, node, [dy], needs, lambda: (_roi_align(op, node),)))


def _roi_align(op: Builder, node: ir.Node) -> Any:
    """Takes the maximum of the weighted taps, not of the interpolated values, as ONNX and its runtimes do."""
    x, rois, batch = operands(node, 3)
    attributes = node.attributes
    half = attributes.get_string("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    edges = op.Sub(op.Mul(rois, attributes.get_float("spatial_scale", 1.0)), 0.5 if half else 0.0)
    axes = []
    for axis, name in enumerate(("output_height", "output_width")):
        start, end = (op.Gather(edges, [k], axis=1) for k in (1 - axis, 3 - axis))  # a region is x₁, y₁, x₂, y₂
        extent = op.Sub(end, start) if half else op.Max(op.Sub(end, start), 1.0)
        axes.append(_bins(op, x, axis + 2, start, extent, attributes.get_int(name, 1), attributes.get_int("sampling_ratio", 0)))
    (rows, hit_y, used_y, count_y), (columns, hit_x, used_x, count_x) = axes
    full = op.Concat(op.Shape(rows), op.Shape(columns, start=1), axis=0)  # regions, bins, samples, bins, samples

    def spread(value: Any, across: list[int]) -> Any:
        return op.Flatten(op.Expand(op.Unsqueeze(value, across), full), axis=1)

    def both(down: Any, across: Any) -> Any:
        return op.And(spread(down, [3, 4]), spread(across, [1, 2]))

    read, weights = sampling.taps(
        op, x, batch, [spread(rows, [3, 4]), spread(columns, [1, 2])], sampling.KERNELS["linear"], "border"
    )
    used = both(used_y, used_x)
    weights = op.Where(op.Unsqueeze(op.And(used, both(hit_y, hit_x)), [2]), weights, op.scalar(0, x))
    each = op.Concat(full, op.lengths((x, 1)), axis=0)
    if attributes.get_string("mode", "avg") == "avg":
        total = op.ReduceSum(op.Reshape(op.MatMul(op.Unsqueeze(weights, [2]), read), each), [2, 4], keepdims=0)
        y = op.Div(total, op.Unsqueeze(op.Max(op.Mul(count_y, count_x), 1.0), [2, 3]))
    else:
        lowest = op.scalar(float(np.finfo(dtype_of(x).numpy()).min), x)
        terms = op.Where(op.Unsqueeze(used, [2, 3]), op.Mul(op.Unsqueeze(weights, [3]), read), lowest)
        y = op.ReduceMax(op.Reshape(op.ReduceMax(terms, [2], keepdims=0), each), [2, 4], keepdims=0)
        y = op.Where(op.Equal(y, lowest), op.scalar(0, x), y)  # a region of zero extent has no samples
    return op.Transpose(y, perm=[0, 3, 1, 2])


def _bins(op: Builder, x: ir.Value, axis: int, start: Any, extent: Any, bins: int, ratio: int) -> tuple[Any, Any, Any, Any]:
    """Along one axis: sample positions (regions × bins × samples), which of them hit x, which count, and how many.

    ``start``, ``extent``: regions × 1. Without a ``ratio`` a region has as many samples per bin as the bin is long.
    """
    width = op.Div(extent, float(bins))
    if ratio > 0:
        count, most = op.expand_like(op.scalar(ratio, x), width), op.const(np.int64(ratio))
    else:
        count = op.Ceil(width)
        most = op.Max(op.Cast(op.ReduceMax(count, keepdims=0), to=int(ir.DataType.INT64)), np.int64(1))
    k = op.cast_like(op.Range(np.int64(0), most, np.int64(1)), x)
    within = op.Mul(width, op.Div(op.Add(k, 0.5), op.Max(count, 1.0)))
    corners = op.Add(start, op.Mul(width, op.cast_like(op.const(np.arange(bins)), x)))
    places = op.Add(op.Unsqueeze(corners, [2]), op.Unsqueeze(within, [1]))
    size = op.cast_like(op.lengths((x, axis)), x)
    hit = op.And(op.GreaterOrEqual(places, -1.0), op.LessOrEqual(places, size))
    used = op.Unsqueeze(op.Less(k, count), [1])
    return op.Max(op.Min(places, op.Sub(size, 1.0)), 0.0), hit, used, count
