"""Gradients of systems of equations, factors and determinants."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims
from graphc.passes.gradients.linear import transpose


@gradient("graphc::Solve")
def solve(op: Builder, node: ir.Node, dx: ir.Value) -> Any:
    """x = a⁻¹·b;  ∂b = a⁻ᵀ·dx,  ∂a = -∂b·xᵀ;  of x = a⁻ᵀ·b, ∂a = -x·∂bᵀ"""
    a, _ = operands(node, 2)
    transposed = node.attributes.get_int("transposed", 0)
    db = op.graphc.Solve(a, dx, transposed=1 - transposed)
    return _of_matrix(op, node, db, transposed), db


@gradient("graphc::TriangularSolve")
def triangular_solve(op: Builder, node: ir.Node, dx: ir.Value) -> Any:
    """As of Solve; only one triangle of a gets a gradient."""
    a, _ = operands(node, 2)
    transposed, upper = (node.attributes.get_int(name, 0) for name in ("transposed", "upper"))
    db = op.graphc.TriangularSolve(a, dx, transposed=1 - transposed, upper=upper)
    return lambda: op.Trilu(_of_matrix(op, node, db, transposed)(), upper=upper), db


def _of_matrix(op: Builder, node: ir.Node, db: Any, transposed: int) -> Any:
    left, right = (node.outputs[0], db) if transposed else (db, node.outputs[0])
    return lambda: op.Neg(op.MatMul(left, transpose(op, right)))


@gradient("graphc::Cholesky")
def cholesky(op: Builder, node: ir.Node, dl: ir.Value) -> Any:
    """a = l·lᵀ;  ∂a is the symmetric part of l⁻ᵀ·Φ(lᵀ·dl)·l⁻¹, where Φ halves the diagonal of the lower triangle

    I. Murray, Differentiation of the Cholesky decomposition (2016).
    """
    l = node.outputs[0]  # noqa: E741
    size = (dims(l) or (None,))[-1]
    if not isinstance(size, int):
        raise UnsupportedOpError(f"the size of the matrices must be known: {describe(node)}")
    halves = op.cast_like(op.const(np.tril(np.ones((size, size))) - np.eye(size) / 2), l)
    inner = op.Mul(op.MatMul(transpose(op, l), dl), halves)
    left = op.graphc.TriangularSolve(l, inner, transposed=1)
    whole = op.graphc.TriangularSolve(l, transpose(op, left), transposed=1)  # transposed, as is its sum with itself
    return op.Mul(op.Add(whole, transpose(op, whole)), 0.5)


@gradient("graphc::LogDeterminant")
def log_determinant(op: Builder, node: ir.Node, dsign: ir.Value | None, dsize: ir.Value | None) -> Any:
    """size = log |det a|;  ∂a = dsize·a⁻ᵀ; a sign has no slope"""
    (a,) = operands(node, 1)
    if dsize is None:
        return op.zeros_like(a)
    size = (dims(a) or (None,))[-1]
    if not isinstance(size, int):
        raise UnsupportedOpError(f"the size of the matrices must be known: {describe(node)}")
    eye = op.Expand(op.cast_like(op.const(np.eye(size)), a), op.shape(a))
    return op.Mul(op.Unsqueeze(dsize, [-2, -1]), op.graphc.Solve(a, eye, transposed=1))


@gradient("Det")
def det(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = det x;  ∂x = dy times the cofactors of x"""
    (x,) = operands(node, 1)
    if not isinstance((dims(x) or (None,))[-1], int):
        raise UnsupportedOpError(f"the size of the matrices must be known: {describe(node)}")
    return op.Mul(op.graphc.Cofactors(x), op.Unsqueeze(dy, [-2, -1]))
