"""Reads update nodes: their gradient, the roles of their states, and the origin of a gradient.

All of it comes from declarations (:class:`graphc.ir.declare.OpDeclaration`), so an optimizer of a plugin needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphc.ir.declare import Role, declaration_of, is_update, required_declaration
from graphc.ir.facts import input_of
from graphc.ir.names import STAGE


def updates_of(graph: ir.Graph) -> list[ir.Node]:
    """All update nodes, in node order."""
    return [node for node in graph if is_update(node)]


def trains(node: ir.Node) -> bool:
    """Whether the node is an optimizer's update: one with a gradient."""
    declaration = declaration_of(node)
    return declaration is not None and declaration.gradient is not None


def is_reduced(node: ir.Node) -> bool:
    """Whether the node updates state from a value that is reduced over the ranks: a gradient or a batch statistic."""
    declaration = declaration_of(node)
    return declaration is not None and bool(declaration.next_value) and declaration.source in declaration.reduces


def source_of(node: ir.Node) -> ir.Value:
    """The operand of an update with one element per state element: a gradient, a statistic, a copied value."""
    source = required_declaration(node).source
    return input_of(node, len(node.inputs) if source is None else source)


def gradient_of(node: ir.Node) -> ir.Value | None:
    """The gradient operand of an optimizer's update; None for other nodes."""
    return source_of(node) if trains(node) else None


def state_of(node: ir.Node) -> ir.Value:
    """The state that names an update: an optimizer's parameter, else the first state that it replaces."""
    return input_of(node, required_declaration(node).main)


def next_value_of(node: ir.Node, index: int | None = None) -> ir.Value:
    """The next value of the state at input ``index`` of an update; by default of its parameter or first state."""
    declaration = required_declaration(node)
    wanted = declaration.main if index is None else index
    return node.outputs[next(output for output, state in declaration.next_value.items() if state == wanted)]


def role_of(node: ir.Node, index: int | None = None) -> Role | None:
    """The role of the state at input ``index`` of an update (by default of :func:`state_of`); None: not a state."""
    declaration = declaration_of(node)
    if declaration is None or not declaration.next_value:
        return None
    return declaration.roles.get(declaration.main if index is None else index)


def has_role(value: ir.Value, role: Role) -> bool:
    """Whether the value is state with the role ``role`` of some update."""
    return any(role_of(node, index) is role for node, index in value.uses())


def copies_of(node: ir.Node) -> list[ir.Node]:
    """The updates that copy the parameter updated by ``node`` to a lower type."""
    return [user for user in next_value_of(node).consumers() if role_of(user) is Role.COPY]


def stages_that_read(node: ir.Node) -> set[str]:
    """The pipeline stages, as nodes are marked with them, that read the parameter of an update, or a copy in a lower type."""
    states = [state_of(update) for update in (node, *copies_of(node))]
    users = [user for state in states for user in state.consumers() if not is_update(user)]
    return {user.metadata_props[STAGE] for user in users if STAGE in user.metadata_props}


def converts(node: ir.Node) -> bool:
    """Whether the node only converts gradients to the type in which they travel."""
    declaration = declaration_of(node)
    return declaration is not None and declaration.passes_through and not declaration.effect


def on_its_way(value: ir.Value) -> Iterator[ir.Value]:
    """The value, followed by its earlier forms in front of each reduction and conversion.

    dW ─► RoundTo ─► AllReduceStart ─► AllReduceWait ─► Widen ─► g        from g: g, 4 values, dW
    """
    yield value
    while (producer := value.producer()) is not None:
        declaration = declaration_of(producer)
        if declaration is None or not declaration.passes_through:
            return
        value = input_of(producer, value.index() or 0)
        yield value
