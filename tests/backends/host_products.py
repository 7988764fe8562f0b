"""Evaluates cuBLASLt layouts, attributes and epilogues with numpy.

Follows the library's documentation (cublasLt.h, CUDA 13): matrices are column-major; D = epilogue(alpha·op(A)·op(B) +
beta·C + bias), with the bias along the rows of D; RELU_AUX writes a mask of one bit per element, GELU_AUX the operand of GELU;
DRELU and DGELU multiply the product by the slope there; BGRAD sums D, BGRADA op(A), BGRADB op(B), each over every dimension
but the rows (BGRADB: the columns) of D. GELU is the tanh form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphc.backends.cupy.libraries.gemm import MASK_BITS, Matrix, MatrixLayout, Product, call_of

MULTIPLES = {"RELU": MASK_BITS, "GELU": 8}


def bind_product(p: Product, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], None]:
    """A closure that evaluates the call on numpy arrays."""
    call = call_of(p)
    given = [*inputs, *[None] * (5 - len(inputs))]
    results = list(outputs)
    d = results.pop(0)
    aux = results.pop(0) if p.keeps_aux else given[4]
    sums = results.pop(0) if p.bias_gradient else None
    assert not results, "an output that nothing writes"
    name = call.epilogue
    kind = "RELU" if "RELU" in name else "GELU" if "GELU" in name else ""
    if aux is not None:
        ld = call.attributes["EPILOGUE_AUX_LD"]
        assert ld >= call.result.rows
        assert ld % MULTIPLES[kind] == 0
    for layout, transposed, rows in ((call.first, "TRANSA", p.n), (call.second, "TRANSB", p.k)):
        assert (layout.columns if call.attributes[transposed] else layout.rows) == rows

    def run(step: int) -> None:
        a = _matrices(given[1], call.first, p.b, step)
        b = _matrices(given[0], call.second, p.a, step)
        out = _matrices(d, call.result, p.d, step)
        a = (a.transpose(0, 2, 1) if call.attributes["TRANSA"] else a).astype(np.float64)
        b = (b.transpose(0, 2, 1) if call.attributes["TRANSB"] else b).astype(np.float64)
        x = p.alpha * (a @ b)
        if call.beta:
            assert p.c is not None
            x += call.beta * _matrices(given[2], call.addend, p.c, step).astype(np.float64)
        if name.endswith("BIAS"):
            x += given[3].reshape(-1).astype(np.float64)[None, :, None]
        if name.startswith(("DRELU", "DGELU")):
            x *= _slope(kind, call, aux)
        elif kind:
            if aux is not None:
                _write_aux(kind, call, aux, x)
            x = np.maximum(x, 0) if kind == "RELU" else gelu(x)
        out[...] = x.astype(d.dtype)
        if sums is not None:
            total = {"BGRADA": a.sum(2), "BGRADB": b.sum(1)}.get(name, x.sum(2))
            sums.reshape(-1)[...] = total[0].astype(sums.dtype)

    return lambda: [run(step) for step in range(p.rounds)] and None


def _matrices(array: Any, layout: MatrixLayout, m: Matrix, step: int) -> Any:
    """A column-major matrix as [batch, rows, columns]."""
    size = array.itemsize
    flat = array.reshape(-1)[m.offset + step * m.round_step :]
    last = (layout.batch - 1) * layout.stride + (layout.columns - 1) * layout.ld + layout.rows
    assert last <= flat.size, "the layout ends behind its array"
    assert layout.ld >= layout.rows
    strides = (layout.stride * size, size, layout.ld * size)
    return np.lib.stride_tricks.as_strided(flat, (layout.batch, layout.rows, layout.columns), strides)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: Any) -> Any:
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)


def _slope(kind: str, call: Any, aux: Any) -> Any:
    rows, columns, ld = call.result.rows, call.result.columns, call.attributes["EPILOGUE_AUX_LD"]
    if kind == "RELU":
        bits = np.unpackbits(aux.reshape(-1), bitorder="little").reshape(columns, ld)
        return bits[:, :rows].T.astype(np.float64)
    return gelu_slope(aux.reshape(columns, ld)[:, :rows].T.astype(np.float64))


def _write_aux(kind: str, call: Any, aux: Any, x: Any) -> None:
    rows, columns, ld = call.result.rows, call.result.columns, call.attributes["EPILOGUE_AUX_LD"]
    if kind == "RELU":
        bits = np.zeros((columns, ld), np.uint8)
        bits[:, :rows] = (x[0] > 0).T
        aux.reshape(-1)[...] = np.packbits(bits, bitorder="little")
    else:
        aux.reshape(columns, ld)[:, :rows] = x[0].T.astype(aux.dtype)
