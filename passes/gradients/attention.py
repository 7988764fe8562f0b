"""Gradients of scaled dot-product attention: of the fused ``graphc`` op, and of ``ai.onnx::Attention`` by parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.declare import OPS, decompose_node
from graphc.ir.facts import dims, rank
from graphc.ir.ops.attention import mask_gradient, repeat_heads, written
from graphc.passes.gradients.linear import transpose
from graphc.passes.gradients.reverse_mode import through


@gradient("graphc::ScaledDotProductAttention", selective=True)
def scaled_dot_product_attention(
    op: Builder, node: ir.Node, dy: ir.Value | None, dsaved: ir.Value | None = None, *, needs: set[ir.Value]
) -> Any:
    """y = (p ∘ keep)·v, p = softmax(α·q·kᵀ + mask);  ∂q, ∂k, ∂v by ScaledDotProductAttentionGrad,  ∂mask = p·(dp - Σp·dp),
    dp = keep ∘ dy·vᵀ

    What it saves has an adjoint in gradients of gradients only, which go through the decomposition.
    """
    if dsaved is not None or dy is None:
        return tuple(through(op, node, (dy, dsaved), needs, lambda: decompose_node(op, node)))
    q, k, v, mask, keep = (*node.inputs, None, None)[:5]
    y, saved = node.outputs
    attributes = OPS[node.op_type].attribute_values(node)
    places = written(attributes["layout"])
    operands = (dy, q, k, v, mask, y, saved, *(() if keep is None else (keep,)))
    made = op.emit(f"{node.op_type}Grad", operands, attributes, domain=node.domain, outputs=len(places))
    found = dict(zip(places, made, strict=True))
    return found.get(0), found.get(1), found.get(2), lambda: mask_gradient(op, node, dy, saved, attributes)


@gradient("Attention", selective=True)
def attention(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """y = p·v, p = softmax(s), s = α·q·kᵀ + bias;  ∂v = pᵀ·dy,  ∂s = p·(dp - Σp·dp) with dp = dy·vᵀ

    ∂q = α·∂s·k,  ∂k = α·∂sᵀ·q,  ∂mask = ∂s, through :func:`by_parts`.
    """
    return tuple(through(op, node, dys, needs, lambda: by_parts(op, node)))


def by_parts(op: Builder, node: ir.Node) -> list[ir.Value]:
    """Compute Attention by simpler ops. Unlike ONNX's function body, a fully masked row gives no NaN.

    Heads may be axis 1 of four or part of axis 2 of three, key heads may serve groups of query heads, keys and values may be
    cached in part, the scores may be capped. The fourth output is the stage that ``qk_matmul_output_mode`` names: 0 product,
    1 capped, 2 biased, 3 softmax.
    """
    attributes = node.attributes
    query, key, value = operands(node, 3)
    _, _, _, mask, past_key, past_value, _ = (*node.inputs, *[None] * 4)[:7]
    q_heads, kv_heads = attributes.get_int("q_num_heads", 0), attributes.get_int("kv_num_heads", 0)
    q = _heads(op, query, q_heads)
    keys = _with_past(op, past_key, _heads(op, key, kv_heads))
    values = _with_past(op, past_value, _heads(op, value, kv_heads))
    scale = attributes.get_float("scale", 0.0) or _default_scale(op, q)
    product = op.MatMul(op.Mul(q, scale), transpose(op, repeat_heads(op, keys, q)))
    cap = attributes.get_float("softcap", 0.0)
    scores = op.Mul(op.Tanh(op.Mul(product, 1 / cap)), cap) if cap > 0 else product
    p = _probabilities(op, node, scores, mask, past_key)
    y = op.MatMul(p, repeat_heads(op, values, q))
    if rank(query) == 3:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.lengths((query, 0), (query, 1), -1))
    found = [y, keys, values]
    if len(node.outputs) > 3:
        mode = attributes.get_int("qk_matmul_output_mode", 0)
        bias = _bias(op, node, scores, mask, past_key)[0] if mode == 2 else None
        found.append(op.Add(scores, bias) if bias is not None else (product, scores, scores, p)[mode])
    return found


def _with_past(op: Builder, past: ir.Value | None, new: Any) -> Any:
    return new if past is None else op.Concat(past, new, axis=2)


def _heads(op: Builder, x: Any, count: int) -> Any:
    """x as (batch, heads, length, size)."""
    return x if rank(x) == 4 else op.Transpose(op.Reshape(x, [0, 0, count, -1]), perm=[0, 2, 1, 3])


def _default_scale(op: Builder, q: Any) -> Any:
    size = (dims(q) or (None,))[-1]
    if isinstance(size, int):
        return 1 / math.sqrt(size or 1)
    return op.Reciprocal(op.Sqrt(op.cast_like(op.Squeeze(op.lengths((q, 3)), [0]), q)))


def _probabilities(op: Builder, node: ir.Node, scores: Any, mask: ir.Value | None, past: ir.Value | None) -> Any:
    """Softmax of the masked scores; a fully masked row is zero."""
    bias, partial = _bias(op, node, scores, mask, past)
    low = op.scalar(-math.inf, scores)
    hidden = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), low) if partial else None
    if hidden is not None:
        bias = op.Where(hidden, op.scalar(0, scores), bias)
    masked = scores if bias is None else op.Add(scores, bias)
    precision = node.attributes.get_int("softmax_precision", int(scores.dtype))
    wide = op.Cast(masked, to=precision) if precision != int(scores.dtype) else masked
    p = op.cast_like(op.Softmax(wide, axis=-1), scores)
    return p if hidden is None else op.Where(hidden, op.scalar(0, scores), p)


def _bias(op: Builder, node: ir.Node, scores: Any, mask: ir.Value | None, past: ir.Value | None) -> tuple[Any, bool]:
    """The bias to add to the scores, or None, and whether it may mask a whole row.

    Query i is at position i + offset among the keys: after the cached ones, or, when ``nonpad_kv_seqlen`` counts valid keys,
    aligned so that the last queries meet the last valid keys; else offset is 0.
    """
    bias: Any = None
    if mask is not None:
        bias = mask if mask.dtype == scores.dtype else op.Where(mask, op.scalar(0, scores), op.scalar(-math.inf, scores))
        bias = _for_all_keys(op, bias, scores)
    valid = node.inputs[6] if len(node.inputs) > 6 else None
    keys = op.Range(np.int64(0), op.Squeeze(op.lengths((scores, 3)), [0]), np.int64(1))
    left, right = (node.attributes.get_int(name, -1) for name in ("left_window_size", "right_window_size"))
    tests: list[Any] = []
    if node.attributes.get_int("is_causal", 0) or left >= 0 or right >= 0:
        queries = op.Unsqueeze(op.Range(np.int64(0), op.Squeeze(op.lengths((scores, 2)), [0]), np.int64(1)), [1])
        if valid is not None and past is None:
            offset = op.Sub(op.Unsqueeze(op.Cast(valid, to=7), [1, 2, 3]), op.lengths((scores, 2)))
        else:
            offset = op.lengths((past, 2)) if past is not None else op.const([0])
        ahead = op.Sub(keys, op.Add(queries, offset))  # distance of a key from its query's position
        tests += [op.LessOrEqual(ahead, [0])] if node.attributes.get_int("is_causal", 0) else []
        tests += [op.GreaterOrEqual(ahead, [-left])] if left >= 0 else []
        tests += [op.LessOrEqual(ahead, [right])] if right >= 0 else []
    if valid is not None:
        tests.append(op.Less(keys, op.Unsqueeze(op.Cast(valid, to=7), [1, 2, 3])))
    for test in tests:
        open_ = bias if bias is not None else op.scalar(0, scores)
        bias = op.Where(test, open_, op.scalar(-math.inf, scores))
    return bias, mask is not None or valid is not None or left >= 0 or right >= 0


def _for_all_keys(op: Builder, bias: Any, scores: Any) -> Any:
    """Extend a mask over the first keys; it hides the others."""
    short, full = (dims(bias) or (None,))[-1], (dims(scores) or (None,))[-1]
    if isinstance(short, int) and isinstance(full, int) and short < full:
        pads = op.const([0, full - short])
        return op.Pad(bias, pads, op.scalar(-math.inf, scores), op.const([-1]))
    return bias
