"""tensor_measures: norms of gradients, and tests for NaN, over all shards of the tensor axis.

    before   dW (shard), db (whole) ─► SumOfSquares ─► norm
    after    dW ─► SumOfSquares ─► AllReduce(sum, tensor) ─► Add ─► norm;   db ─► SumOfSquares ─► Add

Gradients of parameters that are whole on every rank are equal there, and count once. Of a test for NaN the ranks take the
maximum. So all ranks clip by one factor, and all skip a step or none does. The pass runs after those that measure gradients.
Before that, gradients of which each rank has a part of the sum are added up (:mod:`graphc.passes.sharding.partial_gradients`).
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.ir.facts import inputs_of
from graphc.ir.shards import cuts_of
from graphc.ir.updates import source_of, state_of, trains
from graphc.passes.sharding.partial_gradients import sum_partial_gradients
from graphc.pipeline import Context, graph_pass


@graph_pass("tensor_measures", requires=("optimizer", "allreduce"), changes="training")
def tensor_measures(model: ir.Model, ctx: Context) -> bool:
    """Combine what ranks of the tensor axis measure on their shards of gradients."""
    graph, partial = model.graph, sum_partial_gradients(model)
    if partial:
        ctx.note(f"tensor_measures: gradients of {counted(partial, 'parameter')} are sums over the ranks")
    cuts = cuts_of(graph)
    group_of = {source_of(n): cut.group for n in graph if trains(n) and (cut := cuts.get(state_of(n).name or "")) is not None}
    op, count = Builder(graph), 0
    for node in list(graph):
        declaration = declaration_of(node)
        groups = {group for value in node.inputs if value is not None and (group := group_of.get(value)) is not None}
        if declaration is None or not declaration.combine or not groups:
            continue
        (group,) = groups
        _combine(graph, op, node, declaration.combine, group, group_of)
        count += 1
    ctx.note(f"tensor_measures: {count} over all shards")
    return partial + count > 0


def _combine(graph: ir.Graph, op: Builder, node: ir.Node, combine: str, group: str, group_of: dict[ir.Value, str]) -> None:
    op.before, op.scope = node, node.name or node.op_type
    flag = node.outputs[0].dtype == ir.DataType.BOOL
    divided = [v for v in inputs_of(node) if flag or v in group_of]  # a NaN on one rank counts, wherever it is
    whole = [v for v in inputs_of(node) if v not in divided]
    attributes = {k: a.value for k, a in node.attributes.items()}
    (part,) = op.emit(node.op_type, divided, attributes, domain=node.domain)
    number = op.Cast(part, to=int(ir.DataType.FLOAT)) if flag else part
    total = op.graphc.AllReduce(number, tag=f"{group}/{op.scope}", group=group, reduce=combine)
    total = op.Cast(total, to=int(ir.DataType.BOOL)) if flag else total
    if whole:
        (other,) = op.emit(node.op_type, whole, attributes, domain=node.domain)
        total = op.Add(total, other)
    node.outputs[0].replace_all_uses_with(total)
    graph.remove(node, safe=True)
