"""Operands of declared ops by the name of their formal input."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.declare import declaration_of


def place_of(node: ir.Node, name: str) -> int | None:
    """Index of the formal input ``name`` of a declared op, or None where it has none."""
    declaration = declaration_of(node)
    assert declaration is not None
    return next((k for k, formal in enumerate(declaration.inputs) if formal.name == name), None)


def operand(node: ir.Node, name: str) -> ir.Value | None:
    """The value at the formal input ``name``; None where it is left out."""
    index = place_of(node, name)
    return node.inputs[index] if index is not None and index < len(node.inputs) else None


def put(node: ir.Node, name: str, value: ir.Value) -> None:
    """Make ``value`` the operand of the formal input ``name``."""
    index = place_of(node, name)
    assert index is not None
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)
