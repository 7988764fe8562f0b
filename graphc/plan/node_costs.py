"""Models what a node costs: operations, bytes, and a time that is right up to a factor.

The figures compare nodes of one graph with each other, so no machine is named; :mod:`graphc.report.step_profile` scales them
to a machine.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.facts import constant, dims
from graphc.ir.subgraphs import bodies

OPERATIONS_PER_BYTE = 10.0
"""Operations of a product that take as long as one byte to or from memory."""

_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "GroupedMatMul"})

_SELECTIONS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
"""Ops that read no more than they write, and indices."""

_ATTENTION = {"Attention": (0, 1, 4), "ScaledDotProductAttention": (0, 1, 4), "ScaledDotProductAttentionGrad": (1, 2, 10)}
"""Op → which operands are queries and keys, and operations for each element of the queries and each key."""


def elements(value: ir.Value | None, batch: int) -> int:
    """Elements of a value; dimensions that are not known count as ``batch``."""
    if value is None or value.dtype is None:
        return 0
    return math.prod(d if isinstance(d, int) else batch for d in dims(value) or ())


def nbytes(value: ir.Value | None, batch: int) -> int:
    """Bytes of a value; dimensions that are not known count as ``batch``."""
    return 0 if value is None or value.dtype is None else int(elements(value, batch) * value.dtype.itemsize)


def operations(node: ir.Node, batch: int) -> int:
    """Multiplications and additions of matrix products, convolutions and attention; 0 for other nodes."""
    first, second = (node.inputs[k] if k < len(node.inputs) else None for k in range(2))
    out = node.outputs[0] if node.outputs else None
    if node.op_type in _PRODUCTS and first is not None:
        shape = dims(first) or ()
        inner = shape[-2 if node.attributes.get_int("transA", 0) and len(shape) > 1 else -1] if shape else 1
        return 2 * elements(out, batch) * (inner if isinstance(inner, int) else batch)
    if node.op_type == "PermutedMatMul" and first is not None:
        inner = (dims(first) or ())[node.attributes.get_ints("permA", (-1,))[-1]]
        return 2 * elements(out, batch) * (inner if isinstance(inner, int) else batch)
    if node.op_type == "GroupedMatMulGradWeight" and second is not None:
        width = (dims(second) or (1,))[-1]
        return 2 * elements(first, batch) * (width if isinstance(width, int) else batch)
    name = node.op_type.removeprefix("ChannelsLast")
    if name in ("Conv", "ConvTranspose", "ConvGradInput", "ConvGradWeight") and second is not None:
        weight = out if name == "ConvGradWeight" else second
        window = math.prod(d if isinstance(d, int) else batch for d in ((weight and dims(weight)) or ())[1:])
        result = {"Conv": out, "ConvGradWeight": second}.get(name, first)
        return 2 * elements(result, batch) * window
    if node.op_type in ("LSTM", "GRU", "RNN") and first is not None and len(node.inputs) > 2:
        weights = elements(second, batch) + elements(node.inputs[2], batch)
        return 2 * weights * math.prod(d if isinstance(d, int) else batch for d in (dims(first) or ())[:2])
    if node.op_type == "RecurrentTraining" and first is not None:
        hidden = ((out and dims(out)) or (1,))[-1]
        return 2 * elements(first, batch) * (hidden if isinstance(hidden, int) else 1)
    if node.op_type in _ATTENTION:
        queries, keys = (node.inputs[k] for k in _ATTENTION[node.op_type][:2])
        axes = node.attributes.get_string("layout", "").split(",")
        place = axes[1].index("t") if len(axes) > 1 else -2
        length = ((keys and dims(keys)) or (1, 1))[place]
        return _ATTENTION[node.op_type][2] * elements(queries, batch) * (length if isinstance(length, int) else batch)
    return sum(operations(inner, batch) for body in bodies(node) for inner in body.all_nodes())


def seconds(node: ir.Node, batch: int) -> float:
    """The time of a node, up to one factor for all nodes."""
    if node.op_type in ("Constant", "Shape", "Identity") and node.domain in ("", DOMAIN):
        return 0.0
    read = sum(nbytes(v, batch) for v in node.inputs if v is not None and constant(v) is None)
    if node.op_type in _SELECTIONS:
        read = min(read, 2 * sum(nbytes(v, batch) for v in node.outputs))
    return read + sum(nbytes(v, batch) for v in node.outputs) + operations(node, batch) / OPERATIONS_PER_BYTE
