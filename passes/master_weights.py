"""master_weights: keep what products read in the low type, and the float32 parameters only for the update.

    before   w = Cast(W, bf16);   … = Gemm(x, w);   dW = Cast(dw, float) ─► Adam(W, dW, …)
    after    … = Gemm(x, W::bf16);   dw ─► Adam(W, dw, …) ─► W::next ─► Narrow(W::bf16, ·)

The mixed-precision graph converts parameters where they are read, so each worker holds all of them in float32. Where updates
are sharded (ZeRO) that is not needed: ``W::bf16`` is state that every update writes, gradients stay in the low type up to the
update, and the float32 parameter, its **master**, is read by its own update alone, so that a worker keeps its part of it.
Per parameter that is 2 + 2 + 12 bytes (Adam) of which the 12 are divided, instead of 4 + 4 + 8 with the 8 divided. On one
worker the numbers are the same to the bit. A checkpoint holds masters only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.names import GRADIENT_OF
from graphc.ir.ops.updates import LOW
from graphc.ir.state import add_initializer
from graphc.passes._updates import trains, updates_of
from graphc.pipeline import Context, graph_pass

SUFFIX = {ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT16: "fp16"}


@graph_pass("master_weights", requires=("mixed_precision", "optimizer"))
def master_weights(model: ir.Model, ctx: Context, *, low_gradients: bool = True) -> bool:
    """Make a state of every parameter in the low type, where the computation reads it in that type.

    Args:
        low_gradients: whether gradients stay in the low type up to the update, and are reduced in it.
    """
    graph, count = model.graph, 0
    for update in [n for n in updates_of(graph) if trains(n)]:
        parameter = update.inputs[0]
        assert parameter is not None
        casts = [n for n in parameter.consumers() if _lowers(n)]
        if casts and parameter.dtype == ir.DataType.FLOAT:
            _keep_copy(graph, update, parameter, casts)
            count += 1
        if low_gradients:
            _keep_low(graph, update)
    ctx.note(f"master_weights: {count} parameters are read in a low type")
    return count > 0


def _lowers(node: ir.Node) -> bool:
    return (
        node.op_type == "Cast" and node.domain == "" and node.outputs[0].dtype in LOW and not node.outputs[0].is_graph_output()
    )


def _keep_copy(graph: ir.Graph, update: ir.Node, parameter: ir.Value, casts: list[ir.Node]) -> None:
    """Replace the casts of a parameter by state that the update writes."""
    dtype = casts[0].outputs[0].dtype
    assert dtype is not None
    assert parameter.const_value is not None
    name = f"{parameter.name}::{SUFFIX[dtype]}"
    copy = add_initializer(graph, name, np.asarray(parameter.const_value.numpy()).astype(dtype.numpy()))
    for cast in (n for n in casts if n.outputs[0].dtype == dtype):
        cast.outputs[0].replace_all_uses_with(copy)
        graph.remove(cast, safe=True)
    op = Builder(graph, scope="update")
    op.emit("Narrow", [copy, update.outputs[0]], domain=DOMAIN, outputs=[f"{name}::next"], name=f"update/{name}")


def _keep_low(graph: ir.Graph, update: ir.Node) -> None:
    """Let the update read the gradient in front of the cast to float32."""
    wide = update.inputs[1]
    cast = wide.producer() if wide is not None else None
    if wide is None or cast is None or cast.op_type != "Cast" or cast.domain or len(list(wide.uses())) > 1:
        return
    low = cast.inputs[0]
    if low is None or low.dtype not in LOW or low.producer() is None or wide.is_graph_output():
        return
    update.replace_input_with(1, low)
    low.metadata_props[GRADIENT_OF] = wide.metadata_props.pop(GRADIENT_OF, parameter_name(update))
    graph.remove(cast, safe=True)


def parameter_name(update: ir.Node) -> str:
    """Name of the parameter that an update replaces."""
    assert update.inputs[0] is not None
    return update.inputs[0].name or ""
