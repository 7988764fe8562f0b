"""Registering gradient rules.

    @gradient("Mul")
    def mul(op, node, dz):
        \"\"\"z = a·b;  ∂a = dz·b,  ∂b = dz·a\"\"\"
        a, b = node.inputs
        return lambda: op.Mul(dz, b), lambda: op.Mul(dz, a)

A rule gets a :class:`~graphc.ir.builder.Builder`, the forward node and one adjoint per output (None where nothing flows
back through that output; a rule is called only if at least one is there). It returns one entry per input: a value, None
(no gradient), or a function without arguments that makes the value, called only when that gradient is needed. The
engine sums broadcast gradients back to the input's shape, accumulates and prunes; a rule does none of that.

A rule for an op with bodies returns further entries, one for each value that :func:`graphc.ir.subgraphs.captured` lists. One
that is registered as ``selective`` is told by ``needs=``, a set of values, which gradients are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.facts import describe
from graphc.registry import Registry

Rule: TypeAlias = "Callable[..., Any]"


@dataclass(frozen=True, slots=True)
class GradientRule:
    """A rule and its docstring; ``function`` is None for an op whose gradient is zero everywhere.

    Attributes:
        refuses: why every gradient of the op is refused; empty for a rule.
    """

    op: str
    function: Rule | None
    doc: str
    selective: bool = False
    refuses: str = ""


GRADIENTS: Registry[GradientRule] = Registry("gradient", "graphc.gradients")


def gradient(*ops: str, override: bool = False, selective: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated rule for ``ops``: ``"Mul"``, or ``"domain::Op"`` outside ``ai.onnx``."""

    def register(function: Rule) -> Rule:
        for op in ops:
            entry = GradientRule(op, function, (function.__doc__ or "").strip(), selective)
            GRADIENTS.register(op, entry, origin=function.__module__, override=override)
        return function

    return register


def zero_gradient(*ops: str, origin: str) -> None:
    """Mark ops as piecewise constant or integer-valued: their gradient is zero, and they block no path."""
    for op in ops:
        GRADIENTS.register(op, GradientRule(op, None, "zero almost everywhere"), origin=origin)


def refuse_gradient(*ops: str, reason: str, origin: str) -> None:
    """Mark ops that have no derivative here; asking for one raises an error with the ``reason``."""

    def refuse(op: Any, node: ir.Node, *dys: ir.Value | None) -> Any:
        raise UnsupportedOpError(f"no derivative of {node.op_type}: {reason}: {describe(node)}")

    for op in ops:
        GRADIENTS.register(op, GradientRule(op, refuse, reason, refuses=reason), origin=origin)


def key_of(domain: str, op_type: str) -> str:
    """The registry key of an op."""
    return f"{domain}::{op_type}" if domain else op_type


def operands(node: ir.Node, count: int) -> list[ir.Value]:
    """The first ``count`` inputs of a node, which its op requires."""
    return [v for v in node.inputs[:count] if v is not None]
