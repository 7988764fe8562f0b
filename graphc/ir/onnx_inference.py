"""Asks ONNX for the types of the outputs of one node of a standard operator."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import IR_VERSION
from graphc.ir.facts import constant, describe_value, dims
from graphc.ir.operand_shapes import check_operands, check_result

Inferred = tuple[ir.TypeProtocol | None, ir.Shape | None]

CONSTANT_LIMIT = 4096
"""Constants with more elements than this are ignored by shape inference."""


@functools.cache
def schema_of(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


_LISTS_OF_AXES = frozenset(
    {"shape", "starts", "ends", "axes", "steps", "repeats", "pads", "sizes", "scales", "output_shape", "image_shape"}
)
"""Names of operands with an element or two for each axis; ONNX's inference makes as many dimensions."""

_MOST = 128
"""Elements of such an operand: two for each of 64 axes."""


def _check_lists(schema: onnx.defs.OpSchema, inputs: Sequence[ir.Value | None]) -> None:
    """Refuse lists of axes that claim more elements than there are axes, before memory is spent on them."""
    for value, formal in zip(inputs, schema.inputs, strict=False):
        found = dims(value) if value is not None else None
        if value is None or not found or not isinstance(found[0], int) or found[0] <= _MOST:
            continue
        if formal.name in _LISTS_OF_AXES or schema.name == "ConstantOfShape":
            raise ModelError(
                f"{schema.name} gets {describe_value(value)} as its {formal.name!r}; at most {_MOST // 2} axes exist"
            )


def infer_standard(
    schema: onnx.defs.OpSchema,
    op_type: str,
    domain: str,
    version: int,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    num_outputs: int,
) -> tuple[Inferred, ...]:
    _check_lists(schema, inputs)
    if domain == "":
        check_operands(schema, inputs, attributes)
    names = ["" if value is None else f"i{k}" for k, value in enumerate(inputs)]
    outputs = [f"o{k}" for k in range(num_outputs)]
    node = onnx.NodeProto(op_type=op_type, domain=domain, input=names, output=outputs)
    node.attribute.extend(attribute_proto(attr) for attr in attributes.values())
    if op_type == "STFT" and "onesided" not in attributes:
        node.attribute.append(onnx.helper.make_attribute("onesided", 1))  # the default, which ONNX's inference ignores
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for name, value in zip(names, inputs, strict=True):
        if value is None:
            continue
        if value.type is None:
            return ((None, None),) * num_outputs
        types[name] = _type_proto(value)
        known = constant(value)
        if known is not None and known.size <= CONSTANT_LIMIT and known.dtype.kind in "iubf":
            data[name] = onnx.numpy_helper.from_array(known, name)
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[onnx.helper.make_opsetid(domain, version)], ir_version=IR_VERSION
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        operands = ", ".join("-" if v is None else f"{v.name}:{v.dtype}{dims(v)}" for v in inputs)
        raise ModelError(f"{op_type} rejects its inputs ({operands}): {error}") from None
    result = tuple(_from_proto(found.get(name)) for name in outputs)
    if domain == "" and result and result[0][1] is not None:
        check_result(schema, inputs, (size for size in result[0][1] if isinstance(size, int)))
    return result


def attribute_proto(attr: ir.Attr) -> onnx.AttributeProto:
    """The type proto, as ``ir.to_proto`` builds it but faster."""
    return ir.serde.serialize_reference_attribute(attr) if attr.is_ref() else ir.serde.serialize_attribute(attr)


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    if isinstance(value.type, ir.TensorType) and value.dtype is not None:
        proto = onnx.TypeProto()
        proto.tensor_type.elem_type = int(value.dtype)
        found = dims(value)
        if found is not None:
            shape = proto.tensor_type.shape
            shape.Clear()
            for d in found:
                dim = shape.dim.add()
                if isinstance(d, int):
                    dim.dim_value = d
                elif d is not None:
                    dim.dim_param = d
        return proto
    proto = onnx.TypeProto()
    ir.serde.serialize_type_into(proto, value.type) if value.type is not None else None
    return proto


def _from_proto(proto: onnx.TypeProto | None) -> Inferred:
    if proto is None or proto.WhichOneof("value") is None:
        return None, None
    type_ = ir.serde.deserialize_type_proto_for_type(proto)
    if not isinstance(type_, ir.TensorType):
        return type_, None
    if not proto.tensor_type.HasField("shape"):
        return type_, None
    return type_, ir.Shape(
        [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in proto.tensor_type.shape.dim]
    )
