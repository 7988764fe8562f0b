"""Systems of equations, factors and determinants of many small matrices, which ONNX lacks but for Det.

    x = graphc.Solve(a, b)               x = a⁻¹·b, or a⁻ᵀ·b with ``transposed``
    x = graphc.TriangularSolve(a, b)     the same of one triangle of a
    l = graphc.Cholesky(a)               a = l·lᵀ
    sign, size = graphc.LogDeterminant(a)
    c = graphc.Cofactors(a)              c = ∂ det a / ∂ a

Matrices are the last two axes; a and b have as many of them each. Decompositions write elimination out, row by row, and that of
larger matrices as a Scan over the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, same_as, spec_of
from graphc.ir.facts import describe_value, dims, rank, required
from graphc.ir.subgraphs import finish_body, new_body

MOST = 48
"""Rows of a matrix for which elimination is written out, at most: some forty nodes for each, which runtimes fuse. A Scan
computes all columns in every turn, one op after another."""

_END = np.iinfo(np.int64).max


@declare("Solve", inputs="a b", outputs="x", attributes={"transposed": 0}, infer=same_as(1))
def solve(op: Builder, a: ir.Value, b: ir.Value, *, transposed: int) -> ir.Value:
    """x = a⁻¹·b, or a⁻ᵀ·b with ``transposed``; rows are exchanged for the largest pivot. Not finite where a is singular.

    a: … × N × N, b: … × N × M, with the same axes in front.
    """
    return _eliminated(op, _turned(op, a) if transposed else a, b, pivots=True)  # type: ignore[no-any-return]


@declare("TriangularSolve", inputs="a b", outputs="x", attributes={"transposed": 0, "upper": 0}, infer=same_as(1))
def triangular_solve(op: Builder, a: ir.Value, b: ir.Value, *, transposed: int, upper: int) -> ir.Value:
    """x = a⁻¹·b, or a⁻ᵀ·b with ``transposed``, of the lower or ``upper`` triangle of a; operands as of ``Solve``."""
    a = op.Trilu(a, upper=upper)
    return _eliminated(op, _turned(op, a) if transposed else a, b, pivots=False)  # type: ignore[no-any-return]


@declare("Cholesky", inputs="a", outputs="l", infer=same_as(0))
def cholesky(op: Builder, a: ir.Value) -> ir.Value:
    """l with a = l·lᵀ and zeros above the diagonal, for symmetric positive a, of which both triangles count; else NaN."""
    rest: Any = op.Mul(op.Add(a, _turned(op, a)), 0.5)
    count, first, columns = _rows(a, "Cholesky"), rank(a) - 2, []
    if count > MOST:
        return _factored_in_turns(op, rest, count)  # type: ignore[no-any-return]
    for j in range(count):
        corner = _part(op, _part(op, rest, 0, 1, first + 1), 0, 1, first)
        column = op.Div(_part(op, rest, 0, 1, first + 1), op.Sqrt(corner))
        columns.append(op.Pad(column, [j, 0], op.scalar(0, a), [first]) if j else column)
        if j < count - 1:
            below = _part(op, column, 1, _END, first)
            rest = _part(op, _part(op, rest, 1, _END, first + 1), 1, _END, first)
            rest = op.Sub(rest, op.MatMul(below, _turned(op, below)))
    return op.Concat(*columns, axis=first + 1)  # type: ignore[no-any-return]


def _scalars(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    dtype, shape = spec_of(inputs[0])
    return [(dtype, None if shape is None else ir.Shape(list(shape)[:-2]))] * 2


@declare("LogDeterminant", inputs="a", outputs="sign size", infer=_scalars)
def log_determinant(op: Builder, a: ir.Value) -> tuple[ir.Value, ir.Value]:
    """sign of det a and log |det a|, which does not overflow in a kernel; 0 and -∞ where a is singular."""
    determinant = op.Det(a)
    return op.Sign(determinant), op.Log(op.Abs(determinant))


@declare("Cofactors", inputs="a", outputs="c", infer=same_as(0))
def cofactors(op: Builder, a: ir.Value) -> ir.Value:
    """cᵢⱼ = (-1)ⁱ⁺ʲ·det(a without row i and column j) = ∂ det a / ∂ aᵢⱼ: right for singular matrices too."""
    size, lead = _rows(a, "Cofactors"), rank(a) - 2
    if size > MOST:
        raise UnsupportedOpError(
            f"the determinants of all minors of a matrix with {size} rows are too many: use the onnxruntime backend, which has "
            f"a kernel for them ({describe_value(a)})"
        )
    if size == 1:
        return op.ones_like(a)
    others = np.array([[k for k in range(size) if k != i] for i in range(size)], dtype=np.int64)
    rows = op.Gather(a, others, axis=lead)  # …, i, row, column
    minors = op.Transpose(op.Gather(rows, others, axis=lead + 2), perm=[*range(lead), *(lead + k for k in (0, 2, 1, 3))])
    i = np.arange(size)
    return op.Mul(op.Det(minors), op.cast_like(op.const(1 - 2 * ((i[:, None] + i) % 2)), a))  # type: ignore[no-any-return]


def _rows(a: ir.Value, kind: str) -> int:
    count = (dims(a) or (None,))[-1]
    if not isinstance(count, int):
        raise UnsupportedOpError(f"{kind} needs matrices of a known size: {describe_value(a)}")
    return count


def _turned(op: Builder, x: ir.Value) -> Any:
    axes = range(rank(x))
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


def _part(op: Builder, x: ir.Value, first: int, last: int, axis: int) -> Any:
    """Elements of an axis from the first to the one before the last."""
    return op.Slice(x, [first], [last], [axis])


def _eliminated(op: Builder, a: ir.Value, b: ir.Value, *, pivots: bool) -> Any:
    """a⁻¹·b by Gauss and Jordan: column after column of a becomes that of the identity, and is left out.

    Args:
        pivots: exchange rows, so that each pivot is the largest number of its column.
    """
    count, row_axis = _rows(a, "Solve" if pivots else "TriangularSolve"), rank(a) - 2
    column_axis, places = row_axis + 1, np.arange(count)
    rest: Any = op.Concat(a, b, axis=column_axis)
    if count > MOST:
        return _part(op, _eliminated_in_turns(op, rest, count, pivots=pivots), count, _END, column_axis)
    for j in range(count):
        is_row = op.const((places == j)[:, None])
        row = own = _part(op, rest, j, j + 1, row_axis)
        if pivots and j < count - 1:
            sizes = op.Abs(op.Squeeze(_part(op, rest, 0, 1, column_axis), [column_axis]))
            left = op.Where(op.const(places >= j), sizes, op.scalar(-1, a))
            best = op.ArgMax(left, axis=row_axis, keepdims=1)
            chosen = op.Unsqueeze(op.Equal(op.const(places), best), [column_axis])
            row = op.ReduceSum(op.Where(chosen, rest, op.scalar(0, a)), [row_axis], keepdims=1)
            rest = op.Where(chosen, own, rest)  # the pivot's row is written below
        scaled = op.Div(row, _part(op, row, 0, 1, column_axis))
        factors = _part(op, rest, 0, 1, column_axis)
        rest, scaled = (_part(op, m, 1, _END, column_axis) for m in (rest, scaled))
        rest = op.Where(is_row, scaled, op.Sub(rest, op.Mul(factors, scaled)))
    return required(rest)


def _eliminated_in_turns(op: Builder, both: Any, count: int, *, pivots: bool) -> Any:
    """(1, a⁻¹·b) of (a, b): as :func:`_eliminated`, where columns of the identity stay."""
    row_axis, places = rank(both) - 2, np.arange(count)
    numbers = op.const(places)
    inputs = [("rest", both.type, both.shape), ("turn", numbers.type, ir.Shape([]))]
    body, inner, (rest, turn) = new_body(op, inputs, name=f"{op.scope}/turn")

    def taken(x: Any, axis: int) -> Any:
        return inner.Unsqueeze(inner.Gather(x, turn, axis=axis), [axis])

    row = own = taken(rest, row_axis)
    following: Any = rest
    if pivots:
        sizes = inner.Abs(inner.Gather(rest, turn, axis=row_axis + 1))
        left = inner.Where(inner.GreaterOrEqual(inner.const(places), turn), sizes, inner.scalar(-1, rest))
        best = inner.ArgMax(left, axis=row_axis, keepdims=1)
        chosen = inner.Unsqueeze(inner.Equal(inner.const(places), best), [row_axis + 1])
        row = inner.ReduceSum(inner.Where(chosen, rest, inner.scalar(0, rest)), [row_axis], keepdims=1)
        following = inner.Where(chosen, own, rest)
    scaled = inner.Div(row, taken(row, row_axis + 1))
    below = inner.Sub(following, inner.Mul(taken(following, row_axis + 1), scaled))
    is_row = inner.Unsqueeze(inner.Equal(inner.const(places), turn), [1])
    finish_body(inner, [inner.Where(is_row, scaled, below)])
    return op.emit("Scan", [both, numbers], {"body": body, "num_scan_inputs": 1})[0]


def _factored_in_turns(op: Builder, a: Any, count: int) -> Any:
    """The Cholesky factor of a, a column in each turn."""
    first, places = rank(a) - 2, np.arange(count)
    numbers = op.const(places)
    body, inner, (rest, turn) = new_body(
        op, [("rest", a.type, a.shape), ("turn", numbers.type, ir.Shape([]))], name=f"{op.scope}/turn"
    )
    column = inner.Gather(rest, turn, axis=first + 1)
    corner = inner.Unsqueeze(inner.Gather(column, turn, axis=first), [first])
    below = inner.GreaterOrEqual(inner.const(places), turn)
    column = inner.Where(below, inner.Div(column, inner.Sqrt(corner)), inner.scalar(0, rest))
    tall = inner.Unsqueeze(column, [first + 1])
    finish_body(inner, [inner.Sub(rest, inner.Mul(tall, inner.Unsqueeze(column, [first]))), column])
    attributes = {"body": body, "num_scan_inputs": 1, "scan_output_axes": [first + 1]}
    return op.emit("Scan", [a, numbers], attributes, outputs=2)[1]
