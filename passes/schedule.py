"""schedule: start each AllReduce when its last operand exists, wait for it before its first use.

    before   … dW2 … dW1 … AllReduce(b0) AllReduce(b1) Adam Adam
    after    … dW2 AllReduceStart(b0) … dW1 AllReduceStart(b1) AllReduceWait(b0) AllReduceWait(b1) Adam Adam

The order of nodes is the order of execution. Everything that depends on a reduced value comes after the whole backward
pass: first all waits, in the order of the starts (equal on every rank), then what uses the results, updates last, so
that a non-finite gradient can still stop the step before any state has changed.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.bodies import captured
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.pipeline import Context, graph_pass


@graph_pass("schedule")
def schedule(model: ir.Model, ctx: Context) -> bool:
    """Split every AllReduce into Start and Wait and reorder the graph."""
    graph, op = model.graph, Builder(model.graph)
    pairs = [_split(graph, op, node) for node in list(graph) if node.op_type == "AllReduce" and node.domain == "graphc"]
    waits = {wait for _, wait in pairs}
    late: set[ir.Node] = set()
    for node in graph:
        if (
            node in waits
            or is_update(node)
            or any(v is not None and v.producer() in late for v in (*node.inputs, *captured(node)))
        ):
            late.add(node)
    early = [n for n in graph if n not in late]
    starts = {start for start, _ in pairs}
    order = _place_starts([n for n in early if n not in starts], [n for n in early if n in starts])
    begun = {node: k for k, node in enumerate(order)}
    partner = {wait: start for start, wait in pairs}
    order += sorted(waits, key=lambda w: begun.get(partner[w], 0))
    rest = [n for n in graph if n in late and n not in waits]
    order += [n for n in rest if not is_update(n)]
    order += [n for n in rest if is_update(n)]
    changed = list(graph) != order
    if changed:
        graph.remove(order)
        graph.extend(order)
    ctx.note(f"schedule: {len(pairs)} AllReduces overlap with the backward pass")
    return changed


def _split(graph: ir.Graph, op: Builder, node: ir.Node) -> tuple[ir.Node, ir.Node]:
    op.before = node
    attributes = {k: a.value for k, a in node.attributes.items()}
    name = node.name or "allreduce"
    flying = op.emit("AllReduceStart", node.inputs, attributes, domain="graphc", name=f"{name}/start")
    landed = op.emit("AllReduceWait", flying, attributes, domain="graphc", name=f"{name}/wait")
    for old, new in zip(node.outputs, landed, strict=True):
        old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
    start, wait = flying[0].producer(), landed[0].producer()
    assert start is not None
    assert wait is not None
    return start, wait


def _place_starts(compute: list[ir.Node], starts: list[ir.Node]) -> list[ir.Node]:
    position = {node: k for k, node in enumerate(compute)}
    after: dict[int, list[ir.Node]] = {}
    for start in starts:
        producers = [v.producer() for v in start.inputs if v is not None]
        ready = max((position[p] for p in producers if p is not None), default=-1)
        after.setdefault(ready, []).append(start)
    order = list(after.get(-1, []))
    for k, node in enumerate(compute):
        order.append(node)
        order.extend(after.get(k, []))
    return order
