"""State initializers that passes share."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Register a new initializer; ModelError when the name is taken."""
    if name in graph.initializers:
        raise ModelError(f"the graph already has an initializer {name!r}")
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def scalar(graph: ir.Graph, name: str, default: float | int, dtype: type[np.generic] = np.int64) -> ir.Value:
    """The reserved scalar ``name`` (see :mod:`graphc.ir.names`), created with ``default`` on first use."""
    if name in graph.initializers:
        return graph.initializers[name]
    return add_initializer(graph, name, np.array(default, dtype=dtype))
