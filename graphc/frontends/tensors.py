"""Checks that the tensors of a file hold what their dimensions say, before they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from graphc.errors import ModelError

_ELEMENTS = 2**40
"""Most elements of one value; an axis of size 0 does not excuse the others, which NumPy multiplies too."""


def inner_tensors(graphs: Iterable[onnx.GraphProto | onnx.FunctionProto]) -> Iterator[onnx.TensorProto]:
    """The tensors in attributes of nodes, and the initializers of bodies; ModelError for a body that is missing."""
    for attribute in (a for graph in graphs for node in graph.node for a in node.attribute):
        if attribute.type == onnx.AttributeProto.GRAPH and (attribute.ref_attr_name or not attribute.HasField("g")):
            raise ModelError(f"the attribute {attribute.name!r} of a node holds no graph; the file is damaged, export it again")
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        bodies = [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]
        yield from (tensor for body in bodies for tensor in body.initializer)
        yield from inner_tensors(bodies)


def check_inline(tensor: onnx.TensorProto, where: str, what: str = "initializer") -> None:
    """Refuse a tensor of unknown type, or one that holds fewer elements than its dimensions say."""
    if math.prod(max(size, 1) for size in tensor.dims) > _ELEMENTS:
        raise ModelError(f"{where}: {what} {tensor.name!r} has the shape {list(tensor.dims)}, more than 2**40 elements")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not (entry.value.isdecimal() and len(entry.value) < 19):
                raise ModelError(
                    f"{where}: the external data of {what} {tensor.name!r} has the {entry.key} {entry.value[:40]!r}: that"
                    " is no number of bytes; the file is damaged, export it again"
                )
        return
    if any(size < 0 for size in tensor.dims):
        raise ModelError(f"{where}: {what} {tensor.name!r} has a negative size: {list(tensor.dims)}; the file is damaged")
    elements = math.prod(tensor.dims)
    try:
        dtype = ir.DataType(tensor.data_type)
        if dtype == ir.DataType.UNDEFINED:
            raise ValueError
    except ValueError:
        raise ModelError(f"{where}: {what} {tensor.name!r} has the unknown element type {tensor.data_type}") from None
    if tensor.HasField("raw_data"):
        needed = math.ceil(elements * dtype.bitwidth / 8) if dtype != ir.DataType.STRING else 0
        held, unit = len(tensor.raw_data), "bytes"
    elif dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64):
        fields = {ir.DataType.FLOAT: tensor.float_data, ir.DataType.DOUBLE: tensor.double_data}
        needed, held, unit = elements, len(fields.get(dtype, tensor.int64_data)), "elements"
    else:
        return
    if held != needed:
        raise ModelError(
            f"{where}: {what} {tensor.name!r} of shape {list(tensor.dims)} holds {held} {unit} instead of {needed}; "
            "the file is damaged, export it again"
        )
