"""Decomposes ops into reductions and elementwise ops that the fusion compiler generates.

    Softmax(x)   ─►   e = Exp(x − ReduceMax(x));  e ÷ ReduceSum(e)

Half-precision operands are summed in float32, as the standard's ``stash_type`` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

import graphc.backends.fusion.rules  # noqa: F401 - registers the rules
from graphc.backends.fusion.graph_queries import results
from graphc.backends.fusion.op_kernels import is_expression, op_kernel
from graphc.ir.builder import Builder
from graphc.ir.facts import static_dims
from graphc.ir.functions import emit_body, has_body


def take_apart(graph: ir.Graph, keep: Callable[[ir.Node], bool]) -> None:
    """Decompose every op that has a rule in :mod:`.rules`, or whose only decomposition is the standard's function body.

    Outputs that are results of the graph keep their names.

    Args:
        keep: selects nodes that the target runs as they are.
    """
    op = Builder(graph)
    while sum(_replaced(op, node, keep) for node in list(graph)):  # emitted nodes may have a rule too
        pass


def _replaced(op: Builder, node: ir.Node, keep: Callable[[ir.Node], bool]) -> bool:
    op.before, op.scope = node, node.name or node.op_type
    results = _parts(op, node, keep)
    if results is None:
        return False
    for old, new in zip(node.outputs, results, strict=False):
        if new is None:
            continue
        if old.is_graph_output():
            name = old.name
            old.name = op.unique(f"{name}.replaced", value=True)
            (new,) = op.emit("Identity", [new])
            new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    op.graph.remove(node, safe=True)
    return True


def _parts(op: Builder, node: ir.Node, keep: Callable[[ir.Node], bool]) -> Sequence[ir.Value | None] | None:
    kernel, body = op_kernel(node), has_body(node.op_type, node.domain)
    if kernel.decomposition is not None and kernel.decomposed_first:
        return kernel.decomposition(op, node)
    if (kernel.decomposition is None and not body) or is_expression(node) or keep(node):
        return None
    if any(static_dims(v) is None for v in (*node.inputs, *results(node)) if v is not None):
        return None
    found = None if kernel.decomposition is None else kernel.decomposition(op, node)
    return emit_body(op, node) if found is None and body else found
