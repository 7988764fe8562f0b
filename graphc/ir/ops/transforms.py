"""Ops between a gradient and its update: the norm of a whole gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare


def _double_scalar(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType.DOUBLE, ir.Shape([]))]


@declare("SumOfSquares", inputs="*x", outputs="total", infer=_double_scalar, combine="sum")
def sum_of_squares(op: Builder, *x: ir.Value) -> ir.Value:
    """Σ x² over all elements of all x, as float64: float32 ends where a norm reaches 1.8e19."""
    return op.Sum(*[op.ReduceSumSquare(op.Cast(v, to=int(ir.DataType.DOUBLE)), keepdims=0) for v in x])  # type: ignore[no-any-return]
