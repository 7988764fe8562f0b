"""Decomposes quantisation into a division, a rounding and a cast.

Scales are per tensor, per channel or per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphc.backends.fusion.rules.table import operand, optional, rule, single
from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of, shape_of, size_of

RANGES = {
    ir.DataType.INT4: (-8, 7), ir.DataType.UINT4: (0, 15), ir.DataType.INT2: (-2, 1), ir.DataType.UINT2: (0, 3),
    ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255), ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
}  # fmt: skip


@rule("QuantizeLinear")
def quantize(op: Builder, node: ir.Node) -> Sequence[Any]:
    """round(x ÷ scale) + zero point, saturated to the type's range; the cast rounds to float8 and float4."""
    source, scale, zero = operand(node, 0), operand(node, 1), optional(node, 2)
    target = dtype_of(node.outputs[0])
    x = single(op, source)
    ratio = op.Div(x, op.cast_like(_spread(op, node, scale), x))
    if target not in RANGES:
        return [op.Cast(ratio, to=int(target), saturate=node.attributes.get_int("saturate", 1))]
    least, most = RANGES[target]
    whole = op.Round(ratio)
    if zero is not None:
        whole = op.Add(whole, op.Cast(_spread(op, node, zero), to=int(x.dtype)))
    return [op.Cast(op.Clip(whole, float(least), float(most)), to=int(target))]


@rule("DequantizeLinear")
def dequantize(op: Builder, node: ir.Node) -> Sequence[Any]:
    """(x − zero point) · scale, in the type of the scale."""
    x, scale, zero = operand(node, 0), operand(node, 1), optional(node, 2)
    kind = int(ir.DataType.FLOAT)
    value = op.Cast(x, to=kind)
    if zero is not None:
        value = op.Sub(value, op.Cast(_spread(op, node, zero), to=kind))
    result = op.Mul(value, op.Cast(_spread(op, node, scale), to=kind))
    target = dtype_of(node.outputs[0])
    return [op.Cast(result, to=int(target))]


def _spread(op: Builder, node: ir.Node, value: Any) -> Any:
    """A scale or zero point, broadcast against x."""
    shape = shape_of(node.inputs[0])
    block = node.attributes.get_int("block_size", 0)
    if size_of(value) == 1 and not block:
        return op.Reshape(value, op.const([1] * len(shape)))
    axis = node.attributes.get_int("axis", 1) % max(len(shape), 1)
    if not block:
        return op.Reshape(value, op.const([size if k == axis else 1 for k, size in enumerate(shape)]))
    count = shape_of(value)[axis]
    wide = [*shape[: axis + 1], block, *shape[axis + 1 :]]
    wide[axis] = count
    repeated = op.Reshape(op.Expand(op.Unsqueeze(value, [axis + 1]), op.const(wide)), op.const(_merged(wide, axis)))
    return repeated if count * block == shape[axis] else op.Slice(repeated, [0], [shape[axis]], [axis])


def _merged(wide: Sequence[int], axis: int) -> list[int]:
    return [*wide[:axis], wide[axis] * wide[axis + 1], *wide[axis + 2 :]]
