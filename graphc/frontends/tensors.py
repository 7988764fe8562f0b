"""Checks the tensors of a file before they are read: their sizes, and the files of external data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from graphc.errors import ModelError


def check_inline(tensor: onnx.TensorProto, where: str) -> None:
    """Refuse an initializer that holds fewer elements than its dimensions say."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    elements = math.prod(tensor.dims)
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        raise ModelError(f"{where}: initializer {tensor.name!r} has the unknown element type {tensor.data_type}") from None
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
            f"{where}: initializer {tensor.name!r} of shape {list(tensor.dims)} holds {held} {unit} instead of {needed}; "
            "the file is damaged, export it again"
        )


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
    for nodes in (model.graph.all_nodes(), *(f.all_nodes() for f in model.functions.values())):
        for node in nodes:
            for attr in node.attributes.values():
                if attr.type == ir.AttributeType.TENSOR and isinstance(attr.value, ir.ExternalTensor):
                    yield attr.value


def check_external(tensor: ir.ExternalTensor, where: str, folder: Path | None) -> None:
    """Check external data (inside the model's folder, present, long enough) and memory-map it."""
    location = os.fspath(tensor.location)
    name = f"external data {location!r} of tensor {tensor.name!r}"
    if folder is None:
        raise ModelError(f"{where}: {name} has no folder to be found in; load the model from its path")
    if not location or "\0" in location:
        raise ModelError(f"{where}: {name} is no file name")
    base = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(base / location))
    inside = not os.path.isabs(location) and Path(os.path.normpath(location)).parts[:1] != ("..",)
    if not inside or not target.is_relative_to(base):
        raise ModelError(f"{where}: {name} lies outside the folder of the model, which is refused; copy it into {folder}")
    try:
        status = target.stat()
    except OSError:
        raise ModelError(f"{where}: {name} is missing; put the file beside the model, in {folder}") from None
    if not target.is_file():
        raise ModelError(f"{where}: {name} is not a regular file")
    if status.st_nlink > 1:
        raise ModelError(f"{where}: {name} is a file with several hard links, which is refused; make it a plain copy")
    offset, length = tensor.offset or 0, tensor.length
    if offset < 0 or (length is not None and length < tensor.nbytes):
        raise ModelError(
            f"{where}: {name} is declared with offset {offset} and {length} bytes; its shape needs {tensor.nbytes}"
        )
    if offset + tensor.nbytes > status.st_size:
        raise ModelError(
            f"{where}: {name} is too short: {offset + tensor.nbytes} bytes are needed, the file has {status.st_size}; "
            "copy it again"
        )
    tensor.base_dir = str(base)
