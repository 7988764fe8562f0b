"""Dropout masks drawn by Philox, bit for bit those of the op's decomposition."""

from __future__ import annotations

import zlib

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.arrays import given
from graphc.backends.onnxruntime.kernels.jit import exact, inlined
from graphc.device import Array, Run
from graphc.ir.ops.random import dropout_scale, dropout_threshold

GRAIN = 1024
"""Fewest blocks of four elements that are worth handing to another thread."""


@kernel("onnxruntime", "graphc::DropoutMask", when=lambda node: node.outputs[0].dtype == ir.DataType.FLOAT)
def dropout_mask(k: Binding) -> Run:
    """Draw the mask; every block of four elements has its own counter, so threads are independent."""
    (_, seed, step, sample_offset), (mask,) = given(k.inputs, 4), given(k.outputs, 1)
    ratio, tag_word = float(k.attributes["ratio"]), zlib.crc32(str(k.attributes["tag"]).encode())
    per_sample = int(np.prod(mask.shape[1:], dtype=np.int64))
    words: Array = np.zeros(6, dtype=np.uint64)  # seed and tag (the key), step low and high, first element, threshold
    words[1], words[5] = tag_word, dropout_threshold(ratio)
    arguments = (words, np.float32(dropout_scale(ratio)), mask.reshape(-1))
    sweep = k.pool.bind(_dropout_mask, arguments, mask.size // 4 + 2, GRAIN)

    def run() -> None:
        bits, moment = int(seed.item()) & (1 << 64) - 1, int(step.item()) & (1 << 64) - 1
        words[0] = (bits ^ bits >> 32) & 0xFFFFFFFF
        words[2], words[3] = moment & 0xFFFFFFFF, moment >> 32
        words[4] = int(sample_offset.item()) * per_sample & (1 << 64) - 1
        sweep()

    return run


@inlined
def _philox(index, step_low, step_high, key, tag):
    """The four words of a block of elements: Philox4x32-10 in 64-bit lanes, which compiles to vector instructions."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = index & low, index >> half, step_low, step_high
    k0, k1 = key, tag
    for _ in range(10):
        one, two = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (two >> half) ^ c1 ^ k0, two & low
        c2, c3 = (one >> half) ^ c3 ^ k1, one & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@exact
def _dropout_mask(words, kept, mask, start, stop):
    # seed, step and offset are data, but skip lies in 0 … 3, and blocks are whole or compared with the size of the mask
    key, tag, low, high, begin, threshold = words[0], words[1], words[2], words[3], words[4], words[5]
    first, skip, zero = begin // np.uint64(4), np.int64(begin % np.uint64(4)), np.float32(0.0)
    whole = max(start, 1 if skip > 0 else 0)
    rest = max(whole, min(stop, (mask.size + skip) // 4))
    if rest > whole:
        inside, base = mask[4 * whole - skip : 4 * rest - skip], first + np.uint64(whole)
        for block in range(inside.size // 4):
            c0, c1, c2, c3 = _philox(base + np.uint64(block), low, high, key, tag)
            inside[4 * block] = kept if c0 >= threshold else zero
            inside[4 * block + 1] = kept if c1 >= threshold else zero
            inside[4 * block + 2] = kept if c2 >= threshold else zero
            inside[4 * block + 3] = kept if c3 >= threshold else zero
    for block in range(start, stop):
        if block < whole or block >= rest:
            drawn = _philox(first + np.uint64(block), low, high, key, tag)
            for k in range(4):
                at = 4 * block - skip + k
                if 0 <= at < mask.size:
                    mask[at] = kept if drawn[k] >= threshold else zero
