"""allreduce: put an AllReduce between every gradient and the update node that consumes it.

    before   dW ─► Adam(W, ·)
    after    dW ─► AllReduce(sum, group=data) ─► Adam(W, ·)

Each op declares its reduced inputs (``reduces`` in :mod:`graphc.ir.declare`): gradients and loss weights
by sum, batch statistics by mean. The graph does not depend on the number of workers; on one, the plan drops collectives.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.ir.facts import dims, same_dims
from graphc.ir.names import BUCKET
from graphc.passes.optimize.simplify import replace
from graphc.pipeline import Context, graph_pass


@graph_pass("allreduce", requires=("optimizer",), changes="training")
def allreduce(model: ir.Model, ctx: Context, *, group: str = "data") -> bool:
    """Insert one AllReduce per (value, reduction) that an update or a reported mean consumes.

    Args:
        group: the mesh axis of the reduction.
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
    merged = _add_first(graph, op)
    if merged:
        ctx.note(f"allreduce: {merged} sums of two reductions are reductions of a sum")
    ctx.note(f"allreduce: {len(reduced)} AllReduces over axis {group!r}")
    return bool(reduced)


def _add_first(graph: ir.Graph, op: Builder) -> int:
    """AllReduce(a) + AllReduce(b) → AllReduce(a + b), for sums or means over one axis without other readers."""
    count = 0
    for node in list(graph):
        if node.op_type != "Add" or node.domain != "":
            continue
        parts = [value.producer() for value in node.inputs if value is not None]
        first, second = (part if part is not None and _is_linear(part) else None for part in parts)
        if first is None or second is None or first is second or not _alike(first, second):
            continue
        op.before = node
        total = op.Add(first.inputs[0], second.inputs[0])
        attributes = {k: a.value for k, a in first.attributes.items()}
        (result,) = op.emit("AllReduce", [total], attributes, domain=DOMAIN, name=first.name)
        replace(graph, op, node.outputs[0], result)
        for old in (node, first, second):
            graph.remove(old, safe=True)
        count += 1
    return count


def _is_linear(node: ir.Node) -> bool:
    """Whether an AllReduce has one operand, no bucket, one reader, and an order-independent reduction."""
    return (
        node.op_type == "AllReduce"
        and node.domain == DOMAIN
        and len(node.inputs) == 1
        and not node.attributes.get_string(BUCKET, "")
        and node.attributes.get_string("reduce", "sum") in ("sum", "mean")
        and len(list(node.outputs[0].uses())) == 1
        and not node.outputs[0].is_graph_output()
    )


def _alike(first: ir.Node, second: ir.Node) -> bool:
    """Whether both have the same reduction and the same shape: the sum must not broadcast."""
    settings = [[n.attributes.get_string(k, d) for k, d in (("group", "data"), ("reduce", "sum"))] for n in (first, second)]
    shapes = [dims(n.outputs[0]) for n in (first, second)]
    return settings[0] == settings[1] and same_dims(*shapes)
