"""Models of one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.ops.attention import written

Arrays = Sequence["np.ndarray[Any, Any] | None"]
"""Operands of a node; None: omitted."""


def single_node(op: str, arrays: Arrays, attributes: Mapping[str, Any], constants: Sequence[int]) -> ir.Model:
    """A model of one node; ``constants`` are the inputs that are part of the graph, shapes above all."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    builder, values = Builder(graph), []
    for index, array in enumerate(arrays):
        if array is None or index in constants:
            values.append(None if array is None else builder.const(array))
            continue
        value = ir.Value(name=f"i{index}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        graph.inputs.append(value)
        values.append(value)
    domain = "graphc" if op.startswith("graphc::") else ""
    # The only op with one output for each of several operands: those that do not share a tensor.
    count = len(written(attributes["layout"])) if op.endswith("AttentionGrad") else None
    graph.outputs.extend(builder.emit(op.removeprefix("graphc::"), values, attributes, domain=domain, outputs=count))
    return ir.Model(graph, ir_version=IR_VERSION)
