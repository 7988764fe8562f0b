"""ONNX forms of PyTorch's linear algebra, which its exporter lacks (seen in 2.13): systems of equations, inverses, factors,
exponentials.

ONNX has no such operators. Systems, triangular factors and determinants are ops of graphc's own
(:mod:`graphc.ir.ops.linear_algebra`); reflections and exponentials are written out for matrices of a known size, whose number
is free, and their gradients, which follow from the forms, are PyTorch's. A singular matrix, or one that is not positive, gives
an infinity or NaN, where PyTorch raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.frontends.torch_export.forms import fixed_length, like, opset, own, typed

MOST = 48
"""Rows of a matrix that is written out, at most: some forty nodes for each, which take five seconds to export, compile and
start."""


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` of ``torch.onnx.export``."""
    import torch
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat

    aten, a, upper = torch.ops.aten, {"a": TFloat}, {"upper": bool}
    triangular = {**a, "b": TFloat, **upper, "left": bool, "unitriangular": bool}
    table: list[tuple[Any, Callable[..., Any], dict[str, Any]]] = [
        (aten.linalg_inv.default, _inverse, a),
        (aten.inverse.default, _inverse, a),
        (aten.linalg_solve.default, _solve, {**a, "b": TFloat, "left": bool}),
        (aten.linalg_solve_triangular.default, _solve_triangular, triangular),
        (aten.linalg_cholesky.default, _cholesky, {**a, **upper}),
        (aten.cholesky.default, _cholesky, {**a, **upper}),
        (aten.linalg_qr.default, _qr, {**a, "mode": str}),
        (aten.linalg_householder_product.default, _householder_product, {**a, "tau": TFloat}),
        (aten.linalg_matrix_exp.default, _matrix_exp, a),
        (aten.matrix_exp.default, _matrix_exp, a),
        (aten.linalg_slogdet.default, _log_determinant, a),
        (aten.slogdet.default, _log_determinant, a),
    ]
    return {operator: typed(function, {"return": TFloat} | kinds) for operator, function, kinds in table}


def _array(values: Any, of: np.dtype[Any] | type) -> Any:
    return opset().Constant(value=ir.tensor(np.asarray(values, dtype=of)))


def _part(x: Any, first: int, last: int, axis: int) -> Any:
    """Elements of an axis from the first to the one before the last."""
    return opset().Slice(x, _array([first], np.int64), _array([last], np.int64), _array([axis], np.int64))


def _batched(a: Any, b: Any, of_a: Sequence[Any], of_b: Sequence[Any]) -> tuple[Any, Any]:
    """a and b with as many matrices each; ``of_a`` and ``of_b`` count these."""
    op = opset()
    if [*map(str, of_a)] == [*map(str, of_b)]:
        return a, b
    common = op.Shape(op.Add(*(_part(_part(x, 0, 1, -1), 0, 1, -2) for x in (a, b))), end=-2)
    one, other = (op.Expand(x, op.Concat(common, op.Shape(x, start=-2), axis=0)) for x in (a, b))
    return one, other


def _turned(x: Any, rank: int) -> Any:
    return opset().Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _inverse(a):  # type: ignore[no-untyped-def]
    op, count = opset(), fixed_length(a, -1, "inv")
    eye = op.Expand(op.CastLike(_array(np.eye(count), np.float32), a), op.Shape(a))
    return _solve_op()(a, eye)


def _solve(a, b, left=True):  # type: ignore[no-untyped-def]
    op, last = opset(), _array([-1], np.int64)
    of_a, of_b = [*a.shape], [*b.shape]
    vector = len(of_b) == 1 or [*map(str, of_b)] == [*map(str, of_a[:-1])]
    if vector:
        b, of_b = op.Unsqueeze(b, last), [*of_b, 1]
    x = _system(_solve_op(), a, b, of_a, of_b, left=left or vector)
    return op.Squeeze(x, last) if vector else x


def _solve_op() -> Any:
    return own("Solve", "a b", "x", "transposed")


def _system(kind: Any, a: Any, b: Any, of_a: Sequence[Any], of_b: Sequence[Any], *, left: bool, **attributes: int) -> Any:
    """x of a·x = b, or of x·a = b, which is aᵀ·xᵀ = bᵀ; ``kind`` is the op that solves it."""
    b = b if left else _turned(b, len(of_b))
    x = kind(*_batched(a, b, of_a[:-2], of_b[:-2]), transposed=int(not left), **attributes)
    return x if left else _turned(x, max(len(of_a), len(of_b)))


def _solve_triangular(a, b, upper, left=True, unitriangular=False):  # type: ignore[no-untyped-def]
    of_a, of_b = [*a.shape], [*b.shape]
    if unitriangular:
        eye = np.eye(fixed_length(a, -1, "solve_triangular"))
        a = opset().Where(_array(eye, np.bool_), like(1.0, a), a)
    kind = own("TriangularSolve", "a b", "x", "transposed", "upper")
    return _system(kind, a, b, of_a, of_b, left=left, upper=int(upper))


def _cholesky(a, upper=False):  # type: ignore[no-untyped-def]
    factor = own("Cholesky", "a", "l")(a)
    return _turned(factor, len(a.shape)) if upper else factor


def _log_determinant(a):  # type: ignore[no-untyped-def]
    return own("LogDeterminant", "a", "sign size")(a)


def _qr(a, mode="reduced"):  # type: ignore[no-untyped-def]
    """Householder's reflections, with LAPACK's signs: it leaves a column alone that is zero below the diagonal."""
    op, columns, end = opset(), fixed_length(a, -1, "qr"), np.iinfo(np.int64).max
    rows = fixed_length(a, -2, "qr")
    count = min(rows, columns)
    if count > MOST:
        raise NotImplementedError(f"qr of matrices with {count} rows or columns has no translation; {MOST} are the most")
    if mode == "complete" and rows > columns:
        raise NotImplementedError("qr with mode 'complete' has no gradient where rows outnumber columns; use 'reduced'")
    rest, made, reflections, zero, one = a, [], [], like(0.0, a), like(1.0, a)
    signs = []
    for j in range(count):
        row = _part(rest, 0, 1, -2)
        if j < rows - 1:
            column, first = _part(rest, 0, 1, -1), _part(row, 0, 1, -1)
            size = op.Sqrt(op.ReduceSum(op.Mul(column, column), _array([-2], np.int64)))
            ahead = op.Add(first, op.Where(op.Less(first, zero), op.Neg(size), size))
            v = op.Concat(ahead, _part(column, 1, end, -2), axis=-2)
            factor = op.Div(like(2.0, a), op.ReduceSum(op.Mul(v, v), _array([-2], np.int64)))
            rest = _reflected(rest, v, factor, len(a.shape))
            reflections.append((op.Pad(v, _array([j, 0], np.int64), zero, _array([-2], np.int64)), factor))
            below = op.ReduceMax(op.Abs(_part(column, 1, end, -2)), _array([-2], np.int64))
            signs.append(op.Where(op.Equal(below, zero), op.Neg(one), one))
            row = op.Mul(_part(rest, 0, 1, -2), signs[-1])
        made.append(op.Pad(row, _array([j, 0], np.int64), zero, _array([-1], np.int64)) if j else row)
        if j < count - 1:
            rest = _part(_part(rest, 1, end, -2), 1, end, -1)
    r = op.Trilu(op.Concat(*made, axis=-2), upper=1)
    q = op.CastLike(_array(np.eye(rows, count), np.float32), a)
    if mode == "r":
        return op.CastLike(_array([], np.float32), a), r
    if not reflections:
        return op.Expand(q, op.Concat(op.Shape(a, end=-2), _array([rows, count], np.int64), axis=0)), r
    for v, factor in reversed(reflections):
        q = _reflected(q, v, factor, len(a.shape))
    signs += [op.Add(op.Mul(signs[0], zero), one)] * (count - len(signs))  # of a last row, which nothing reflects
    return op.Mul(q, op.Concat(*signs, axis=-1)), r


def _reflected(x: Any, v: Any, factor: Any, rank: int) -> Any:
    """x − factor · v · vᵀ · x"""
    op = opset()
    return op.Sub(x, op.MatMul(op.Mul(v, factor), op.MatMul(_turned(v, rank), x)))


def _householder_product(a, tau):  # type: ignore[no-untyped-def]
    """Π (1 − τᵢ·vᵢ·vᵢᵀ) = 1 − V·T·Vᵀ, with T = (1 + N)⁻¹·diag(τ), N = diag(τ)·(VᵀV above the diagonal).

    Of blocks on the diagonal whose inverses are known, 1 × 1 at first, two are put together at a time:
    [[A, N], [0, B]]⁻¹ = [[A⁻¹, −A⁻¹·N·B⁻¹], [0, B⁻¹]].
    """
    op, rank = opset(), len(a.shape)
    rows, columns = (fixed_length(a, axis, "householder_product") for axis in (-2, -1))
    count = fixed_length(tau, -1, "householder_product")
    eye = op.CastLike(_array(np.eye(rows, columns), np.float32), a)
    below = op.Trilu(_part(a, 0, count, -1), _array(-1, np.int64), upper=0)
    v = op.Add(below, op.CastLike(_array(np.eye(rows, count), np.float32), a))
    above = op.Mul(op.Unsqueeze(tau, _array([-1], np.int64)), op.MatMul(_turned(v, rank), v))
    inverse, places, size = op.CastLike(_array(np.eye(count), np.float32), a), np.arange(count), 1
    while size < count:
        block = places // size
        pairs = (block[:, None] + 1 == block) & (block % 2 == 1)
        between = op.Where(_array(pairs, np.bool_), above, like(0.0, a))
        inverse, size = op.Sub(inverse, op.MatMul(inverse, op.MatMul(between, inverse))), 2 * size
    inverse = op.Mul(inverse, op.Unsqueeze(tau, _array([-2], np.int64)))
    return op.Sub(eye, op.MatMul(v, op.MatMul(inverse, op.MatMul(_turned(v, rank), eye))))


SMALL, SQUARINGS, TERMS = 0.7, 10, 16
"""Norm of a matrix whose exponential the series gives with all digits of float64, squarings of it at most, and terms."""


def _matrix_exp(a):  # type: ignore[no-untyped-def]
    """exp(a) = exp(a / 2ⁿ) squared n times, n chosen for each matrix; exact for norms up to 700, NaN beyond."""
    op, count = opset(), fixed_length(a, -1, "matrix_exp")
    last = _array([-1], np.int64)
    norm = op.ReduceMax(op.ReduceSum(op.Abs(a), _array([-2], np.int64)), last)
    doublings = op.Log(op.Max(op.Div(norm, like(SMALL, a)), like(1.0, a)))
    n = op.Ceil(op.Div(doublings, like(math.log(2), a)))
    x = op.Div(a, op.Pow(like(2.0, a), n))
    x = op.Where(op.LessOrEqual(n, like(float(SQUARINGS), a)), x, like(math.nan, a))
    eye = op.CastLike(_array(np.eye(count), np.float32), a)
    powers = [eye, x, op.MatMul(x, x)]
    powers.append(op.MatMul(powers[2], x))
    fourth, made = op.MatMul(powers[2], powers[2]), None
    for k in reversed(range(0, TERMS, 4)):
        terms = [op.Mul(power, like(1 / math.factorial(k + j), a)) for j, power in enumerate(powers)]
        total = op.Add(op.Add(terms[0], terms[1]), op.Add(terms[2], terms[3]))
        made = total if made is None else op.Add(total, op.MatMul(fourth, made))
    for k in range(SQUARINGS):
        made = op.Where(op.Greater(n, like(float(k), a)), op.MatMul(made, made), made)
    return made
