"""Kernels between gradients and updates, over the flat buffers that gradients lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import numpy as np
import onnx_ir as ir

from graphc.backend import Array, Binding, Run, kernel
from graphc.backends.onnxruntime.kernels.arrays import given
from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.steps import ALIGNMENT

BLOCK = 16384
"""Elements that are summed at once. Blocks do not depend on the number of threads, so neither does the sum: replicas on
machines of different size must clip by the same factor."""


@kernel("onnxruntime", "graphc::SumOfSquares", dtypes=(ir.DataType.FLOAT, ir.DataType.DOUBLE))
def sum_of_squares(k: Binding) -> Run:
    (total,) = given(k.outputs, 1)
    pool = k.pool
    work = [(flat, np.zeros(-(-flat.size // BLOCK))) for flat in contiguous(given(k.inputs, len(k.inputs)))]

    def run() -> None:
        for flat, sums in work:
            pool.run(_sums_of_squares, (flat, sums), sums.size)
        total[...] = sum(float(sums.sum()) for _, sums in work)

    return run


@jit
@no_type_check
def _sums_of_squares(flat, sums, start, stop):
    for block in range(start, stop):
        part = flat[block * BLOCK : min(flat.size, (block + 1) * BLOCK)]
        total = 0.0
        for i in range(part.size):
            x = np.float64(part[i])
            total += x * x
        sums[block] = total


def contiguous(arrays: Sequence[Array]) -> list[Array]:
    """The arrays as few vectors: neighbours in one flat buffer become one, with the padding between them, which is zero."""
    found: list[Array] = []
    for array in arrays:
        flat = array.reshape(-1)
        last = found[-1] if found else None
        if last is not None and last.base is not None and last.base is flat.base and last.dtype == flat.dtype:
            gap = _address(flat) - _address(last) - last.nbytes
            if 0 <= gap < ALIGNMENT:
                count = last.size + gap // last.itemsize + flat.size
                found[-1] = np.ndarray((count,), last.dtype, buffer=last.base, offset=_address(last) - _address(last.base))
                continue
        found.append(flat)
    return found


def _address(array: Array) -> int:
    return int(array.ctypes.data)
