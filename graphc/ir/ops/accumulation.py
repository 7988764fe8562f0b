"""Sums over the micro-batches of a step: ``Accumulate`` runs per micro-batch, its users once per step.

The functions divide a training graph into nodes that run for each micro-batch and nodes that run once.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare, is_update, same_as
from graphc.ir.ops.collectives import collective_of
from graphc.ir.subgraphs import captured


@declare("Accumulate", inputs="x", outputs="y", attributes={"steps": REQUIRED, "tree": 0}, infer=same_as(0))
def accumulate(op: Builder, x: ir.Value, *, steps: int, tree: int) -> ir.Value:
    """y = Σ x over the ``steps`` micro-batches of a training step; with one micro-batch y = x, the decomposition.

    With ``tree``, ``steps`` counts the micro-batches of all ranks together, and the sum is taken pairwise over neighbours,
    level
    by level: it has the same bits for every number of ranks.
    """
    return op.Identity(x)  # type: ignore[no-any-return]


def is_accumulation(node: ir.Node) -> bool:
    """Whether the node sums over micro-batches."""
    return node.op_type == "Accumulate" and node.domain == DOMAIN


def accumulation_steps(graph: ir.Graph) -> int:
    """Micro-batches of a step; 1 where nothing is accumulated."""
    return max((n.attributes["steps"].as_int() for n in graph if is_accumulation(n)), default=1)


def sums_by_tree(graph: ir.Graph) -> bool:
    """Whether the micro-batches are those of all ranks together, for equal bits on any number of ranks."""
    return any(is_accumulation(n) and n.attributes.get_int("tree", 0) for n in graph)


def run_once(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that run once a step: updates, and nodes that depend on updates or on sums over micro-batches."""
    if not any(is_accumulation(n) for n in graph):
        return set(graph)
    found: set[ir.Node] = set()
    for node in graph:
        sources = (v.producer() for v in (*node.inputs, *captured(node)) if v is not None)
        if is_update(node) or any(s in found or (s is not None and is_accumulation(s)) for s in sources):
            found.add(node)
    return found


def reduces_within(graph: ir.Graph) -> bool:
    """Whether a micro-batch contains a collective, so that all ranks must run the same number of them."""
    once = run_once(graph)
    return any(collective_of(n) is not None and n not in once for n in graph)
