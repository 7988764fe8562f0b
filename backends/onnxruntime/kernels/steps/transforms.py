"""Kernels between gradients and updates, over the flat buffers of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import exact, jit
from graphc.device import ALIGNMENT, Array, Run, in_order
from graphc.ir.declare import OPS
from graphc.ir.ops.transforms import DEPENDENT

BLOCK = 16384
"""Elements summed in one block. Blocks do not depend on the number of threads, so neither does the sum: replicas on machines
of different size must clip by the same factor.
"""


@kernel("onnxruntime", "graphc::SumOfSquares", dtypes=(ir.DataType.FLOAT, ir.DataType.DOUBLE))
def sum_of_squares(k: Binding) -> Run:
    (total,) = given(k.outputs, 1)
    work = [(flat, np.zeros(-(-flat.size // BLOCK))) for flat in contiguous(given(k.inputs, len(k.inputs)))]
    sweeps = [k.pool.bind(_sums_of_squares, (flat, sums), sums.size) for flat, sums in work]

    of_arrays = np.zeros(len(work))
    sweeps += [k.pool.bind(_add_blocks, (sums, of_arrays[i : i + 1]), 1) for i, (_, sums) in enumerate(work)]
    return in_order([*sweeps, k.pool.bind(_add_blocks, (of_arrays, total.reshape(1)), 1)])


@exact
def _add_blocks(sums, total, start, stop):
    found = 0.0
    for block in range(sums.size):
        found += sums[block]
    total[0] = found


@jit
def _sums_of_squares(flat, sums, start, stop):
    for block in range(start, stop):
        part = flat[block * BLOCK : min(flat.size, (block + 1) * BLOCK)]
        total = 0.0
        for i in range(part.size):
            x = np.float64(part[i])
            total += x * x
        sums[block] = total


@kernel("onnxruntime", "graphc::RoundTo")
def narrow(k: Binding) -> Run:
    loop = _to_float16 if k.attributes["to"] == ir.DataType.FLOAT16 else _to_bfloat16
    return _convert(k, loop, np.uint32, np.uint16)


@kernel("onnxruntime", "graphc::Widen", dtypes=(ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
def widen(k: Binding) -> Run:
    (source, *_) = given(k.inputs, 1)
    loop, write = widening(source.dtype)
    return _convert(k, loop, np.uint16, write)


def widening(dtype: np.dtype[Any]) -> tuple[Callable[..., None], type[np.generic]]:
    """The loop that converts ``dtype`` (seen as uint16) to float32, and the view type of the float32 array."""
    return (_from_float16, np.float32) if dtype == np.float16 else (_from_bfloat16, np.uint32)


@kernel("onnxruntime", "graphc::Narrow", dtypes=(ir.DataType.FLOAT16, ir.DataType.BFLOAT16), inplace=OPS["Narrow"].next_value)
def narrow_copy(k: Binding) -> Run:
    (_, wide), (copy,), pool = given(k.inputs, 2), given(k.outputs, 1), k.pool
    loop = _to_float16 if copy.dtype == np.float16 else _to_bfloat16
    source, target = wide.reshape(-1).view(np.uint32), copy.reshape(-1).view(np.uint16)
    return pool.bind(loop, (source, target), source.size, BLOCK)


def _convert(k: Binding, loop: Callable[..., None], read: type[np.generic], write: type[np.generic]) -> Run:
    """One sweep a flat buffer where source and target have the same layout, else one a tensor."""
    count = len(k.inputs)
    sources, targets = given(k.inputs, count), given(k.outputs, count)
    if [a.size for a in contiguous(sources)] == [a.size for a in contiguous(targets)]:
        sources, targets = contiguous(sources), contiguous(targets)
    pairs = [(a.reshape(-1).view(read), b.reshape(-1).view(write)) for a, b in zip(sources, targets, strict=True)]
    return in_order([k.pool.bind(loop, (source, target), source.size, BLOCK) for source, target in pairs])


@exact
def _to_bfloat16(source, target, start, stop):
    source, target = source[start:stop], target[start:stop]
    for i in range(source.size):
        x = source[i]
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (x >> np.uint32(16)) | np.uint32(0x40)
        target[i] = quiet if (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded


@exact
def _from_bfloat16(source, target, start, stop):
    source, target = source[start:stop], target[start:stop]
    for i in range(source.size):
        target[i] = np.uint32(source[i]) << np.uint32(16)


@exact
def _to_float16(source, target, start, stop):
    """Convert with integer operations, which always vectorise; numpy's own conversion takes ten times as long."""
    source, target = source[start:stop], target[start:stop]
    for i in range(source.size):
        x = source[i]
        size = x & np.uint32(0x7FFFFFFF)
        odd = (size >> np.uint32(13)) & np.uint32(1)
        half = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)  # exponent 127 becomes 15
        shift = np.uint32(126) - (size >> np.uint32(23))  # below 2^-14 the leading one is written out
        shift = np.uint32(25) if shift > np.uint32(25) else shift
        digits = (size & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
        small = digits >> shift
        rest, tie = digits - (small << shift), np.uint32(1) << (shift - np.uint32(1))
        small += np.uint32(rest > tie or (rest == tie and (small & np.uint32(1)) == np.uint32(1)))
        half = small if size < np.uint32(0x38800000) else half
        half = np.uint32(0x7C00) if size >= np.uint32(0x47800000) else half
        half = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else half
        target[i] = ((x >> np.uint32(16)) & np.uint32(0x8000)) | half


@exact
def _from_float16(source, target, start, stop):
    """Convert sign and magnitude separately: below 2^-14 a float16's magnitude is an integer times 2^-24."""
    source, target = source[start:stop], target[start:stop]
    for i in range(source.size):
        x = np.int32(source[i])
        exponent, digits = (x >> np.int32(10)) & np.int32(31), x & np.int32(1023)
        power = _POWERS[exponent]  # five bits, 32 powers
        number = np.float32(digits + np.int32(1024) if exponent > 0 else digits) * power
        number = np.float32(np.nan) if exponent == 31 and digits > 0 else number
        target[i] = -number if x >= np.int32(0x8000) else number


_POWERS = np.ldexp(np.float32(1), np.maximum(np.arange(32), 1) - 25).astype(np.float32)
_POWERS[31] = np.inf
"""The value of the last digit of a float16, by exponent."""


@kernel("onnxruntime", "graphc::Orthogonalize")
def orthogonalize(k: Binding) -> Run:
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    columns = np.zeros(x.shape[::-1])
    loop = k.pool.bind(_orthogonalize, (columns, DEPENDENT), 1)

    def run() -> None:
        np.copyto(columns, x.T)
        loop()
        np.copyto(y, columns.T, casting="unsafe")

    return run


@exact
def _orthogonalize(rows, dependent, start, stop):
    for k in range(rows.shape[0]):
        own = rows[k]
        before = _dot(own, own)
        for j in range(k):
            other = rows[j]
            share = _dot(other, own)
            for i in range(own.size):
                own[i] -= share * other[i]
        square = _dot(own, own)
        if square <= dependent * before:
            own[:] = 0.0
        else:  # NaN counts as large: it must be seen
            norm = np.sqrt(square)
            for i in range(own.size):
                own[i] /= norm


@exact
def _dot(a, b):
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel("onnxruntime", "graphc::KeepLargest")
def keep_largest(k: Binding) -> Run:
    (x,), (kept, rest) = given(k.inputs, 1), given(k.outputs, 2)
    bits, source, targets = x.reshape(-1).view(np.uint32), x.reshape(-1), (kept.reshape(-1), rest.reshape(-1))
    count, bins = min(int(k.attributes["count"]), x.size), np.zeros(1 << 16, dtype=np.int64)
    return k.pool.bind(_keep_largest, (bits, source, *targets, count, bins), 1)


@exact
def _keep_largest(bits, source, kept, rest, count, bins, start, stop):
    """Find the threshold 16 bits at a time: without the sign, floats and their bit patterns have the same order.

    There is a bin for every pattern of 16 bits, so that NaN and infinity have theirs.
    """
    high, left = np.uint32(0), count
    bins[:] = 0
    for i in range(bits.size):
        bins[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(16)] += 1
    for k in range(bins.size - 1, -1, -1):
        if bins[k] >= left:
            high = np.uint32(k)
            break
        left -= bins[k]
    bins[:] = 0
    for i in range(bits.size):
        size = bits[i] & np.uint32(0x7FFFFFFF)
        bins[size & np.uint32(0xFFFF)] += size >> np.uint32(16) == high
    threshold = high << np.uint32(16)
    for k in range(bins.size - 1, -1, -1):
        if bins[k] >= left:
            threshold |= np.uint32(k)
            break
        left -= bins[k]
    for i in range(bits.size):
        size = bits[i] & np.uint32(0x7FFFFFFF)
        keep = size > threshold or (size == threshold and left > 0)
        left -= size == threshold
        kept[i] = source[i] if keep else np.float32(0)
        rest[i] = np.float32(0) if keep else source[i]


@kernel("onnxruntime", "graphc::Assign", inplace=OPS["Assign"].next_value)
def assign(k: Binding) -> Run:
    return _replace(k)


@kernel("onnxruntime", "graphc::Residual", inplace=OPS["Residual"].next_value)
def residual(k: Binding) -> Run:
    return _replace(k)


def _replace(k: Binding) -> Run:
    state, value = given(k.inputs, 2)
    (new,) = given(k.outputs, 1)
    skip = optional(k.inputs, 2)

    def run() -> None:
        np.copyto(new, state if skip is not None and skip else value)

    return run


def contiguous(arrays: Sequence[Array]) -> list[Array]:
    """Merge neighbours in one flat buffer into single vectors, with the padding between them, which is zero.

    Buffers come in the order of first occurrence, and arrays of one buffer by address: the same on all ranks.
    """
    found: list[Array] = []
    vectors = [array.reshape(-1) for array in arrays]
    first = {id(v.base): k for k, v in reversed(list(enumerate(vectors))) if v.base is not None}
    places = [(first.get(id(v.base), k), _address(v)) for k, v in enumerate(vectors)]
    for _, flat in sorted(zip(places, vectors, strict=True), key=lambda pair: pair[0]):
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
