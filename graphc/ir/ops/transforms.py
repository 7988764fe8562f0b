"""Ops between gradients and their updates: the global norm, rounding, compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Role, Spec, declare, same_as, spec_of
from graphc.ir.facts import describe_value, static_dims
from graphc.ir.ops.updates import like_parameter

DEPENDENT = 1e-10
"""A column whose square shrinks below this fraction depends on earlier ones (float32 rounding leaves about 1e-5)."""


def _double_scalar(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType.DOUBLE, ir.Shape([]))]


@declare("SumOfSquares", inputs="*x", outputs="total", infer=_double_scalar, combine="sum")
def sum_of_squares(op: Builder, *x: ir.Value) -> ir.Value:
    """Σ x² over all elements of all x, as float64: float32 overflows at a norm of 1.8e19."""
    return op.Sum(*[op.ReduceSumSquare(op.Cast(v, to=int(ir.DataType.DOUBLE)), keepdims=0) for v in x])  # type: ignore[no-any-return]


def _of_type(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType(attributes["to"]), spec_of(x)[1]) for x in inputs]


@declare("RoundTo", inputs="*x", outputs="*y", attributes={"to": REQUIRED}, infer=_of_type, passes_through=True)
def round_to(op: Builder, *x: ir.Value, to: int) -> tuple[ir.Value, ...]:
    """y_k is the gradient x_k rounded (to nearest, ties to even) to the low type ``to`` in which it travels."""
    return tuple(op.Cast(v, to=to) for v in x)


@declare("Widen", inputs="*x", outputs="*y", attributes={"to": int(ir.DataType.FLOAT)}, infer=_of_type, passes_through=True)
def widen(op: Builder, *x: ir.Value, to: int) -> tuple[ir.Value, ...]:
    """y_k is x_k in the type ``to``; if x_k comes from a ``RoundTo``, y_k may reuse the memory of the unrounded value."""
    return tuple(op.Cast(v, to=to) for v in x)


@declare("KeepLargest", inputs="x", outputs="kept rest", attributes={"count": REQUIRED}, infer=same_as(0, 0))
def keep_largest(op: Builder, x: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
    """kept: the ``count`` elements of x of largest magnitude (the first among equal ones), else 0;  rest = x − kept"""
    flat = op.Reshape(x, [-1])
    _, places = op.TopK(op.Abs(flat), [count], _outputs=2)
    kept = op.ScatterElements(op.zeros_like(flat), places, op.Gather(flat, places, axis=0))
    kept = op.reshape_like(kept, x)
    return kept, op.Sub(x, kept)


@declare("Orthogonalize", inputs="x", outputs="y", infer=same_as(0))
def orthogonalize(op: Builder, x: ir.Value) -> ir.Value:
    """Orthonormalise the columns of the matrix x from left to right (modified Gram–Schmidt).

    A column that depends on those before it, up to rounding, becomes zero, so that y·yᵀ is a projection in every case.
    """
    shape = static_dims(x)
    if shape is None or len(shape) != 2:
        raise UnsupportedOpError(f"Orthogonalize needs a matrix of known size, not {describe_value(x)}")
    columns: list[ir.Value] = []
    for k in range(shape[1]):
        column = op.Slice(x, [k], [k + 1], [1])
        before = op.ReduceSumSquare(column, keepdims=1)
        for other in columns:
            column = op.Sub(column, op.Mul(other, op.ReduceSum(op.Mul(other, column), keepdims=1)))
        square = op.ReduceSumSquare(column, keepdims=1)
        dependent = op.LessOrEqual(square, op.Mul(before, DEPENDENT))  # NaN must stay visible
        columns.append(op.Where(dependent, op.zeros_like(column), op.Div(column, op.Sqrt(square))))
    return op.Concat(*columns, axis=1)  # type: ignore[no-any-return]


@declare(
    "Assign",
    inputs="state value skip?",
    outputs="next_state",
    infer=like_parameter(1, 1),
    next_value={0: 0},
    source=1,
    roles={0: Role.OPTIMIZER},
    elementwise=True,
)
def assign(op: Builder, state: ir.Value, value: ir.Value, skip: ir.Value | None = None) -> ir.Value:
    """state' = value: state that is the same on all ranks."""
    return value if skip is None else op.Where(skip, state, value)


@declare(
    "Residual",
    inputs="residual unsent skip?",
    outputs="next_residual",
    infer=like_parameter(1, 1),
    next_value={0: 0},
    source=1,
    roles={0: Role.OPTIMIZER},
    local=(0,),
    elementwise=True,
)
def residual(op: Builder, residual: ir.Value, unsent: ir.Value, skip: ir.Value | None = None) -> ir.Value:
    """residual' = unsent: the part of this rank's gradient that compression left out, for the next step (error feedback)."""
    return unsent if skip is None else op.Where(skip, residual, unsent)
