"""Gradients of collectives: a sum in the forward pass is a sum in the backward pass."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import describe


@gradient("graphc::AllReduce")
def all_reduce(op: Builder, node: ir.Node, *dys: ir.Value | None) -> Any:
    """y = Σx over the ranks, of a loss that is the sum of the ranks' losses;  ∂x = Σdy over the ranks (mean alike)"""
    reduce = node.attributes.get_string("reduce", "sum")
    if reduce not in ("sum", "mean"):
        raise UnsupportedOpError(f"no gradient for AllReduce with reduce={reduce!r}: {describe(node)}")
    group = node.attributes.get_string("group", "data")
    present = [dy for dy in dys if dy is not None]
    tag = fresh_tag(op.graph, f"{node.attributes['tag'].as_string()}::grad")
    reduced = iter(op.emit("AllReduce", present, {"tag": tag, "group": group, "reduce": reduce}, domain="graphc"))
    return tuple(None if dy is None else next(reduced) for dy in dys)


def fresh_tag(graph: ir.Graph, tag: str) -> str:
    """``tag``, or the first of ``tag.1``, ``tag.2`` … that no collective of the graph uses."""
    taken = {n.attributes["tag"].as_string() for n in graph if n.domain == "graphc" and "tag" in n.attributes}
    k = 1
    fresh = tag
    while fresh in taken:
        fresh, k = f"{tag}.{k}", k + 1
    return fresh
