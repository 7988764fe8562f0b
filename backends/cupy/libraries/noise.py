"""Memory filled with noise, in which libraries are measured; zeros take less power and multiply faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

BITS = {
    ir.DataType.FLOAT16: (np.uint16, 0x83FF, 0x3800),
    ir.DataType.BFLOAT16: (np.uint16, 0x807F, 0x3F00),
    ir.DataType.FLOAT: (np.uint32, 0x807FFFFF, 0x3F000000),
    ir.DataType.DOUBLE: (np.uint64, 0x800FFFFFFFFFFFFF, 0x3FE << 52),
    ir.DataType.BOOL: (np.uint8, 1, 0),
}
"""Element type → (words, random bits, set bits) of numbers between ½ and 1 of either sign."""

CACHE = 64 << 20
"""Bytes of the largest L2 cache of today's GPUs, of an H200."""

MOST_SETS = 16


def sets_for(nbytes: int) -> int:
    """How many copies of operands of ``nbytes`` to use in turn, so that a call does not find them in the cache."""
    return max(1, min(MOST_SETS, -(-2 * CACHE // max(1, nbytes))))


def noise(device: Any, sizes: Sequence[tuple[int, ir.DataType]]) -> tuple[Any, list[int]]:
    """Memory for parts of (bytes, element type), filled with noise.

    Returns:
        The memory, and the address of each part.

    Raises:
        DeviceMemoryError: it does not fit.
    """
    starts = [0]
    for size, _ in sizes:
        starts.append(-(-(starts[-1] + int(size)) // 256) * 256)
    memory = device.zeros(starts[-1])
    words = np.random.default_rng(0).integers(0, 1 << 63, 1 << 16, dtype=np.uint64)
    for start, (size, dtype) in zip(starts, sizes, strict=False):
        kind, random, fixed = BITS[dtype]
        block = ((words.view(kind) & kind(random)) | kind(fixed)).view(np.uint8)[:size]
        part, filled = memory[start : start + size], len(block)
        device.copy(part[:filled], block)
        while filled < size:
            more = min(filled, size - filled)
            device.copy(part[filled : filled + more], part[:more])
            filled += more
    return memory, [int(memory.data.ptr) + start for start in starts[:-1]]
