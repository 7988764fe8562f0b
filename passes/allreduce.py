"""allreduce: put an AllReduce between every gradient and the update node that consumes it.

    before   dW ─► Adam(W, ·)
    after    dW ─► AllReduce(sum, group=data) ─► Adam(W, ·)

What is reduced, and how, is declared with each op (``reduces`` in :mod:`graphc.ir.declare`): gradients and loss weights
by sum, batch statistics by mean. The graph does not depend on the number of workers; on one, the plan drops collectives.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.pipeline import Context, graph_pass


@graph_pass("allreduce", requires=("optimizer",))
def allreduce(model: ir.Model, ctx: Context, *, group: str = "data") -> bool:
    """Insert one AllReduce per (value, reduction) that an update or a reported mean consumes.

    Args:
        group: the mesh axis over which to reduce.
    """
    graph = model.graph
    op = Builder(graph, scope="allreduce")
    reduced: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in list(graph):
        declaration = declaration_of(node)
        if declaration is None:
            continue
        for index, reduction in declaration.reduces.items():
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is None:
                continue
            result = reduced.get((value, reduction))
            if result is None:
                op.before = node
                result = op.graphc.AllReduce(value, tag=f"{group}/{value.name}", group=group, reduce=reduction)
                reduced[value, reduction] = result
            node.replace_input_with(index, result)
    ctx.note(f"allreduce: {len(reduced)} AllReduces over axis {group!r}")
    return bool(reduced)
