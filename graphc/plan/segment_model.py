"""Builds the ONNX model of a segment, and binds single ``graphc`` ops to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Run
from graphc.ir import DOMAIN_VERSION, IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import constant, dtype_of, static_dims
from graphc.ir.serialize import to_proto
from graphc.ir.subgraphs import captured
from graphc.plan.steps import PlanStep


def segment_model(step: PlanStep) -> onnx.ModelProto:
    """The ONNX model of a segment: its nodes, the constants they read as initializers, static types throughout."""
    graph = onnx.GraphProto(name="segment")
    constants: dict[str, np.ndarray] = {}
    bound = set(step.inputs)
    for node in step.nodes:
        graph.node.append(ir.serde.serialize_node(node))
        for value in node.inputs:
            if value is not None and value not in bound and (known := constant(value)) is not None:
                constants[value.name or ""] = known
        for inner in captured(node):
            if inner not in bound and (known := constant(inner)) is not None:
                constants[inner.name or ""] = known
    for name, known in constants.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(known).reshape(known.shape), name))
    graph.input.extend(_value_info(v) for v in step.inputs)
    graph.output.extend(_value_info(v) for v in step.outputs)
    domains = {"": OPSET}
    for node in step.nodes:
        if node.domain != "" and node.graph is not None:
            domains[node.domain] = node.graph.opset_imports[node.domain]
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in sorted(domains.items())]
    return onnx.ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=opsets)


def _value_info(value: ir.Value) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(value.name or "", int(dtype_of(value)), static_dims(value))


def bind_op(
    backend: Backend,
    op_type: str,
    attributes: Mapping[str, Any],
    inputs: Sequence[Array | None],
    outputs: Sequence[Array | None],
    *,
    domain: str = "graphc",
) -> Run:
    """Bind one op to arrays as a segment, decomposed unless the backend holds the op.

    Args:
        outputs: None where nothing is written.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": DOMAIN_VERSION}, name=op_type)
    values: list[ir.Value | None] = []
    bound: dict[str, Array] = {}
    for index, array in enumerate(inputs):
        if array is None:
            values.append(None)
            continue
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value = ir.Value(name=f"i{index}", type=kind, shape=ir.Shape(list(array.shape)))
        graph.inputs.append(value)
        values.append(value)
        bound[f"i{index}"] = array
    op = Builder(graph)
    produced = op.emit(op_type, values, dict(attributes), domain=domain, outputs=[f"o{k}" for k in range(len(outputs))])
    graph.outputs.extend(value for value, array in zip(produced, outputs, strict=True) if array is not None)
    decompose_graph(graph, backend.holds)
    results = {f"o{k}": array for k, array in enumerate(outputs) if array is not None}
    return backend.bind_segment(to_proto(ir.Model(graph, ir_version=IR_VERSION)), bound, results)
