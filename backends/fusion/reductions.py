"""Reductions: how columns become one number a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.expressions import compute_type, literal
from graphc.backends.fusion.views import integers
from graphc.ir.facts import shape_of


@dataclass(frozen=True, slots=True)
class Reduction:
    """How columns are reduced: start, what each contributes, how two combine, and what becomes of the total."""

    start: Callable[[ir.DataType], str]
    each: Callable[[str, ir.DataType], str]
    combine: str
    last: Callable[[str, ir.DataType, int], str] = lambda total, dtype, count: total


def _least(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "false"
    return literal(dtype, -np.inf if dtype.is_floating_point() else np.iinfo(dtype.numpy()).min)


def _greatest(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "true"
    return literal(dtype, np.inf if dtype.is_floating_point() else np.iinfo(dtype.numpy()).max)


def _zero(dtype: ir.DataType) -> str:
    return literal(dtype, 0)


def _plain(value: str, dtype: ir.DataType) -> str:
    return value


def _absolute(value: str, dtype: ir.DataType) -> str:
    return f"({value} < 0 ? -{value} : {value})"


def _square(value: str, dtype: ir.DataType) -> str:
    return f"({value} * {value})"


def _over_count(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({total} / {literal(dtype, count)})"


def _root(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({compute_type(dtype)})sqrt((double){total})"


def _logarithm(total: str, dtype: ir.DataType, count: int) -> str:
    return f"({compute_type(dtype)})log((double){total})"


REDUCTIONS: Mapping[str, Reduction] = {
    "ReduceSum": Reduction(_zero, _plain, "Sum"),
    "ReduceMean": Reduction(_zero, _plain, "Sum", _over_count),
    "ReduceMax": Reduction(_least, _plain, "Maximum"),
    "ReduceMin": Reduction(_greatest, _plain, "Minimum"),
    "ReduceProd": Reduction(lambda dtype: literal(dtype, 1), _plain, "Prod"),
    "ReduceL1": Reduction(_zero, _absolute, "Sum"),
    "ReduceL2": Reduction(_zero, _square, "Sum", _root),
    "ReduceSumSquare": Reduction(_zero, _square, "Sum"),
    "ReduceLogSum": Reduction(_zero, _plain, "Sum", _logarithm),
}


def reduced_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a reduction sums over; None where they are not known."""
    rank = len(shape_of(node.inputs[0]))
    axes = integers(node, 1)
    if len(node.inputs) > 1 and node.inputs[1] is not None and axes is None:
        return None
    if not axes:
        return () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(a % rank for a in axes))
