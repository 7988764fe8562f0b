"""Function bodies: the standard's own definition of a composite op, emitted through the builder.

    MeanVarianceNormalization(x)   ─►   ReduceMean, Sub, Pow, ReduceMean, Sqrt, Div …

ONNX defines many ops by a function of simpler ones. Autodiff differentiates an op without a rule through its body, and
``legalize`` puts the body in place of an op that is newer than the opset of a legalised graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from graphc.ir import OPSET
from graphc.ir.builder import Builder
from graphc.passes._legalize_parameters import constant_tensor
from graphc.passes._legalize_versions import adapt


def schema_of(op_type: str, domain: str = "") -> onnx.defs.OpSchema | None:
    """The schema of the legal opset, that of a newer one where the op is newer, or None for an unknown op."""
    if onnx.defs.has(op_type, OPSET, domain):
        return onnx.defs.get_schema(op_type, OPSET, domain)
    return onnx.defs.get_schema(op_type, domain) if onnx.defs.has(op_type, domain) else None


def has_body(op_type: str, domain: str = "") -> bool:
    """Whether the standard defines the op by a function."""
    schema = schema_of(op_type, domain)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def emit_body(op: Builder, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    """Emit the body of ``node`` through ``op``; one value per output, or None when it has no body without subgraphs."""
    function = _function(node)
    if function is None or any(a.HasField("g") for inner in function.node for a in inner.attribute):
        return None
    version = next((entry.version for entry in function.opset_import if entry.domain in ("", "ai.onnx")), OPSET)
    inputs = [*node.inputs, *[None] * len(function.input)]
    values: dict[str, ir.Value | None] = {"": None, **dict(zip(function.input, inputs, strict=False))}
    for inner in function.node:
        attributes = _attributes(function, inner, node)
        operands = [values[name] for name in inner.input]
        results = _emit(op, inner, operands, attributes, version)
        values.update(zip(inner.output, results, strict=False))
    return tuple(values[name] for name in list(function.output)[: len(node.outputs)])


def _function(node: ir.Node) -> onnx.FunctionProto | None:
    schema = schema_of(node.op_type, node.domain)
    if schema is None:
        return None
    if schema.has_function:
        text = schema.get_function_with_opset_version(_newest(schema.function_opset_versions))
        return onnx.FunctionProto.FromString(text)
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
    function = onnx.FunctionProto.FromString(text)
    return function if function.node else None


def _newest(versions: Sequence[int]) -> int:
    """The body for the newest opset that is legal, or for the oldest when all are newer."""
    legal = [v for v in versions if v <= OPSET]
    return max(legal) if legal else min(versions)


def _attributes(function: onnx.FunctionProto, inner: onnx.NodeProto, node: ir.Node) -> dict[str, ir.Attr]:
    """The attributes of a node of the body; those that refer to attributes of the call take their values."""
    schema = schema_of(node.op_type, node.domain)
    given = {name: attr for name, attr in node.attributes.items() if attr.type != ir.AttributeType.UNDEFINED}
    found: dict[str, ir.Attr] = {}
    for proto in inner.attribute:
        if not proto.ref_attr_name:
            found[proto.name] = ir.from_proto(proto)
            continue
        if proto.ref_attr_name in given:
            attr = given[proto.ref_attr_name]
            found[proto.name] = ir.Attr(proto.name, attr.type, attr.value)
        elif schema is not None and proto.ref_attr_name in schema.attributes:
            default = schema.attributes[proto.ref_attr_name].default_value
            if default.type != onnx.AttributeProto.UNDEFINED:
                found[proto.name] = ir.from_proto(default)
                found[proto.name] = ir.Attr(proto.name, found[proto.name].type, found[proto.name].value)
    return found


def _emit(
    op: Builder,
    inner: onnx.NodeProto,
    operands: Sequence[ir.Value | None],
    attributes: dict[str, ir.Attr],
    version: int,
) -> Sequence[ir.Value]:
    """One node of the body in the legal opset."""
    scratch = ir.Node(inner.domain, inner.op_type, operands, attributes.values(), num_outputs=len(inner.output))
    try:
        if inner.op_type == "Constant":
            tensor = constant_tensor(scratch)
            assert tensor is not None
            return [op.const(tensor.numpy())]
        replaced = adapt(op, scratch, version) if version < OPSET else None
        if replaced is not None:
            return replaced
        return op.emit(inner.op_type, scratch.inputs, scratch.attributes, domain=inner.domain, outputs=len(inner.output))
    finally:
        scratch.resize_inputs(0)  # no longer counts as a user of its operands


__all__ = ["emit_body", "has_body", "schema_of"]
