"""Reads signatures of ops: their inputs, outputs and attributes, from schema or declaration.

Signatures are cached, because each access to a schema of ``onnx`` copies it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from graphc.ir.declare import REQUIRED, OpDeclaration

ENDLESS = 1 << 30
"""Stands for "no limit" on the inputs or outputs of a variadic op."""

_KINDS: dict[type, ir.AttributeType] = {
    bool: ir.AttributeType.INT,
    int: ir.AttributeType.INT,
    float: ir.AttributeType.FLOAT,
    str: ir.AttributeType.STRING,
}


@dataclass(frozen=True, slots=True)
class SchemaFormal:
    """A formal input or output.

    Attributes:
        variable: the schema's type variable; None when the type is fixed or the items of a variadic may differ.
        allowed: names of the accepted types, such as ``tensor(float)``; None: any.
    """

    name: str
    required: bool
    variable: str | None = None
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs, outputs and attributes of an op.

    Attributes:
        arity: least and most inputs, least and most outputs.
        default_outputs: number of outputs of a node by default; -1: one per input.
        attributes: name → kind; None: any kind.
        required: names of the attributes without a default.
    """

    inputs: tuple[SchemaFormal, ...]
    outputs: tuple[SchemaFormal, ...]
    arity: tuple[int, int, int, int]
    default_outputs: int
    attributes: Mapping[str, ir.AttributeType | None]
    required: tuple[str, ...]

    def input_error(self, op: str, count: int) -> str:
        """Describe why ``op`` rejects ``count`` inputs; empty if it accepts them."""
        least, most = self.arity[:2]
        return "" if least <= count <= most else f"{op} takes {count_range(least, most, 'input')}, not {count}"


_INDEX_TYPES = frozenset({"tensor(int32)", "tensor(int64)"})


@functools.cache
def index_operands(op_type: str, version: int) -> tuple[int, ...]:
    """The inputs of a standard op that take int32 or int64 and nothing else: indices, axes and lengths."""
    signature = standard_signature(op_type, "", version)
    formals = signature.inputs if signature is not None else ()
    return tuple(k for k, formal in enumerate(formals) if formal.allowed == _INDEX_TYPES)


def count_range(least: int, most: int, what: str) -> str:
    """``1 input``, ``2 to 3 inputs`` or ``at least 1 input``."""
    number = str(least) if least == most else f"at least {least}" if most >= ENDLESS else f"{least} to {most}"
    return f"{number} {what}{'' if number.endswith(' 1') or number == '1' else 's'}"


def formal_of(formals: tuple[SchemaFormal, ...], index: int) -> SchemaFormal:
    """The formal of operand ``index``; a variadic formal covers all further operands."""
    return formals[min(index, len(formals) - 1)]


@functools.cache
def standard_signature(op_type: str, domain: str, version: int) -> Signature | None:
    """The signature of an op in an opset of ``onnx``; None if the opset lacks it."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    constraints = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    single = onnx.defs.OpSchema.FormalParameterOption.Single

    def formals(parameters: Sequence[onnx.defs.OpSchema.FormalParameter]) -> tuple[SchemaFormal, ...]:
        return tuple(
            SchemaFormal(
                p.name,
                p.option == single,
                p.type_str if p.type_str in constraints and p.is_homogeneous else None,
                constraints.get(p.type_str, frozenset({p.type_str})),
            )
            for p in parameters
        )

    kinds = {name: ir.AttributeType[str(a.type).rpartition(".")[2]] for name, a in schema.attributes.items()}
    required = tuple(name for name, a in schema.attributes.items() if a.required)
    arity = (schema.min_input, min(schema.max_input, ENDLESS), schema.min_output, min(schema.max_output, ENDLESS))
    outputs = formals(schema.outputs)
    return Signature(formals(schema.inputs), outputs, arity, max(1, sum(f.required for f in outputs)), kinds, required)


@functools.cache
def declared_signature(declaration: OpDeclaration) -> Signature:
    """The signature of a ``graphc`` or plugin op."""
    inputs = tuple(SchemaFormal(f.name, not (f.optional or f.variadic)) for f in declaration.inputs)
    outputs = tuple(SchemaFormal(f.name, False) for f in declaration.outputs)
    endless_inputs, endless_outputs = (any(f.variadic for f in fs) for fs in (declaration.inputs, declaration.outputs))
    least = sum(f.required for f in inputs)
    arity = (least, ENDLESS if endless_inputs else len(inputs), 0, ENDLESS if endless_outputs else len(outputs))
    kinds = {name: None if d is REQUIRED else _KINDS.get(type(d)) for name, d in declaration.attributes.items()}
    required = tuple(name for name, d in declaration.attributes.items() if d is REQUIRED)
    return Signature(inputs, outputs, arity, -1 if endless_outputs else len(outputs), kinds, required)
