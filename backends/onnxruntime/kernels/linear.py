"""Matrix products by oneDNN, which takes 3 to 15 % less time over them than onnxruntime (float32, AVX-512, one thread).

GFLOP/s for 512 × 256 × 1024 and its gradients: oneDNN 112, 105, 112; onnxruntime 108, 99, 96. Where operands lie badly for
oneDNN on AVX2, SciPy's BLAS computes the product, a part of the result in each thread of the pool.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.arrays import given, optional
from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.kernels.onednn import MatmulPrimitive, library, scratchpad_of
from graphc.backends.onnxruntime.kernels.products import open_blas, product
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.device import Array, Run
from graphc.ir.facts import static_dims

WORTH = 1 << 20
"""Smallest product, in multiplications, for which a native step costs less than it saves."""


NARROWEST = 32
"""Smallest side of matrices that oneDNN multiplies many at a time; onnxruntime takes half the time over narrower ones."""


def _shapes(node: ir.Node) -> list[tuple[int, ...]] | None:
    """The shapes of two operands and the result, when all are known."""
    found = [static_dims(v) if v is not None else None for v in (*node.inputs[:2], node.outputs[0])]
    known = [shape for shape in found if shape is not None]
    return known if len(known) == 3 else None


def _large_gemm(node: ir.Node) -> bool:
    shapes, attributes = _shapes(node), node.attributes
    if shapes is None or library() is None or attributes.get_float("alpha", 1.0) != 1:
        return False
    (a, _, (_, columns)), bias = shapes, node.inputs[2] if len(node.inputs) > 2 else None
    if math.prod(a) * columns < WORTH:
        return False
    return bias is None or (attributes.get_float("beta", 1.0) == 1 and static_dims(bias) in ((columns,), (1, columns)))


@kernel("onnxruntime", "Gemm", when=_large_gemm)
def gemm(k: Binding) -> Run:
    """c = a'·b' + bias"""
    (a, b), (c,) = given(k.inputs, 2), given(k.outputs, 1)
    bias = optional(k.inputs, 2)
    return product_of(k.pool, a.T if k.attributes.get("transA") else a, b.T if k.attributes.get("transB") else b, c, bias)


def _large_matmul(node: ir.Node) -> bool:
    shapes = _shapes(node)
    if shapes is None or library() is None or len(shapes[0]) < 2 or len(shapes[1]) < 2:
        return False
    a, b, c = shapes
    if math.prod(a) * c[-1] < WORTH:
        return False
    return len(b) == 2 or (a[:-2] == b[:-2] and min(*a[-2:], c[-1]) >= NARROWEST)


@kernel("onnxruntime", "MatMul", when=_large_matmul)
def matmul(k: Binding) -> Run:
    """c = a·b for a matrix b and a stack of rows a, or for as many matrices each"""
    (a, b), (c,) = given(k.inputs, 2), given(k.outputs, 1)
    if b.ndim > 2:
        lib = library()
        assert lib is not None
        of_a, of_b, of_c = (x.reshape(-1, *x.shape[-2:]) for x in (a, b, c))
        return MatmulPrimitive(lib, of_a, of_b, of_c, None, threads=k.pool.threads, scratch=scratchpad_of(k.pool)).runner()
    return product_of(k.pool, a.reshape(-1, b.shape[0]), b, c.reshape(-1, b.shape[1]))


def product_of(pool: Pool, a: Array, b: Array, c: Array, bias: Array | None = None) -> Run:
    """c = a·b + bias for matrices, a and b possibly views of others with rows apart or transposed: by oneDNN or BLAS."""
    lib = library()
    if lib is None or _rows_collide(a, b):
        return _by_blas(pool, a, b, c, bias)
    return MatmulPrimitive(lib, a, b, c, bias, threads=pool.threads, scratch=scratchpad_of(pool)).runner()


NARROW, SHALLOW = 64, 128
"""Smallest sides of a result and length of its sums from which BLAS is worth the copies that it makes of both operands."""


def _rows_collide(a: Array, b: Array) -> bool:
    """Whether oneDNN, which reads operands in place, goes down columns whose elements share a few sets of the cache.

    BLAS copies both operands into panels first. On an AMD core of 96 GFLOP/s it reaches 83 to 94 for every layout and shape,
    oneDNN 97 for rows that lie well and 40 to 85 for others: 41 for the weight gradient of 1024 outputs by 256 inputs and 1024
    rows, 68 for 384 × 384 × 512. oneDNN's code for AVX-512 copies as well.
    """
    (m, k), n = a.shape, b.shape[1]
    if LANES != 8 or min(m, n) < NARROW or k < SHALLOW:
        return False
    of_a, of_b = max(a.strides), max(b.strides)
    if _is_transposed(a) and of_a % 1024 == 0:
        return True
    return of_b % 4096 == 0 if _is_transposed(b) else of_b % 2048 == 0 or of_b == 1024


def _is_transposed(x: Array) -> bool:
    return x.strides[0] == x.itemsize != x.strides[1]


def _by_blas(pool: Pool, a: Array, b: Array, c: Array, bias: Array | None) -> Run:
    open_blas()
    places = [_is_transposed(a), _is_transposed(b), a.shape[1]]
    for x in (a, b, c):
        places += [x.ctypes.data, max(*(s // x.itemsize for s in x.strides), x.shape[0 if _is_transposed(x) else 1])]
    tiles = np.array(parts_of_product(c.shape[0], c.shape[1], pool.threads), dtype=np.int64)
    table = np.array(places, dtype=np.int64)
    row = np.empty((0,), dtype=np.float32) if bias is None else bias.reshape(-1)
    run = pool.bind(_multiply, (c, row, table, tiles, _NUMBERS), len(tiles))
    return lambda held=(a, b): run()  # type: ignore[misc]


def parts_of_product(rows: int, columns: int, threads: int) -> list[tuple[int, int, int, int]]:
    """First and last row, first and last column of each thread's part of a result: as square as can be.

    Each thread copies the rows and the columns that its part reads.
    """
    counts = [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
    across, along = min(counts, key=lambda each: (rows / each[0] + columns / each[1], each))
    of_rows, of_columns = _cuts(rows, across), _cuts(columns, along)
    return [(*r, *q) for r in itertools.pairwise(of_rows) for q in itertools.pairwise(of_columns)]


def _cuts(total: int, parts: int) -> list[int]:
    """Where a side is cut, at multiples of what a loop of BLAS takes at once."""
    return sorted({*(total * k // parts // PIECE * PIECE for k in range(parts)), total})


PIECE = 16
"""Rows or columns that a loop of BLAS takes at once, at most."""

_NUMBERS = np.array([1.0, 0.0], dtype=np.float32)


@jit
def _multiply(c, bias, table, tiles, numbers, start, stop):
    one, zero = numbers.ctypes.data, numbers.ctypes.data + 4
    of_a, of_b = table[0] != 0, table[1] != 0
    for t in range(start, stop):
        top, bottom, left, right = tiles[t]
        if bias.size > 0:
            for r in range(top, bottom):
                for n in range(left, right):
                    c[r, n] = bias[n]
        a = table[3] + 4 * top * (1 if of_a else table[4])
        b = table[5] + 4 * left * (table[6] if of_b else 1)
        at = table[7] + 4 * (top * table[8] + left)
        kept = one if bias.size > 0 else zero
        product(of_a, of_b, bottom - top, right - left, table[2], one, a, table[4], b, table[6], kept, at, table[8])
