"""Differentiating thousands of nodes takes little more than building them, and the effort grows with their number."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.names import GRADIENT_OF
from graphc.passes.training.autodiff import autodiff
from graphc.pipeline import Context
from tests.effort import growth, processor_time


def mesh(nodes: int) -> ir.Model:
    """Blocks of mixed ops over a symbolic batch, each with two parameters, linked to the one before and to earlier ones."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 8]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="mesh")
    op = Builder(graph)

    def parameter(name: str, shape: list[int]) -> ir.Value:
        tensor = ir.tensor(np.ones(shape, np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor)
        graph.register_initializer(value)
        return value

    y = skip = x
    block = 0
    while len(graph) < nodes:
        weight, bias = parameter(f"w{block}", [8, 8]), parameter(f"b{block}", [8])
        h = op.Tanh(op.Add(op.MatMul(y, weight), bias))
        h = op.LayerNormalization(h, bias, axis=-1)
        h = op.Mul(op.Sigmoid(h), op.Relu(h))
        h = op.Reshape(op.Transpose(op.Reshape(h, [0, 2, 4]), perm=[0, 2, 1]), [0, 8])
        h = op.Softmax(op.Concat(h, op.Neg(h), axis=1), axis=1)
        h, _ = op.Split(h, axis=1, num_outputs=2, _outputs=2)
        y = op.Add(h, skip)
        skip = y if block % 4 == 0 else skip
        block += 1
    graph.outputs.append(op.ReduceSum(y, keepdims=0))
    return ir.Model(graph, ir_version=IR_VERSION)


def differentiate(model: ir.Model) -> None:
    autodiff(model, Context(), of=[model.graph.outputs[0].name or ""])


@pytest.mark.large
def test_five_thousand_nodes_take_a_few_times_what_building_them_took() -> None:
    """Three to five times, for about 9,000 further nodes; 0.8 s on one core of the machine of ``docs/benchmarks.md``."""
    model = mesh(5_000)
    differentiate(model)
    assert {v.metadata_props.get(GRADIENT_OF) for n in model.graph for v in n.outputs} - {None} == set(model.graph.initializers)
    building = processor_time(lambda: None, lambda _: mesh(5_000))
    assert processor_time(lambda: mesh(5_000), differentiate) < 10 * building


@pytest.mark.large
@pytest.mark.full
def test_the_effort_grows_in_proportion() -> None:
    assert growth(mesh, differentiate, 200) < 8
