"""Creates state initializers that passes share, and checks tensors for NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import FLOATS


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


_PIECE = 1 << 20
"""Number of elements checked at a time."""


def pieces(tensor: ir.TensorProtocol) -> Iterator[np.ndarray[Any, Any]]:
    """The elements of ``tensor`` in flat pieces; of a repeating one (``ConstantOfShape``) only the stored ones."""
    array = np.asarray(tensor.numpy())
    array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    flat = array.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield flat[start : start + _PIECE]


def is_finite(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    return tensor.dtype not in FLOATS or all(bool(np.isfinite(piece).all()) for piece in pieces(tensor))


def repeats_one_value(tensor: ir.TensorProtocol) -> bool:
    """Whether all elements are equal."""
    first: Any = None
    for piece in pieces(tensor):
        first = piece[0] if first is None else first
        if not bool((piece == first).all()):
            return False
    return True


def not_finite(graph: ir.Graph) -> list[str]:
    """Names of the initializers that hold a NaN or an infinity, in the order of the file."""
    return [
        name for name, value in graph.initializers.items() if value.const_value is not None and not is_finite(value.const_value)
    ]
