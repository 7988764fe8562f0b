"""Declares ops of the ``graphc`` domain: schema, type inference, effects and decomposition.

    @declare("ReluGrad", inputs="dy y", outputs="dx", infer=same_as(0))
    def relu_grad(op, dy, y):
        \"\"\"dx = dy where y > 0, else 0\"\"\"
        return op.Where(op.Greater(y, 0.0), dy, op.zeros_like(dy))

The decorated function is the op's **decomposition** into standard ONNX ops or simpler ``graphc`` ops.
:func:`declare_primitive` declares an op without a decomposition, such as a collective.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, TypeAlias, TypedDict, Unpack

import numpy as np
import onnx_ir as ir

from graphc.errors import InternalError, UsageError
from graphc.registry import Registry

if TYPE_CHECKING:
    from graphc.ir.builder import Builder

Spec: TypeAlias = "tuple[ir.DataType, ir.Shape | None]"
"""Inferred type of one output: element type and shape (None: unknown rank)."""

InferFunction: TypeAlias = "Callable[[Sequence[ir.Value | None], Mapping[str, Any]], Sequence[Spec]]"
Decomposition: TypeAlias = "Callable[..., ir.Value | tuple[ir.Value | None, ...]]"

REQUIRED: Any = object()
"""Marks an attribute without a default."""

SHARD, OFFLOAD = "shard", "offload"
PLACEMENT: Mapping[str, Any] = {"bucket": "", SHARD: "", OFFLOAD: 0}
"""Attributes of every update op that say where it runs; decompositions do not receive them.

``bucket`` names the flat buffers that the update shares with others. ``shard`` is empty, ``even`` or ``root``: the update runs
over this rank's elements of its bucket (:mod:`graphc.ir.ops.collectives`), and each rank keeps only its shard of state that is
not gathered. ``offload``: the state lies in host memory and the update runs there.
"""


class Role(enum.Enum):
    """Role of a state of an update."""

    PARAMETER = "parameter"
    """A trainable parameter; checkpoints and exported models hold it."""
    OPTIMIZER = "optimizer"
    """State of an optimizer or of gradient compression, such as a momentum or an error feedback."""
    STATISTIC = "statistic"
    """A running statistic of the forward pass: small, and read whole when the model is evaluated."""
    COUNTER = "counter"
    """A number of steps."""
    SCALE = "scale"
    """The loss scale; its update reads ``skip``, the overflow flag of the step, and has the attribute ``minimum``."""
    COPY = "copy"
    """A copy of the parameter (the update's ``source``) in a lower type; checkpoints do not hold it."""


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
    """The declaration of one ``graphc`` or custom op.

    Attributes:
        next_value: output index → index of the input that it replaces (parameters, optimizer state, running statistics).
            A node with a non-empty ``next_value`` is an **update node**.
        gradient: of an optimizer: index of the input that is the parameter's gradient.
        source: of another update: index of the input with one element per state element, if there is one: a batch
            statistic, or the copied value. For an optimizer it is the gradient.
        roles: index of a state input → role of the state. By default the first next value of an optimizer is the parameter's
            and the others are optimizer state.
        local: indices of inputs that hold state which differs from rank to rank: it is neither broadcast nor compared. A
            checkpoint holds its sum over the ranks, and each rank restores an equal part of it.
        reduces: input index → reduction (``"sum"`` or ``"mean"``) that data-parallel training puts before that input. By
            default an optimizer sums its gradient and the input called ``divisor``.
        elementwise: element k of every next value depends only on element k of the states and of the source, and on scalars:
            the update may run over any part of a flat buffer.
        combine: ``"sum"`` or ``"max"`` when that reduction of the results over parts of the operands is the result over the
            whole (a sum of squares, a test for NaN); such an op has the attribute ``shard`` too.
        passes_through: output k is input k, reduced over the ranks or converted to another type.
        effect: the node must be neither merged nor deleted, nor moved across another of the same group.
        decompose: builds the same outputs from standard ops; None for primitives, which need a backend kernel.
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
    gradient: int | None = None
    source: int | None = None
    roles: Mapping[int, Role] = field(default_factory=dict)
    reduces: Mapping[int, str] = field(default_factory=dict)
    decompose: Decomposition | None = None
    elementwise: bool = False
    combine: str = ""
    passes_through: bool = False
    local: tuple[int, ...] = ()

    @property
    def flat(self) -> tuple[int, ...]:
        """Inputs with one element per state element: the states and the source."""
        return tuple(sorted({*self.next_value.values(), *(() if self.source is None else (self.source,))}))

    @property
    def main(self) -> int:
        """Index of the state that names an update: the parameter, else the first state."""
        return next((k for k, role in self.roles.items() if role is Role.PARAMETER), self.next_value[min(self.next_value)])

    def place_of(self, name: str) -> int | None:
        """Index of the formal input ``name``, or None when the op lacks it."""
        return next((k for k, formal in enumerate(self.inputs) if formal.name == name), None)

    def attribute_values(self, node: ir.Node) -> dict[str, Any]:
        """The node's attributes as Python values, defaults filled in.

        Files store float attributes in float32. They are read back as the shortest decimal that rounds to the stored value,
        so that 0.999 (and 1 − 0.999) is the same before and after a model is saved.
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


class OpOptions(TypedDict, total=False):
    """What a declaration may say besides its signature; see :class:`OpDeclaration`."""

    attributes: Mapping[str, Any]
    effect: bool
    next_value: Mapping[int, int]
    gradient: int
    source: int
    roles: Mapping[int, Role]
    reduces: Mapping[int, str]
    elementwise: bool
    combine: str
    passes_through: bool
    local: tuple[int, ...]


class Declared(OpOptions, total=False):
    """All that a declaration says; see :class:`OpDeclaration`. ``inputs`` and ``outputs`` are text for :class:`Formal`."""

    inputs: Required[str]
    outputs: Required[str]
    infer: Required[InferFunction]
    doc: Required[str]
    origin: Required[str]
    decompose: Decomposition | None


def make_declaration(name: str, **given: Unpack[Declared]) -> OpDeclaration:
    """An :class:`OpDeclaration` with its defaults filled in.

    Raises:
        UsageError: a state of the update has no role, or the gradient is one of the states.
    """
    options: dict[str, Any] = {**given}
    inputs, outputs, doc = (options.pop(key) for key in ("inputs", "outputs", "doc"))
    formals, next_value = Formal.parse(inputs), options.get("next_value", {})
    placement: Mapping[str, Any] = PLACEMENT if next_value else {SHARD: ""} if options.get("combine") else {}
    options["attributes"] = {**options.get("attributes", {}), **placement}
    gradient, states = options.get("gradient"), [next_value[k] for k in sorted(next_value)]
    if gradient is not None:
        if not states or gradient in states:
            raise UsageError(f"the optimizer {name!r} needs states other than its gradient: next_value={dict(next_value)}")
        options["source"] = gradient
        divisors = [k for k, formal in enumerate(formals) if formal.name == "divisor"]
        options.setdefault("reduces", dict.fromkeys((gradient, *divisors), "sum"))
        parameter = {} if Role.PARAMETER in options.get("roles", {}).values() else {states[0]: Role.PARAMETER}
        options["roles"] = {**dict.fromkeys(states, Role.OPTIMIZER), **parameter, **options.get("roles", {})}
    if states and options.get("roles", {}).keys() != set(states):
        raise UsageError(f"the update {name!r} must give each of its states a role: roles={{{states[0]}: Role.…}}")
    return OpDeclaration(name, formals, Formal.parse(outputs), doc=inspect.cleandoc(doc), **options)


def declare_primitive(name: str, **given: Unpack[Declared]) -> OpDeclaration:
    """Register an op of the ``graphc`` domain; see :class:`OpDeclaration` for the arguments."""
    declaration = make_declaration(name, **given)
    OPS.register(name, declaration, origin=declaration.origin)
    return declaration


def declare(
    name: str, *, inputs: str, outputs: str, infer: InferFunction, **options: Unpack[OpOptions]
) -> Callable[[Decomposition], Decomposition]:
    """Register an op whose decomposition is the decorated function ``(op, *inputs, **attributes)``."""

    def register(function: Decomposition) -> Decomposition:
        doc, origin = function.__doc__ or "", function.__module__
        declare_primitive(
            name, inputs=inputs, outputs=outputs, infer=infer, doc=doc, decompose=function, origin=origin, **options
        )
        return function

    return register


def declared(domain: str, op_type: str) -> OpDeclaration | None:
    """The declaration of a ``graphc`` or custom op; None for standard and unknown ops."""
    if domain == "graphc":
        return OPS.get(op_type)
    return CUSTOM.get(f"{domain}::{op_type}") if domain else None


def declaration_of(node: ir.Node) -> OpDeclaration | None:
    """The declaration of a ``graphc`` or custom node; None for standard and unknown ops."""
    return declared(node.domain, node.op_type)


def required_declaration(node: ir.Node) -> OpDeclaration:
    """The declaration of a node that must have one.

    Raises:
        InternalError: the op is not declared.
    """
    declaration = declaration_of(node)
    if declaration is None:
        raise InternalError(f"the node {node.name!r} is a {node.domain or 'ai.onnx'}::{node.op_type}, which is not declared")
    return declaration


def has_effect(node: ir.Node) -> bool:
    """Whether the node must survive dead-code elimination and never be merged: collectives, updates, what becomes an update."""
    declaration = declaration_of(node)
    return declaration is not None and (declaration.effect or bool(declaration.next_value) or bool(declaration.roles))


def decompose_node(op: Builder, node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Emit the decomposition of ``node`` through ``op``; returns one value per output (None: absent)."""
    declaration = declaration_of(node)
    if declaration is None or declaration.decompose is None:
        raise ValueError(f"{node.domain}::{node.op_type} has no decomposition")
    attributes = {k: v for k, v in declaration.attribute_values(node).items() if k not in PLACEMENT}
    result = declaration.decompose(op, *node.inputs, **attributes)
    return result if isinstance(result, tuple) else (result,)


def same_as(*indices: int) -> InferFunction:
    """Inference rule: output k has the type and shape of input ``indices[k]``."""

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
    """Index of the formal input ``name`` of a declared op, or None when it lacks it."""
    return required_declaration(node).place_of(name)


def operand(node: ir.Node, name: str) -> ir.Value | None:
    """The value at the formal input ``name``; None when absent."""
    index = place_of(node, name)
    return node.inputs[index] if index is not None and index < len(node.inputs) else None


def put(node: ir.Node, name: str, value: ir.Value) -> None:
    """Make ``value`` the operand of the formal input ``name``."""
    index = place_of(node, name)
    if index is None:
        raise InternalError(f"the op {node.op_type} of {node.name!r} has no input {name!r}")
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)
