"""Writes nodes that onnxruntime computes element by element, or product by product, as arithmetic of generated kernels.

x[..., 0], one Gather            ─►  a slice, which the kernel that uses it reads
4000 products of 16 × 8 and 8    ─►  Σₖ A[…, k] · b[k]
Resize, cubic or of float64      ─►  M₁ · x · M₂ᵀ with matrices of after × before elements
AveragePool of float64           ─►  the same
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.rules.indexing import axis_by_axis
from graphc.ir.builder import Builder
from graphc.ir.decomposition import replace_node
from graphc.ir.facts import constant, dtype_of, required, shape_of
from graphc.ir.ops.convolution import Window
from graphc.ir.ops.pooling import averaging_matrix

SMALL = 512
"""Multiplications of a matrix product below which many of them are sums inside a kernel."""


def rewrite(graph: ir.Graph) -> None:
    """Rewrite the nodes of a segment, whose shapes are static."""
    op = Builder(graph)
    _slice_selections(op, graph)
    _spread_products(op, graph)
    _resize_axis_by_axis(op, graph)
    _average_axis_by_axis(op, graph)


def _nodes(graph: ir.Graph, op_type: str) -> list[ir.Node]:
    return [node for node in graph if node.op_type == op_type and node.domain == ""]


def _slice_selections(op: Builder, graph: ir.Graph) -> None:
    """Write each Gather of one known index as a slice, whose indices nobody checks: onnxruntime copies element by element."""
    for node in _nodes(graph, "Gather"):
        x, index = node.inputs[0], constant(node.inputs[1])
        if x is None or constant(x) is not None or index is None or index.size != 1 or index.ndim > 1:
            continue
        axis = node.attributes.get_int("axis", 0) % len(shape_of(x))
        size, at = shape_of(x)[axis], int(index.reshape(-1)[0])
        if -size <= at < size:  # else onnxruntime reports the error
            op.before, op.scope = node, node.name or node.op_type
            part = op.Slice(x, [at % size], [at % size + 1], [axis])
            replace_node(op, node, [part if index.ndim else op.Squeeze(part, [axis])])


def _spread_products(op: Builder, graph: ir.Graph) -> None:
    """Write products of vectors, and many small ones, as sums: a runtime starts a matrix product for each of them.

    A · b  ─►  Σₖ A[…, k] · b[k]        a · bᵀ  ─►  a[…, 1] · b[1, …]
    """
    for node in _nodes(graph, "MatMul"):
        a, b = (required(v) for v in node.inputs)
        rank, shape = len(shape_of(node.outputs[0])), shape_of(a)
        if a.dtype != ir.DataType.FLOAT or 0 in (*shape, *shape_of(b)):
            continue
        if 1 in (len(shape), len(shape_of(b))):  # an operand is a vector, not a matrix of one row or column
            op.before, op.scope = node, node.name or node.op_type
            is_row = len(shape) < len(shape_of(b))
            products = op.Mul(op.Unsqueeze(a, [1]), b) if is_row else op.Mul(a, b)
            replace_node(op, node, [op.ReduceSum(products, [-2 if is_row else -1], keepdims=0)])
            continue
        if not len(shape) == len(shape_of(b)) == rank:
            continue
        rows, depth, columns = *shape[-2:], shape_of(b)[-1]
        single = 1 in (rows, depth, columns)
        if not single and (rows * depth * columns > SMALL or rank == 2):
            continue
        op.before, op.scope = node, node.name or node.op_type
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        if depth == 1:
            result = op.Mul(a, b)
        elif columns == 1:
            result = op.ReduceSum(op.Mul(a, op.Transpose(b, perm=swapped)), [rank - 1])
        elif rows == 1:
            result = op.ReduceSum(op.Mul(op.Transpose(a, perm=swapped), b), [rank - 2])
        else:
            wide = op.Mul(op.Unsqueeze(a, [rank]), op.Unsqueeze(b, [rank - 2]))
            result = op.ReduceSum(wide, [rank - 1], keepdims=0)
        replace_node(op, node, [result])


def _resize_axis_by_axis(op: Builder, graph: ir.Graph) -> None:
    """Write cubic and antialiased resizing as products with a matrix for each axis, and whole factors as repetitions.

    onnxruntime computes these element by element, and volumes with a search for each; of float64, it resizes nothing.
    """
    for node in _nodes(graph, "Resize"):
        mode = node.attributes.get_string("mode", "nearest")
        x, wide = required(node.inputs[0]), node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.DOUBLE
        smooth = mode == "cubic" or node.attributes.get_int("antialias", 0) == 1 or wide
        crops = node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
        fits = wide or (x.dtype == ir.DataType.FLOAT and not crops and (smooth or mode == "nearest"))
        if fits and 0 not in shape_of(x):
            op.before, op.scope = node, node.name or node.op_type
            result = axis_by_axis(op, node, _product if smooth else _repetition)
            if result is not None:
                replace_node(op, node, result)


def _average_axis_by_axis(op: Builder, graph: ir.Graph) -> None:
    """Write averages of float64 windows as products with a matrix for each axis: onnxruntime has none."""
    for node in _nodes(graph, "AveragePool"):
        x, shape = required(node.inputs[0]), shape_of(required(node.inputs[0]))
        if x.dtype != ir.DataType.DOUBLE or 0 in shape:
            continue
        op.before, op.scope = node, node.name or node.op_type
        window = Window.of({name: a.value for name, a in node.attributes.items()}, shape[2:])
        include_pad, value = bool(node.attributes.get_int("count_include_pad", 0)), x
        for axis, (before, after) in enumerate(zip(shape[2:], shape_of(node.outputs[0])[2:], strict=True)):
            matrix = averaging_matrix(window, axis, include_pad, before, after)
            value = _product(op, value, matrix, axis + 2, len(shape))
        replace_node(op, node, [value])


def _product(op: Builder, x: ir.Value, matrix: np.ndarray, axis: int, rank: int) -> Any:
    weights, shape = matrix.astype(dtype_of(x).numpy()), list(shape_of(x))
    if axis == rank - 1:
        return op.MatMul(x, op.const(np.ascontiguousarray(weights.T)))
    lines = op.Reshape(x, op.const([*shape[: axis + 1], -1]))
    return op.Reshape(op.MatMul(op.const(weights), lines), op.const([*shape[:axis], len(matrix), *shape[axis + 1 :]]))


def _repetition(op: Builder, x: ir.Value, matrix: np.ndarray, axis: int, rank: int) -> Any | None:
    (after, before), shape, chosen = matrix.shape, list(shape_of(x)), matrix.argmax(axis=1)
    if np.array_equal(chosen, np.arange(after) // max(1, after // before)):
        repeated = op.Expand(op.Unsqueeze(x, [axis + 1]), op.const([*shape[: axis + 1], after // before, *shape[axis + 1 :]]))
        return op.Reshape(repeated, op.const([*shape[:axis], after, *shape[axis + 1 :]]))
    step = chosen[1] - chosen[0] if after > 1 else 1
    if step > 0 and np.array_equal(chosen, chosen[0] + step * np.arange(after)):
        return op.Slice(x, [int(chosen[0])], [int(chosen[-1]) + 1], [axis], [int(step)])
    return None
