"""Sums the gradients of parameters of which each rank of a group computes a part.

    before   dscale (of this rank's positions) ─► AllReduce(data) ─► Adam
    after    dscale, dbias, … ─► AllReduce(tensor) ─► AllReduce(data) ─► Adam

One collective for all of them, after the last micro-batch: they are vectors, mostly.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.shards import PARTIAL
from graphc.ir.updates import on_its_way, source_of, state_of, trains
from graphc.passes.precision.update_graph import sink
from graphc.pipe.tasks import mark_updates


def sum_partial_gradients(model: ir.Model) -> int:
    """Put an AllReduce behind the gradients of parameters marked :data:`PARTIAL`; returns how many. The marks are gone then."""
    graph = model.graph
    updates = [node for node in graph if trains(node) and PARTIAL in state_of(node).metadata_props]
    if not updates:
        return 0
    stage_of = mark_updates(model)
    together: dict[tuple[str, str, str], dict[ir.Value, None]] = {}
    for node in updates:
        *_, computed = on_its_way(source_of(node))
        key = state_of(node).metadata_props.pop(PARTIAL), stage_of.get(node, ""), str(computed.dtype)
        together.setdefault(key, {})[computed] = None
    for number, ((group, _, _), gradients) in enumerate(together.items()):
        _sum(graph, list(gradients), group, f"{group}/gradients{number or ''}")
    return len(updates)


def _sum(graph: ir.Graph, gradients: list[ir.Value], group: str, tag: str) -> None:
    nodes = list(graph)
    place = max(nodes.index(producer) for value in gradients if (producer := value.producer()) is not None)
    op = Builder(graph)
    op.before, op.scope = nodes[place + 1], tag
    users = [list(value.uses()) for value in gradients]
    results = op.emit("AllReduce", gradients, {"tag": tag, "group": group, "adjoint": "whole"}, domain=DOMAIN, name=tag)
    for uses, result in zip(users, results, strict=True):
        for user, index in uses:
            user.replace_input_with(index, result)
    producer = results[0].producer()
    assert producer is not None
    sink(graph, [producer])
