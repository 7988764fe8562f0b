"""hierarchical: reduce gradients inside each node, then between nodes, then inside again.

    before   dW ─► AllReduce(b, group=node+data) ─► Adam(W, …)
    after    dW ─► ReduceScatter(b, data) ─► AllReduce(b, node, within=data) ─► AllGather(b, data) ─► Adam(W, …)

Between nodes a rank sends the gradients that it owns in its node only: 1/n of them, with n ranks a node. ``schedule`` starts
each of the three behind the same of the bucket before, so that both kinds of link are busy at once. Source: M. Cho et al.,
"BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy", SysML 2019.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.names import BUCKET
from graphc.ir.updates import on_its_way, source_of, trains
from graphc.passes.distributed.sharding import between_nodes, inside, spans_nodes
from graphc.pipeline import Context, graph_pass


@graph_pass("hierarchical", requires=("optimizer", "allreduce", "bucket"), changes="training")
def hierarchical(model: ir.Model, ctx: Context) -> bool:
    """Divide every AllReduce of gradients over nodes into three collectives.

    Raises:
        UsageError: gradients that are not all summed in every step.
    """
    graph = model.graph
    found: dict[ir.Node, None] = {}
    for node in (n for n in graph if trains(n)):
        producers = (value.producer() for value in on_its_way(source_of(node)))
        found |= dict.fromkeys(p for p in producers if p is not None and p.op_type == "AllReduce" and spans_nodes(p))
    op = Builder(graph)
    for reduction in found:
        _divide(graph, op, reduction)
    ctx.note(f"hierarchical: {counted(len(found), 'AllReduce')} inside the nodes and between them")
    return bool(found)


def _divide(graph: ir.Graph, op: Builder, reduction: ir.Node) -> None:
    values = reduction.attributes
    how = values.get_string("reduce", "sum")
    if how not in ("sum", "mean") or values.get_int("every", 1) > 1 or values.get_int("nonzero", 0) > 0:
        raise UsageError(
            f"hierarchical needs gradients that are all summed in every step, unlike {reduction.name!r} (reduce={how});"
            " top-k compression, adasum and deterministic='any-world' exclude it"
        )
    op.before, op.scope = reduction, reduction.name or "hierarchical"
    name = values["tag"].as_string().partition("/")[2]
    shared = {k: a.value for k, a in values.items() if k in ("reduce", BUCKET)} | inside(reduction) | {"owner": "even"}
    parts = op.emit("ReduceScatter", reduction.inputs, shared, domain="graphc", name=f"scatter/{name}")
    reduced = between_nodes(op, reduction, parts)
    gather = {k: v for k, v in shared.items() if k != "reduce"} | {"tag": f"{shared['tag']}/whole"}
    results = op.emit("AllGather", reduced, gather, domain="graphc", name=f"gather/{name}")
    for old, new in zip(reduction.outputs, results, strict=True):
        old.replace_all_uses_with(new)
    graph.remove(reduction, safe=True)
