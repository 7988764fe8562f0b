"""Dropout masks and uniform numbers drawn by Philox, bit for bit those of the ops' decompositions."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import exact, inlined, specialized
from graphc.device import Array, Run, in_order
from graphc.ir.ops.random import dropout_scale, dropout_threshold

GRAIN = 1024
"""Fewest blocks of four elements that are worth handing to another thread."""

MASK, UNIFORM = range(2)


@kernel("onnxruntime", "graphc::DropoutMask", when=lambda node: node.outputs[0].dtype == ir.DataType.FLOAT)
def dropout_mask(k: Binding) -> Run:
    """Zero below the threshold of the ratio, else the factor on kept elements."""
    ratio = float(k.attributes["ratio"])
    return _drawing(k, MASK, dropout_threshold(ratio), dropout_scale(ratio))


@kernel("onnxruntime", "graphc::Uniform")
def uniform(k: Binding) -> Run:
    """The upper 24 bits of a word, of 2²⁴."""
    return _drawing(k, UNIFORM, 0, 2.0**-24)


def _drawing(k: Binding, kind: int, threshold: int, factor: float) -> Run:
    """Draws; every block of four elements has its own counter, so threads are independent."""
    (_, seed, step, sample_offset), (drawn,) = given(k.inputs, 4), given(k.outputs, 1)
    per_sample = int(np.prod(drawn.shape[1:], dtype=np.int64))
    words: Array = np.zeros(6, dtype=np.uint64)  # seed and tag (the key), step low and high, first element, threshold
    words[1], words[5] = zlib.crc32(str(k.attributes["tag"]).encode()), threshold
    sweep = k.pool.bind(_draw(kind), (words, np.float32(factor), drawn.reshape(-1)), drawn.size // 4 + 2, GRAIN)

    moment = [value.reshape(1) for value in (seed, step, sample_offset)]
    return in_order([k.pool.bind(_write_words, (*moment, per_sample, words), 1), sweep])


@exact
def _write_words(seed, step, sample_offset, per_sample, words, start, stop):
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    bits, moment = np.uint64(seed[0]), np.uint64(step[0])
    words[0] = (bits ^ (bits >> half)) & low
    words[2], words[3] = moment & low, moment >> half
    words[4] = np.uint64(sample_offset[0]) * np.uint64(per_sample)


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


@inlined
def _number(kind, word, threshold, factor):
    if kind == UNIFORM:
        return np.float32(np.int32(word >> np.uint64(8))) * factor
    return factor if word >= threshold else np.float32(0.0)


@specialized
def _draw(kind: int) -> Callable[..., None]:
    """Make the loop for one of the ops."""

    @exact
    def draw(words, factor, drawn, start, stop):
        # seed, step and offset are data, but skip lies in 0 … 3, and blocks are whole or compared with the size of the result
        key, tag, low, high, begin, threshold = words[0], words[1], words[2], words[3], words[4], words[5]
        first, skip = begin // np.uint64(4), np.int64(begin % np.uint64(4))
        whole = max(start, 1 if skip > 0 else 0)
        rest = max(whole, min(stop, (drawn.size + skip) // 4))
        if rest > whole:
            inside, base = drawn[4 * whole - skip : 4 * rest - skip], first + np.uint64(whole)
            for block in range(inside.size // 4):
                c0, c1, c2, c3 = _philox(base + np.uint64(block), low, high, key, tag)
                inside[4 * block] = _number(kind, c0, threshold, factor)
                inside[4 * block + 1] = _number(kind, c1, threshold, factor)
                inside[4 * block + 2] = _number(kind, c2, threshold, factor)
                inside[4 * block + 3] = _number(kind, c3, threshold, factor)
        for block in range(start, stop):
            if block < whole or block >= rest:
                four = _philox(first + np.uint64(block), low, high, key, tag)
                for k in range(4):
                    at = 4 * block - skip + k
                    if 0 <= at < drawn.size:
                        drawn[at] = _number(kind, four[k], threshold, factor)

    return draw
