"""Reductions: how the columns of a row combine into one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.expressions import compute_type, literal
from graphc.backends.fusion.kernel_source import NotFusibleError
from graphc.backends.fusion.views import integers
from graphc.ir.facts import shape_of


def _plain(value: str, dtype: ir.DataType) -> str:
    return value


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the columns of a row combine into one number.

    Attributes:
        start: the total before the first column.
        combine: the device function that adds two contributions.
        each: the contribution of a column.
        last: the result, from the total and the number of columns.
    """

    start: Callable[[ir.DataType], str]
    combine: str
    each: Callable[[str, ir.DataType], str] = _plain
    last: Callable[[str, ir.DataType, int], str] = lambda total, dtype, count: total


def least(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "false"
    return literal(dtype, -np.inf if dtype.is_floating_point() else np.iinfo(dtype.numpy()).min)


def greatest(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "true"
    return literal(dtype, np.inf if dtype.is_floating_point() else np.iinfo(dtype.numpy()).max)


def zero(dtype: ir.DataType) -> str:
    return literal(dtype, 0)


def one(dtype: ir.DataType) -> str:
    return literal(dtype, 1)


def absolute(value: str, dtype: ir.DataType) -> str:
    return f"({value} < 0 ? -{value} : {value})"


def square(value: str, dtype: ir.DataType) -> str:
    return f"({value} * {value})"


def over_count(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({total} / {literal(dtype, count)})"


def root(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({compute_type(dtype)})sqrt((double){total})"


def logarithm(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({compute_type(dtype)})log((double){total})"


def reduced_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a reduction reduces; None if they are not known."""
    rank = len(shape_of(node.inputs[0]))
    axes = integers(node, 1)
    if len(node.inputs) > 1 and node.inputs[1] is not None and axes is None:
        return None
    if not axes:
        return () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(a % rank for a in axes))


def known_axes(node: ir.Node) -> tuple[int, ...]:
    """The axes of a fused reduction; NotFusibleError if they are not known."""
    found = reduced_axes(node)
    if found is None:
        raise NotFusibleError(f"the axes of {node.op_type} {node.name} are not constant")
    return found
