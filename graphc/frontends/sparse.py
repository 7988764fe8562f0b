"""Makes the sparse tensors of a file dense ones: no runtime trains them otherwise, and a trained file holds them dense."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import numpy_helper

from graphc.errors import ModelError
from graphc.frontends.tensors import check_inline
from graphc.ir.model_bytes import DEFAULT_BYTES, shown


def with_dense_tensors(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``proto``, or a copy whose sparse initializers and constants are dense.

    Raises:
        ModelError: indices that do not fit, or a tensor that would take more than 2 GiB.
    """
    if not proto.graph.sparse_initializer and not any(_sparse(node) for node in proto.graph.node):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    graph.initializer.extend(_dense(tensor, where, tensor.values.name) for tensor in graph.sparse_initializer)
    del graph.sparse_initializer[:]
    for node in graph.node:
        if _sparse(node):
            value = _dense(node.attribute[0].sparse_tensor, where, node.output[0] if node.output else "")
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("value", value))
    return copy


def _sparse(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].name == "sparse_value"


def _dense(tensor: onnx.SparseTensorProto, where: str, name: str) -> onnx.TensorProto:
    shape, what = tuple(tensor.dims), "the values of the sparse tensor"
    for part in (tensor.values, tensor.indices):
        check_inline(part, where, what)
        if part.data_location == onnx.TensorProto.EXTERNAL or part.data_type == onnx.TensorProto.STRING:
            raise ModelError(
                f"{where}: the sparse tensor {name!r} holds texts or lies in another file; write it as a dense one"
            )
    values, indices = numpy_helper.to_array(tensor.values), numpy_helper.to_array(tensor.indices)
    count = math.prod(shape)
    if any(size < 0 for size in shape) or len(shape) > 64:
        raise ModelError(f"{where}: the sparse tensor {name!r} has no shape that a tensor can have: {list(shape)[:8]}")
    if count * values.dtype.itemsize > DEFAULT_BYTES:
        raise ModelError(f"{where}: the sparse tensor {name!r} of shape {list(shape)} takes more than {shown(DEFAULT_BYTES)}")
    linear = indices.ndim == 1
    if indices.dtype != np.int64 or values.ndim != 1 or indices.shape != (len(values), *(() if linear else (len(shape),))):
        raise ModelError(
            f"{where}: the sparse tensor {name!r} has values of shape {list(values.shape)} and indices of shape"
            f" {list(indices.shape)}; a value needs one index, or one for each of its {len(shape)} axes"
        )
    limits = np.array([count] if linear else shape, np.int64)
    if indices.size and (indices.min() < 0 or (indices.reshape(len(values), -1) >= limits).any()):
        raise ModelError(f"{where}: the sparse tensor {name!r} of shape {list(shape)} has an index beyond it")
    dense = np.zeros(shape, values.dtype)
    if linear:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    found = numpy_helper.from_array(dense, name)
    found.data_type = tensor.values.data_type
    return found
