"""Computes the ops that constants mostly go through directly by NumPy.

ONNX's reference evaluator defines them all; its import takes 0.15 s, and a call builds and checks a model of one node. What is
computed here has the same bits. Anything else, other types and wrong operands included, is left to the evaluator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

TYPES = frozenset(np.dtype(kind) for kind in (np.bool_, np.int32, np.int64, np.float32, np.float64))

Arrays = Sequence[np.ndarray]
Attributes = Mapping[str, ir.Attr]


def compute_directly(node: ir.Node, arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The only output of a standard node from its operands; None for what ONNX's evaluator has to decide."""
    formula = FORMULAS.get(node.op_type)
    given = [array for array in arrays if array is not None]
    if formula is None or len(given) < len(arrays) or not all(array.dtype in TYPES for array in given):
        return None
    try:
        found = formula(given, node.attributes)
    except (
        ValueError,
        TypeError,
        IndexError,
        ArithmeticError,
        MemoryError,
    ):  # operands that do not fit together, or a step of 0
        return None
    return None if found is None or found.dtype not in TYPES else np.asarray(found)


def _same_types(function: Callable[..., Any], kinds: str) -> Callable[[Arrays, Attributes], np.ndarray | None]:
    """Two operands of one type, of one of these kinds."""

    def formula(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
        a, b = arrays
        return np.asarray(function(a, b)) if a.dtype == b.dtype and a.dtype.kind in kinds else None

    return formula


def _cast(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    try:
        wanted = ir.DataType(attributes["to"].as_int()).numpy()
    except (KeyError, TypeError, ValueError):
        return None
    return arrays[0].astype(wanted) if wanted in TYPES else None


def _expand(arrays: Arrays, attributes: Attributes) -> np.ndarray:
    data, shape = arrays
    return np.array(np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(int(d) for d in shape))))


def _range(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    start, limit, delta = arrays
    if start.dtype.kind != "i" or any(array.size != 1 for array in arrays):
        return None
    return np.arange(start.item(), limit.item(), delta.item()).astype(start.dtype)


def _sqrt(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(arrays[0])) if arrays[0].dtype.kind == "f" else None


def _squeeze(arrays: Arrays, attributes: Attributes) -> np.ndarray:
    data, *axes = arrays
    return np.squeeze(data, axis=tuple(int(axis) for axis in axes[0]) if axes else None)


def _trilu(arrays: Arrays, attributes: Attributes) -> np.ndarray:
    data, *diagonal = arrays
    upper = attributes["upper"].as_int() if "upper" in attributes else 1
    return (np.triu if upper else np.tril)(data, diagonal[0].item() if diagonal else 0)


def _unsqueeze(arrays: Arrays, attributes: Attributes) -> np.ndarray:
    data, axes = arrays
    return np.expand_dims(data, axis=tuple(int(axis) for axis in axes))


def _where(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    condition, x, y = arrays
    return np.where(condition, x, y) if x.dtype == y.dtype and condition.dtype == np.bool_ else None


FORMULAS: Mapping[str, Callable[[Arrays, Attributes], np.ndarray | None]] = {
    "Add": _same_types(np.add, "if"),
    "Cast": _cast,
    "Div": _same_types(np.divide, "f"),
    "Equal": _same_types(np.equal, "bif"),
    "Expand": _expand,
    "Mul": _same_types(np.multiply, "if"),
    "Range": _range,
    "Sqrt": _sqrt,
    "Squeeze": _squeeze,
    "Sub": _same_types(np.subtract, "if"),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
"""Op → formula over its operands."""
