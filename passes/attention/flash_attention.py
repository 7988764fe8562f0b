"""flash_attention: rewrite attention for fused kernels, which never store scores and probabilities.

    before   y, p = graphc.ScaledDotProductAttention(q, k, v, seen)       seen: booleans, p: probabilities for the gradient
    after    a, l = graphc.ScaledDotProductAttention(q, k, v, bias; saves=logsumexp, finite=1);  y = Where(hidden, 0, a)

A fused kernel saves one number per row. It supports only additive masks, and no mask over every key of a query. So booleans
and infinities become -1e30. Rows that may be masked entirely are set to zero after the kernel, and before the gradient's kernel
so are their adjoints, while their saved number is set to 1e30, from which every probability is 0.

The mask of a dropout becomes zeros and ones in the type of q; the gradient redraws it, so none is kept for the backward pass.
Its factor multiplies the kernel's result and, before the gradient's kernel, the adjoint; products take such factors in.
Backends that have the op ask for this pass; shapes are static.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import OPS
from graphc.ir.facts import constant, input_of, inputs_of, static_dims
from graphc.ir.infer import apply
from graphc.ir.ops.attention import drawn_mask, from_heads, operand_axes
from graphc.ir.ops.random import dropout_scale
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass

FORWARD, BACKWARD = "ScaledDotProductAttention", "ScaledDotProductAttentionGrad"

KEEP = {FORWARD: 4, BACKWARD: 7}
"""Index of the dropout mask among the operands."""

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

LOW = -1e30
"""Stands for minus infinity: a float32 score vanishes when this is added."""


@graph_pass("flash_attention", changes="form")
def flash_attention(model: ir.Model, ctx: Context) -> bool:
    """Make attention save one number per row of scores, and use finite additive masks."""
    graph, op = model.graph, Builder(model.graph)
    nodes = [node for node in graph if node.domain == "graphc" and node.op_type in (FORWARD, BACKWARD)]
    changed = [_save_rows(node) for node in nodes if node.op_type == FORWARD]
    plain: dict[ir.Value, ir.Value] = {}
    drawn = [_draw_bits(op, node, plain) for node in nodes]
    if any(drawn):
        dead_code_elimination(graph)
    changed += [new is not None for new in drawn]
    nodes = [new or node for new, node in zip(drawn, nodes, strict=True)]
    masks: dict[object, tuple[ir.Value, ir.Value | None]] = {}
    for node in nodes:
        shift = 1 if node.op_type == BACKWARD else 0
        mask = node.inputs[shift + 3] if len(node.inputs) > shift + 3 else None
        if mask is None or node.attributes.get_int("finite", 0) == 1:
            continue
        op.before, op.scope = node, node.name or node.op_type
        key = mask, node.attributes.get_int("causal", 0), tuple(_lengths(node))
        if key not in masks:
            masks[key] = _finite(op, node, mask)
        _with_mask(graph, op, node, *masks[key])
        changed.append(True)
    ctx.note(f"flash_attention: {sum(changed)} changes")
    return any(changed)


def _save_rows(node: ir.Node) -> bool:
    """Save the log-sum-exp of each row, if only gradients of the op read the saved value."""
    saved = node.outputs[1]
    readers = list(saved.consumers())
    if node.attributes.get_string("saves", "probabilities") == "logsumexp" or saved.is_graph_output():
        return False
    if any(reader.op_type != BACKWARD for reader in readers):
        return False
    for each in (node, *readers):
        each.attributes["saves"] = ir.AttrString("saves", "logsumexp")
    saved.shape = None
    apply(node)
    return True


def _draw_bits(op: Builder, node: ir.Node, plain: dict[ir.Value, ir.Value]) -> ir.Node | None:
    """Replace the node by one with its own mask of zeros and ones, instead of the factors of its dropout; None: no dropout.

    Args:
        plain: by each result of a forward node, what its kernel writes.
    """
    index = KEEP[node.op_type]
    keep = node.inputs[index] if len(node.inputs) > index else None
    drawn = drawn_mask(keep)
    if keep is None or drawn is None:
        return None
    inputs, backward = list(node.inputs), node.op_type == BACKWARD
    q = input_of(node, 1 if backward else 0)
    op.before, op.scope = node, f"{node.name or node.op_type}/keep"
    values = OPS[drawn.op_type].attribute_values(drawn)
    mask = op.emit(drawn.op_type, drawn.inputs, values, domain="graphc", outputs=1)[0]
    ones = op.cast_like(op.Greater(mask, op.scalar(0, mask)), q)
    shape = static_dims(keep) or ()
    inputs[index] = op.Reshape(ones, [*[1] * (4 - len(shape)), *shape])
    factor = dropout_scale(values["ratio"])
    if backward:
        inputs[0], inputs[5] = scaled(op, input_of(node, 0), factor), plain.get(input_of(node, 5), inputs[5])
    attributes = {**OPS[node.op_type].attribute_values(node), "factor": 1.0}
    made = list(op.emit(node.op_type, inputs, attributes, domain="graphc", outputs=len(node.outputs)))
    new = made[0].producer()
    if not backward:
        kernels = made[0]
        made[0] = scaled(op, kernels, factor)
        plain[made[0]] = kernels
    for old, value in zip(node.outputs, made, strict=True):
        replace(op.graph, op, old, value)
    op.graph.remove(node, safe=True)
    return new


def scaled(op: Builder, x: ir.Value, factor: float) -> ir.Value:
    """x · factor, of which half precision rounds the result only."""
    if factor == 1:
        return x
    wide = op.Cast(x, to=int(ir.DataType.FLOAT)) if x.dtype in HALVES else x
    found: ir.Value = op.cast_like(op.Mul(wide, op.scalar(factor, wide)), x)
    return found


def _lengths(node: ir.Node) -> list[int]:
    """The numbers of queries and keys."""
    shift = 1 if node.op_type == BACKWARD else 0
    axes = operand_axes(OPS[node.op_type].attribute_values(node)["layout"])
    found = []
    for value, order in zip(inputs_of(node)[shift : shift + 2], axes, strict=False):
        found.append((static_dims(value) or ())[order.index("t")] if "t" in order else 1)
    return found


def _finite(op: Builder, node: ir.Node, mask: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """The mask as float32 numbers to add, of rank 4, and the rows that it masks entirely; None: none."""
    shape = static_dims(mask) or ()
    if len(shape) < 4:
        mask = op.Reshape(mask, [*[1] * (4 - len(shape)), *shape])
    boolean = mask.dtype == ir.DataType.BOOL
    wide = mask if boolean else op.Cast(mask, to=int(ir.DataType.FLOAT))
    low, zero = np.float32(LOW), np.float32(0)
    number = op.Where(mask, zero, low) if boolean else op.Max(wide, low)
    seen = mask if boolean else op.Greater(wide, np.float32(-math.inf))
    causal = node.attributes.get_int("causal", 0)
    if not _may_hide(mask, causal, _lengths(node)):
        return number, None
    if causal:
        queries, keys = (np.arange(length) for length in _lengths(node))
        seen = op.And(seen, op.LessOrEqual(op.const(keys), op.const(queries[:, None])))
    return number, op.Equal(op.ReduceMax(op.Where(seen, np.float32(1), zero), [-1], keepdims=1), zero)


def _may_hide(mask: ir.Value, causal: int, lengths: list[int]) -> bool:
    known = constant(mask)
    if known is None:
        return True
    seen = known if known.dtype == np.bool_ else known.astype(np.float64) > -math.inf
    return not (seen & (np.tri(lengths[0], lengths[1]) > 0) if causal else seen).any(axis=-1).all()


def _with_mask(graph: ir.Graph, op: Builder, node: ir.Node, number: ir.Value, hidden: ir.Value | None) -> None:
    """Replace the node by the same call with another mask; zeroes ``hidden`` rows in its result or incoming adjoint."""
    attributes = OPS[node.op_type].attribute_values(node)
    backward = node.op_type == BACKWARD
    axes, inputs = operand_axes(attributes["layout"])[3], list(node.inputs)
    rows = None if hidden is None else from_heads(op, hidden, axes)
    inputs[4 if backward else 3] = number
    if backward and rows is not None and hidden is not None:
        dy, saved = input_of(node, 0), input_of(node, 6)
        inputs[0] = op.Where(rows, op.scalar(0, dy), dy)
        inputs[6] = op.Where(op.Squeeze(hidden, [-1]), op.scalar(-LOW, saved), saved)
    made = list(op.emit(node.op_type, inputs, {**attributes, "finite": 1}, domain="graphc", outputs=len(node.outputs)))
    if not backward and rows is not None:
        made[0] = op.Where(rows, op.scalar(0, made[0]), made[0])
    for old, new in zip(node.outputs, made, strict=True):
        replace(graph, op, old, new)
    graph.remove(node, safe=True)
