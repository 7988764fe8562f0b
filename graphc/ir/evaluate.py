"""Evaluates single nodes on constants, by ONNX's reference evaluator, within limits of size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.facts import constant, dims
from graphc.ir.numpy_ops import compute_directly
from graphc.ir.onnx_inference import attribute_proto, infer_standard, schema_of

MOST_ELEMENTS = 1 << 24
"""Of one computed value; :func:`computed` stops when all values on the way have eight times as many."""

_WINDOWS = ("kernel_shape", "strides", "dilations", "pads", "output_padding", "output_shape")
_WIDEST = 1 << 12
"""Of a window whose op is computed: the evaluator pads copies of its operands."""

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
    if _is_large(node, arrays):
        return None
    if len(node.outputs) == 1 and (direct := compute_directly(node, arrays)) is not None:
        return [direct]
    from onnx.reference import ReferenceEvaluator  # 0.15 s, and most models do not need it

    names = ["" if array is None else f"i{k}" for k, array in enumerate(arrays)]
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    outputs = [f"o{k}" for k in range(len(node.outputs))]
    proto = onnx.NodeProto(op_type=node.op_type, domain="", input=names, output=outputs)
    proto.attribute.extend(attribute_proto(attr) for attr in node.attributes.values())
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


def _is_large(node: ir.Node, arrays: Sequence[np.ndarray | None]) -> bool:
    """Whether a result would have too many elements; known before anything is computed."""
    schema = schema_of(node.op_type, OPSET, "")
    if schema is None:
        return True
    if any(abs(n) > _WIDEST for name in _WINDOWS if name in node.attributes for n in node.attributes[name].as_ints()):
        return True
    values = []
    for array in arrays:
        tensor = None if array is None else ir.tensor(array)
        values.append(
            None
            if tensor is None or array is None
            else ir.Value(type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        )
    try:
        found = infer_standard(schema, node.op_type, "", OPSET, values, node.attributes, len(node.outputs))
    except ModelError:
        return True
    shapes = [shape for _, shape in found if shape is not None and shape.is_static()]
    if len(shapes) < len(found):  # it follows from the data, as that of NonZero
        held = [array for array in arrays if array is not None and array.dtype.kind in "iuf"]
        return any(array.size > MOST_ELEMENTS or (array > MOST_ELEMENTS).any() for array in held)
    return any(math.prod(shape.numpy()) > MOST_ELEMENTS for shape in shapes)


def computed(value: ir.Value, known: dict[ir.Value, np.ndarray | None]) -> np.ndarray | None:
    """Compute a value from constants, initializers and ``known`` values; None if it depends on anything else.

    ``known`` receives every value on the way.
    """
    pending, taken = [value], sum(array.size for array in known.values() if array is not None)
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
            results = compute(producer, arrays) if whole and taken < 8 * MOST_ELEMENTS else None
            taken += sum(array.size for array in results or ())
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
