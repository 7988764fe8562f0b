"""Matrix products by oneDNN, which takes 3 to 15 % less time over them than onnxruntime (float32, AVX-512, one thread).

GFLOP/s for 512 × 256 × 1024 and its gradients: oneDNN 112, 105, 112; onnxruntime 108, 99, 96. Where operands lie badly for
oneDNN on AVX2, :mod:`.panels` computes the product, and on processors with AMX :mod:`.tiles` a large one. Products of float64
are in :mod:`.wide_products`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.kernels.onednn.primitives import MatmulPrimitive
from graphc.backends.onnxruntime.kernels.products.panels import product_in_panels
from graphc.backends.onnxruntime.kernels.products.tiles import is_better_on_tiles, product_on_tiles
from graphc.backends.onnxruntime.kernels.products.wide_products import product
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.device import Array, Run, in_order
from graphc.ir.facts import required, static_dims

WORTH = 1 << 14
"""Smallest product, in multiplications, for which a native step costs less than it saves."""


TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

NARROWEST = 32
"""Smallest side of matrices that oneDNN multiplies many at a time; narrower ones are multiplied in :mod:`.wide_products`."""
FEWEST, LEAST = 4, 512
"""Smallest side of a matrix, and multiplications of one product, of which less is a sum in a kernel of other arithmetic."""


WORTH_PARTING = 1 << 17
"""Multiplications with narrow matrices from which a step of their own pays: it parts the arithmetic around it."""


def _are_many(count: int, *sides: int) -> bool:
    """Whether a kernel multiplies so many matrices with these rows, sums and columns."""
    total = count * math.prod(sides)
    return min(sides) >= NARROWEST or (min(sides) >= FEWEST and math.prod(sides) > LEAST and total >= WORTH_PARTING)


def _by_onednn(dtype: Any, *sides: int) -> bool:
    return bool(dtype == np.float32 and min(sides) >= NARROWEST)


def _shapes(node: ir.Node) -> list[tuple[int, ...]] | None:
    """The shapes of two operands and the result, when all are known."""
    found = [static_dims(v) if v is not None else None for v in (*node.inputs[:2], node.outputs[0])]
    known = [shape for shape in found if shape is not None]
    return known if len(known) == 3 else None


def _is_float(node: ir.Node) -> bool:
    """Whether the operands are of float32, not float64."""
    return required(node.inputs[0]).dtype == ir.DataType.FLOAT


def _is_native(node: ir.Node) -> bool:
    return library() is not None or not _is_float(node)


def _large_gemm(node: ir.Node) -> bool:
    shapes, attributes = _shapes(node), node.attributes
    if shapes is None or not _is_native(node) or attributes.get_float("alpha", 1.0) != 1:
        return False
    (a, _, (_, columns)), bias = shapes, node.inputs[2] if len(node.inputs) > 2 else None
    if math.prod(a) * columns < WORTH:
        return False
    return bias is None or (attributes.get_float("beta", 1.0) == 1 and static_dims(bias) in ((columns,), (1, columns)))


@kernel("onnxruntime", "Gemm", dtypes=TYPES, when=_large_gemm)
def gemm(k: Binding) -> Run:
    """c = a'·b' + bias"""
    (a, b), (c,) = given(k.inputs, 2), given(k.outputs, 1)
    a, b, bias = a.T if k.attributes.get("transA") else a, b.T if k.attributes.get("transB") else b, optional(k.inputs, 2)
    if c.dtype == np.float64:
        return product(k.pool, a[None], b[None], c[None], bias)
    return product_of(k.pool, a, b, c, bias)


def _large_matmul(node: ir.Node) -> bool:
    shapes = _shapes(node)
    if shapes is None or not _is_native(node) or len(shapes[0]) < 2 or len(shapes[1]) < 2:
        return False
    a, b, c = shapes
    if a[-1] * math.prod(c) < WORTH:
        return False
    return len(b) == 2 or (a[:-2] in ((), b[:-2]) and _are_many(math.prod(c[:-2]), *a[-2:], c[-1]))


@kernel("onnxruntime", "MatMul", dtypes=TYPES, when=_large_matmul)
def matmul(k: Binding) -> Run:
    """c = a·b for a matrix b and a stack of rows a, for as many matrices each, or for one matrix a and many b"""
    (a, b), (c,) = given(k.inputs, 2), given(k.outputs, 1)
    if c.dtype == np.float64 and b.ndim == 2:
        return product(k.pool, a.reshape(1, -1, b.shape[0]), b[None], c.reshape(1, -1, b.shape[1]))
    if b.ndim > 2 and not _by_onednn(c.dtype, *a.shape[-2:], b.shape[-1]):
        a, b, c = (x.reshape(-1, *x.shape[-2:]) for x in (a, b, c))
        return product(k.pool, np.broadcast_to(a, (len(c), *a.shape[1:])), b, c)
    if b.ndim > 2:
        return _products(k.pool, *(x.reshape(-1, *x.shape[-2:]) for x in (a, b, c)))
    return product_of(k.pool, a.reshape(-1, b.shape[0]), b, c.reshape(-1, b.shape[1]))


def _products(pool: Pool, a: Array, b: Array, c: Array) -> Run:
    """c = a·b for as many matrices each behind other axes, all of them possibly apart, those of a and b transposed.

    One matrix a may multiply all of b.
    """
    lib = library()
    assert lib is not None

    def by_onednn() -> Run:
        return MatmulPrimitive(lib, a, b, c, None, pool=pool).runner()

    if c.ndim == 3 and len(a) == len(c) and is_better_on_tiles(pool, c.shape, a.shape[2]):
        return product_on_tiles(pool, a, b, c, None, by_onednn)
    return by_onednn()


def _large_permuted(node: ir.Node) -> bool:
    shapes, attributes = _shapes(node), node.attributes
    if shapes is None or not _is_native(node):
        return False
    a, b, y = shapes
    rows, depth = (a[axis] for axis in attributes.get_ints("permA", ())[-2:])
    columns = b[attributes.get_ints("permB", ())[-1]]
    in_rows = attributes.get_ints("permY", ())[-1] == len(y) - 1
    wide = _is_float(node) and min(rows, depth, columns) >= NARROWEST
    count = math.prod(y) // (rows * columns)
    return math.prod(y) * depth >= WORTH and _are_many(count, rows, depth, columns) and (in_rows or wide)


@kernel("onnxruntime", "graphc::PermutedMatMul", dtypes=TYPES, when=_large_permuted)
def permuted_matmul(k: Binding) -> Run:
    """y' = a'·b' for as many matrices each, where ' permutes the axes"""
    (a, b), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    a, b = a.transpose(k.attributes["permA"]), b.transpose(k.attributes["permB"])
    y = y.transpose(np.argsort(k.attributes["permY"]))
    stacks = _stacks(a, b, y)
    if not _by_onednn(y.dtype, *a.shape[-2:], b.shape[-1]):
        places = np.ndindex(stacks[0].shape[:-3])
        return in_order([product(k.pool, *(x[place] for x in stacks)) for place in places])
    if stacks[0].ndim == 3 or not is_better_on_tiles(k.pool, stacks[2].shape[-3:], a.shape[-1]):
        return _products(k.pool, *stacks)
    return in_order([_products(k.pool, *(x[place] for x in stacks)) for place in np.ndindex(stacks[0].shape[:-3])])


def _stacks(*arrays: Array) -> tuple[Array, ...]:
    """Views of arrays of as many matrices each, with as few axes in front of these as strides allow, and one at least."""
    last = arrays[-1]
    outer = sorted((axis for axis in range(last.ndim - 2) if last.shape[axis] > 1), key=lambda axis: -last.strides[axis])
    single = [axis for axis in range(last.ndim - 2) if last.shape[axis] == 1]
    views = [
        x.transpose(*single, *outer, x.ndim - 2, x.ndim - 1).reshape(1, *(x.shape[k] for k in outer), *x.shape[-2:])
        for x in arrays
    ]
    at = 0
    while at < views[0].ndim - 3:
        inner = views[0].shape[at + 1]
        if views[0].shape[at] == 1 or all(x.strides[at] == inner * x.strides[at + 1] for x in views):
            views = [x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]) for x in views]
        else:
            at += 1
    return tuple(views)


def product_of(pool: Pool, a: Array, b: Array, c: Array, bias: Array | None = None) -> Run:
    """c = a·b + bias for matrices, a and b possibly views of others with rows apart or transposed.

    oneDNN computes it, or :mod:`.panels` or :mod:`.tiles` where they are faster.
    """
    if is_better_on_tiles(pool, (1, *c.shape), a.shape[1]):
        return product_on_tiles(pool, a, b, c, bias, lambda: product_without_tiles(pool, a, b, c, bias))
    return product_without_tiles(pool, a, b, c, bias)


def product_without_tiles(pool: Pool, a: Array, b: Array, c: Array, bias: Array | None) -> Run:
    """c = a·b + bias as :func:`product_of`, by oneDNN or in panels."""
    lib = library()
    if lib is None or (_is_better_in_panels(a, b) and not pool.bf16_products):
        return product_in_panels(pool, a, b, c, bias)
    return MatmulPrimitive(lib, a, b, c, bias, pool=pool).runner()


NARROW, SHALLOW = 64, 128
"""Smallest sides of a result and length of its sums from which copies of both operands are worth their time."""


def _is_better_in_panels(a: Array, b: Array) -> bool:
    """Whether oneDNN, which reads operands in place, goes down their columns.

    Where both operands are contiguous along the sums, as in a linear layer, oneDNN reaches 97 of 97 GFLOP/s on an AMD core, if
    columns of b do not lie multiples of a page apart, which share a few sets of the cache. In other layouts it reaches 84 to
    93, and less where rows of an operand share sets: 41 for the weight gradient of 1024 outputs by 256 inputs and 1024 rows.
    oneDNN's code for AVX-512 copies operands itself.
    """
    if LANES != 8 or min(a.shape[0], b.shape[1]) < NARROW or a.shape[1] < SHALLOW:
        return False
    return _is_transposed(a) or not _is_transposed(b) or max(b.strides) % 4096 == 0


def _is_transposed(x: Array) -> bool:
    return x.strides[0] == x.itemsize != x.strides[1]
