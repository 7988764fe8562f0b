"""Gradients of matrix products.

Two-dimensional products use ``Gemm``, whose transposes are free. A batch of rows times a matrix is first flattened to two
dimensions, because onnxruntime runs that form as one large BLAS product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import rank
from graphc.passes.gradients.reverse_mode import INTEGER_PRODUCTS

zero_gradient(*sorted(INTEGER_PRODUCTS), origin=__name__)


@gradient("Gemm")
def gemm(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = α·a'·b' + β·c;  ∂a' = α·dy·b'ᵀ,  ∂b' = α·a'ᵀ·dy,  ∂c = β·dy"""
    a, b = operands(node, 2)
    alpha = node.attributes.get_float("alpha", 1.0)
    beta = node.attributes.get_float("beta", 1.0)
    ta, tb = node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)

    def da() -> Any:
        return _gemm(op, b, dy, tb, 1, alpha) if ta else _gemm(op, dy, b, 0, 1 - tb, alpha)

    def db() -> Any:
        return _gemm(op, dy, a, 1, ta, alpha) if tb else _gemm(op, a, dy, 1 - ta, 0, alpha)

    return da, db, lambda: op.Mul(dy, beta) if beta != 1 else dy


def _gemm(op: Builder, a: ir.Value, b: ir.Value, ta: int, tb: int, alpha: float = 1.0) -> Any:
    return op.Gemm(a, b, transA=ta or None, transB=tb or None, alpha=alpha if alpha != 1 else None)


@gradient("MatMul")
def matmul(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = a·b;  ∂a = dz·bᵀ,  ∂b = aᵀ·dz, where a vector a is a row and a vector b a column"""
    a, b = operands(node, 2)
    if rank(a) == 1 and rank(b) == 1:
        return lambda: op.Mul(dz, b), lambda: op.Mul(dz, a)
    if rank(b) == 2 and rank(a) >= 2:
        return lambda: _rows_gradient(op, a, b, dz), lambda: _gemm(op, _rows(op, a), _rows(op, dz), 1, 0)
    if rank(a) == 1:
        row, dz_row = op.Unsqueeze(a, [0]), op.Unsqueeze(dz, [-2])
        return (
            lambda: op.Squeeze(op.MatMul(dz_row, transpose(op, b)), [-2]),
            lambda: op.MatMul(transpose(op, row), dz_row),
        )
    if rank(b) == 1:
        dz_column = op.Unsqueeze(dz, [-1])
        return lambda: op.Mul(dz_column, b), lambda: op.Squeeze(op.MatMul(transpose(op, a), dz_column), [-1])
    return lambda: op.MatMul(dz, transpose(op, b)), lambda: op.MatMul(transpose(op, a), dz)


@gradient("graphc::GroupedMatMul")
def grouped_matmul(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y[s] = x[s]·w[owner[s]];  ∂x[s] = dy[s]·w[owner[s]]ᵀ,  ∂w[e] = Σ x[s]ᵀ·dy[s] over the rows of e"""
    x, w, owner = operands(node, 3)
    transposed, gathers = node.attributes.get_int("transB", 0), node.attributes.get_int("gathers", 0) or None
    a, b = (dy, x) if transposed else (x, dy)
    return (
        lambda: op.graphc.GroupedMatMul(dy, w, owner, transB=1 - transposed or None, gathers=gathers),
        lambda: op.graphc.GroupedMatMulGradWeight(a, b, owner, op.shape(w), gathers=gathers),
        None,
    )


def _rows(op: Builder, x: ir.Value) -> Any:
    return x if rank(x) == 2 else op.Flatten(x, axis=rank(x) - 1)


def _rows_gradient(op: Builder, a: ir.Value, b: ir.Value, dz: ir.Value) -> Any:
    da = _gemm(op, _rows(op, dz), b, 0, 1)
    return da if rank(a) == 2 else op.reshape_like(da, a)


def transpose(op: Builder, x: ir.Value) -> Any:
    """x with its last two axes exchanged."""
    axes = list(range(rank(x)))
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


@gradient("Einsum")
def einsum(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = einsum(a, b, …);  ∂a = einsum(dz, b, …), repeated along labels that only a has, on the diagonal of a double one"""
    inputs = operands(node, len(node.inputs))
    terms, result = einsum_terms(node, inputs)

    def make(k: int) -> Any:
        own = "".join(dict.fromkeys(terms[k]))
        others = [j for j in range(len(inputs)) if j != k]
        known = set(result).union(*(terms[j] for j in others))
        kept = "".join(c for c in own if c in known)
        equation = ",".join([result, *(terms[j] for j in others)]) + "->" + kept
        value = dz if equation == f"{kept}->{kept}" else op.Einsum(dz, *(inputs[j] for j in others), equation=equation)
        missing = [i for i, c in enumerate(own) if c not in known]
        value = op.Unsqueeze(value, missing) if missing else value
        if len(own) < len(terms[k]):
            return _onto_diagonal(op, value, own, terms[k], inputs[k])
        return op.expand_like(value, inputs[k]) if missing else value

    return tuple((lambda k=k: make(k)) for k in range(len(inputs)))


def _onto_diagonal(op: Builder, value: Any, own: str, term: str, like: ir.Value) -> Any:
    """``value`` (axes ``own``) where all axes of ``term`` with the same label agree, else 0."""
    first = [term.index(c) for c in own]
    spread = op.Unsqueeze(value, [i for i in range(len(term)) if i not in first])
    mask: Any = None
    for i, c in enumerate(term):
        if i in first:
            continue
        a, b = (_positions(op, like, axis, len(term)) for axis in (term.index(c), i))
        same = op.Equal(a, b)
        mask = same if mask is None else op.And(mask, same)
    return op.expand_like(op.Where(mask, spread, op.scalar(0, value)), like)


def _positions(op: Builder, like: ir.Value, axis: int, width: int) -> Any:
    """0, 1, 2 … along one axis."""
    numbers = op.Range(np.int64(0), op.Squeeze(op.lengths((like, axis)), [0]), np.int64(1))
    return op.Unsqueeze(numbers, [k for k in range(width) if k != axis])


def einsum_terms(node: ir.Node, inputs: list[ir.Value]) -> tuple[list[str], str]:
    """Index letters of each operand and of the result, with ellipsis and implicit result expanded."""
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    free = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBAzyxwvutsrqponmlkjihgfedcba" if c not in equation]
    widths = [rank(v) - len(t.replace("...", "")) if "..." in t else 0 for t, v in zip(terms, inputs, strict=True)]
    batch = "".join(free[: max(widths)])
    terms = [t.replace("...", batch[len(batch) - w :]) for t, w in zip(terms, widths, strict=True)]
    if arrow:
        return terms, result.replace("...", batch)
    letters = sorted(c for c in set("".join(terms)) if c not in batch)
    return terms, batch + "".join(c for c in letters if sum(t.count(c) for t in terms) == 1)
