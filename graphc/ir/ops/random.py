"""Counter-based random ops: draws depend only on seed, step, tag and the element's global index.

The generator is Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). Element ``i`` of a tensor is word ``i mod 4`` of the block with

    counter = (i div 4 as two 32-bit words, step as two 32-bit words),   key = (seed folded to 32 bits, CRC-32 of the tag)

where ``i`` counts through the **global** batch: ``i = sample_offset · (elements per sample) + local index``. Replays,
recomputation, backends and any split of a batch over ranks therefore draw the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare
from graphc.ir.facts import shape_of_result

DROPOUT_MASK = "DropoutMask"
RANDOM_OPS = frozenset({DROPOUT_MASK, "Uniform"})

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10

Words = np.ndarray[Any, np.dtype[np.uint64]]


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four 32-bit words (held in uint64) per counter; ``counter`` is four words or arrays of words."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    for r in range(_ROUNDS):
        k0, k1 = (np.uint64((k + r * w) & _WORD) for k, w in zip(key, _WEYL, strict=True))
        first, second = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        word, half = np.uint64(_WORD), np.uint64(32)
        c0, c1, c2, c3 = (second >> half) ^ c1 ^ k0, second & word, (first >> half) ^ c3 ^ k1, first & word
    return c0, c1, c2, c3


def philox_key(seed: int, tag: str) -> tuple[int, int]:
    """The key of all draws with this seed and tag."""
    bits = seed & 0xFFFFFFFFFFFFFFFF
    return (bits ^ (bits >> 32)) & _WORD, zlib.crc32(tag.encode())


def philox_words(start: int, count: int, *, seed: int, step: int, tag: str) -> Words:
    """The 32-bit words (in uint64) of global elements ``start … start + count - 1``."""
    first = start // 4
    blocks = np.arange(first, (start + count + 3) // 4, dtype=np.uint64)
    half, word = np.uint64(32), np.uint64(_WORD)
    moment = step & 0xFFFFFFFFFFFFFFFF
    words = philox((blocks & word, blocks >> half, moment & _WORD, moment >> 32), philox_key(seed, tag))
    flat = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(-1)
    return flat[start - 4 * first : start - 4 * first + count]


def philox_uniform(
    shape: Sequence[int], *, seed: int, step: int, sample_offset: int = 0, tag: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Reference: uniform float64 numbers in [0, 1) of the given shape, whose first axis counts samples."""
    count = int(np.prod(shape, dtype=np.int64))
    start = sample_offset * int(np.prod(shape[1:], dtype=np.int64))
    words = philox_words(start, count, seed=seed, step=step, tag=tag)
    return (words.astype(np.float64) / 2.0**32).reshape(tuple(shape))


def dropout_threshold(ratio: float) -> int:
    """Threshold: an element is dropped when its 32-bit word is below."""
    return min(max(round(ratio * 2.0**32), 0), 1 << 32)


def dropout_scale(ratio: float) -> float:
    """Factor on kept elements; 0 when none is kept."""
    return 1.0 / (1.0 - ratio) if ratio < 1.0 else 0.0


@declare(
    DROPOUT_MASK,
    inputs="shape seed step sample_offset",
    outputs="mask",
    attributes={"ratio": 0.5, "tag": REQUIRED, "dtype": int(ir.DataType.FLOAT)},
    infer=lambda inputs, attributes: [(ir.DataType(int(attributes["dtype"])), shape_of_result(inputs[0]))],
)
def dropout_mask(
    op: Builder,
    shape: ir.Value,
    seed: ir.Value,
    step: ir.Value,
    sample_offset: ir.Value,
    *,
    ratio: float,
    tag: str,
    dtype: int,
) -> ir.Value:
    """mask = 0 with probability ``ratio``, else 1 / (1 - ratio); float of type ``dtype`` and the given int64 shape.

    ``seed``, ``step`` and ``sample_offset`` are int64 scalars. Element i is dropped when its Philox word is below
    ratio · 2³². The first axis counts samples: the rows of a rank's share start at row ``sample_offset`` of the global batch.
    """
    lanes, mine = _words(op, shape, seed, step, sample_offset, tag)
    threshold = np.int64(dropout_threshold(ratio))
    kept = mine(op.GreaterOrEqual(op.Cast(c, to=int(ir.DataType.INT64)), threshold) for c in lanes)
    kind = ir.DataType(dtype).numpy()
    return op.Where(kept, np.asarray(dropout_scale(ratio), kind), np.asarray(0, kind))  # type: ignore[no-any-return]


@declare(
    "Uniform",
    inputs="shape seed step sample_offset",
    outputs="y",
    attributes={"tag": REQUIRED},
    infer=lambda inputs, attributes: [(ir.DataType.FLOAT, shape_of_result(inputs[0]))],
)
def uniform(op: Builder, shape: ir.Value, seed: ir.Value, step: ir.Value, sample_offset: ir.Value, *, tag: str) -> ir.Value:
    """Multiples of 2⁻²⁴ in [0, 1), all equally likely: the upper 24 bits of Philox words; float32 of the given int64 shape.

    ``seed``, ``step`` and ``sample_offset`` as for :func:`dropout_mask`.
    """
    lanes, mine = _words(op, shape, seed, step, sample_offset, tag)
    upper = mine(op.Cast(op.BitShift(c, np.uint64(8), direction="RIGHT"), to=int(ir.DataType.FLOAT)) for c in lanes)
    return op.Mul(upper, np.float32(2.0**-24))  # type: ignore[no-any-return]


def _words(
    op: Builder, shape: ir.Value, seed: ir.Value, step: ir.Value, sample_offset: ir.Value, tag: str
) -> tuple[tuple[Any, Any, Any, Any], Callable[[Iterable[Any]], Any]]:
    """The four words of each block that holds elements of this rank, and what picks its elements from results by lane."""
    word, half = np.uint64(_WORD), np.uint64(32)

    def low(x: ir.Value) -> ir.Value:
        return op.BitwiseAnd(x, word)  # type: ignore[no-any-return]

    def high(x: ir.Value) -> ir.Value:
        return op.BitShift(x, half, direction="RIGHT")  # type: ignore[no-any-return]

    def unsigned(x: ir.Value) -> ir.Value:
        return op.Cast(x, to=int(ir.DataType.UINT64))  # type: ignore[no-any-return]

    count = op.ReduceProd(shape, keepdims=0)
    per_sample = op.ReduceProd(op.Slice(shape, [1], [np.iinfo(np.int64).max], [0]), keepdims=0)
    start = op.Mul(sample_offset, per_sample)
    first = op.Div(start, np.int64(4))
    # Two extra blocks cover any alignment of the first element and keep the number of blocks static.
    blocks = op.Add(op.Range(np.int64(0), op.Add(op.Div(count, np.int64(4)), np.int64(2)), np.int64(1)), first)

    index, moment = unsigned(blocks), unsigned(step)
    c0, c1, c2, c3 = low(index), high(index), low(moment), high(moment)
    bits = unsigned(seed)
    seed_word = low(op.BitwiseXor(bits, high(bits)))
    tag_word = zlib.crc32(tag.encode())
    for r in range(_ROUNDS):
        k0 = low(op.Add(seed_word, np.uint64(r * _WEYL[0] & _WORD)))
        k1 = np.uint64((tag_word + r * _WEYL[1]) & _WORD)
        one, two = op.Mul(c0, np.uint64(_MULTIPLIERS[0])), op.Mul(c2, np.uint64(_MULTIPLIERS[1]))
        c0, c1 = op.BitwiseXor(op.BitwiseXor(high(two), c1), k0), low(two)
        c2, c3 = op.BitwiseXor(op.BitwiseXor(high(one), c3), k1), low(one)

    skip = op.Unsqueeze(op.Sub(start, op.Mul(first, np.int64(4))), [0])

    def mine(lanes: Iterable[Any]) -> Any:
        every = op.Reshape(op.Concat(*[op.Unsqueeze(lane, [1]) for lane in lanes], axis=1), [-1])
        return op.Reshape(op.Slice(every, skip, op.Add(skip, op.Unsqueeze(count, [0])), [0]), shape)

    return (c0, c1, c2, c3), mine
