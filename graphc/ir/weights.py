"""Questions about the numbers in a tensor, answered piece by piece: a memory-mapped weight is never copied whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import FLOATS

_PIECE = 1 << 20
"""Elements that are looked at together."""


def pieces(tensor: ir.TensorProtocol) -> Iterator[np.ndarray[Any, Any]]:
    """The elements of ``tensor`` in flat pieces; of one that repeats (``ConstantOfShape``), those that are stored."""
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
