"""The gradient of a Gather of rows: an embedding's."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.arrays import given
from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.kernels.written_rows import WrittenRows
from graphc.device import Run
from graphc.ir.facts import static_dims

LEAST = 1 << 14
"""Smallest gradient, in elements, that is worth a step of its own."""


def _is_large(node: ir.Node) -> bool:
    shapes = [static_dims(v) for v in (*node.inputs[:2], *node.outputs) if v is not None]
    return all(shape is not None and 0 not in shape for shape in shapes) and math.prod(shapes[-1] or ()) >= LEAST


@kernel("onnxruntime", "graphc::GatherGrad", when=_is_large)
def gather_grad(k: Binding) -> Run:
    """dx = rows of dy added at their indices, in the order of the indices"""
    (dy, indices, _), (dx,) = given(k.inputs, 3), given(k.outputs, 1)
    rows = k.rows if isinstance(k.rows, WrittenRows) else WrittenRows.of(dx, k.pool.threads, alone=False)
    flat = dx.reshape(dx.shape[0], -1)
    arguments = (dy.reshape(-1, flat.shape[1]), indices.reshape(-1), flat, flat.view(np.int32))
    return k.pool.bind(_gather_grad, (*arguments, rows.touched, rows.alone, rows.nonfinite), rows.nonfinite.size)


@jit
def _gather_grad(dy, indices, dx, bits, touched, alone, nonfinite, start, stop):
    rows, width = dx.shape
    parts, exponent = nonfinite.size, np.int32(0x7F800000)
    for part in range(start, stop):
        first, last = rows * part // parts, rows * (part + 1) // parts
        if alone[0] == 0:
            dx[first:last] = np.float32(0.0)
            touched[first:last] = 0
        for r in range(first, last):
            if touched[r] != 0:
                dx[r] = np.float32(0.0)
                touched[r] = 0
        for i in range(indices.size):
            r = indices[i] + rows if indices[i] < 0 else indices[i]
            if first <= r < last:  # the Gather refused an index outside before
                touched[r] = 1
                row, slope = dx[r], dy[i]
                for c in range(width):
                    row[c] += slope[c]
        count = 0
        for r in range(first, last):
            if touched[r] != 0:
                row_bits = bits[r]
                for c in range(width):
                    count += (row_bits[c] & exponent) == exponent
        nonfinite[part] = count
