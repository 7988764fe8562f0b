"""The text form: what is written is read back as the same graph, by us and by onnx's own parser."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.errors import ModelError
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.equal import assert_equal, difference
from graphc.ir.state import add_initializer
from graphc.ir.text import from_text, to_text
from graphc.ir.verify import verify_model


def model_of(graph):
    return ir.Model(graph, ir_version=IR_VERSION)


def empty_graph(*shape, dtype=ir.DataType.FLOAT):
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(shape))
    return ir.Graph([x], [], nodes=[], name="g", opset_imports={"": OPSET}), x


def test_a_training_graph_survives_the_round_trip(squeezenet_training):
    text = to_text(squeezenet_training)
    back = from_text(text)
    verify_model(back)
    assert difference(squeezenet_training, back, weights=False) is None
    assert to_text(back) == text
    onnx.parser.parse_model(text)


def test_names_of_nodes_and_values_survive(squeezenet_training):
    back = from_text(to_text(squeezenet_training))
    for ours, theirs in zip(squeezenet_training.graph, back.graph, strict=True):
        assert (ours.name, [v.name for v in ours.outputs]) == (theirs.name, [v.name for v in theirs.outputs])


def test_weights_are_exact_when_asked_for():
    graph, x = empty_graph(2, 64)
    weight = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32) * 1e-20
    graph.outputs.append(Builder(graph).MatMul(x, add_initializer(graph, "layer.0/w", weight)))
    model = model_of(graph)
    np.testing.assert_array_equal(
        from_text(to_text(model, weights=True)).graph.initializers["layer.0/w"].const_value.numpy(), weight
    )
    assert "{}" in to_text(model)
    assert not from_text(to_text(model)).graph.initializers["layer.0/w"].const_value.numpy().any()


@pytest.mark.parametrize(
    "array",
    [
        np.array([np.inf, -np.inf, np.nan, -0.0, 1e-45, 3.4e38, 0.1], np.float32),
        np.array([1e-300, 0.1, -np.inf]),
        np.array([-(2**63), 2**63 - 1]),
        np.array([2**64 - 1], np.uint64),
        np.array([[True, False]]),
        np.array([0.1, -2, np.inf], np.float16),
        np.array([0.1, -2, np.nan], ml_dtypes.bfloat16),
        np.array(7, np.int8),
        np.zeros((0, 3), np.float32),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_tensors_of_every_kind_are_exact(array):
    graph, x = empty_graph(1)
    add_initializer(graph, "state", array)
    op = Builder(graph)
    graph.outputs.extend([op.Identity(op.const(array)), op.Identity(x)])
    back = from_text(to_text(model_of(graph)))
    assert back.graph.initializers["state"].const_value.numpy().tobytes() == array.tobytes()
    assert_equal(model_of(graph), back)


def test_awkward_names_attributes_and_metadata():
    graph, x = empty_graph("batch size", None)
    op = Builder(graph, scope='block "1"/back\\slash')
    y = op.LeakyRelu(x, alpha=1e-30)
    y = op.graphc.AllReduce(y, tag='x "y" \\ [z] #@ {')
    y.metadata_props["graphc.gradient_of"] = "x # 1"
    y.metadata_props["pkg.exporter.note"] = "not ours"
    y.producer().metadata_props["graphc.stage"] = "3"
    low, none = op.const(np.float32(0)), None
    y = op.Clip(y, none, low)
    first, second = op.TopK(op.Squeeze(y, [1]), np.array([1]), _outputs=["float", "int64"])
    graph.outputs.extend([first, second])
    model = model_of(graph)
    model.metadata_props["graphc.mesh"] = "data=2"
    back = from_text(to_text(model))
    assert_equal(model, back)
    collective = next(n for n in back.graph if n.op_type == "AllReduce")
    assert collective.metadata_props == {"graphc.stage": "3"}
    assert collective.outputs[0].metadata_props == {"graphc.gradient_of": "x # 1"}


def test_subgraphs():
    text = """
    <ir_version: 11, opset_import: ["" : 26]>
    g (bool c, float[2] x) => (float[2] y) {
       y = If <then_branch: graph = t () => (float[2] a) <float[1] q = {2.0}> { a = Mul (x, q) },
               else_branch: graph = e () => (float[2] b) { b = Neg (x) }> (c)
    }
    """
    model = from_text(text)
    verify_model(model)
    again = from_text(to_text(model))
    assert_equal(model, again)
    assert difference(model, from_text(text.replace("Neg", "Exp"))) is not None


def test_what_inference_cannot_find_is_written_down():
    graph, x = empty_graph(4)
    y = Builder(graph).NonZero(x)
    y.shape = ir.Shape([1, "found"])
    z = Builder(graph).Cast(y, to=int(ir.DataType.FLOAT))
    graph.outputs.append(z)
    back = from_text(to_text(model_of(graph)))
    assert back.graph[0].outputs[0].shape == ir.Shape([1, "found"])


def test_graphc_ops_are_typed_after_reading():
    model = from_text("""
    <ir_version: 11, opset_import: ["" : 26, "graphc" : 1]>
    g (float[N,3] dy, int64[1] s) => (float[3] y, h) {
       a = Constant <value: tensor = int64[1] {3}> ()
       y = graphc.ReduceSumTo (dy, a)
       h = graphc.AllReduce <tag: string = "t"> (dy)
    }
    """)
    assert model.graph.outputs[1].dtype == ir.DataType.FLOAT
    assert model.graph.outputs[1].shape == ir.Shape(["N", 3])


@pytest.mark.parametrize("text", ["", "not a model", '<ir_version: 11, opset_import: ["" : 26]> g (float[2] x => (y) {}'])
def test_syntax_errors_are_model_errors(text):
    with pytest.raises(ModelError, match="not a model in ONNX text syntax"):
        from_text(text)
