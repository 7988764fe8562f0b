"""Emits the standard's function bodies: ONNX's own definitions of composite ops.

    MeanVarianceNormalization(x)   ─►   ReduceMean, Sub, Pow, ReduceMean, Sqrt, Div …

Autodiff differentiates an op without a rule through its body, and ``legalize`` replaces an op that is newer than the opset
of a legalised graph by its body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.ir import OPSET
from graphc.ir.builder import Builder
from graphc.ir.control_flow import type_body_inputs
from graphc.ir.facts import FLOATS, constant, required
from graphc.ir.opset_adapters import adapt
from graphc.ir.subgraphs import bodies, captured, copy_body
from graphc.ir.toposort import silent_reader

_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Where", "Clip"})
_SUBGRAPHS_SINCE = 18
"""First opset whose bodies may hold subgraphs: the subgraphs are not adapted, and from here on need not be."""


def schema_of(op_type: str, domain: str = "") -> Any:
    """The schema in the legal opset, or in a newer one if the op is newer; None for an unknown op.

    Returns an ``onnx.defs.OpSchema``; its published types leave out function bodies.
    """
    if onnx.defs.has(op_type, OPSET, domain):
        return onnx.defs.get_schema(op_type, OPSET, domain)
    return onnx.defs.get_schema(op_type, domain) if onnx.defs.has(op_type, domain) else None


def has_body(op_type: str, domain: str = "") -> bool:
    """Whether the standard defines the op by a function."""
    schema = schema_of(op_type, domain)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def emit_body(op: Builder, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    """Emit the body of ``node`` through ``op``; one value per output, or None when no body is legal."""
    proto = _function(node)
    if proto is None:
        return None
    del proto.output[len(node.outputs) :]  # a body does not compute optional outputs that the call omits
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), OPSET)
    with silent_reader():
        function: ir.Function = ir.serde.deserialize_function(proto)
    if version < _SUBGRAPHS_SINCE and any(True for inner in function for _ in bodies(inner)):
        return None
    inputs = [*node.inputs, *[None] * len(function.inputs)]
    values: dict[ir.Value, ir.Value] = {f: v for f, v in zip(function.inputs, inputs, strict=False) if v is not None}
    outer = {v.name: v for v in captured(node)}  # values that a body attribute of the call captures
    loose = {v for inner in function for v in inner.inputs if v is not None and v.producer() is None and v not in values}
    values.update((v, outer[v.name]) for v in loose if v.name in outer)
    for inner in function:
        operands = [values.get(v) if v is not None else None for v in inner.inputs]
        results = _emit(op, inner, operands, _attributes(op, inner, node, operands, values), version)
        values.update(zip(inner.outputs, results, strict=False))
    return tuple(values.get(out) for out in list(function.outputs)[: len(node.outputs)])


def _function(node: ir.Node) -> onnx.FunctionProto | None:
    schema = schema_of(node.op_type, node.domain)
    if schema is None:
        return None
    if schema.has_function:
        text = schema.get_function_with_opset_version(_newest(schema.function_opset_versions))
        return _parsed(text)
    if not schema.has_context_dependent_function or any(v is not None and v.type is None for v in node.inputs):
        return None
    types = [ir.serde.serialize_type(v.type) if v is not None and v.type is not None else onnx.TypeProto() for v in node.inputs]
    for proto, value in zip(types, node.inputs, strict=True):
        if value is not None and value.shape is not None and isinstance(value.type, ir.TensorType):
            ir.serde.serialize_shape_into(proto, value.shape)
    version = _newest(schema.context_dependent_function_opset_versions)
    call = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    call.input.extend("" if v is None else f"i{k}" for k, v in enumerate(node.inputs))
    call.output.extend(f"o{k}" for k in range(len(node.outputs)))
    call.attribute.extend(ir.to_proto(attr) for attr in node.attributes.values())
    text = schema.get_context_dependent_function_with_opset_version(
        version, call.SerializeToString(), [proto.SerializeToString() for proto in types]
    )
    function = _parsed(text)
    return function if function.node else None


def _parsed(text: bytes) -> onnx.FunctionProto:
    function = onnx.FunctionProto()
    function.ParseFromString(text)
    return function


def _newest(versions: Sequence[int]) -> int:
    """The body for the newest legal opset, or the oldest body when all are newer."""
    legal = [v for v in versions if v <= OPSET]
    return max(legal) if legal else min(versions)


def _attributes(
    op: Builder,
    inner: ir.Node,
    node: ir.Node,
    operands: Sequence[ir.Value | None],
    values: Mapping[ir.Value, ir.Value],
) -> dict[str, ir.Attr]:
    """The attributes of a node of the body, with references to the call's attributes resolved."""
    if any(True for _ in bodies(inner)):
        type_body_inputs(inner.op_type, operands, inner.attributes)
    found: dict[str, ir.Attr] = {}
    for name, attr in inner.attributes.items():
        if attr.is_ref():
            given = _given(node, attr.ref_attr_name or "")
            if given is not None:
                found[name] = ir.Attr(name, given.type, given.value)
        elif attr.type == ir.AttributeType.GRAPH:
            found[name] = ir.Attr(name, attr.type, copy_body(op, attr.as_graph(), values))
        else:
            found[name] = attr
    return found


def _given(node: ir.Node, name: str) -> ir.Attr | None:
    """An attribute of the call, or its default."""
    if name in node.attributes:
        return node.attributes[name]
    schema = schema_of(node.op_type, node.domain)
    if schema is None or name not in schema.attributes:
        return None
    default = schema.attributes[name].default_value
    return None if default.type == onnx.AttributeProto.UNDEFINED else ir.serde.deserialize_attribute(default)


def _emit(
    op: Builder, inner: ir.Node, operands: Sequence[ir.Value | None], attributes: dict[str, ir.Attr], version: int
) -> Sequence[ir.Value]:
    """Emit one node of the body in the legal opset."""
    scratch = ir.Node(inner.domain, inner.op_type, operands, attributes.values(), num_outputs=len(inner.outputs))
    try:
        if inner.op_type == "Constant":
            tensor = required(ir.convenience.get_const_tensor(scratch.outputs[0]))
            return [op.const(tensor.numpy())]
        replaced = adapt(op, scratch, version) if version < OPSET else None
        if replaced is not None:
            return replaced
        agreed = _agreeing(op, inner.op_type, scratch.inputs)
        return op.emit(inner.op_type, agreed, scratch.attributes, domain=inner.domain, outputs=len(inner.outputs))
    finally:
        scratch.resize_inputs(0)  # no longer a user of its operands


def _agreeing(op: Builder, op_type: str, operands: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Bring arithmetic operands to one type: some bodies have float32 constants whatever the call's type."""
    values = [v for v in operands if v is not None and v.dtype in FLOATS]
    like = next((v for v in values if constant(v) is None), None)
    if op_type not in _ARITHMETIC or like is None or like.dtype is None:
        return list(operands)
    dtype = like.dtype.numpy()
    return [
        op.const(np.asarray(known).astype(dtype)) if v in values and (known := constant(v)) is not None else v for v in operands
    ]
