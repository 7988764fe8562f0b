"""Parts of a segment that share nothing become segments of their own.

    ReduceSum(dy) ┐ one segment: dy lives until        ReduceSum(dy)   dy is gone, and
    Where(m, dx)  ┘ the result of Where is written     Where(m, dx)    the result takes its memory

A segment takes nodes that follow each other in the order of the graph. A bias gradient and the activation gradient of the next
layer follow each other without reading or writing a common value, so one segment for both only keeps memory longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.facts import known_nbytes
from graphc.ir.subgraphs import bodies


def apart(nodes: Sequence[ir.Node], least: int) -> list[list[ir.Node]]:
    """Divide the nodes of a segment into parts without a common value, each in the order of the graph.

    Args:
        nodes: in the order of the graph.
        least: bytes from which an operand that two nodes read joins them. A part without any value of that size stays with the
            part before it.
    """
    if len(nodes) == 1 or any(bodies(node) for node in nodes):
        return [list(nodes)]  # subgraphs read values by name
    made = {out for node in nodes for out in node.outputs}
    parent: dict[ir.Node | ir.Value, ir.Node | ir.Value] = {}

    def root(member: ir.Node | ir.Value) -> ir.Node | ir.Value:
        while (above := parent.setdefault(member, member)) is not member:
            parent[member] = parent[above]
            member = above
        return member

    large = set()
    for node in nodes:
        for value in (*node.inputs, *node.outputs):
            if value is None:
                continue
            heavy = known_nbytes(value) >= least
            if heavy:
                large.add(node)
            if heavy or value in made:
                parent[root(node)] = root(value)
    worth = {root(node) for node in large}
    parts: list[list[ir.Node]] = []
    place: dict[ir.Node | ir.Value, list[ir.Node]] = {}
    for node in nodes:
        found = root(node)
        if found not in place:
            if found in worth or not parts:
                parts.append([])
            place[found] = parts[-1]
        place[found].append(node)
    return parts
