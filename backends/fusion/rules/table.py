"""Registers decomposition rules, and provides helpers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.op_kernels import Decomposition, record
from graphc.ir.builder import Builder
from graphc.ir.facts import FLOATS, input_of, rank

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def rule(*ops: str, first: bool = False) -> Callable[[Decomposition], Decomposition]:
    """Register a function as the decomposition of ``ops``.

    Args:
        first: the rule takes precedence over a library, a kernel and the op's own function body; shapes need not be static.
    """

    def register(function: Decomposition) -> Decomposition:
        for op in ops:
            found = record(op)
            found.decomposition, found.decomposed_first = function, first
        return function

    return register


def operand(node: ir.Node, index: int) -> Any:
    """A required input."""
    return input_of(node, index)


def optional(node: ir.Node, index: int) -> Any:
    """An optional input; None if it is omitted."""
    return node.inputs[index] if index < len(node.inputs) else None


def single(op: Builder, x: Any) -> Any:
    """``x`` in its accumulation type: float32 for half precisions."""
    return op.Cast(x, to=int(ir.DataType.FLOAT)) if x.dtype in HALVES else x


def is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def axis_of(node: ir.Node, default: int) -> int:
    """The attribute ``axis``, counted from 0."""
    return node.attributes.get_int("axis", default) % rank(input_of(node))


def iota(op: Builder, size: int, axis: int, rank: int) -> Any:
    """An int64 constant that counts 0, 1, … along ``axis``; its other dimensions are 1."""
    return op.const(np.arange(size, dtype=np.int64).reshape([size if k == axis else 1 for k in range(rank)]))
