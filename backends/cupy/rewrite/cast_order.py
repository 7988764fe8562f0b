"""Reorders casts and transposes so that products can absorb them."""

from __future__ import annotations

import onnx_ir as ir

from graphc.backends.cupy.libraries.gemm import DOMAIN, TYPES, is_product
from graphc.backends.fusion.graph_queries import direct_user, drop, in_memory, is_cast, stand_in
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of, input_of, size_of


def casts_before_views(graph: ir.Graph, op: Builder) -> None:
    """Cast(view(x)) ─► view(Cast(x)) before products, which then read x in its own order."""
    known = {(n.inputs[0], n.outputs[0].dtype): n.outputs[0] for n in graph if is_cast(n)}
    for node in [n for n in graph if is_cast(n) and n.outputs[0].dtype in TYPES]:
        source = node.inputs[0]
        view = None if source is None else source.producer()
        if view is None or not op_kernel(view).same_elements or not _feeds_product(node.outputs[0]):
            continue
        inner, dtype = input_of(view), dtype_of(node.outputs[0])
        op.before, op.scope = node, node.name or "Cast"
        cast = known.get((inner, dtype))
        if cast is None:
            cast = known[inner, dtype] = op.Cast(inner, to=int(dtype))
        (again,) = op.emit(view.op_type, [cast, *view.inputs[1:]], dict(view.attributes))
        stand_in(node.outputs[0], again)


def small_casts_first(graph: ir.Graph, size: int) -> None:
    """Move small casts of the graph's inputs to the front, where a few kernels run them all.

    Casts of up to ``size`` elements are small.
    """
    chosen = [
        node
        for node in graph
        if is_cast(node) and node.inputs[0] is not None
        if node.inputs[0].producer() is None and size_of(node.outputs[0]) <= size and not node.outputs[0].is_graph_output()
    ]
    taken = set(chosen)
    rest = next((node for node in graph if node not in taken), None)
    if chosen and rest is not None:
        graph.remove(chosen)
        graph.insert_before(rest, chosen)


def small_casts_last(graph: ir.Graph, size: int) -> None:
    """Move small unread casts of library results (bias gradients, for example) to the end.

    Casts of up to ``size`` elements are small.
    """
    chosen = [
        node
        for node in graph
        if is_cast(node) and node.inputs[0] is not None
        if node.outputs[0].is_graph_output() and not node.outputs[0].uses() and size_of(node.outputs[0]) <= size
        if (producer := node.inputs[0].producer()) is not None and producer.domain == DOMAIN
    ]
    graph.remove(chosen)
    graph.extend(chosen)


def views_before_casts(graph: ir.Graph, op: Builder) -> None:
    """Transpose(Cast(product)) ─► Cast(Transpose(product)), so that the product is written in the order that its readers
    need.
    """
    for node in [n for n in graph if n.op_type == "Transpose" and n.domain == ""]:
        source = node.inputs[0]
        cast = None if source is None else source.producer()
        if source is None or not is_cast(cast) or direct_user(source) is not node:
            continue
        inner = cast.inputs[0]
        made = None if inner is None else in_memory(inner).producer()
        if inner is None or made is None or not is_product(made):
            continue
        op.before, op.scope = node, node.name or "Transpose"
        given = {"perm": node.attributes["perm"].as_ints()} if "perm" in node.attributes else {}
        turned = op.Transpose(inner, **given)
        stand_in(node.outputs[0], op.Cast(turned, to=cast.attributes["to"].as_int()))
        drop(graph, cast)


def _feeds_product(value: ir.Value) -> bool:
    for user, _ in value.uses():
        if user.domain == "" and (is_product(user) or (op_kernel(user).same_elements and _feeds_product(user.outputs[0]))):
            return True
    return False
