"""Gradient of max pooling over regions of interest (R. Girshick: "Fast R-CNN", ICCV 2015, section 2.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder


@gradient("MaxRoiPool")
def max_roi_pool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = the maximum of x over each cell of each region;  ∂x = dy where x = y in the cell, in equal shares

    A region is a row of rois, [image, x1, y1, x2, y2], rounded to whole pixels after scaling, both ends included.
    """
    (x, rois), (y,) = operands(node, 2), node.outputs
    rows, columns = node.attributes["pooled_shape"].as_ints()
    scale = node.attributes.get_float("spatial_scale", 1.0)
    image = op.Cast(op.Slice(rois, [0], [1], [1]), to=7)
    ends = op.Floor(op.Add(op.Mul(op.Slice(rois, [1], [5], [1]), scale), 0.5))
    left, top, right, bottom = (op.Slice(ends, [k], [k + 1], [1]) for k in range(4))
    inside = [_inside(op, x, 2, top, bottom, rows), _inside(op, x, 3, left, right, columns)]
    whole = op.Gather(x, op.Squeeze(image, [1]), axis=0)
    total: Any = None
    for i in range(rows):
        for j in range(columns):
            cell = op.And(op.Unsqueeze(inside[0][i], [1, 3]), op.Unsqueeze(inside[1][j], [1, 2]))
            best, share = (op.Slice(value, [i, j], [i + 1, j + 1], [2, 3]) for value in (y, dy))
            hits = op.cast_like(op.And(cell, op.Equal(whole, best)), dy)
            ties = op.Max(op.ReduceSum(hits, [2, 3], keepdims=1), op.scalar(1, dy))  # a cell outside the image is empty
            part = op.Mul(hits, op.Div(share, ties))
            total = part if total is None else op.Add(total, part)
    return lambda: op.ScatterND(op.zeros_like(x), image, total, reduction="add")


def _inside(op: Builder, x: ir.Value, axis: int, first: Any, last: Any, count: int) -> list[Any]:
    """Membership of positions along an axis in cell 0, 1 … of each region: region × position, bool."""
    size = op.Div(op.Max(op.Add(op.Sub(last, first), 1.0), op.scalar(1, first)), float(count))
    places = op.Range(np.int64(0), op.Squeeze(op.lengths((x, axis)), [0]), np.int64(1))
    places = op.Unsqueeze(op.cast_like(places, first), [0])
    found = []
    for k in range(count):
        begin = op.Add(op.Floor(op.Mul(size, float(k))), first)
        end = op.Add(op.Ceil(op.Mul(size, float(k + 1))), first)
        found.append(op.And(op.GreaterOrEqual(places, begin), op.Less(places, end)))
    return found
