"""Scaled dot-product attention as one op; an attribute gives each operand's axis order.

    y, saved   = graphc.ScaledDotProductAttention(q, k, v, mask?, keep?; scale, causal, layout, saves, factor)
    gradients… = graphc.ScaledDotProductAttentionGrad(dy, q, k, v, mask, y, saved, keep?; the same attributes)

``layout`` is written like an einsum, ``"bthd,bthd,bthd->bthd"``: batch b, heads h, length t (k and v have their own), head
size d; a missing letter is an axis of size 1. A digit is an index: ``"tb0hd,tb1hd,tb2hd->tbhd"`` reads q, k and v from parts
0, 1 and 2 of axis 2 of one tensor, which is then passed three times. So a kernel reads the product of a packed projection in
place and writes its gradient in place for the next product, without copies.

With grouped queries, each head of k and v serves an equal number of consecutive heads of q. ``mask`` broadcasts to
(b, h, t, length of k): numbers are added to the scores, booleans mark visible keys. ``causal``: query i sees the keys 0 to i.
A query that sees no key gets zeros. ``finite`` promises that the mask is float32 and additive and leaves every query a key:
kernels can use it as it is (the ``flash_attention`` pass makes it so).

A dropout multiplies the probabilities by ``factor`` · ``keep``, of shape (b, h, t, length of k); the probabilities before
dropout are saved. With ``factor``, ``keep`` may hold zeros and ones, which half precision represents exactly.

``saves`` selects what the backward pass gets of the scores: ``probabilities``, b × h × t × length of k, or the ``logsumexp``
of each row, b × h × t, from which it recomputes the probabilities (T. Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError, UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.facts import Dim, dims, input_of
from graphc.ir.ops.random import DROPOUT_MASK

HEADS = "bhtd"
"""The axis order in which the op is defined."""

STANDARD_LAYOUT = "bhtd,bhtd,bhtd->bhtd"

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def operand_axes(layout: str) -> tuple[str, str, str, str]:
    """The axes of q, k, v and y.

    Raises:
        ModelError: the text is not a valid layout.
    """
    left, arrow, y = layout.partition("->")
    parts = (*left.split(","), y)
    if arrow and len(parts) == 4 and all(_is_layout(p) for p in parts) and y.isalpha():
        q, k, v, y = parts
        return q, k, v, y
    raise ModelError(f"layout {layout!r} of ScaledDotProductAttention is not of the form {STANDARD_LAYOUT!r}")


def _is_layout(axes: str) -> bool:
    letters = [c for c in axes if c.isalpha()]
    return set(letters) <= set(HEADS) and len(set(letters)) == len(letters) and sum(c.isdigit() for c in axes) <= 1


def packed(axes: str) -> int | None:
    """The axis that packs an operand with others, or None when it is a tensor of its own."""
    return next((k for k, c in enumerate(axes) if c.isdigit()), None)


def written(layout: str) -> list[int]:
    """Operands (0 q, 1 k, 2 v) with a gradient output; a packed tensor has one, at the first of its parts."""
    found, seen = [], False
    for index, axes in enumerate(operand_axes(layout)[:3]):
        if packed(axes) is None or not seen:
            found.append(index)
        seen |= packed(axes) is not None
    return found


def sizes(value: ir.Value, axes: str) -> dict[str, Dim]:
    """The sizes of b, h, t and d of an operand; 1 for a missing axis.

    Raises:
        ModelError: the rank of the operand does not fit.
    """
    found = dims(value) or [None] * len(axes)
    if len(found) != len(axes):
        raise ModelError(f"{value.name!r} has rank {len(found)}, its layout {axes!r} has {len(axes)} axes")
    return {letter: found[axes.index(letter)] if letter in axes else 1 for letter in HEADS}


def _infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    q_axes, k_axes, v_axes, y_axes = operand_axes(attributes["layout"])
    q, k, v = (value for value in inputs[:3] if value is not None)
    of_q, of_k, of_v = sizes(q, q_axes), sizes(k, k_axes), sizes(v, v_axes)
    _check_sizes(q, of_q, of_k, of_v)
    dtype, _ = spec_of(q)
    y = {**of_q, "d": of_v["d"]}
    rows = [of_q["b"], of_q["h"], of_q["t"]]
    if attributes["saves"] == "probabilities":
        saved: Spec = dtype, ir.Shape([*rows, of_k["t"]])
    elif attributes["saves"] == "logsumexp":
        saved = ir.DataType.FLOAT if dtype in _HALVES else dtype, ir.Shape(rows)
    else:
        raise ModelError(f"saves is 'probabilities' or 'logsumexp', not {attributes['saves']!r}")
    return [(dtype, ir.Shape([y[letter] for letter in y_axes])), saved]


def _check_sizes(q: ir.Value, of_q: Mapping[str, Dim], of_k: Mapping[str, Dim], of_v: Mapping[str, Dim]) -> None:
    pairs = [(of_k[c], of_v[c]) for c in "bht"] + [(of_q[c], of_k[c]) for c in "bd"]
    known = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
    queries, keys = of_q["h"], of_k["h"]
    shared = not isinstance(queries, int) or not isinstance(keys, int) or queries % max(keys, 1) == 0
    if any(a != b for a, b in known) or not shared:
        raise ModelError(f"ScaledDotProductAttention of {q.name!r}: q is {of_q}, k {of_k}, v {of_v}, which do not go together")


_ATTRIBUTES = {"scale": REQUIRED, "causal": 0, "layout": STANDARD_LAYOUT, "saves": "probabilities", "finite": 0, "factor": 1.0}


@declare("ScaledDotProductAttention", inputs="q k v mask? keep?", outputs="y saved", infer=_infer, attributes=_ATTRIBUTES)
def scaled_dot_product_attention(
    op: Builder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: ir.Value | None = None,
    keep: ir.Value | None = None,
    **options: Any,
) -> tuple[ir.Value, ...]:
    """y = (p ∘ keep)·v with p = softmax(scale·q·kᵀ + mask) over the keys; ``saved`` is p, or of each row log Σ exp(score)."""
    axes = operand_axes(options["layout"])
    q4, k4, v4 = (to_heads(op, value, of) for value, of in zip((q, k, v), axes[:3], strict=True))
    scores, hidden = _scores(op, q4, k4, mask, options)
    p = op.Softmax(scores, axis=-1)
    if hidden is not None:
        p = op.Where(hidden, op.scalar(0, p), p)
    p = op.cast_like(p, q)
    y = from_heads(op, op.MatMul(_dropped(op, p, keep, options, q), repeat_heads(op, v4, q4)), axes[3])
    if options["saves"] == "probabilities":
        return y, p
    top = op.ReduceMax(scores, [-1], keepdims=1)
    total = op.Add(top, op.Log(op.ReduceSum(op.Exp(op.Sub(scores, top)), [-1], keepdims=1)))
    if hidden is not None:
        total = op.Where(hidden, op.scalar(-math.inf, total), total)
    return y, op.Squeeze(total, [-1])


@declare(
    "ScaledDotProductAttentionGrad",
    inputs="dy q k v mask? y saved keep?",
    outputs="*gradients",
    infer=lambda inputs, attributes: [spec_of(inputs[1 + index]) for index in written(attributes["layout"])],
    attributes=_ATTRIBUTES,
)
def scaled_dot_product_attention_grad(
    op: Builder,
    dy: ir.Value,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: ir.Value | None,
    y: ir.Value,
    saved: ir.Value,
    keep: ir.Value | None = None,
    **options: Any,
) -> tuple[ir.Value, ...]:
    """∂v = pᵀ·dy,  ∂q = scale·ds·k,  ∂k = scale·dsᵀ·q  with ds = p·(dp - Σ dp·p), dp = dy·vᵀ; all parts of a packed tensor.

    A dropout multiplies p in ∂v, and dp.
    """
    axes, scale = operand_axes(options["layout"]), options["scale"]
    q4, k4, v4 = (to_heads(op, value, of) for value, of in zip((q, k, v), axes[:3], strict=True))
    dy4 = to_heads(op, dy, axes[3])
    p = _saved_probabilities(op, q4, k4, mask, saved, options)
    ds = _score_gradient(op, dy4, v4, p, q4, keep, options)
    scaled = op.Mul(q4, scale)
    found = (
        op.Mul(op.MatMul(ds, repeat_heads(op, k4, q4)), scale),
        _sum_heads(op, op.MatMul(_swap(op, ds), scaled), k4),
        _sum_heads(op, op.MatMul(_swap(op, _dropped(op, p, keep, options, q)), dy4), v4),
    )
    results = []
    for index in written(options["layout"]):
        place = packed(axes[index])
        if place is None:
            results.append(from_heads(op, found[index], axes[index]))
            continue
        parts = {int(a[place]): (f, a) for f, a in zip(found, axes, strict=False) if packed(a) is not None}
        own = (from_heads(op, part, a.replace(str(k), "")) for k, (part, a) in sorted(parts.items()))
        results.append(op.Concat(*(op.Unsqueeze(part, [place]) for part in own), axis=place))
    return tuple(results)


def drawn_mask(keep: ir.Value | None) -> ir.Node | None:
    """The node that draws the dropout mask, found through reshapes."""
    node = keep.producer() if keep is not None else None
    while node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == DROPOUT_MASK else None


def mask_gradient(op: Builder, node: ir.Node, dy: ir.Value, saved: ir.Value, attributes: Mapping[str, Any]) -> Any:
    """The gradient of the scores, and so of the mask added to them: b × h × t × length of k."""
    q, k, v = (input_of(node, index) for index in range(3))
    mask, keep = (*node.inputs, None)[3:5]
    axes = operand_axes(attributes["layout"])
    q4, k4, v4 = (to_heads(op, value, of) for value, of in zip((q, k, v), axes[:3], strict=True))
    p = _saved_probabilities(op, q4, k4, mask, saved, attributes)
    return _score_gradient(op, to_heads(op, dy, axes[3]), v4, p, q4, keep, attributes)


def to_heads(op: Builder, x: ir.Value, axes: str) -> Any:
    """x as (batch, heads, length, size)."""
    place = packed(axes)
    if place is not None:
        part = int(axes[place])
        x = op.Squeeze(op.Slice(x, [part], [part + 1], [place]), [place])  # moves elements only, so kernels read it in place
        axes = axes[:place] + axes[place + 1 :]
    order = [axes.index(letter) for letter in HEADS if letter in axes]
    if order != sorted(order):
        x = op.Transpose(x, perm=order)
    missing = [k for k, letter in enumerate(HEADS) if letter not in axes]
    return op.Unsqueeze(x, missing) if missing else x


def from_heads(op: Builder, x: Any, axes: str) -> Any:
    """Transpose (batch, heads, length, size) to the order ``axes``."""
    missing = [k for k, letter in enumerate(HEADS) if letter not in axes]
    if missing:
        x = op.Squeeze(x, missing)
    held = [letter for letter in HEADS if letter in axes]
    order = [held.index(letter) for letter in axes]
    return x if order == sorted(order) else op.Transpose(x, perm=order)


def repeat_heads(op: Builder, x: Any, q: Any) -> Any:
    """Repeat each head of keys or values for every query head that uses it."""
    group = _group(x, q)
    if group == 1:
        return x
    wide = op.Concat(*[op.Unsqueeze(x, [2])] * group, axis=2)
    return op.Reshape(wide, op.Concat(op.Shape(x, start=0, end=1), [-1], op.Shape(x, start=2), axis=0))


def _group(x: Any, q: Any) -> int:
    own, queries = (dims(x) or (None,) * 4)[1], (dims(q) or (None,) * 4)[1]
    if own == queries:
        return 1
    if not isinstance(own, int) or not isinstance(queries, int) or own == 0 or queries % own:
        raise UnsupportedOpError(f"{queries} heads of queries cannot share {own} heads of keys: {x.name!r}")
    return queries // own


def _sum_heads(op: Builder, x: Any, like: Any) -> Any:
    """Sum over the query heads that share a head of ``like``."""
    group = _group(like, x)
    if group == 1:
        return x
    own = (dims(like) or ())[1]
    assert isinstance(own, int)
    shape = op.Concat(op.Shape(x, start=0, end=1), [own, group], op.Shape(x, start=2), axis=0)
    return op.ReduceSum(op.Reshape(x, shape), [2], keepdims=0)


def _swap(op: Builder, x: Any) -> Any:
    return op.Transpose(x, perm=[0, 1, 3, 2])


def _widen(op: Builder, x: Any) -> Any:
    """Convert half precision to float32 before sums and exponentials."""
    return op.Cast(x, to=int(ir.DataType.FLOAT)) if x.dtype in _HALVES else x


def _scores(op: Builder, q: Any, k: Any, mask: ir.Value | None, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The masked scores, and the rows that are masked entirely (left unmasked); None when no row can be."""
    scores = _widen(op, op.MatMul(op.Mul(q, options["scale"]), _swap(op, repeat_heads(op, k, q))))
    low, zero = op.scalar(-math.inf, scores), op.scalar(0, scores)
    bias: Any = None
    if mask is not None:
        bias = op.Where(mask, zero, low) if mask.dtype == ir.DataType.BOOL else op.cast_like(mask, scores)
    if options["causal"]:
        keys, queries = (_positions(op, scores, axis) for axis in (3, 2))
        seen = op.LessOrEqual(keys, op.Unsqueeze(queries, [1]))
        bias = op.Where(seen, zero if bias is None else bias, low)
    if mask is None or options["finite"]:
        return (scores if bias is None else op.Add(scores, bias)), None
    hidden = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), low)
    return op.Add(scores, op.Where(hidden, zero, bias)), hidden


def _positions(op: Builder, x: Any, axis: int) -> Any:
    """0, 1, 2 … along an axis."""
    size = (dims(x) or (None,) * 4)[axis]
    if isinstance(size, int):
        return op.const(np.arange(size, dtype=np.int64))
    return op.Range(np.int64(0), op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0]), np.int64(1))


def _saved_probabilities(
    op: Builder, q: Any, k: Any, mask: ir.Value | None, saved: ir.Value, options: Mapping[str, Any]
) -> Any:
    if options["saves"] == "probabilities":
        return saved
    scores, hidden = _scores(op, q, k, mask, options)
    p = op.Exp(op.Sub(scores, op.Unsqueeze(saved, [-1])))
    return op.cast_like(p if hidden is None else op.Where(hidden, op.scalar(0, p), p), q)


def _score_gradient(op: Builder, dy: Any, v: Any, p: Any, q: Any, keep: ir.Value | None, options: Mapping[str, Any]) -> Any:
    dp = _widen(op, op.MatMul(dy, _swap(op, repeat_heads(op, v, q))))
    return op.cast_like(op.graphc.SoftmaxGrad(_dropped(op, dp, keep, options, dp), _widen(op, p), axis=-1), q)


def _dropped(op: Builder, x: Any, keep: ir.Value | None, options: Mapping[str, Any], like: Any) -> Any:
    """x · factor · keep, multiplied in float32 at least and rounded to the type of ``like``."""
    if keep is None:
        return x
    wide = _widen(op, x)
    product = op.Mul(wide, op.cast_like(keep, wide))
    return op.cast_like(op.Mul(product, options["factor"]) if options["factor"] != 1 else product, like)
