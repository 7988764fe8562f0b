"""The test for NaN and infinity, without Python between its sweeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import exact
from graphc.backends.onnxruntime.kernels.common.written_rows import WrittenRows
from graphc.device import Array, Run, in_order

GRAIN = 16384
"""Smallest range, in elements, that is worth handing to another thread."""

_INFINITIES = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float64": 0x7FF0000000000000}


def is_tested(array: Array) -> bool:
    """Whether :func:`bind_search` knows the element type."""
    return array.dtype.name in _INFINITIES


def bind_search(array: Array, records: Sequence[WrittenRows], pool: Pool, found: Array) -> list[Run]:
    """Sweeps that set ``found``, int64[1], to 1 where a 1-D array holds a NaN or an infinity.

    Args:
        records: of parts of the array, in order: of them, rows that are not zero are known to be finite or not.
    """
    bits = array.view(f"i{array.itemsize}")
    infinity = np.array([_INFINITIES[array.dtype.name]], bits.dtype)
    start, runs = array.ctypes.data, []
    edges = [(edge - start) // array.itemsize for record in records for edge in record.range]
    for a, b in zip([0, *edges[1::2]], [*edges[::2], bits.size], strict=True):
        if a < b:
            runs.append(pool.bind(_search, (bits[a:b], infinity, found), b - a, GRAIN))
    for record, a, b in zip(records, edges[::2], edges[1::2], strict=True):
        runs.append(pool.bind(_search_rows, (bits[a:b], infinity, record.alone, record.nonfinite, found), b - a, GRAIN))
    return runs


@exact
def _search(bits, infinity, found, start, stop):
    exponent, bits, count = infinity[0], bits[start:stop], 0
    for i in range(bits.size):
        count += (bits[i] & exponent) == exponent
    if count:
        found[0] = 1


@exact
def _search_rows(bits, infinity, alone, nonfinite, found, start, stop):
    if alone[0]:
        if start == 0:
            for k in range(nonfinite.size):
                if nonfinite[k]:
                    found[0] = 1
    else:
        _search(bits, infinity, found, start, stop)


@kernel("onnxruntime", "graphc::AnyNonFinite", dtypes=(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
def any_non_finite(k: Binding) -> Run:
    (skip,) = given(k.outputs, 1)
    found = np.zeros(1, dtype=np.int64)
    runs = [run for array in given(k.inputs, len(k.inputs)) for run in bind_search(array.reshape(-1), (), k.pool, found)]
    return in_order([*runs, k.pool.bind(_note, (found, skip.reshape(1).view(np.uint8)), 1)])


@exact
def _note(found, skip, start, stop):
    skip[0], found[0] = found[0], 0
