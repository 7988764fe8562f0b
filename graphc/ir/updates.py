"""Update nodes: which operand is the gradient, what each state is for, and where a gradient comes from.

All of it is read from declarations (:class:`graphc.ir.declare.OpDeclaration`), so an optimizer of a plugin needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphc.ir.declare import Role, declaration_of, is_update, required_declaration
from graphc.ir.facts import input_of


def updates_of(graph: ir.Graph) -> list[ir.Node]:
    """All update nodes, in node order."""
    return [node for node in graph if is_update(node)]


def trains(node: ir.Node) -> bool:
    """Whether the node is the update of an optimizer: it takes a gradient."""
    declaration = declaration_of(node)
    return declaration is not None and declaration.gradient is not None


def is_reduced(node: ir.Node) -> bool:
    """Whether the node updates state with something reduced over the ranks: a gradient, or a batch statistic."""
    declaration = declaration_of(node)
    return declaration is not None and bool(declaration.next_value) and declaration.source in declaration.reduces


def source_of(node: ir.Node) -> ir.Value:
    """The operand of an update with an element for each element of the state: a gradient, a statistic, what is copied."""
    source = required_declaration(node).source
    return input_of(node, len(node.inputs) if source is None else source)


def gradient_of(node: ir.Node) -> ir.Value | None:
    """The gradient that the update of an optimizer takes; None for other nodes."""
    return source_of(node) if trains(node) else None


def state_of(node: ir.Node) -> ir.Value:
    """The state after which an update is named: the parameter of an optimizer, or else the first state that it replaces."""
    return input_of(node, required_declaration(node).main)


def next_value_of(node: ir.Node, index: int | None = None) -> ir.Value:
    """The next value of the state that is input ``index`` of an update; of its parameter or first state by default."""
    declaration = required_declaration(node)
    wanted = declaration.main if index is None else index
    return node.outputs[next(output for output, state in declaration.next_value.items() if state == wanted)]


def role_of(node: ir.Node, index: int | None = None) -> Role | None:
    """What the state at input ``index`` of an update is for (by default the one of :func:`state_of`); None: it is no state."""
    declaration = declaration_of(node)
    if declaration is None or not declaration.next_value:
        return None
    return declaration.roles.get(declaration.main if index is None else index)


def has_role(value: ir.Value, role: Role) -> bool:
    """Whether the value is state that some update keeps for ``role``."""
    return any(role_of(node, index) is role for node, index in value.uses())


def copies_of(node: ir.Node) -> list[ir.Node]:
    """The updates that copy the parameter that ``node`` has just updated to a lower type."""
    return [user for user in next_value_of(node).consumers() if role_of(user) is Role.COPY]


def converts(node: ir.Node) -> bool:
    """Whether the node only changes the type in which gradients travel."""
    declaration = declaration_of(node)
    return declaration is not None and declaration.passes_through and not declaration.effect


def on_its_way(value: ir.Value) -> Iterator[ir.Value]:
    """The value, and back from it what it was before each reduction and conversion.

    dW ─► RoundTo ─► AllReduceStart ─► AllReduceWait ─► Widen ─► g        from g: g, 4 values, dW
    """
    yield value
    while (producer := value.producer()) is not None:
        declaration = declaration_of(producer)
        if declaration is None or not declaration.passes_through:
            return
        value = input_of(producer, value.index() or 0)
        yield value
