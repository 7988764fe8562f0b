"""Attention, forward and backward, one head and one block of queries at a time, so that scores stay in cache.

A head's operands are copied to panels in scratch memory, from wherever the op's layout has their rows; results and gradients
are written in place (:mod:`.panels`). Milliseconds on one AVX2 core, forward and backward, PyTorch's in brackets: 96 heads of
64 × 64 over 32 elements take 1.1 and 1.7 (1.2 and 3.6), 48 heads of 197 × 197 over 64 elements 8.0 and 14.6 (9.7 and 22), 12
causal heads of 1024 × 1024 over 64 elements 26 and 62 (39 and 99).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.products.panels import GAP, copy_to_panels, multiply_panels, panels_bytes
from graphc.backends.onnxruntime.vectors.functions import LANES, PANEL, array_of, exponentials, floats_at, highest_of_row
from graphc.device import Array, Run
from graphc.ir.facts import static_dims
from graphc.ir.ops.attention import HEADS, operand_axes, packed, sizes, written

TILE = 65536
"""Bytes of the scores of one block of queries: 256 KiB, a part of a core's level-2 cache."""

# columns of the operand table that a kernel gets: start, and steps along batch, head and length
_START, _BATCH, _HEAD, _ROW = range(4)


def _fits(node: ir.Node) -> bool:
    """Whether the kernel takes this node: no empty operand, contiguous rows of head elements, a float32 mask of a dropout."""
    backward = node.op_type.endswith("Grad")
    layout = node.attributes.get_string("layout", "bhtd,bhtd,bhtd->bhtd")
    shapes = [static_dims(v) for v in (*node.inputs, *node.outputs) if v is not None]
    mask = node.inputs[4 if backward else 3] if len(node.inputs) > 3 else None
    keep = (*node.inputs, *[None] * 8)[7 if backward else 4]
    if any(not axes.endswith("d") for axes in operand_axes(layout)) or any(s is None or 0 in s for s in shapes):
        return False
    if keep is not None and (keep.dtype != ir.DataType.FLOAT or not _is_whole(keep, node.inputs[int(backward) :], layout)):
        return False
    if mask is None:
        return True
    keys = static_dims(mask) or (1,)
    return keys[-1] != 1 and mask.dtype in (ir.DataType.BOOL, ir.DataType.FLOAT)


def _is_whole(keep: ir.Value, operands: Sequence[ir.Value | None], layout: str) -> bool:
    """Whether a dropout's mask has an element for every score, which the kernels read without looking."""
    axes, (q, k) = operand_axes(layout), operands[:2]
    if q is None or k is None:
        return False
    of_q, of_k = sizes(q, axes[0]), sizes(k, axes[1])
    scores, found = (of_q["b"], of_q["h"], of_q["t"], of_k["t"]), static_dims(keep) or (0,)
    return math.prod(found) == math.prod(n for n in scores if isinstance(n, int)) and found[-1] == of_k["t"]


@dataclass
class _Heads:
    """The operand description that both kernels take."""

    flat: list[Array]
    table: Array
    shape: Array
    bias: Array
    seen: Array
    numbers: Array
    keep: Array
    causal: bool
    probabilities: bool

    def rows(self, saved: Array) -> Array:
        """What the op saves, by query: its probabilities, or its log-sum-exp alone."""
        return saved.reshape(-1, int(self.shape[4]) if self.probabilities else 1)

    @property
    def masks(self) -> tuple[Any, ...]:
        return self.bias, self.seen, self.keep, self.causal, self.probabilities


def _heads(
    k: Binding, q: Array, key: Array, value: Array, mask: Array | None, keep: Array | None, others: list[tuple[Array, str]]
) -> _Heads:
    axes = operand_axes(k.attributes["layout"])
    operands = [(q, axes[0]), (key, axes[1]), (value, axes[2]), *others]
    table = np.array([_place(array, layout) for array, layout in operands], dtype=np.int64)
    of_q, of_k, of_v = (_sizes(a, layout) for a, layout in operands[:3])
    shape = np.array([of_q["b"], of_q["h"], of_k["h"], of_q["t"], of_k["t"], of_q["d"], of_v["d"]], dtype=np.int64)
    bias, seen = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.uint8)
    steps = [-1, 0, 0, 0]
    if mask is not None:
        padded = (1,) * (4 - mask.ndim) + mask.shape
        steps = [int(mask.dtype != np.bool_), *(0 if n == 1 else math.prod(padded[d + 1 :]) for d, n in enumerate(padded[:3]))]
        if mask.dtype == np.bool_:
            seen = mask.view(np.uint8).reshape(-1)
        else:
            bias = mask.reshape(-1)
    table = np.concatenate([table, np.array([steps], dtype=np.int64)])
    numbers = np.array([k.attributes["scale"], k.attributes["factor"]], dtype=np.float32)
    kept = np.empty((0, 1), dtype=np.float32) if keep is None else keep.reshape(-1, keep.shape[-1])
    flat = [array.reshape(-1) for array, _ in operands]
    probabilities = k.attributes["saves"] == "probabilities"
    return _Heads(flat, table, shape, bias, seen, numbers, kept, bool(k.attributes["causal"]), probabilities)


def _sizes(array: Array, axes: str) -> dict[str, int]:
    return {letter: array.shape[axes.index(letter)] if letter in axes else 1 for letter in HEADS}


def _place(array: Array, axes: str) -> tuple[int, int, int, int]:
    """(start, step of batch, of heads, of rows) in elements of a C-contiguous array."""
    step = {letter: math.prod(array.shape[k + 1 :]) for k, letter in enumerate(axes)}
    part = packed(axes)
    start = int(axes[part]) * step[axes[part]] if part is not None else 0
    return start, step.get("b", 0), step.get("h", 0), step.get("t", array.shape[-1])


def _rows(queries: int, keys: int, causal: bool) -> int:
    """Queries in a block; causal attention leaves out the keys behind a block, so that more blocks compute fewer scores."""
    most = min(queries, max(16, TILE // keys))
    return min(most, max(32, -(-queries // 64) * 16)) if causal else most


@kernel("onnxruntime", "graphc::ScaledDotProductAttention", when=_fits)
def scaled_dot_product_attention(k: Binding) -> Run:
    """y = (p ∘ keep)·v, p = softmax(scale·q·kᵀ + mask)"""
    q, key, value = given(k.inputs, 3)
    y, saved = given(k.outputs, 2)
    mask, keep = optional(k.inputs, 3), optional(k.inputs, 4)
    heads = _heads(k, q, key, value, mask, keep, [(y, operand_axes(k.attributes["layout"])[3])])
    batch, count, _, queries, keys, size, width = (int(n) for n in heads.shape)
    parts, rows = min(k.pool.threads, batch * count), _rows(queries, keys, heads.causal)
    scratch = _scratch(k.pool, parts, rows, keys, [(size, keys), (keys, width)], scores=1)
    arguments = (*heads.flat, heads.rows(saved), *heads.masks, heads.table, heads.shape, heads.numbers, *scratch)
    return k.pool.bind(_forward, arguments, parts)


def _scratch(
    pool: Pool, parts: int, rows: int, keys: int, panels: Sequence[tuple[int, int]], *, scores: int
) -> tuple[Array, Array]:
    """What a kernel computes in: the cell that holds the scratchpad's address, and numbers.

    A part of the heads has ``scores`` areas of ``rows`` × ``keys`` floats, one for each matrix in panels, and one for columns
    that do not fill a panel. The numbers are rows of an area of scores, bytes of such a row, bytes of a part, the number of
    parts, and the byte of a part at which each area begins.
    """
    line = 4 * (-(-keys // PANEL) * PANEL + LANES)  # not a multiple of the distance at which rows share sets of the cache
    each = [*[rows * line] * scores, *(panels_bytes(*matrix) for matrix in panels), max(rows, keys) * PANEL * 4]
    begins = [0, *itertools.accumulate(-(-n // 64) * 64 for n in each)]
    scratch = scratchpad_of(pool)
    scratch.reserve(begins[-1] * parts)
    return scratch.cell, np.array([rows, line, begins[-1], parts, *begins[:-1]], dtype=np.int64)


@jit
def _forward(q, k, v, y, saved, bias, seen, keep, causal, probabilities, table, shape, numbers, cell, areas, start, stop):
    batch, heads, key_heads, queries, keys, size, width = shape
    block, line, each, parts = areas[0], areas[1], areas[2], areas[3]
    of_k, of_v = (size * PANEL + GAP) * 4, (keys * PANEL + GAP) * 4
    for part in range(start, stop):
        base, held = cell[0] + part * each, -1
        at_scores, at_panels_k, at_panels_v, edge = base + areas[4], base + areas[5], base + areas[6], base + areas[7]
        tile = array_of(floats_at(at_scores), (block, line // 4))
        for item in range(batch * heads * part // parts, batch * heads * (part + 1) // parts):
            b, h = item // heads, item % heads
            g = h * key_heads // heads
            at_q, at_y = _at(q, table[0], b, h), _at(y, table[3], b, h)
            if held != b * key_heads + g:
                held = b * key_heads + g
                at_k, at_v = _at(k, table[1], b, g), _at(v, table[2], b, g)
                copy_to_panels(at_k, 4, 4 * table[1, 3], size, keys, at_panels_k)
                _scale(at_panels_k, (keys + PANEL - 1) // PANEL * (of_k // 4), numbers[0])
                copy_to_panels(at_v, 4 * table[2, 3], 4, keys, width, at_panels_v)
            for first in range(0, queries, block):
                last = min(first + block, queries)
                count, limit = last - first, min(keys, last) if causal else keys
                columns = (limit + PANEL - 1) // PANEL * PANEL
                row_q, row_y = at_q + 4 * first * table[0, 3], at_y + 4 * first * table[3, 3]
                multiply_panels(
                    row_q, 4 * table[0, 3], 4, count, at_panels_k, of_k, size, at_scores, line, columns, False, edge
                )
                for r in range(count):
                    row, number = tile[r], item * queries + first + r
                    own = min(limit, first + r + 1) if causal else limit
                    if table[4, 0] >= 0:
                        _mask(row[:own], bias, seen, table[4], b, h, first + r)
                    top, total = _softmax(row, own)
                    row[own:limit] = np.float32(0.0)
                    if probabilities:
                        _copy(saved[number, :limit], row)
                        saved[number, limit:] = np.float32(0.0)
                    else:
                        saved[number, 0] = top + np.float32(math.log(total))
                    if keep.size > 0:
                        _drop(row[:limit], keep[number], numbers[1])
                multiply_panels(at_scores, line, 4, count, at_panels_v, of_v, limit, row_y, 4 * table[3, 3], width, False, edge)


@jit
def _copy(out, x):
    for c in range(out.size):
        out[c] = x[c]


@jit
def _scale(at, count, factor):
    """Multiply ``count`` floats at an address."""
    x = array_of(floats_at(at), (count,))
    for c in range(count):
        x[c] *= factor


@jit
def _at(array, place, b, h):
    """Address of the first element of a head."""
    return array.ctypes.data + 4 * (place[0] + b * place[1] + h * place[2])


@jit
def _mask(row, bias, seen, place, b, h, r):
    """Mask the scores of query r; ``place[0]`` is 0 for a boolean mask and 1 for an additive one."""
    begin = b * place[1] + h * place[2] + r * place[3]
    if place[0] == 1:
        own = bias[begin : begin + row.size]
        for c in range(row.size):
            row[c] += own[c]
    elif place[0] == 0:
        shown = seen[begin : begin + row.size]
        for c in range(row.size):
            row[c] = row[c] if shown[c] != 0 else -np.float32(np.inf)


@jit
def _softmax(row, own):
    """Turn the first ``own`` scores into probabilities; returns their maximum m and Σ exp(score - m).

    A masked row gets zeros. The last vector is written whole.
    """
    at = row.ctypes.data
    top = highest_of_row(at, own)
    if top == -np.float32(np.inf):
        row[:own] = np.float32(0.0)
        return top, np.float32(1.0)
    total = exponentials(at, own, top)
    _scale(at, own, np.float32(1.0) / total)
    return top, total


@jit
def _drop(row, keep, factor):
    """row = row · factor · keep"""
    for c in range(row.size):
        row[c] *= factor * keep[c]


@kernel("onnxruntime", "graphc::ScaledDotProductAttentionGrad", when=_fits)
def scaled_dot_product_attention_grad(k: Binding) -> Run:
    """∂v = (p ∘ keep)ᵀ·dy,  ∂q = scale·ds·k,  ∂k = scale·dsᵀ·q  with ds = p·(dp - Σ dy·y), dp = keep ∘ dy·vᵀ"""
    dy, q, key, value = given(k.inputs, 4)
    y, saved = given(k.inputs[5:], 2)
    axes = operand_axes(k.attributes["layout"])
    gradients = dict(zip(written(k.attributes["layout"]), k.outputs, strict=True))
    whole = next((gradients[i] for i in gradients if packed(axes[i]) is not None), None)
    targets = [(gradients.get(i, whole), axes[i]) for i in range(3)]
    others = [(y, axes[3]), (dy, axes[3]), *((array, layout) for array, layout in targets if array is not None)]
    heads = _heads(k, q, key, value, k.inputs[4], optional(k.inputs, 7), others)
    batch, _, key_heads, queries, keys, size, width = (int(n) for n in heads.shape)
    parts, rows = min(k.pool.threads, batch * key_heads), _rows(queries, keys, heads.causal)
    panels = [(width, keys), (keys, size), (rows, size), (rows, width), (size, keys)]
    scratch = _scratch(k.pool, parts, rows, keys, panels, scores=2)
    arguments = (*heads.flat, heads.rows(saved), *heads.masks, heads.table, heads.shape, heads.numbers, *scratch)
    return k.pool.bind(_backward, arguments, parts)


@jit
def _backward(
    q, k, v, y, dy, dq, dk, dv, saved, bias, seen, keep, causal, probabilities, table, shape, numbers, cell, areas, start, stop
):
    batch, heads, key_heads, queries, keys, size, width = shape
    block, line, each, parts = areas[0], areas[1], areas[2], areas[3]
    of_k, of_v = (size * PANEL + GAP) * 4, (width * PANEL + GAP) * 4
    of_keys = (keys * PANEL + GAP) * 4
    group = heads // key_heads
    row_of_q, row_of_dy, row_of_dq = 4 * table[0, 3], 4 * table[4, 3], 4 * table[5, 3]
    row_of_dk, row_of_dv = 4 * table[6, 3], 4 * table[7, 3]
    for part in range(start, stop):
        base = cell[0] + part * each
        at_ds, at_p, at_panels_v, at_panels_k = base + areas[4], base + areas[5], base + areas[6], base + areas[7]
        at_panels_q, at_panels_dy, at_scaled_k, edge = base + areas[8], base + areas[9], base + areas[10], base + areas[11]
        slopes, shares = array_of(floats_at(at_ds), (block, line // 4)), array_of(floats_at(at_p), (block, line // 4))
        for item in range(batch * key_heads * part // parts, batch * key_heads * (part + 1) // parts):
            b, g = item // key_heads, item % key_heads
            at_k, at_v = _at(k, table[1], b, g), _at(v, table[2], b, g)
            at_dk, at_dv = _at(dk, table[6], b, g), _at(dv, table[7], b, g)
            copy_to_panels(at_v, 4, 4 * table[2, 3], width, keys, at_panels_v)
            copy_to_panels(at_k, 4 * table[1, 3], 4, keys, size, at_panels_k)
            if not probabilities:
                copy_to_panels(at_k, 4, 4 * table[1, 3], size, keys, at_scaled_k)
                _scale(at_scaled_k, (keys + PANEL - 1) // PANEL * (of_k // 4), numbers[0])
            adds = False
            for h in range(g * group, (g + 1) * group):
                blocks = (queries + block - 1) // block
                for number in range(blocks):
                    # the last block sees most keys: it comes first, and writes all rows of ∂k and ∂v, unseen ones as zeros
                    first = (blocks - 1 - number) * block
                    last = min(first + block, queries)
                    count, limit = last - first, min(keys, last) if causal and adds else keys
                    columns = (limit + PANEL - 1) // PANEL * PANEL
                    of_queries, begin = (count * PANEL + GAP) * 4, (b * heads + h) * queries + first
                    row_q, row_dy = _at(q, table[0], b, h) + first * row_of_q, _at(dy, table[4], b, h) + first * row_of_dy
                    row_dq = _at(dq, table[5], b, h) + first * row_of_dq
                    copy_to_panels(row_q, row_of_q, 4, count, size, at_panels_q)
                    copy_to_panels(row_dy, row_of_dy, 4, count, width, at_panels_dy)
                    multiply_panels(row_dy, row_of_dy, 4, count, at_panels_v, of_v, width, at_ds, line, columns, False, edge)
                    if not probabilities:
                        multiply_panels(row_q, row_of_q, 4, count, at_scaled_k, of_k, size, at_p, line, columns, False, edge)
                    for r in range(count):
                        row, slope = shares[r, :limit], slopes[r, :limit]
                        if probabilities:
                            _copy(row, saved[begin + r])
                        else:
                            own = min(limit, first + r + 1) if causal else limit
                            if table[8, 0] >= 0:
                                _mask(row[:own], bias, seen, table[8], b, h, first + r)
                            _again(row, own, saved[begin + r, 0])
                        at_y = table[3, 0] + b * table[3, 1] + h * table[3, 2] + (first + r) * table[3, 3]
                        at_dy = table[4, 0] + b * table[4, 1] + h * table[4, 2] + (first + r) * table[4, 3]
                        if keep.size > 0:
                            _drop(slope, keep[begin + r], numbers[1])
                        _score_gradient(slope, row, y[at_y : at_y + width], dy[at_dy : at_dy + width], numbers[0])
                        if keep.size > 0:
                            _drop(row, keep[begin + r], numbers[1])
                    multiply_panels(at_p, 4, line, limit, at_panels_dy, of_queries, count, at_dv, row_of_dv, width, adds, edge)
                    multiply_panels(at_ds, line, 4, count, at_panels_k, of_keys, limit, row_dq, row_of_dq, size, False, edge)
                    multiply_panels(at_ds, 4, line, limit, at_panels_q, of_queries, count, at_dk, row_of_dk, size, adds, edge)
                    adds = True


@jit
def _again(row, own, logarithm):
    """Recompute the probabilities of the first ``own`` scores of a row from their log-sum-exp."""
    if logarithm == -np.float32(np.inf):
        row[:own] = np.float32(0.0)
    else:
        exponentials(row.ctypes.data, own, logarithm)
    if own < row.size:
        row[own:] = np.float32(0.0)


@jit
def _score_gradient(ds, p, y, dy, scale):
    """ds = scale·p·(dp - Σ dy·y), with dp in ds."""
    total = np.float32(0.0)
    for c in range(y.size):
        total += y[c] * dy[c]
    for c in range(ds.size):
        ds[c] = scale * p[c] * (ds[c] - total)
