"""Finds operands and readers of a segment's values, through free reshapes, and removes nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import onnx_ir as ir

from graphc.backends.fusion.op_kernels import op_kernel
from graphc.backends.fusion.reductions import reduced_axes
from graphc.ir.facts import constant, input_of, shape_of, static_dims
from graphc.ir.subgraphs import bodies, captured

INTO = "graphc.into"
"""Metadata key of a node that updates its first operand in place: operand and result share memory."""


def sweep(graph: ir.Graph) -> None:
    """Remove the nodes whose results are unused."""
    for node in reversed(list(graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)


def drop(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node and its readers, unless a result of the graph depends on them."""
    for out in node.outputs:
        for user, _ in list(out.uses()):
            if user.graph is graph:
                drop(graph, user)
    if node.graph is graph and not any(out.uses() or out.is_graph_output() for out in node.outputs):
        graph.remove(node, safe=True)


def stand_in(old: ir.Value, new: ir.Value) -> None:
    """Replace ``old`` by ``new``, which takes over its name if it is a result of the graph."""
    if old.is_graph_output():
        name = old.name
        old.name = f"{name}.replaced"
        new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def users(value: ir.Value) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    """(node, input, value) of every node that reads ``value`` or a reshape of it."""
    for user, index in list(value.uses()):
        if index == 0 and op_kernel(user).same_memory:
            yield from users(user.outputs[0])
        else:
            yield user, index, value


def is_kept(value: ir.Value) -> bool:
    """Whether the value, or a reshape of it, is a result of the graph."""
    if value.is_graph_output():
        return True
    return any(op_kernel(u).same_memory and is_kept(u.outputs[0]) for u, _ in value.uses())


def only_user(value: ir.Value) -> tuple[ir.Node, int, ir.Value] | None:
    """The only node that reads the value, through reshapes; None if there are several or it is a result."""
    if is_kept(value):
        return None
    found = list(users(value))
    return found[0] if len(found) == 1 else None


def direct_user(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0][0] if len(uses) == 1 and not value.is_graph_output() else None


def in_memory(value: ir.Value) -> ir.Value:
    producer = value.producer()
    while producer is not None and op_kernel(producer).same_memory:
        value = input_of(producer)
        producer = value.producer()
    return value


def ends(value: ir.Value) -> bool:
    """Whether the value only moves to a result of the graph or to a node that updates it in place."""
    while not value.is_graph_output():
        user = direct_user(value)
        if user is not None and INTO in user.meta and user.inputs[0] is value:
            return True
        if user is None or not op_kernel(user).same_elements:
            return False
        value = user.outputs[0]
    return not value.uses()


def is_cast(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Whether the node is a standard Cast: rewrites move it, and memory may hold its operand instead."""
    return node is not None and node.op_type == "Cast" and node.domain == ""


def before_cast(value: ir.Value | None) -> ir.Value | None:
    """The float32 value that a Cast rounded to ``value``."""
    producer = None if value is None else value.producer()
    if not is_cast(producer):
        return None
    source = producer.inputs[0]
    return source if source is not None and source.dtype == ir.DataType.FLOAT else None


def row_sums(value: ir.Value, length: int) -> Iterator[ir.Node]:
    """The nodes that sum ``value`` over its rows of ``length`` elements."""
    for user, index, seen in users(value):
        if user.op_type == "ReduceSum" and user.domain == "" and index == 0:
            axes = reduced_axes(user)
            if axes == tuple(range(len(shape_of(seen)) - 1)) and axes and shape_of(seen)[-1] == length:
                yield user


def leads_to_transpose(value: ir.Value) -> bool:
    user = direct_user(value)
    while user is not None and op_kernel(user).same_elements:
        if not op_kernel(user).same_memory:
            return True
        user = direct_user(user.outputs[0])
    return False


def operands(node: ir.Node) -> list[ir.Value | None]:
    """The inputs of a node, then the values that its bodies capture, except constants."""
    if not any(True for _ in bodies(node)):
        return list(node.inputs)
    return [*node.inputs, *(v for v in captured(node) if constant(v) is None and v not in node.inputs)]


def wanted(value: ir.Value) -> bool:
    """Whether the graph uses this output of a node."""
    return bool(value.uses()) or value.is_graph_output()


def results(node: ir.Node) -> list[ir.Value]:
    """The outputs of a node, without absent ones."""
    return [v for v in node.outputs if v.dtype is not None and (static_dims(v) is not None or wanted(v))]
