"""Infers types and shapes of node outputs: ONNX's inference, ``graphc`` declarations, one cache.

Inference runs when a node is created (:mod:`graphc.ir.builder`) and over a whole graph after its input shapes changed
(:func:`propagate`). Results depend only on the op, its attributes, the input types and small integer constants. They are
cached under that key, so a model of 50 equal blocks pays for one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import DOMAIN, DOMAIN_VERSION, OPSET
from graphc.ir.control_flow import infer_control
from graphc.ir.declare import OPS, REQUIRED, OpDeclaration, declared
from graphc.ir.evaluate import evaluate
from graphc.ir.facts import constant, describe, dims, neighbourhood
from graphc.ir.onnx_inference import CONSTANT_LIMIT, Inferred, infer_standard, schema_of
from graphc.ir.refined_shapes import refine
from graphc.ir.subgraphs import CONTROL
from graphc.ir.symbolic_dims import follow

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
    schema = schema_of(op_type, version, domain)
    if schema is None:
        return ((None, None),) * num_outputs
    key = _key(op_type, domain, version, num_outputs, inputs, attributes)
    if key is not None and (hit := _cache.get(key)) is not None:
        return tuple((type_, ir.Shape(shape.dims) if shape is not None else None) for type_, shape in hit)
    result = infer_standard(schema, op_type, domain, version, inputs, attributes, num_outputs)
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
    schema = schema_of(node.op_type, _ANY_VERSION, node.domain)
    return schema.since_version if schema is not None else DOMAIN_VERSION


_ANY_VERSION = 1 << 20
"""Above every version of every domain."""


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
        if known is not None and known.size <= (CONSTANT_LIMIT if known.dtype.kind in "iub" else 16):
            parts.append((_number(value.dtype), known.shape, known.tobytes()))
        else:
            held = value.type
            parts.append((int(held.dtype) if type(held) is ir.TensorType else str(held), dims(value)))
    for name in sorted(attributes):
        attr = attributes[name]
        kind = attr.type
        if kind is ir.AttributeType.GRAPH or kind is ir.AttributeType.GRAPHS:
            return None
        if kind is ir.AttributeType.TENSOR:
            tensor = attr.value  # as_tensor() checks that slowly
            if tensor.size > 64 or tensor.dtype == ir.DataType.STRING:
                return None
            parts.append((name, int(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()))
        else:
            parts.append((name, int(kind), str(attr.value)))
    return tuple(parts)


def _number(dtype: ir.DataType | None) -> int:
    """An element type as a number, which hashes much faster."""
    return -1 if dtype is None else int(dtype)


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
            result = evaluate(node, limit=CONSTANT_LIMIT)
    if result is None:
        return False
    out.const_value = ir.Tensor(result, name=out.name)
    out.shape = ir.Shape(result.shape)
    return True


def _is_integral(dtype: ir.DataType) -> bool:
    return dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
