"""Systems of equations, factors and determinants: one matrix after another, threads share the matrices.

Large matrices, of which there are few, are in :mod:`.blocked_factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.products.blocked_factors import LEAST, eliminate, factor, substitute
from graphc.device import Array, Run, in_order
from graphc.ir.facts import static_dims

TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _is_known(node: ir.Node) -> bool:
    return all(0 not in (static_dims(v) or (0,)) for v in node.inputs if v is not None)


def _matrices(x: Array) -> Array:
    return x.reshape(-1, *x.shape[-2:])


def _bind(k: Binding, function: object, arguments: tuple[Array | np.int64, ...], count: int, rows: int, *, own: int = 1) -> Run:
    """Each part has ``own`` matrices of scratch memory."""
    grain = max(1, 8192 // rows**3)
    parts = max(1, min(k.pool.threads, count // grain))
    first = given(k.inputs, 1)[0]
    room = np.zeros((parts, own, rows, rows), dtype=first.dtype)
    return k.pool.bind(function, (*arguments, room), parts)  # type: ignore[arg-type]


MOST = 8
"""Large matrices for each thread, at most, of which each is computed by all threads."""


def _in_blocks(k: Binding, a: Array) -> bool:
    return a.shape[1] >= LEAST and len(a) <= MOST * k.pool.threads


def _bind_copy(pool: Pool, x: Array, y: Array) -> Run:
    rows, columns = x.shape[0] * x.shape[1], x.shape[2]
    return pool.bind(_copy_rows, (x, y), rows, max(1, 16384 // columns))


def _solve_in_blocks(pool: Pool, a: Array, b: Array, x: Array) -> Run:
    rows, columns = a.shape[1], b.shape[2]
    both, odd = np.zeros((1, rows, rows + columns), dtype=a.dtype), np.zeros(1, dtype=np.int64)
    runs: list[Run] = []
    for q in range(len(a)):
        runs += [_bind_copy(pool, a[q : q + 1], both[:, :, :rows]), _bind_copy(pool, b[q : q + 1], both[:, :, rows:])]
        runs += [*eliminate(pool, both[0], odd), *substitute(pool, both[0, :, :rows], both[0, :, rows:], upper=True)]
        runs.append(_bind_copy(pool, both[:, :, rows:], x[q : q + 1]))
    return in_order(runs)


def _determinants_in_blocks(pool: Pool, a: Array, last: tuple[Callable[..., None], *tuple[Array, ...]]) -> Run:
    """``last`` is a function and what it writes, for each matrix an element, from its triangle."""
    m, odd = np.zeros((1, *a.shape[1:]), dtype=a.dtype), np.zeros(1, dtype=np.int64)
    function, *results = last
    runs: list[Run] = []
    for q in range(len(a)):
        runs += [_bind_copy(pool, a[q : q + 1], m), *eliminate(pool, m[0], odd)]
        runs.append(pool.bind(function, (m[0], odd, *(y[q : q + 1] for y in results)), 1))
    return in_order(runs)


@kernel("onnxruntime", "graphc::Solve", dtypes=TYPES, when=_is_known)
def solve(k: Binding) -> Run:
    """x = a⁻¹·b or a⁻ᵀ·b, by elimination with exchanges of rows"""
    (a, b), (x,) = map(_matrices, given(k.inputs, 2)), map(_matrices, given(k.outputs, 1))
    if _in_blocks(k, a):
        return _solve_in_blocks(k.pool, a.swapaxes(1, 2) if k.attributes["transposed"] else a, b, x)
    return _bind(k, _solve, (a, b, x, np.int64(k.attributes["transposed"])), len(a), a.shape[1])


@kernel("onnxruntime", "graphc::TriangularSolve", dtypes=TYPES, when=_is_known)
def triangular_solve(k: Binding) -> Run:
    """x = a⁻¹·b or a⁻ᵀ·b for one triangle of a"""
    (a, b), (x,) = map(_matrices, given(k.inputs, 2)), map(_matrices, given(k.outputs, 1))
    transposed, upper = (np.int64(k.attributes[name]) for name in ("transposed", "upper"))
    if _in_blocks(k, a):
        side, triangles = bool(transposed) != bool(upper), a.swapaxes(1, 2) if transposed else a
        systems = zip(triangles, x, strict=True)
        return in_order([_bind_copy(k.pool, b, x), *(run for t, y in systems for run in substitute(k.pool, t, y, upper=side))])
    return _bind(k, _triangular, (a, b, x, transposed, upper), len(a), a.shape[1])


@kernel("onnxruntime", "graphc::Cholesky", dtypes=TYPES, when=_is_known)
def cholesky(k: Binding) -> Run:
    """l with a = l·lᵀ"""
    (a,), (low,) = map(_matrices, given(k.inputs, 1)), map(_matrices, given(k.outputs, 1))
    if _in_blocks(k, a):
        return in_order([run for x, y in zip(a, low, strict=True) for run in factor(k.pool, x, y)])
    return _bind(k, _cholesky, (a, low), len(a), a.shape[1])


@kernel("onnxruntime", "graphc::LogDeterminant", dtypes=TYPES, when=_is_known)
def log_determinant(k: Binding) -> Run:
    """sign and logarithm of the size of det a"""
    (a,), (sign, size) = map(_matrices, given(k.inputs, 1)), (y.reshape(-1) for y in given(k.outputs, 2))
    if _in_blocks(k, a):
        return _determinants_in_blocks(k.pool, a, (_log_of_triangles, sign, size))
    return _bind(k, _log_determinant, (a, sign, size), len(a), a.shape[1])


@kernel("onnxruntime", "Det", dtypes=TYPES, when=_is_known)
def determinant(k: Binding) -> Run:
    """det a, by elimination with exchanges of rows"""
    (a,), (y,) = map(_matrices, given(k.inputs, 1)), (y.reshape(-1) for y in given(k.outputs, 1))
    if _in_blocks(k, a):
        return _determinants_in_blocks(k.pool, a, (_product_of_triangles, y))
    return _bind(k, _determinant, (a, y), len(a), a.shape[1])


@kernel("onnxruntime", "graphc::Cofactors", dtypes=TYPES, when=_is_known)
def cofactors(k: Binding) -> Run:
    """c = adj(a)ᵀ, where P·a·Q = L·U with exchanges of rows and columns.

    adj(a) = ± Q·adj(U)·L⁻¹·P, and of an upper triangle with the last column (c, t), adj(U) = [[t·d·V⁻¹, -d·V⁻¹·c], [0, d]]
    for the triangle V in front of it and d = det V. Nothing is divided by t, the smallest pivot, which may be zero; if V is
    singular as well, a has no cofactors but zero.
    """
    (a,), (c,) = map(_matrices, given(k.inputs, 1)), map(_matrices, given(k.outputs, 1))
    rows = a.shape[1]
    order = np.zeros((k.pool.threads, 2, rows), dtype=np.int64)
    return _bind(k, _cofactors, (a, c, order), len(a), rows, own=2)


@jit
def _reduce(m, x):
    """Elimination with exchanges of rows in m, and the same in x; m becomes its upper triangle.

    Returns whether rows were exchanged an odd number of times.
    """
    n, odd = m.shape[0], False
    for k in range(n):
        best, size = k, abs(m[k, k])
        for i in range(k + 1, n):
            if abs(m[i, k]) > size:
                best, size = i, abs(m[i, k])
        if best != k:
            odd = not odd
            for j in range(k, n):
                m[k, j], m[best, j] = m[best, j], m[k, j]
            for j in range(x.shape[1]):
                x[k, j], x[best, j] = x[best, j], x[k, j]
        if m[k, k] == 0:
            continue
        pivot, beside = m[k, k + 1 :], x[k]
        for i in range(k + 1, n):
            factor, row, other = m[i, k] / m[k, k], m[i, k + 1 :], x[i]
            for j in range(pivot.size):
                row[j] -= factor * pivot[j]
            for j in range(beside.size):
                other[j] -= factor * beside[j]
    return odd


@jit
def _back(m, x):
    """x = m⁻¹·x for the upper triangle of m."""
    n = m.shape[0]
    for k in range(n - 1, -1, -1):
        pivot = m[k, k]
        for j in range(x.shape[1]):
            x[k, j] /= pivot
        done = x[k]
        for i in range(k):
            factor, row = m[i, k], x[i]
            for j in range(done.size):
                row[j] -= factor * done[j]


@jit
def _forward(m, x):
    """x = m⁻¹·x for the lower triangle of m."""
    n = m.shape[0]
    for k in range(n):
        pivot = m[k, k]
        for j in range(x.shape[1]):
            x[k, j] /= pivot
        done = x[k]
        for i in range(k + 1, n):
            factor, row = m[i, k], x[i]
            for j in range(done.size):
                row[j] -= factor * done[j]


@jit
def _copy(x, y, transposed):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            if transposed != 0:
                y[j, i] = x[i, j]
            else:
                y[i, j] = x[i, j]


@jit
def _solve(a, b, x, transposed, room, start, stop):
    parts = room.shape[0]
    for part in range(start, stop):
        m = room[part, 0]
        for q in range(len(a) * part // parts, len(a) * (part + 1) // parts):
            _copy(a[q], m, transposed)
            _copy(b[q], x[q], 0)
            _reduce(m, x[q])
            _back(m, x[q])


@jit
def _triangular(a, b, x, transposed, upper, room, start, stop):
    parts = room.shape[0]
    for part in range(start, stop):
        m = room[part, 0]
        for q in range(len(a) * part // parts, len(a) * (part + 1) // parts):
            _copy(a[q], m, transposed)
            _copy(b[q], x[q], 0)
            if (upper != 0) != (transposed != 0):
                _back(m, x[q])
            else:
                _forward(m, x[q])


@jit
def _cholesky(a, low, room, start, stop):
    parts, n = room.shape[0], a.shape[1]
    for part in range(start, stop):
        for q in range(len(a) * part // parts, len(a) * (part + 1) // parts):
            x, l = a[q], low[q]  # noqa: E741
            for i in range(n):
                for j in range(i + 1):
                    l[i, j] = (x[i, j] + x[j, i]) / 2
                for j in range(i + 1, n):
                    l[i, j] = 0
            for i in range(n):  # row after row, each a sum along two rows
                for j in range(i):
                    total = l[i, j]
                    for k in range(j):
                        total -= l[i, k] * l[j, k]
                    l[i, j] = total / l[j, j]
                total = l[i, i]
                for k in range(i):
                    total -= l[i, k] * l[i, k]
                l[i, i] = math.sqrt(total)


@jit
def _log_of(m, odd):
    """Sign and logarithm of the size of the product of a diagonal; the other sign if ``odd``."""
    negative, total = odd, 0.0
    for k in range(m.shape[0]):
        if m[k, k] < 0:
            negative = not negative
        total += math.log(abs(np.float64(m[k, k])))
    return 0.0 if total == -math.inf else (-1.0 if negative else 1.0), total


@jit
def _product_of(m, odd):
    """The product of a diagonal, with the other sign if ``odd``."""
    total = -1.0 if odd else 1.0
    for k in range(m.shape[0]):
        total *= np.float64(m[k, k])
    return total


@jit
def _log_of_triangles(m, odd, sign, size, start, stop):
    sign[0], size[0] = _log_of(m, odd[0] != 0)


@jit
def _product_of_triangles(m, odd, y, start, stop):
    y[0] = _product_of(m, odd[0] != 0)


@jit
def _copy_rows(x, y, start, stop):
    for r in range(start, stop):
        source, target = x[r // x.shape[1], r % x.shape[1]], y[r // x.shape[1], r % x.shape[1]]
        for j in range(source.size):
            target[j] = source[j]


@jit
def _log_determinant(a, sign, size, room, start, stop):
    parts = room.shape[0]
    for part in range(start, stop):
        m = room[part, 0]
        for q in range(len(a) * part // parts, len(a) * (part + 1) // parts):
            _copy(a[q], m, 0)
            sign[q], size[q] = _log_of(m, _reduce(m, m[:, :0]))


@jit
def _determinant(a, y, room, start, stop):
    parts = room.shape[0]
    for part in range(start, stop):
        m = room[part, 0]
        for q in range(len(a) * part // parts, len(a) * (part + 1) // parts):
            _copy(a[q], m, 0)
            y[q] = _product_of(m, _reduce(m, m[:, :0]))


@jit
def _cofactors(a, c, order, room, start, stop):
    parts, n = room.shape[0], a.shape[1]
    for part in range(start, stop):
        m, x, rows, columns = room[part, 0], room[part, 1], order[part, 0], order[part, 1]
        for q in range(len(a) * part // parts, len(a) * (part + 1) // parts):
            _copy(a[q], m, 0)
            sign = 1.0
            for k in range(n):
                rows[k] = columns[k] = k
            for k in range(n):
                best, other, size = k, k, abs(m[k, k])
                for i in range(k, n):
                    for j in range(k, n):
                        if abs(m[i, j]) > size:
                            best, other, size = i, j, abs(m[i, j])
                if best != k:
                    sign, rows[k], rows[best] = -sign, rows[best], rows[k]
                    for j in range(n):
                        m[k, j], m[best, j] = m[best, j], m[k, j]
                if other != k:
                    sign, columns[k], columns[other] = -sign, columns[other], columns[k]
                    for i in range(n):
                        m[i, k], m[i, other] = m[i, other], m[i, k]
                if m[k, k] == 0:
                    continue
                for i in range(k + 1, n):  # factors of L stay below the diagonal
                    factor = m[i, k] / m[k, k]
                    m[i, k] = factor
                    for j in range(k + 1, n):
                        m[i, j] -= factor * m[k, j]
            last = m[n - 1, n - 1]
            front = sign
            for k in range(n - 1):
                front *= np.float64(m[k, k])
            # x = L⁻¹, then adj(U)·x
            for i in range(n):
                for j in range(n):
                    x[i, j] = 1 if i == j else 0
                for k in range(i):
                    factor = m[i, k]
                    for j in range(k + 1):
                        x[i, j] -= factor * x[k, j]
            if front == 0:
                for i in range(n):
                    for j in range(n):
                        c[q, i, j] = 0
                continue
            for i in range(n - 1):
                for j in range(n):
                    x[i, j] = last * x[i, j] - m[i, n - 1] * x[n - 1, j]
            for k in range(n - 2, -1, -1):
                pivot = m[k, k]
                for j in range(n):
                    x[k, j] /= pivot
                for i in range(k):
                    factor = m[i, k]
                    for j in range(n):
                        x[i, j] -= factor * x[k, j]
            for i in range(n):
                for j in range(n):
                    c[q, rows[j], columns[i]] = front * x[i, j]
