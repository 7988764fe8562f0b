"""Matrix products by oneDNN, which takes 3 to 15 % less time over them than onnxruntime (float32, AVX-512, one thread).

GFLOP/s for 512 × 256 × 1024 and its gradients: oneDNN 112, 105, 112; onnxruntime 108, 99, 96.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.arrays import given, optional
from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.kernels.onednn import MatmulPrimitive, OneDNN, library, scratchpad_of
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.device import Array, Run, in_order
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
    """c = a·b + bias for matrices, a and b possibly views of others: by oneDNN, else by numpy (without bias)."""
    lib = library()
    if lib is None:
        assert bias is None
        return lambda: np.matmul(a, b, out=c)  # type: ignore[return-value]
    if bias is None and _rows_collide(a, c.shape[1]):
        return _in_strips(lib, pool, a, b, c)
    return MatmulPrimitive(lib, a, b, c, bias, threads=pool.threads, scratch=scratchpad_of(pool)).runner()


PAGE = 4096
"""Bytes from which addresses share a set of the level-1 cache again."""

STRIP = 1 << 20
"""Elements of the left operand that are copied at a time: 4 MiB, within the level-3 cache."""

COLUMNS = range(128, 384)
"""Columns of a result for which copies pay: with fewer the product is too short, with more oneDNN copies by itself."""

DEEPEST = 8192
"""Rows of the left operand up to which copies pay: beyond, strips leave the cache or become narrow."""


def _rows_collide(a: Array, columns: int) -> bool:
    """Whether oneDNN reads a transposed left operand down columns whose elements share a few sets of the cache.

    It then takes a quarter more time: 27 GFLOP/s in place of 34 for the weight gradient of 1024 outputs by 256 inputs. Its code
    for AVX-512 does not.
    """
    across, down = a.strides
    collide = across == a.itemsize and down % PAGE == 0 and a.shape[0] > 1
    return collide and LANES == 8 and columns in COLUMNS and a.shape[1] <= DEEPEST


def _in_strips(lib: OneDNN, pool: Pool, a: Array, b: Array, c: Array) -> Run:
    """c = a·b for ``a`` that is a transposed view, from copies of some rows at a time with another stride."""
    depth, scratch = a.shape[1], scratchpad_of(pool)
    rows = min(a.shape[0], 512, max(256, STRIP // depth // 16 * 16))  # a stride of less than a page
    held = _strips(pool, depth * rows)[: depth * rows].reshape(depth, rows)
    runs: list[Run] = []
    for first in range(0, a.shape[0], rows):
        part, result = a.T[:, first : first + rows], c[first : first + rows]
        strip = held[:, : part.shape[1]]
        runs.append(pool.bind(_copy, (part, strip), depth, 64))
        runs.append(MatmulPrimitive(lib, strip.T, b, result, None, threads=pool.threads, scratch=scratch).runner())
    return in_order(runs)


_STRIPS: weakref.WeakKeyDictionary[Pool, Array] = weakref.WeakKeyDictionary()


def _strips(pool: Pool, size: int) -> Array:
    """Scratch memory that all products of a pool share: they run one after another."""
    found = _STRIPS.get(pool)
    if found is None or found.size < size:
        found = _STRIPS[pool] = np.empty(max(size, STRIP), dtype=np.float32)
    return found


@jit
def _copy(source, target, start, stop):
    for r in range(start, stop):
        row, copy = source[r], target[r]
        for c in range(row.size):
            copy[c] = row[c]
