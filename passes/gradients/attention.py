"""Gradient of scaled dot-product attention (``ai.onnx::Attention``), with the probabilities computed anew."""

from __future__ import annotations

import functools
import math
from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, rank
from graphc.passes.gradients.linear import transpose
from graphc.passes.gradients.shape import lengths


@gradient("Attention")
def attention(op: Builder, node: ir.Node, dy: ir.Value | None, *others: ir.Value | None) -> Any:
    """y = p·v, p = softmax(s), s = α·q·kᵀ + mask;  ∂v = pᵀ·dy,  ∂s = p·(dp - Σp·dp) with dp = dy·vᵀ

    ∂q = α·∂s·k,  ∂k = α·∂sᵀ·q,  ∂mask = ∂s. Heads may be axis 1 of four or part of axis 2 of three, key heads may serve
    groups of query heads, and the scores may be capped.
    """
    _refuse(node, others)
    assert dy is not None
    attributes = node.attributes
    query, key, value = operands(node, 3)
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    q_heads, kv_heads = attributes.get_int("q_num_heads", 0), attributes.get_int("kv_num_heads", 0)
    q, dz = _heads(op, query, q_heads), _heads(op, dy, q_heads)
    group = _group(node, q_heads, kv_heads)
    k = _repeat(op, _heads(op, key, kv_heads), group)
    v = _repeat(op, _heads(op, value, kv_heads), group)
    scale = attributes.get_float("scale", 0.0) or _default_scale(op, q)
    scaled = op.Mul(q, scale)
    scores, slope = op.MatMul(scaled, transpose(op, k)), None
    cap = attributes.get_float("softcap", 0.0)
    if cap > 0:
        bent = op.Tanh(op.Mul(scores, 1 / cap))
        scores, slope = op.Mul(bent, cap), functools.partial(op.Sub, 1.0, op.Mul(bent, bent))
    p = _probabilities(op, node, scores, mask)

    @functools.cache
    def dscores() -> Any:
        dp = op.MatMul(dz, transpose(op, v))
        return op.Mul(p, op.Sub(dp, op.ReduceSum(op.Mul(p, dp), [-1], keepdims=1)))

    @functools.cache
    def dproduct() -> Any:
        return op.Mul(dscores(), slope()) if slope is not None else dscores()

    def dq() -> Any:
        return _merge(op, op.Mul(op.MatMul(dproduct(), k), scale), query)

    def dk() -> Any:
        return _merge(op, _sum_groups(op, op.MatMul(transpose(op, dproduct()), scaled), group), key)

    def dv() -> Any:
        return _merge(op, _sum_groups(op, op.MatMul(transpose(op, p), dz), group), value)

    return dq, dk, dv, dscores


def _refuse(node: ir.Node, others: tuple[ir.Value | None, ...]) -> None:
    problems = [name for k, name in ((4, "past_key"), (5, "past_value"), (6, "nonpad_kv_seqlen")) if _has(node, k)]
    problems += [name for name in ("left_window_size", "right_window_size") if node.attributes.get_int(name, -1) >= 0]
    problems += ["a gradient of its further outputs"] if any(dy is not None for dy in others) else []
    if problems:
        raise UnsupportedOpError(f"no gradient for Attention with {', '.join(problems)}: {describe(node)}")


def _has(node: ir.Node, index: int) -> bool:
    return index < len(node.inputs) and node.inputs[index] is not None


def _heads(op: Builder, x: Any, count: int) -> Any:
    """x as (batch, heads, length, size)."""
    return x if rank(x) == 4 else op.Transpose(op.Reshape(x, [0, 0, count, -1]), perm=[0, 2, 1, 3])


def _merge(op: Builder, x: Any, like: Any) -> Any:
    return x if rank(like) == 4 else op.reshape_like(op.Transpose(x, perm=[0, 2, 1, 3]), like)


def _group(node: ir.Node, q_heads: int, kv_heads: int) -> int:
    """How many query heads share one key head."""
    query, key = operands(node, 2)
    if rank(query) == 4:
        counts = (dims(query) or ())[1], (dims(key) or ())[1]
        if counts[0] == counts[1]:
            return 1
        if not isinstance(counts[0], int) or not isinstance(counts[1], int):
            raise UnsupportedOpError(f"the numbers of heads of Attention must be known: {describe(node)}")
        q_heads, kv_heads = counts[0], counts[1]
    return q_heads // kv_heads


def _repeat(op: Builder, x: Any, group: int) -> Any:
    """Each head of x ``group`` times in a row."""
    if group == 1:
        return x
    wide = op.Expand(op.Unsqueeze(x, [2]), lengths(op, (x, 0), (x, 1), group, (x, 2), (x, 3)))
    return op.Reshape(wide, lengths(op, (x, 0), -1, (x, 2), (x, 3)))


def _sum_groups(op: Builder, x: Any, group: int) -> Any:
    if group == 1:
        return x
    heads = (dims(x) or ())[1]
    assert isinstance(heads, int)
    split = op.Reshape(x, lengths(op, (x, 0), heads // group, group, (x, 2), (x, 3)))
    return op.ReduceSum(split, [2], keepdims=0)


def _default_scale(op: Builder, q: Any) -> Any:
    size = (dims(q) or (None,))[-1]
    if isinstance(size, int):
        return 1 / math.sqrt(size)
    return op.Reciprocal(op.Sqrt(op.cast_like(op.Squeeze(lengths(op, (q, 3)), [0]), q)))


def _probabilities(op: Builder, node: ir.Node, scores: Any, mask: ir.Value | None) -> Any:
    """Softmax of the masked scores; a row that is masked as a whole is zero."""
    low = op.scalar(-math.inf, scores)
    bias: Any = None
    if mask is not None:
        short, full = (dims(mask) or (None,))[-1], (dims(scores) or (None,))[-1]
        if isinstance(short, int) and isinstance(full, int) and short < full:
            raise UnsupportedOpError(f"no gradient for Attention with a mask shorter than the keys: {describe(node)}")
        bias = mask if mask.dtype == scores.dtype else op.Where(mask, op.scalar(0, scores), low)
    if node.attributes.get_int("is_causal", 0):
        ones = op.Expand(op.const(1, ir.DataType.INT64), lengths(op, (scores, 2), (scores, 3)))
        allowed = op.Cast(op.Trilu(ones, upper=0), to=int(ir.DataType.BOOL))
        bias = op.Where(allowed, bias if bias is not None else op.scalar(0, scores), low)
    hidden = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), low) if mask is not None else None
    if hidden is not None:
        bias = op.Where(hidden, op.scalar(0, scores), bias)
    masked = scores if bias is None else op.Add(scores, bias)
    precision = node.attributes.get_int("softmax_precision", int(scores.dtype))
    wide = op.Cast(masked, to=precision) if precision != int(scores.dtype) else masked
    p = op.cast_like(op.Softmax(wide, axis=-1), scores)
    return p if hidden is None else op.Where(hidden, op.scalar(0, scores), p)
