"""The table of rules that take a standard op apart, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import FLOATS, shape_of

Rule = Callable[[Builder, ir.Node], "Sequence[ir.Value | None] | None"]
"""(builder, node) → new values for the node's outputs, or None where the rule does not apply."""

RULES: dict[str, Rule] = {}

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register what ``ops`` are made of. The shapes of the node's operands and results are static."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def operand(node: ir.Node, index: int) -> Any:
    """An input that the op requires."""
    value = node.inputs[index]
    assert value is not None
    return value


def optional(node: ir.Node, index: int) -> Any:
    """An input that may be left out; None then."""
    return node.inputs[index] if index < len(node.inputs) else None


def single(op: Builder, x: Any) -> Any:
    """``x`` in the type in which it is summed: float32 for half precisions."""
    return op.Cast(x, to=int(ir.DataType.FLOAT)) if x.dtype in HALVES else x


def is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def axis_of(node: ir.Node, default: int) -> int:
    """The attribute ``axis``, from 0."""
    return node.attributes.get_int("axis", default) % len(shape_of(node.inputs[0]))


def iota(op: Builder, size: int, axis: int, rank: int) -> Any:
    """0, 1, … along ``axis`` and 1 along the others, int64."""
    return op.const(np.arange(size, dtype=np.int64).reshape([size if k == axis else 1 for k in range(rank)]))
