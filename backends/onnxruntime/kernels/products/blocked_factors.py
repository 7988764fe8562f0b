"""Factors of a large matrix, and systems of equations with one, in blocks: nearly all of the work is products of matrices.

    L of L·Lᵀ = A        block columns from the left, each A's less the product of what stands left of it in L
    X of T·X = B         block rows, each B's less the product of T's blocks beside the diagonal and rows of X that are known
    P·A = L·U            a block column by elimination with exchanges of rows, then a product off everything right below it

All threads share each product, and what is between products by rows or by columns.
"""

from __future__ import annotations

import itertools

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.products.linear import product_of
from graphc.backends.onnxruntime.kernels.products.wide_products import product
from graphc.device import Array, Run

LEAST = 96
"""Rows of a matrix from which blocks take less time."""
BLOCK = 32
"""Rows of a block; of an elimination with exchanges, twice as many, since each product passes over what is left."""


def _multiply(pool: Pool, a: Array, b: Array, c: Array) -> Run:
    """c = a·b"""
    return product_of(pool, a, b, c) if c.dtype == np.float32 else product(pool, a[None], b[None], c[None])


def factor(pool: Pool, a: Array, low: Array) -> list[Run]:
    """Steps to low with a = low·lowᵀ."""
    n = len(a)
    runs = [pool.bind(_take_lower, (a, low), n, 64)]
    beside, nothing = (np.zeros((n, BLOCK), dtype=a.dtype) for _ in range(2))
    for first, last in _cuts(n, BLOCK):
        taken = (beside if first else nothing)[: n - first, : last - first]
        if first:
            runs.append(_multiply(pool, low[first:, :first], low[first:last, :first].T, taken))
        runs.append(pool.bind(_factor_corner, (low[first:last, first:last], taken[: last - first]), 1))
        if last < n:
            below = low[last:, first:last], taken[last - first :], low[first:last, first:last]
            runs.append(pool.bind(_solve_rows, below, n - last, 16))
    return runs


def substitute(pool: Pool, triangle: Array, x: Array, *, upper: bool) -> list[Run]:
    """Steps that replace x by triangle⁻¹·x; the triangle may be a view with columns for rows."""
    n, count = x.shape
    beside, nothing = (np.zeros((BLOCK, count), dtype=x.dtype) for _ in range(2))
    runs: list[Run] = []
    cuts = _cuts(n, BLOCK)
    for first, last in reversed(cuts) if upper else cuts:
        known = slice(last, n) if upper else slice(0, first)
        taken = (beside if known.start < known.stop else nothing)[: last - first]
        if known.start < known.stop:
            runs.append(_multiply(pool, triangle[first:last, known], x[known], taken))
        arguments = triangle[first:last, first:last], taken, x[first:last], np.int64(upper)
        runs.append(pool.bind(_solve_columns, arguments, -(-count // 64), 1))
    return runs


def eliminate(pool: Pool, m: Array, odd: Array) -> list[Run]:
    """Steps that replace m, n rows of n or more columns, by L (without its diagonal of ones) and U of its first n, and the
    columns behind by L⁻¹·P of them.

    Args:
        odd: int64[1], whether rows were exchanged an odd number of times.
    """
    n, width = m.shape
    order = np.zeros(n, dtype=np.int64)
    memory = np.zeros(n * width, dtype=m.dtype)
    runs: list[Run] = [pool.bind(_start, (odd,), 1)]
    for first, last in _cuts(n, 2 * BLOCK):
        runs.append(pool.bind(_eliminate_block, (m, order, odd, np.int64(first), np.int64(last)), 1))
        pieces = -(-width // 64)
        runs.append(pool.bind(_follow, (m, order, np.int64(first), np.int64(last)), pieces, 1))
        if last < n and last < width:
            taken = memory[: (n - last) * (width - last)].reshape(n - last, width - last)
            runs.append(_multiply(pool, m[last:, first:last], m[first:last, last:], taken))
            runs.append(pool.bind(_subtract, (m[last:, last:], taken), n - last, max(1, 16384 // width)))
    return runs


def _cuts(n: int, block: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*range(0, n, block), n]))


@jit
def _take_lower(a, low, start, stop):
    for i in range(start, stop):
        for j in range(i + 1):
            low[i, j] = (a[i, j] + a[j, i]) / 2
        for j in range(i + 1, a.shape[0]):
            low[i, j] = 0


@jit
def _factor_corner(low, taken, start, stop):
    for i in range(low.shape[0]):
        for j in range(i + 1):
            total = low[i, j] - taken[i, j]
            for k in range(j):
                total -= low[i, k] * low[j, k]
            low[i, j] = np.sqrt(total) if i == j else total / low[j, j]


@jit
def _solve_rows(low, taken, corner, start, stop):
    """Each row r of low becomes (r - taken)·corner⁻ᵀ."""
    for i in range(start, stop):
        row, less = low[i], taken[i]
        for j in range(row.size):
            total, known = row[j] - less[j], corner[j]
            for k in range(j):
                total -= row[k] * known[k]
            row[j] = total / known[j]


@jit
def _solve_columns(triangle, taken, x, upper, start, stop):
    """x becomes triangle⁻¹·(x - taken), 64 columns a piece."""
    n = x.shape[0]
    for piece in range(start, stop):
        first, last = piece * 64, min(x.shape[1], piece * 64 + 64)
        for i in range(n):
            row, less = x[i, first:last], taken[i, first:last]
            for j in range(row.size):
                row[j] -= less[j]
        for step in range(n):
            k = n - 1 - step if upper != 0 else step
            done, pivot = x[k, first:last], triangle[k, k]
            for j in range(done.size):
                done[j] /= pivot
            for i in range(0 if upper != 0 else k + 1, k if upper != 0 else n):
                row, by = x[i, first:last], triangle[i, k]
                for j in range(done.size):
                    row[j] -= by * done[j]


@jit
def _start(odd, start, stop):
    odd[0] = 0


@jit
def _eliminate_block(m, order, odd, first, last, start, stop):
    """Elimination of the columns ``first`` to ``last``; ``order`` keeps which row each is exchanged with."""
    n = m.shape[0]
    for k in range(first, last):
        best, size = k, abs(m[k, k])
        for i in range(k + 1, n):
            if abs(m[i, k]) > size:
                best, size = i, abs(m[i, k])
        order[k] = best
        if best != k:
            odd[0] = 1 - odd[0]
            for j in range(first, last):
                m[k, j], m[best, j] = m[best, j], m[k, j]
        if m[k, k] == 0:
            continue
        pivot = m[k, k + 1 : last]
        for i in range(k + 1, n):
            by, row = m[i, k] / m[k, k], m[i, k + 1 : last]
            m[i, k] = by
            for j in range(row.size):
                row[j] -= by * pivot[j]


@jit
def _follow(m, order, first, last, start, stop):
    """Other columns, 64 a piece, follow the exchanges of the block; those behind it are solved for its triangle."""
    for piece in range(start, stop):
        low, high = piece * 64, min(m.shape[1], piece * 64 + 64)
        for k in range(first, last):
            other = order[k]
            if other != k:
                for j in range(low, high):
                    if j < first or j >= last:
                        m[k, j], m[other, j] = m[other, j], m[k, j]
        low = max(low, last)
        if low < high:
            for k in range(first, last):
                done = m[k, low:high]
                for i in range(k + 1, last):
                    row, by = m[i, low:high], m[i, k]
                    for j in range(done.size):
                        row[j] -= by * done[j]


@jit
def _subtract(x, y, start, stop):
    for i in range(start, stop):
        row, less = x[i], y[i]
        for j in range(row.size):
            row[j] -= less[j]
