"""Takes stand-ins for adjoints out of a graph that is, or will not be, differentiated (:mod:`graphc.ir.ops.own_gradients`)."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import has_effect
from graphc.ir.facts import input_of
from graphc.ir.ops.own_gradients import OWN_GRADIENTS
from graphc.ir.subgraphs import captured, remove_with_bodies
from graphc.passes.optimize.simplify import replace


def drop_stand_ins(graph: ir.Graph) -> bool:
    """Put what they compute in the place of the calls of ``torch.autograd.Function``, and remove their backward passes."""
    marks = [node for node in graph if node.op_type in OWN_GRADIENTS and node.domain == DOMAIN]
    op = Builder(graph)
    for node in marks:
        if node.op_type == "TakeAdjoint":
            op.before = node
            replace(graph, op, node.outputs[0], input_of(node, 0))
    suspects = set(marks)
    for node in reversed(list(graph)) if marks else ():
        if node in suspects and not has_effect(node) and not any(v.uses() or v.is_graph_output() for v in node.outputs):
            sources = (v.producer() for v in (*node.inputs, *captured(node)) if v is not None)
            suspects.update(source for source in sources if source is not None)
            remove_with_bodies(graph, node)
    return bool(marks)
