"""Infers types and shapes of node outputs: ONNX's inference, ``graphc`` declarations, one cache.

Inference runs when a node is created (:mod:`graphc.ir.builder`) and over a whole graph after its input shapes changed
(:func:`propagate`). Results depend only on the op, its attributes, the input types and small integer constants. They are
cached under that key, so a model of 50 equal blocks pays for one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import DOMAIN, DOMAIN_VERSION, IR_VERSION, OPSET
from graphc.ir.control_flow import infer_control
from graphc.ir.declare import OPS, REQUIRED, OpDeclaration, declared
from graphc.ir.facts import constant, describe, dims, neighbourhood
from graphc.ir.subgraphs import CONTROL
from graphc.ir.symbolic_dims import follow, refine

Inferred = tuple[ir.TypeProtocol | None, ir.Shape | None]

_CONSTANT_LIMIT = 4096
"""Constants with more elements than this are ignored by shape inference."""

_cache: dict[Any, tuple[Inferred, ...]] = {}


def infer_outputs(
    op_type: str,
    domain: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    *,
    version: int = OPSET,
    num_outputs: int,
) -> tuple[Inferred, ...]:
    """Infer (type, shape) of each output; (None, None) where unknown.

    Raises:
        ModelError: the op rejects its inputs.
    """
    declaration = OPS[op_type] if domain == DOMAIN else declared(domain, op_type)
    if declaration is not None:
        return _infer_declared(declaration, inputs, attributes)
    if domain == "" and op_type in CONTROL:
        return tuple(infer_control(op_type, inputs, attributes, functools.partial(propagate, version=version)))
    schema = _schema(op_type, version, domain)
    if schema is None:
        return ((None, None),) * num_outputs
    key = _key(op_type, domain, version, num_outputs, inputs, attributes)
    if key is not None and (hit := _cache.get(key)) is not None:
        return tuple((type_, ir.Shape(shape.dims) if shape is not None else None) for type_, shape in hit)
    result = _infer_standard(schema, op_type, domain, version, inputs, attributes, num_outputs)
    if key is not None:
        _cache[key] = tuple((type_, ir.Shape(shape.dims) if shape is not None else None) for type_, shape in result)
    return result


def version_of(node: ir.Node, opset: int = OPSET) -> int:
    """The version of the node's domain: what its graph imports, else the newest known.

    Args:
        opset: version of the standard domain.
    """
    if node.domain == "":
        return opset
    imports = node.graph.opset_imports if isinstance(node.graph, ir.Graph) else {}
    if node.domain in imports:
        return imports[node.domain]
    schema = _schema(node.op_type, _ANY_VERSION, node.domain)
    return schema.since_version if schema is not None else DOMAIN_VERSION


_ANY_VERSION = 1 << 20
"""Above every version of every domain."""


@functools.cache
def _schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _infer_declared(
    declaration: OpDeclaration, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]
) -> tuple[Inferred, ...]:
    values: dict[str, Any] = dict(declaration.attributes)
    for name, attr in attributes.items():
        values[name] = list(attr.value) if isinstance(attr.value, (tuple, list)) else attr.value
    for name, value in values.items():
        if value is REQUIRED:
            raise ModelError(f"{declaration.name} needs the attribute {name!r}")
    return tuple((ir.TensorType(dtype), shape) for dtype, shape in declaration.infer(inputs, values))


def _key(
    op_type: str,
    domain: str,
    version: int,
    num_outputs: int,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
) -> Any:
    parts: list[Any] = [op_type, domain, version, num_outputs]
    for value in inputs:
        if value is None:
            parts.append(None)
            continue
        known = constant(value)
        if known is not None and known.size <= (_CONSTANT_LIMIT if known.dtype.kind in "iub" else 16):
            parts.append((_number(value.dtype), known.shape, known.tobytes()))
        else:
            kind = value.type
            parts.append((int(kind.dtype) if type(kind) is ir.TensorType else str(kind), dims(value)))
    for name in sorted(attributes):
        attr = attributes[name]
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            return None
        if attr.type == ir.AttributeType.TENSOR:
            tensor = attr.value  # as_tensor() checks that slowly
            if tensor.size > 64 or tensor.dtype == ir.DataType.STRING:
                return None
            parts.append((name, int(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()))
        else:
            parts.append((name, int(attr.type), str(attr.value)))
    return tuple(parts)


def _number(dtype: ir.DataType | None) -> int:
    """An element type as a number, which hashes much faster."""
    return -1 if dtype is None else int(dtype)


def _infer_standard(
    schema: onnx.defs.OpSchema,
    op_type: str,
    domain: str,
    version: int,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    num_outputs: int,
) -> tuple[Inferred, ...]:
    names = ["" if value is None else f"i{k}" for k, value in enumerate(inputs)]
    outputs = [f"o{k}" for k in range(num_outputs)]
    node = onnx.NodeProto(op_type=op_type, domain=domain, input=names, output=outputs)
    node.attribute.extend(_attribute_proto(attr) for attr in attributes.values())
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
        if known is not None and known.size <= _CONSTANT_LIMIT and known.dtype.kind in "iubf":
            data[name] = onnx.numpy_helper.from_array(known, name)
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[onnx.helper.make_opsetid(domain, version)], ir_version=IR_VERSION
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        operands = ", ".join("-" if v is None else f"{v.name}:{v.dtype}{dims(v)}" for v in inputs)
        raise ModelError(f"{op_type} rejects its inputs ({operands}): {error}") from None
    return tuple(_from_proto(found.get(name)) for name in outputs)


def _attribute_proto(attr: ir.Attr) -> onnx.AttributeProto:
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


_LIKE_INPUT = frozenset({"GroupNormalization", "MeanVarianceNormalization", "Binarizer", "Imputer", "Normalizer", "Scaler"})
"""Ops that ONNX cannot infer: their output has the shape of their input, and its type where the schema leaves that open."""


def infer_node(node: ir.Node, version: int = OPSET) -> tuple[Inferred, ...]:
    """Infer the outputs of a node; see :func:`infer_outputs`.

    Raises:
        ModelError: the op rejects its inputs, or inference fails.
    """
    try:
        return infer_outputs(
            node.op_type, node.domain, node.inputs, node.attributes, version=version, num_outputs=len(node.outputs)
        )
    except (ValueError, IndexError, TypeError) as error:
        raise ModelError(f"inference of {describe(node)} failed: {error}") from error


def apply(node: ir.Node, *, version: int = OPSET) -> None:
    """Infer the outputs of ``node`` from its inputs and store their types and shapes."""
    try:
        found = infer_node(node, version)
    except ModelError as error:
        raise ModelError(f"{error}\n{neighbourhood(node)}") from error.__cause__
    if node.op_type in _LIKE_INPUT and node.domain in ("", "ai.onnx.ml") and node.inputs[0] is not None:
        found = ((found[0][0] or node.inputs[0].type, node.inputs[0].shape),)
    for value, (type_, shape) in zip(node.outputs, found, strict=False):
        if type_ is not None:
            value.type = type_
        if shape is not None:
            value.shape = shape
    refine(node)


def propagate(graph: ir.Graph, *, version: int = OPSET) -> None:
    """Re-infer every value of ``graph`` in node order and fold small integer arithmetic.

    ``Shape`` of a static value, and integer or boolean ops on constants, get a ``const_value``, so that later shapes
    (of ``Reshape``, ``Expand`` …) become static too. The nodes stay as they are; ``simplify`` replaces them.
    """
    for node in graph:
        if node.op_type != "Constant":
            for value in node.outputs:
                value.const_value = None  # folded from shapes that may have changed
        apply(node, version=version_of(node, version))
        fold(node)


def fold(node: ir.Node) -> bool:
    """Store the constant output of ``node`` when it is small integer or boolean arithmetic on constants."""
    if node.domain != "" or len(node.outputs) != 1 or node.op_type == "Constant":
        return False
    out = node.outputs[0]
    if out.const_value is not None:
        return False
    result: np.ndarray | None = None
    if out.dtype is not None and _is_integral(out.dtype):
        result = follow(node)
        if result is None:
            result = evaluate(node, limit=_CONSTANT_LIMIT)
    if result is None:
        return False
    out.const_value = ir.Tensor(result, name=out.name)
    out.shape = ir.Shape(result.shape)
    return True


def _is_integral(dtype: ir.DataType) -> bool:
    return dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


NOT_DETERMINED = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


def evaluate(node: ir.Node, *, limit: int) -> np.ndarray | None:
    """Evaluate a single-output standard node whose inputs are constants of at most ``limit`` elements; else None."""
    if node.domain != "" or node.op_type in NOT_DETERMINED or len(node.outputs) != 1:
        return None
    arrays: list[np.ndarray | None] = []
    for value in node.inputs:
        known = constant(value)
        if value is not None and (known is None or known.size > limit):
            return None
        arrays.append(known)
    if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
        return None
    if node.outputs[0].type is not None and not isinstance(node.outputs[0].type, ir.TensorType):
        return None
    found = dims(node.outputs[0])
    static = [d for d in found or () if isinstance(d, int)]
    if found is not None and len(static) == len(found) and math.prod(static) > limit:
        return None
    found_outputs = compute(node, arrays)
    return found_outputs[0] if found_outputs is not None else None


def compute(node: ir.Node, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """Compute the outputs of a standard node without bodies from its operands; None where that is impossible."""
    if node.domain != "" or node.op_type in NOT_DETERMINED:
        return None
    if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
        return None
    from onnx.reference import ReferenceEvaluator

    names = ["" if array is None else f"i{k}" for k, array in enumerate(arrays)]
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    outputs = [f"o{k}" for k in range(len(node.outputs))]
    proto = onnx.NodeProto(op_type=node.op_type, domain="", input=names, output=outputs)
    proto.attribute.extend(_attribute_proto(attr) for attr in node.attributes.values())
    graph = onnx.helper.make_graph(
        [proto],
        "constant",
        [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ],
        [onnx.helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    try:
        found: Any = ReferenceEvaluator(model).run(None, feeds)
        return [np.asarray(array) for array in found]
    except Exception:
        return None  # the reference evaluator lacks the op: keep the node


def computed(value: ir.Value, known: dict[ir.Value, np.ndarray | None]) -> np.ndarray | None:
    """Compute a value from constants, initializers and ``known`` values; None if it depends on anything else.

    ``known`` receives every value on the way.
    """
    pending = [value]
    while pending:
        last = pending[-1]
        producer = last.producer()
        if last in known:
            pending.pop()
            continue
        stored = _stored(last)
        if stored is None and producer is not None:
            missing = [v for v in producer.inputs if v is not None and v not in known]
            if missing:
                pending.extend(missing)
                continue
            arrays = [known[v] if v is not None else None for v in producer.inputs]
            whole = all(a is not None for a, v in zip(arrays, producer.inputs, strict=True) if v is not None)
            results = compute(producer, arrays) if whole else None
            known.update({out: results[k] if results is not None else None for k, out in enumerate(producer.outputs)})
        known.setdefault(last, stored)
        pending.pop()
    return known[value]


def _stored(value: ir.Value) -> np.ndarray | None:
    """The array of a constant, or of an initializer that no feed replaces."""
    fixed = constant(value)
    if fixed is None and value.is_initializer() and value.const_value is not None and not value.is_graph_input():
        return np.asarray(value.const_value.numpy())
    return fixed
