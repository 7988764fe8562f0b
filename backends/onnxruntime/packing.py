"""Packs integers of two and four bits: onnxruntime stores several in a byte, numpy (``ml_dtypes``) one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from graphc.device import Array

_BITS: dict[np.dtype[Any], int] = {
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
    np.dtype(ml_dtypes.int2): 2,
    np.dtype(ml_dtypes.uint2): 2,
}


def is_packed(dtype: np.dtype[Any]) -> bool:
    """Whether onnxruntime keeps several elements of the type in a byte."""
    return dtype in _BITS


def packed_like(array: Array) -> Array:
    """Bytes that hold the elements of ``array``, the first one in the lowest bits."""
    return np.zeros(max(1, -(-array.size * _BITS[array.dtype] // 8)), dtype=np.uint8)


def pack(array: Array, held: Array) -> None:
    bits = _BITS[array.dtype]
    codes = array.reshape(-1).astype(np.int8).view(np.uint8) & ((1 << bits) - 1)
    held[:] = 0
    for k in range(8 // bits):
        part = codes[k :: 8 // bits]
        held[: len(part)] |= part << (k * bits)


def unpack(held: Array, array: Array) -> None:
    bits = _BITS[array.dtype]
    codes = np.empty(array.size, dtype=np.uint8)
    for k in range(8 // bits):
        part = codes[k :: 8 // bits]
        part[:] = (held[: len(part)] >> (k * bits)) & ((1 << bits) - 1)
    signed = np.dtype(array.dtype) in (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.int2))
    values = codes.astype(np.int8)
    if signed:
        values[codes >= 1 << (bits - 1)] -= 1 << bits
    np.copyto(array, values.astype(array.dtype).reshape(array.shape))
