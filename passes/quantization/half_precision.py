"""Makes the tensors of a half-precision file float32, for training.

    before   x:float16 ─► Conv(W:float16) ─► y:float16
    after    x:float32 ─► Conv(W:float32) ─► y:float32

Updates smaller than a half-precision digit are lost, Adam's eps rounds to 0, sums over a batch overflow, and most kernels of a
CPU convert to float32 anyway. An export rounds the parameters to the file's type again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_TYPES = frozenset({"to", "dtype", "output_dtype", "stash_type", "softmax_precision"})
"""Attributes that name an element type."""


def widen(graph: ir.Graph, trained: Iterable[str]) -> Counter[str]:
    """Make every half-precision tensor of a legalised graph float32 if a parameter is one.

    Args:
        trained: names of the parameters.

    Returns:
        Element type → number of parameters that had it. Empty where nothing changed: no parameter is in half precision, or an
        operator without a declaration in ONNX takes such tensors, so that nobody can say what it makes of others.
    """
    found = Counter(
        value.dtype.name.lower()
        for name in trained
        if (value := graph.initializers.get(name)) is not None and value.dtype in HALF and value.dtype is not None
    )
    if not found or any(_is_bound_to_type(node) for node in graph.all_nodes()):
        return Counter()
    for value in _values(graph):
        value.type = _wide(value.type)
        if value.const_value is not None and value.const_value.dtype in HALF:
            value.const_value = _wide_tensor(value.const_value)
    for node in graph.all_nodes():
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _wide_tensor(attribute.as_tensor()))
            elif attribute.name in _TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in HALF:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
    return found


def _is_bound_to_type(node: ir.Node) -> bool:
    touched = any(value is not None and value.dtype in HALF for value in (*node.inputs, *node.outputs))
    return touched and (node.domain != "" or node.op_type == "BitCast")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    graphs: dict[ir.Graph, None] = {graph: None}
    graphs.update((node.graph, None) for node in graph.all_nodes() if isinstance(node.graph, ir.Graph))
    for one in graphs:
        yield from one.inputs
        yield from one.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _wide(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(ir.DataType.FLOAT) if kind.dtype in HALF else kind
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return type(kind)(_wide(kind.elem_type))  # type: ignore[arg-type]
    return kind


def _wide_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
