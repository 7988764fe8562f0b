"""Declaring an op of the ``graphc`` domain: schema, type inference, effects and decomposition in one place.

    @declare("ReluGrad", inputs="dy y", outputs="dx", infer=same_as(0))
    def relu_grad(op, dy, y):
        \"\"\"dx = dy where y > 0, else 0\"\"\"
        return op.Where(op.Greater(y, 0.0), dy, op.zeros_like(dy))

The decorated function is the op's **decomposition** into standard ONNX ops (or into simpler ``graphc`` ops). An op that
has none (a collective) is declared with :func:`declare_primitive`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.registry import Registry

if TYPE_CHECKING:
    from graphc.ir.builder import Builder

Spec: TypeAlias = "tuple[ir.DataType, ir.Shape | None]"
"""What inference says of one output: element type and shape (None: unknown rank)."""

InferFunction: TypeAlias = "Callable[[Sequence[ir.Value | None], Mapping[str, Any]], Sequence[Spec]]"
Decomposition: TypeAlias = "Callable[..., ir.Value | tuple[ir.Value | None, ...]]"

REQUIRED: Any = object()
"""Marks an attribute without a default."""

SHARD, OFFLOAD = "shard", "offload"
PLACEMENT: Mapping[str, Any] = {SHARD: "", OFFLOAD: 0}
"""Attributes of every update op that say where it runs and not what it computes; decompositions do not get them.

``shard`` is empty, ``even`` or ``root``: the update runs over the elements that this rank owns of its bucket's flat arrays
(:mod:`graphc.ir.ops.collectives`), and state that nothing gathers is kept for those only. ``offload``: the state lies in the
host's memory and the update runs there.
"""


@dataclass(frozen=True, slots=True)
class Formal:
    """A formal input or output: ``name`` required, ``name?`` optional, ``*name`` variadic (only the last)."""

    name: str
    optional: bool = False
    variadic: bool = False

    @staticmethod
    def parse(text: str) -> tuple[Formal, ...]:
        return tuple(Formal(w.strip("?*"), optional=w.endswith("?"), variadic=w.startswith("*")) for w in text.split())


@dataclass(frozen=True, slots=True, eq=False)
class OpDeclaration:
    """All that graphc knows about one op of its domain, or a custom one.

    Attributes:
        next_value: output index → index of the input of which it is the next value (parameters, optimizer state,
            running statistics). A node with a non-empty ``next_value`` is an **update node**.
        local: input indices of state that differs from rank to rank: it is neither broadcast nor compared, and a checkpoint
            holds the sum over the ranks, of which each takes an equal part.
        reduces: input index → reduction (``"sum"`` or ``"mean"``) that data-parallel training puts before that input.
        elementwise: element k of every next value depends on element k of the states and of input 1, and on scalars only: the
            update may run over any part of a flat array.
        combine: ``"sum"`` or ``"max"`` where the result over several parts of the operands is that reduction of the results
            over each part (a sum of squares, a test for NaN); such an op has the attribute ``shard`` too.
        effect: the node must neither be merged with another nor deleted nor moved across one of the same group.
        decompose: builds the same outputs from standard ops; None for primitives that only a backend can run.
    """

    name: str
    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, Any]
    infer: InferFunction
    doc: str
    origin: str
    effect: bool = False
    next_value: Mapping[int, int] = field(default_factory=dict)
    reduces: Mapping[int, str] = field(default_factory=dict)
    decompose: Decomposition | None = None
    elementwise: bool = False
    combine: str = ""
    local: tuple[int, ...] = ()

    def attribute_values(self, node: ir.Node) -> dict[str, Any]:
        """The node's attributes as Python values, defaults filled in.

        A file holds float attributes in float32; they come back as the shortest decimal that rounds to what was stored,
        so that 0.999 means the same (1 − 0.999 too) before and after a model is saved.
        """
        values = dict(self.attributes)
        for name, attr in node.attributes.items():
            values[name] = list(attr.value) if isinstance(attr.value, (tuple, list)) else attr.value
            if attr.type == ir.AttributeType.FLOAT:
                values[name] = float(str(np.float32(attr.value)))
        return values


OPS: Registry[OpDeclaration] = Registry("op", "graphc.ops")
"""Ops of the ``graphc`` domain by name."""

CUSTOM: Registry[OpDeclaration] = Registry("custom op", "graphc.ops")
"""Ops of any other domain, by ``domain::name``; see :mod:`graphc.custom`."""


def declare_primitive(
    name: str,
    *,
    inputs: str,
    outputs: str,
    infer: InferFunction,
    doc: str,
    attributes: Mapping[str, Any] | None = None,
    effect: bool = False,
    next_value: Mapping[int, int] | None = None,
    reduces: Mapping[int, str] | None = None,
    decompose: Decomposition | None = None,
    origin: str | None = None,
    elementwise: bool = False,
    combine: str = "",
    local: tuple[int, ...] = (),
) -> OpDeclaration:
    """Register an op of the ``graphc`` domain; see :class:`OpDeclaration` for the arguments."""
    placement = PLACEMENT if next_value else {SHARD: ""} if combine else {}
    if origin is None:
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        origin = str(caller.f_globals["__name__"]) if caller else "?"
    declaration = OpDeclaration(
        name=name,
        inputs=Formal.parse(inputs),
        outputs=Formal.parse(outputs),
        attributes={**(attributes or {}), **placement},
        infer=infer,
        doc=inspect.cleandoc(doc),
        origin=origin,
        effect=effect,
        next_value=dict(next_value or {}),
        reduces=dict(reduces or {}),
        decompose=decompose,
        elementwise=elementwise,
        combine=combine,
        local=local,
    )
    OPS.register(name, declaration, origin=origin)
    return declaration


def declare(
    name: str,
    *,
    inputs: str,
    outputs: str,
    infer: InferFunction,
    attributes: Mapping[str, Any] | None = None,
    next_value: Mapping[int, int] | None = None,
    reduces: Mapping[int, str] | None = None,
    elementwise: bool = False,
    combine: str = "",
    local: tuple[int, ...] = (),
) -> Callable[[Decomposition], Decomposition]:
    """Register an op whose decomposition is the decorated function ``(op, *inputs, **attributes)``."""

    def register(function: Decomposition) -> Decomposition:
        declare_primitive(
            name,
            inputs=inputs,
            outputs=outputs,
            infer=infer,
            doc=function.__doc__ or "",
            attributes=attributes,
            next_value=next_value,
            reduces=reduces,
            decompose=function,
            origin=function.__module__,
            elementwise=elementwise,
            combine=combine,
            local=local,
        )
        return function

    return register


def declared(domain: str, op_type: str) -> OpDeclaration | None:
    """The declaration of a ``graphc`` op or a custom one; None for a standard op and for what nobody declares."""
    if domain == "graphc":
        return OPS.get(op_type)
    return CUSTOM.get(f"{domain}::{op_type}") if domain else None


def declaration_of(node: ir.Node) -> OpDeclaration | None:
    """The declaration of a ``graphc`` or custom node, or None for a standard op and for what nobody declares."""
    return declared(node.domain, node.op_type)


def has_effect(node: ir.Node) -> bool:
    """Whether the node must survive dead-code elimination and never be merged: collectives and updates."""
    declaration = declaration_of(node)
    return declaration is not None and (declaration.effect or bool(declaration.next_value))


def decompose_node(op: Builder, node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Emit the decomposition of ``node`` through ``op``; returns one value per output (None: not produced)."""
    declaration = declaration_of(node)
    if declaration is None or declaration.decompose is None:
        raise ValueError(f"{node.domain}::{node.op_type} has no decomposition")
    attributes = {k: v for k, v in declaration.attribute_values(node).items() if k not in PLACEMENT}
    result = declaration.decompose(op, *node.inputs, **attributes)
    return result if isinstance(result, tuple) else (result,)


def same_as(*indices: int) -> InferFunction:
    """Inference: output k has the type and shape of input ``indices[k]``."""

    def infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
        return [spec_of(inputs[i]) for i in indices]

    return infer


def spec_of(value: ir.Value | None) -> Spec:
    """(dtype, shape) of a typed value."""
    if value is None or value.dtype is None:
        raise ValueError(f"value {value.name if value else None!r} has no type")
    return value.dtype, value.shape


def is_update(node: ir.Node) -> bool:
    """Whether the node computes the next value of some state (an optimizer update, a running average, a counter)."""
    declaration = declaration_of(node)
    return declaration is not None and bool(declaration.next_value)


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
