"""Ops between gradients and their updates: the norm of all of them, what travels in place of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of


def _double_scalar(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType.DOUBLE, ir.Shape([]))]


@declare("SumOfSquares", inputs="*x", outputs="total", infer=_double_scalar, combine="sum")
def sum_of_squares(op: Builder, *x: ir.Value) -> ir.Value:
    """Σ x² over all elements of all x, as float64: float32 ends where a norm reaches 1.8e19."""
    return op.Sum(*[op.ReduceSumSquare(op.Cast(v, to=int(ir.DataType.DOUBLE)), keepdims=0) for v in x])  # type: ignore[no-any-return]


def _of_type(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType(attributes["to"]), spec_of(x)[1]) for x in inputs]


@declare("Narrow", inputs="*x", outputs="*y", attributes={"to": REQUIRED}, infer=_of_type)
def narrow(op: Builder, *x: ir.Value, to: int) -> tuple[ir.Value, ...]:
    """y_k is the gradient x_k rounded (to nearest, ties to even) to the low type ``to`` in which it travels."""
    return tuple(op.Cast(v, to=to) for v in x)


@declare("Widen", inputs="*x", outputs="*y", attributes={"to": int(ir.DataType.FLOAT)}, infer=_of_type)
def widen(op: Builder, *x: ir.Value, to: int) -> tuple[ir.Value, ...]:
    """y_k is x_k in the type ``to``; where x_k comes of a ``Narrow``, y_k may take the memory of what was narrowed."""
    return tuple(op.Cast(v, to=to) for v in x)
