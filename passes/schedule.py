"""schedule: start each collective when its last operand exists, wait for it before its first use.

    before   … dW2 … dW1 … AllReduce(b0) AllReduce(b1) Adam Adam
    after    … dW2 AllReduceStart(b0) … dW1 AllReduceStart(b1) AllReduceWait(b0) AllReduceWait(b1) Adam Adam

The order of nodes is the order of execution. What a gradient or the loss does not need and that depends on a reduced value
comes after the whole backward pass: first all waits, in the order of the starts (equal on every rank), then what uses the
results, updates last, so that a non-finite gradient can still stop the step before any state has changed.

A reduction **inside** the forward or backward pass (shared batch statistics) is waited for where it is first used. What the
start does not need moves behind it, so that there is work to do while it is under way:

    before   dx2 dW2 sums1 AllReduce(sums1) dx1          after   dx2 sums1 AllReduceStart dW2 AllReduceWait dx1
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.bodies import captured
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL
from graphc.ir.ops.collectives import COLLECTIVES
from graphc.pipeline import Context, graph_pass


@graph_pass("schedule")
def schedule(model: ir.Model, ctx: Context) -> bool:
    """Split every collective into Start and Wait and reorder the graph."""
    graph, op = model.graph, Builder(model.graph)
    pairs = [_split(graph, op, node) for node in list(graph) if node.op_type in COLLECTIVES and node.domain == DOMAIN]
    partner = {wait: start for start, wait in pairs}
    needed = _needed_by_gradients(graph)
    inner = [wait for wait in partner if wait in needed]
    late = _late(graph, [wait for wait in partner if wait not in needed])
    early = _overlap([n for n in graph if n not in late], {partner[w]: w for w in inner})
    starts = {start for start, wait in pairs if wait in late}
    order = _place_starts([n for n in early if n not in starts], [n for n in early if n in starts])
    begun = {node: k for k, node in enumerate(order)}
    landing = sorted((w for w in partner if w in late and partner[w] in begun), key=lambda w: begun[partner[w]])
    rest = [n for n in graph if n in late and n not in set(landing)]
    chained = {partner[n]: n for n in rest if n in partner}
    order += [*landing, *_overlap([n for n in rest if not is_update(n)], chained), *(n for n in rest if is_update(n))]
    changed = list(graph) != order
    if changed:
        graph.remove(order)
        graph.extend(order)
    within = f", {len(inner)} of them inside it" if inner else ""
    ctx.note(f"schedule: {len(pairs)} collectives overlap with the backward pass{within}")
    return changed


def _operands(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes whose results ``node`` reads."""
    for value in (*node.inputs, *captured(node)):
        producer = value.producer() if value is not None else None
        if producer is not None:
            yield producer


def _needed_by_gradients(graph: ir.Graph) -> set[ir.Node]:
    """The nodes from which the loss and the gradients are computed."""
    found: set[ir.Node] = set()
    for node in reversed(graph):
        marked = any(GRADIENT_OF in v.metadata_props or LOSS_TOTAL in v.metadata_props for v in node.outputs)
        if marked or node in found:
            found.add(node)
            found.update(_operands(node))
    return found


def _late(graph: ir.Graph, waits: Collection[ir.Node]) -> set[ir.Node]:
    """Updates, ``waits``, and all that depends on any of them."""
    late: set[ir.Node] = set(waits)
    for node in graph:
        if is_update(node) or any(n in late for n in _operands(node)):
            late.add(node)
    return late


def _overlap(nodes: Sequence[ir.Node], inner: dict[ir.Node, ir.Node]) -> list[ir.Node]:
    """Put each start in ``inner`` in front of what it does not need since the last wait, and its wait before the first use."""
    first_use: dict[ir.Node, ir.Node] = {}
    waits = set(inner.values())
    for node in nodes:
        for wait in waits.intersection(_operands(node)):
            first_use.setdefault(node, wait)
            waits.discard(wait)
    order: list[ir.Node] = []
    since = 0
    for node in nodes:
        if node in inner.values():
            continue
        if node in first_use:
            order.append(first_use[node])
            since = len(order)
        order.append(node)
        if node in inner:
            order[since:] = _start_first(order[since:])
            since = order.index(node, since) + 1
    return order


def _start_first(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """``nodes``, whose last one is a start, with all that it does not need behind it."""
    start = nodes[-1]
    needed = {start}
    for node in reversed(nodes):
        if node in needed:
            needed.update(_operands(node))
    return [n for n in nodes if n in needed] + [n for n in nodes if n not in needed]


def _split(graph: ir.Graph, op: Builder, node: ir.Node) -> tuple[ir.Node, ir.Node]:
    op.before = node
    attributes = {k: a.value for k, a in node.attributes.items()}
    name = node.name or node.op_type.lower()
    flying = op.emit(f"{node.op_type}Start", node.inputs, attributes, domain=DOMAIN, name=f"{name}/start")
    landed = op.emit(f"{node.op_type}Wait", flying, attributes, domain=DOMAIN, name=f"{name}/wait")
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
