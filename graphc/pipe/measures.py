"""Lets each stage of a pipeline measure its own gradients, so that numbers pass between the ranks and not gradients.

before   SumOfSquares(g of stage 0, g of stage 1)
after    SumOfSquares(g of stage 0) ─► Add ◄─ SumOfSquares(g of stage 1)
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.ir.facts import inputs_of
from graphc.pipe.tasks import Assignment


def separate_measures(graph: ir.Graph, found: Assignment) -> bool:
    """Divide every node that measures gradients of several stages or devices (a norm, a test for NaN).

    Returns:
        Whether anything changed.
    """
    op, changed = Builder(graph), False
    for node in list(graph):
        declaration = declaration_of(node)
        if declaration is None or not declaration.combine:
            continue
        by_stage: dict[int, list[ir.Value]] = {}
        for value in inputs_of(node):
            by_stage.setdefault(found.made_on(value) or 0, []).append(value)
        if len(by_stage) < 2:
            continue
        op.before, op.scope = node, node.name or node.op_type
        attributes = {k: a.value for k, a in node.attributes.items()}
        total, *others = [op.emit(node.op_type, values, attributes, domain=node.domain)[0] for values in by_stage.values()]
        for other in others:
            if total.dtype == ir.DataType.BOOL:
                total = op.Or(total, other)
            else:
                total = op.Add(total, other) if declaration.combine == "sum" else op.Max(total, other)
        node.outputs[0].replace_all_uses_with(total)
        graph.remove(node, safe=True)
        changed = True
    return changed
