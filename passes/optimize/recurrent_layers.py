"""recurrent_layers: run RNN, GRU and LSTM layers by the loop that training has, where no gradient reads them either.

    before   y, y_h = GRU(x, w, r)
    after    y, y_h = RecurrentTraining(Gemm(x, w), r)

autodiff does this to the layers on the way to a loss. In inference mode the standard ops are left: an LSTM of 256 features took
17.5 ms in onnxruntime; PyTorch takes 8.4, and so does this loop.

Shapes are static: a backend that has a kernel for RecurrentTraining asks for this pass over its plans
(:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.decomposition import replace_node
from graphc.ir.facts import static_dims
from graphc.ir.ops.recurrent import RECURRENT
from graphc.ir.ops.recurrent_training import training_form
from graphc.pipeline import Context, graph_pass


@graph_pass("recurrent_layers", changes="form")
def recurrent_layers(model: ir.Model, ctx: Context) -> bool:
    """Put RecurrentTraining in place of recurrent layers of float32 whose cell it has."""
    layers = [node for node in model.graph if _accepts(node)]
    if not layers:
        return False
    op, count = Builder(model.graph), 0
    for node in layers:
        op.before, op.scope = node, node.name or node.op_type
        replaced = training_form(op, node)
        if replaced is not None:
            replace_node(op, node, replaced)
            count += 1
    ctx.note(f"recurrent_layers: {count} of {counted(len(layers), 'layer')}")
    return count > 0


def _accepts(node: ir.Node) -> bool:
    if node.domain or node.op_type not in RECURRENT:
        return False
    shapes = [static_dims(v) for v in node.inputs if v is not None]
    x = node.inputs[0]
    return x is not None and x.dtype == ir.DataType.FLOAT and all(shape is not None and 0 not in shape for shape in shapes)
