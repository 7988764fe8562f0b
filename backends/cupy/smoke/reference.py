"""What numpy makes of the calls of the smoke test, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.libraries.gemm import Matrix, Product, mask_row

M, N, K = 64, 96, 128

Array = Any


def products(dtype: ir.DataType, result: ir.DataType) -> Iterator[Product]:
    """A product of M × K and K × N with every epilogue, and one that reads both operands transposed."""
    plain = Product(Matrix(M, K, K, 1), Matrix(K, N, N, 1), Matrix(M, N, N, 1), dtype, result)
    rows, mask = Matrix(M, N, N, 1), Matrix(M, N, mask_row(N), 1)
    yield plain
    yield replace(plain, a=Matrix(M, K, 1, M), b=Matrix(K, N, 1, K), alpha=0.5)
    yield replace(plain, c=rows, bias=True)
    yield replace(plain, bias_gradient="a", a=Matrix(M, K, 1, M))
    yield replace(plain, bias_gradient="b")
    if dtype != result:
        return
    for name, aux in (("relu", mask), ("gelu", rows)):
        yield replace(plain, bias=True, epilogue=name)
        yield replace(plain, bias=True, epilogue=name, aux=aux)
        yield replace(plain, epilogue=f"{name}_grad", aux=aux)
        yield replace(plain, epilogue=f"{name}_grad", aux=aux, bias_gradient="d")


def operands(p: Product) -> tuple[list[Array | None], list[tuple[Array, bool]]]:
    """Operands of ``p`` as its call takes them; and each result, with whether it must be exact."""
    rng = np.random.default_rng(0)

    def numbers(*shape: int, dtype: ir.DataType = p.result) -> Array:
        return rng.standard_normal(shape).astype(dtype.numpy())

    a, b = numbers(M, K, dtype=p.dtype), numbers(K, N, dtype=p.dtype)
    c = None if p.c is None else numbers(M, N)
    bias = numbers(N) if p.bias else None
    aux = None
    if p.epilogue.endswith("_grad"):
        aux = _bits(numbers(M, N) > 0, p) if p.epilogue == "relu_grad" else numbers(M, N)
    x = p.alpha * (a.astype(np.float64) @ b.astype(np.float64))
    x = x + (0 if c is None else c.astype(np.float64)) + (0 if bias is None else bias.astype(np.float64))
    made, kept = _epilogue(p, x, aux)
    results = [(made, False)]
    if kept is not None:
        results.append((kept, p.epilogue == "relu"))
    if p.bias_gradient:
        total = {"a": a.astype(np.float64).sum(1), "b": b.astype(np.float64).sum(0), "d": made.sum(0)}[p.bias_gradient]
        results.append((total, False))
    read = [np.ascontiguousarray(v.T) if m.column_step != 1 else v for v, m in ((a, p.a), (b, p.b))]
    return [*read, c, bias, aux], [(v if exact else v.astype(p.result.numpy()), exact) for v, exact in results]


def _epilogue(p: Product, x: Array, aux: Array | None) -> tuple[Array, Array | None]:
    """The result of the epilogue, and what it keeps for its gradient."""
    if p.epilogue == "relu":
        return np.maximum(x, 0), None if p.aux is None else _bits(x > 0, p)
    if p.epilogue == "gelu":
        return 0.5 * x * (1 + _inner(x)), None if p.aux is None else x
    if p.epilogue == "relu_grad":
        assert aux is not None
        return x * np.unpackbits(aux.reshape(M, -1), axis=1, bitorder="little")[:, :N], None
    if p.epilogue == "gelu_grad":
        assert aux is not None
        z = aux.astype(np.float64)
        t = _inner(z)
        return x * (0.5 * (1 + t) + 0.5 * z * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 0.134145 * z * z)), None
    return x, None


def _inner(x: Array) -> Array:
    return np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _bits(signs: Array, p: Product) -> Array:
    """A row of bits for each row, padded as the library wants it."""
    assert p.aux is not None
    return np.packbits(np.pad(signs, ((0, 0), (0, p.aux.row_step - N))), axis=1, bitorder="little")


def convolution(x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
    """Conv with a border of one pixel, and its gradients with respect to x and w."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    y, dx, dw = np.zeros(dy.shape), np.zeros(padded.shape), np.zeros(w.shape)
    rows, columns = dy.shape[2:]
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            seen = (..., slice(r, r + rows), slice(s, s + columns))
            y += np.einsum("ncij,oc->noij", padded[seen], w[:, :, r, s])
            dx[seen] += np.einsum("noij,oc->ncij", dy, w[:, :, r, s])
            dw[:, :, r, s] = np.einsum("noij,ncij->oc", dy, padded[seen])
    return y, dx[:, :, 1:-1, 1:-1], dw


def attention(q: Array, k: Array, v: Array, dy: Array, scale: float) -> tuple[Array, Array, tuple[Array, Array, Array]]:
    """Causal attention, the logarithm of each row's sum, and the gradients of q, k and v."""
    length = q.shape[-2]
    scores = np.where(np.tri(length, dtype=bool), scale * q @ k.swapaxes(-1, -2), -np.inf)
    most = scores.max(-1, keepdims=True)
    saved = most + np.log(np.exp(scores - most).sum(-1, keepdims=True))
    p = np.exp(scores - saved)
    y = p @ v
    dp = dy @ v.swapaxes(-1, -2)
    ds = scale * p * (dp - (dy * y).sum(-1, keepdims=True))
    return y, saved, (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy)
