"""master_weights: store low-precision copies of parameters as state; only the update reads float32.

    before   w = Cast(W, bf16);   … = Gemm(x, w);   dW = Cast(dw, float) ─► Adam(W, dW, …)
    after    … = Gemm(x, W::bf16);   dw ─► Adam(W, dw, …) ─► W::next ─► Narrow(W::bf16, ·)

The mixed-precision graph converts parameters where they are read, so each worker holds all of them in float32. Sharded updates
(ZeRO) do not need that: ``W::bf16`` is state that every update writes, gradients stay in the low type up to the update, and
only the update reads the float32 parameter, the **master**, so each worker keeps only its shard of it. With Adam a
parameter takes 2 + 2 + 12 bytes with the 12 sharded, instead of 4 + 4 + 8 with the 8 sharded. On one worker the results are
bit-identical. A checkpoint holds masters only.

A backend whose update kernel also writes the copy asks for this pass too (``low_gradients=false``), so that no step casts a
parameter. The graph then has buckets, and the flat buffer of a bucket is copied as a whole.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import operand, put
from graphc.ir.facts import array_of
from graphc.ir.names import BUCKET, GRADIENT_OF
from graphc.ir.ops.updates import LOW
from graphc.ir.shards import cut_alike
from graphc.ir.state import add_initializer
from graphc.ir.updates import next_value_of, source_of, state_of, trains
from graphc.pipeline import Context, graph_pass

VIEWS = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
"""Ops allowed between a parameter and its cast, because they commute with it."""

SUFFIX = {ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT16: "fp16"}


@graph_pass("master_weights", requires=("mixed_precision", "optimizer"), changes="training")
def master_weights(model: ir.Model, ctx: Context, *, low_gradients: bool = True, vectors: bool = True) -> bool:
    """Store a low-precision copy of every parameter that the computation reads in that type.

    Args:
        low_gradients: whether gradients stay in the low type up to the update, and are reduced in it.
        vectors: whether one-dimensional parameters have copies too. A library that adds a bias to a product in float32 reads
            the master, and casts of vectors cost little.
    """
    graph, count = model.graph, 0
    op = Builder(graph)
    for updates in _together(graph):
        casts = {update: _casts(graph, state_of(update), vectors) for update in updates}
        dtype = next((chain[-1].outputs[0].dtype for found in casts.values() for chain in found), None)
        if dtype is not None and all(_may_be_copied(update) for update in updates):
            for update in updates:
                count += _keep_copy(op, update, dtype, casts[update])
        if low_gradients:
            for update in updates:
                _keep_low(graph, update)
    ctx.note(f"master_weights: copies {counted(count, 'parameter')} to a low type")
    return count > 0


def _together(graph: ir.Graph) -> list[list[ir.Node]]:
    """The updates of optimizers, grouped by bucket."""
    found: dict[str | ir.Node, list[ir.Node]] = {}
    for node in graph:
        if trains(node):
            found.setdefault(node.attributes.get_string(BUCKET, "") or node, []).append(node)
    return list(found.values())


def _casts(graph: ir.Graph, value: ir.Value, vectors: bool) -> list[list[ir.Node]]:
    """The casts of a parameter to a low type, each with the nodes in front of it that change shape or order."""
    if not vectors and value.is_initializer() and len(value.shape or ()) < 2:
        return []
    found = []
    for node in dict.fromkeys(user for user, index in value.uses() if index == 0):
        if node.graph is graph and _lowers(node):
            found.append([node])
        elif node.graph is graph and node.op_type in VIEWS and not node.domain:
            found += [[node, *chain] for chain in _casts(graph, node.outputs[0], vectors)]
    return found


def _lowers(node: ir.Node) -> bool:
    return (
        node.op_type == "Cast" and node.domain == "" and node.outputs[0].dtype in LOW and not node.outputs[0].is_graph_output()
    )


def _may_be_copied(update: ir.Node) -> bool:
    """Whether the parameter is float32 and its update is final: no average over workers changes it."""
    return state_of(update).dtype == ir.DataType.FLOAT and not next_value_of(update).uses()


def _keep_copy(op: Builder, update: ir.Node, dtype: ir.DataType, casts: list[list[ir.Node]]) -> bool:
    """Replace the casts of a parameter to ``dtype`` by state written after its update; returns whether there were any."""
    parameter = state_of(update)
    name = f"{parameter.name}::{SUFFIX[dtype]}"
    copy = add_initializer(op.graph, name, array_of(parameter).astype(dtype.numpy()))
    cut_alike(copy, parameter)
    for chain in (c for c in casts if c[-1].outputs[0].dtype == dtype):
        _read_copy(op, copy, chain)
    bucket = update.attributes.get_string(BUCKET, "")
    attributes = {BUCKET: bucket} if bucket else {}
    op.before, op.scope = None, "update"
    (following,) = op.emit(
        "Narrow", [copy, next_value_of(update)], attributes, domain=DOMAIN, outputs=[f"{name}::next"], name=f"update/{name}"
    )
    skip, node = operand(update, "skip"), following.producer()
    if skip is not None and node is not None:
        put(node, "skip", skip)
    return bool(casts)


def _read_copy(op: Builder, copy: ir.Value, chain: list[ir.Node]) -> None:
    """Apply the nodes between a parameter and its cast to the copy; removes nodes without other readers."""
    *views, cast = chain
    op.before, op.scope, value = cast, cast.name or "copy", copy
    for view in views:
        attributes = {name: attribute.value for name, attribute in view.attributes.items()}
        (value,) = op.emit(view.op_type, [value, *view.inputs[1:]], attributes)
    cast.outputs[0].replace_all_uses_with(value)
    for node in reversed(chain):
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            op.graph.remove(node, safe=True)


def _keep_low(graph: ir.Graph, update: ir.Node) -> None:
    """Make the update read the gradient before its cast to float32."""
    wide = source_of(update)
    cast = wide.producer()
    if cast is None or cast.op_type != "Cast" or cast.domain or len(list(wide.uses())) > 1:
        return
    low = cast.inputs[0]
    if low is None or low.dtype not in LOW or low.producer() is None or wide.is_graph_output():
        return
    update.replace_input_with(list(update.inputs).index(wide), low)
    low.metadata_props[GRADIENT_OF] = wide.metadata_props.pop(GRADIENT_OF, state_of(update).name or "")
    graph.remove(cast, safe=True)
