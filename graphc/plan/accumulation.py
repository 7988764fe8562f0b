"""The two phases of a step with micro-batches, read from the graph: what runs for each of them, and what runs once."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.declare import is_update
from graphc.ir.ops.collectives import collective_of
from graphc.ir.subgraphs import captured


def is_accumulation(node: ir.Node) -> bool:
    """Whether the node sums over micro-batches."""
    return node.op_type == "Accumulate" and node.domain == DOMAIN


def accumulation_steps(graph: ir.Graph) -> int:
    """Micro-batches of a step; 1 where nothing is accumulated."""
    return max((n.attributes["steps"].as_int() for n in graph if is_accumulation(n)), default=1)


def sums_by_tree(graph: ir.Graph) -> bool:
    """Whether the micro-batches are those of all ranks together, for the same bits on any number of them."""
    return any(is_accumulation(n) and n.attributes.get_int("tree", 0) for n in graph)


def run_once(graph: ir.Graph) -> set[ir.Node]:
    """Updates, and what depends on sums over all micro-batches or on updates; everything, where nothing is accumulated."""
    if not any(is_accumulation(n) for n in graph):
        return set(graph)
    found: set[ir.Node] = set()
    for node in graph:
        sources = (v.producer() for v in (*node.inputs, *captured(node)) if v is not None)
        if is_update(node) or any(s in found or (s is not None and is_accumulation(s)) for s in sources):
            found.add(node)
    return found


def reduces_within(graph: ir.Graph) -> bool:
    """Whether ranks meet inside a micro-batch, so that all of them must run the same number."""
    once = run_once(graph)
    return any(collective_of(n) is not None and n not in once for n in graph)
