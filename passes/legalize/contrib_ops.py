"""Rewrites onnxruntime's own ops (``com.microsoft``) as standard ops.

    before   y = com.microsoft.FusedConv(x, w, b; activation="Relu")
    after    c = Conv(x, w, b);  y = Relu(c)

onnxruntime's exporters and its graph optimizer write them. A rule returns the new outputs, or None for a form of the op that
has no standard counterpart here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, inputs_of, static_dims
from graphc.ir.opset_adapters import Adapter, take
from graphc.passes.legalize.contrib_quantized import QUANTIZED_OPS


def adapt_contributed(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Rewrite a ``com.microsoft`` node (some files put them into the standard domain by mistake) as standard ops.

    Returns None for an op without a rule.

    Raises:
        UnsupportedOpError: a form of the op that the rule does not cover.
    """
    rule = CONTRIBUTED.get(node.op_type)
    if rule is None:
        return None
    values = rule(op, node)
    if values is None:
        raise UnsupportedOpError(
            f"this form of {node.domain or 'ai.onnx'}::{node.op_type} has no counterpart in standard ops: {describe(node)}; "
            "export the model without fusions of onnxruntime"
        )
    return values


def _gelu(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return [op.Gelu(node.inputs[0])]


def _bias_gelu(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return [op.Gelu(op.Add(*node.inputs))]


def _fast_gelu(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x = node.inputs[0] if len(node.inputs) < 2 or node.inputs[1] is None else op.Add(*node.inputs)
    return [op.Gelu(x, approximate="tanh")]


def _quick_gelu(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x = node.inputs[0]
    return [op.Mul(x, op.Sigmoid(op.Mul(x, float(take(node, "alpha", 1.702)))))]


def _fused_matmul(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    if take(node, "transBatchA", 0) or take(node, "transBatchB", 0):
        return None
    operands: list[ir.Value] = []
    for value, name in zip(inputs_of(node), ("transA", "transB"), strict=False):
        if take(node, name, 0):
            order = list(range(op.rank(value)))
            value = op.Transpose(value, perm=[*order[:-2], order[-1], order[-2]])
        operands.append(value)
    product, alpha = op.MatMul(*operands), float(take(node, "alpha", 1.0))
    return [product if alpha == 1.0 else op.Mul(product, alpha)]


def _sum_of_present(op: Builder, *values: ir.Value | None) -> ir.Value:
    total, *rest = [v for v in values if v is not None]
    for value in rest:
        total = op.Add(total, value)
    return total


def _skip_normalization(op: Builder, node: ir.Node, op_type: str, epsilon: float) -> Sequence[ir.Value] | None:
    inputs = [*node.inputs, None, None, None]
    x, skip, scale = inputs[:3]
    # LayerNormalization has a beta before the bias; the simplified form has none.
    beta, bias = (inputs[3], inputs[4]) if op_type == "LayerNormalization" else (None, inputs[3])
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:3]):
        return None
    total = _sum_of_present(op, x, skip, bias)
    (y,) = op.emit(op_type, [total, scale, beta], {"axis": -1, "epsilon": float(take(node, "epsilon", epsilon))}, outputs=1)
    return [y, y, y, total]


def _skip_layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    return _skip_normalization(op, node, "LayerNormalization", 1e-12)


def _skip_simplified_layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    return _skip_normalization(op, node, "RMSNormalization", 1e-5)


def _simplified_layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return None
    return [op.RMSNormalization(*node.inputs, axis=take(node, "axis", -1), epsilon=float(take(node, "epsilon", 1e-5)))]


def _layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    options = {"axis": int(take(node, "axis", -1)), "epsilon": float(take(node, "epsilon", 1e-5))}
    return op.emit("LayerNormalization", node.inputs, options, outputs=len(node.outputs))


_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
}
"""Activation of a fused op → the attributes that hold its parameters."""


def _fused_conv(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """activation(Conv(x, w, b) + z)"""
    kind, parameters = take(node, "activation", ""), take(node, "activation_params", [])
    x, w, b, z = [*node.inputs, None, None][:4]
    y = op.emit("Conv", [x, w, b], dict(node.attributes), outputs=1)[0]
    if z is not None:
        y = op.Add(y, z)
    if not kind:
        return [y]
    if kind == "Clip":
        return [op.Clip(y, *(float(p) for p in parameters))]
    if kind not in _ACTIVATIONS:
        return None
    return op.emit(kind, [y], dict(zip(_ACTIVATIONS[kind], map(float, parameters), strict=False)), outputs=1)


def _padding_mask(op: Builder, mask: ir.Value, q: ir.Value, low: float) -> ir.Value:
    """Turn a key mask of ones and zeros into an additive mask of shape (batch, 1, queries, keys)."""
    keep = op.Unsqueeze(op.Cast(mask, to=int(ir.DataType.BOOL)), [1, 2])
    length = op.Gather(op.shape(q), [1], axis=0)
    rows = op.Concat([1, 1], length, [1], axis=0)  # onnxruntime does not broadcast over the query axis
    return op.Expand(op.Where(keep, op.scalar(0, q), op.scalar(low, q)), rows)  # type: ignore[no-any-return]


def _multi_head_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Attention over projected queries, keys and values (batch, length, heads · size); masks are added to the scores."""
    q, k, v, bias, padding, scores, *past = [*node.inputs, *[None] * 8][:8]
    shapes = [dims(value) if value is not None else None for value in (q, k, v)]
    if any(shape is None or len(shape) != 3 for shape in shapes) or any(p is not None for p in past) or _used(node, 1, 2):
        return None
    assert q is not None
    widths = [shape[2] for shape in shapes if shape is not None]
    if bias is not None:
        if not all(isinstance(w, int) for w in widths):
            return None
        parts = op.Split(bias, widths, axis=0, _outputs=3)
        q, k, v = (op.Add(value, part) for value, part in zip((q, k, v), parts, strict=True))
    assert q is not None
    mask = scores
    if padding is not None:
        if len(dims(padding) or ()) != 2:
            return None
        added = _padding_mask(op, padding, q, float(take(node, "mask_filter_value", -10000.0)))
        mask = added if scores is None else op.Add(scores, added)
    heads = int(take(node, "num_heads"))
    return [_attention(op, q, k, v, mask, heads, heads, take(node, "scale"), causal=bool(take(node, "unidirectional", 0)))]


def _attention(
    op: Builder,
    q: ir.Value | None,
    k: ir.Value | None,
    v: ir.Value | None,
    mask: ir.Value | None,
    heads: int,
    kv_heads: int,
    scale: float | None,
    *,
    causal: bool,
    softcap: float = 0.0,
) -> ir.Value:
    options: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": kv_heads, "is_causal": int(causal)}
    if scale:  # onnxruntime takes 0 as the default, 1/√size
        options["scale"] = float(scale)
    if softcap:
        options["softcap"] = float(softcap)
    return op.emit("Attention", [q, k, v, mask], options, outputs=1)[0]


def _used(node: ir.Node, first: int, last: int) -> bool:
    return any(v.uses() or v.is_graph_output() for v in node.outputs[first : last + 1])


def _rotary_embedding(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Positions are given as a table (batch, length), or as one number: the position of the first token."""
    x, positions, cosines, sines = node.inputs
    shape = static_dims(cosines) if cosines is not None else None
    found = dims(x) if x is not None else None
    if x is None or positions is None or found is None or take(node, "is_packed_batching", 0):
        return None
    if float(take(node, "scale", 1.0)) != 1.0:
        return None
    heads, partial = int(take(node, "num_heads", 0)), int(take(node, "rotary_embedding_dim", 0))
    if len(found) == 3 and not heads:
        if shape is None or not isinstance(found[2], int):
            return None
        heads = found[2] // (2 * shape[1])
    if len(dims(positions) or (0, 0)) == 1:
        positions = _count_from(op, positions, x, -2)
    options = {"interleaved": int(take(node, "interleaved", 0)), "num_heads": heads, "rotary_embedding_dim": partial}
    return [op.RotaryEmbedding(x, cosines, sines, positions, **options)]


def _count_from(op: Builder, first: ir.Value, x: ir.Value, axis: int) -> ir.Value:
    """Positions first, first + 1, … as one row per sample of ``x``; their number is the size of its axis ``axis``."""
    size = op.shape(x)
    length = op.Gather(size, op.const(np.asarray(axis)), axis=0)
    steps = op.Add(
        op.Range(op.const(np.asarray(0)), length, op.const(np.asarray(1))), op.Cast(first, to=int(ir.DataType.INT64))
    )
    batch = op.Gather(size, [0], axis=0)
    return op.Expand(op.Unsqueeze(steps, [0]), op.Concat(batch, op.Unsqueeze(length, [0]), axis=0))  # type: ignore[no-any-return]


def _group_query_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Causal attention without past keys, as in training; only padding sees keys after the last valid one."""
    q, k, v, past_key, past_value, _, _, cosines, sines, positions, scores, sink = [*node.inputs, *[None] * 12][:12]
    heads, kv_heads = int(take(node, "num_heads")), int(take(node, "kv_num_heads"))
    special = take(node, "local_window_size", -1) != -1 or take(node, "smooth_softmax", 0) == 1 or sink is not None
    past = any(p is not None and 0 not in (dims(p) or ()) for p in (past_key, past_value))
    shape = dims(q) if q is not None else None
    if special or past or q is None or shape is None or not isinstance(shape[2], int):
        return None
    if k is None:
        size = shape[2] // (heads + 2 * kv_heads)
        q, k, v = op.Split(q, [heads * size, kv_heads * size, kv_heads * size], axis=2, _outputs=3)
    else:
        size = shape[2] // heads
    assert q is not None
    assert v is not None
    if take(node, "do_rotary", 0):
        if positions is None:
            positions = _count_from(op, op.const(np.zeros(1, np.int64)), q, 1)
        interleaved = int(take(node, "rotary_interleaved", 0))
        q = op.RotaryEmbedding(q, cosines, sines, positions, num_heads=heads, interleaved=interleaved)
        k = op.RotaryEmbedding(k, cosines, sines, positions, num_heads=kv_heads, interleaved=interleaved)
    softcap, scale = float(take(node, "softcap", 0.0)), take(node, "scale")
    y = _attention(op, q, k, v, scores, heads, kv_heads, scale, causal=True, softcap=softcap)
    present = [op.Transpose(op.Reshape(value, [0, 0, kv_heads, size]), perm=[0, 2, 1, 3]) for value in (k, v)]
    return [y, *present]


CONTRIBUTED: dict[str, Adapter] = {
    "BiasGelu": _bias_gelu,
    "FastGelu": _fast_gelu,
    "FusedConv": _fused_conv,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "GroupQueryAttention": _group_query_attention,
    "LayerNormalization": _layer_normalization,
    "MultiHeadAttention": _multi_head_attention,
    "QuickGelu": _quick_gelu,
    "RotaryEmbedding": _rotary_embedding,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SkipLayerNormalization": _skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_normalization,
    **QUANTIZED_OPS,
}
"""``com.microsoft`` op → its standard form."""
