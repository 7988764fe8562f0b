"""simplify keeps the numbers, keeps the effects, is stable and quick. What it rewrites is in ``simplify.onnxtxt``."""

from __future__ import annotations

import copy
import os

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.declare import has_effect
from graphc.ir.equal import assert_equal
from graphc.ir.state import add_initializer
from graphc.ir.text import from_text, to_text
from graphc.ir.verify import verify_model
from graphc.passes.legalize.decompose import decompose_graph
from graphc.passes.optimize.simplify import common_subexpressions, dead_code_elimination, fold_and_rewrite, simplify_graph
from graphc.pipeline import Context, run
from tests.effort import growth
from tests.tiers import thinned

LIGHT = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")


def execute(model, feeds):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    proto = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def random_graph(seed: int, *, symbolic: bool) -> ir.Model:
    """A random DAG over [4, 6] tensors with many identities, equal nodes, reshapes and constants in it."""
    random = np.random.default_rng(seed)
    rows = "N" if symbolic else 4
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([rows, 6]))
    graph = ir.Graph([x], [], nodes=[], name="random", opset_imports={"": OPSET})
    op = Builder(graph)
    square = add_initializer(graph, "square", random.standard_normal((6, 6)).astype(np.float32) / 3)
    row = add_initializer(graph, "row", random.standard_normal(6).astype(np.float32))
    scalar = add_initializer(graph, "scalar", np.array(1.5, np.float32))
    pool = [x, op.Add(x, row)]

    def pick():
        return pool[int(random.integers(max(0, len(pool) - 6), len(pool)))]

    makers = [
        lambda: op.Add(pick(), pick()),
        lambda: op.Mul(pick(), op.ones_like(pick())),
        lambda: op.Add(op.zeros_like(pick()), pick()),
        lambda: op.Sub(pick(), op.Sub(op.Sqrt(scalar), op.Sqrt(scalar))),
        lambda: op.Div(pick(), 1.0),
        lambda: op.Mul(op.Expand(op.Exp(scalar), op.shape(x)), pick()),
        lambda: op.Tanh(op.Identity(pick())),
        lambda: op.MatMul(pick(), op.Transpose(square)),
        lambda: op.Transpose(op.MatMul(square, op.Transpose(pick()))),
        lambda: op.reshape_like(op.Reshape(op.Reshape(pick(), [-1]), [2, -1]), x),
        lambda: op.Squeeze(op.Unsqueeze(op.Neg(op.Neg(pick())), [1]), [1]),
        lambda: op.Transpose(op.Transpose(op.Unsqueeze(pick(), [0]), perm=[2, 0, 1]), perm=[1, 2, 0]),
        lambda: op.Sum(op.Cast(pick(), to=1)),
        lambda: op.Where(op.Less(op.Size(x), np.int64(1)), pick(), pick()),
        lambda: op.Slice(op.Pad(pick(), np.zeros(4, np.int64)), [0, 0], [99, 99]),
        lambda: op.ReduceMax(op.Unsqueeze(pick(), [1]), [1], keepdims=0),
    ]
    for _ in range(40):
        made = makers[int(random.integers(len(makers)))]()
        if made.shape is None or len(made.shape) != 2:
            made = op.Squeeze(made, [0])
        pool.append(op.Mul(made, np.float32(0.7)))
    for k, value in enumerate(pool[-3:]):
        graph.outputs.append(op.emit("Identity", [value], outputs=[f"y{k}"])[0])
    return ir.Model(graph, ir_version=IR_VERSION)


@pytest.mark.full
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("seed", thinned(range(15), 2))
def test_random_graphs_compute_the_same(seed, symbolic):
    model = random_graph(seed, symbolic=symbolic)
    verify_model(model)
    feeds = {"x": np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32)}
    wanted, before = execute(model, feeds), len(model.graph)
    simplify_graph(model.graph)
    verify_model(model)
    assert len(model.graph) < before
    for got, want in zip(execute(model, feeds), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_simplifying_is_stable_and_deterministic(seed):
    once, again = random_graph(seed, symbolic=True), random_graph(seed, symbolic=True)
    simplify_graph(once.graph)
    simplify_graph(again.graph)
    assert to_text(once, weights=True) == to_text(again, weights=True)
    assert simplify_graph(once.graph) is False
    assert_equal(once, again)


@pytest.mark.full
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v2"])
def test_zoo_models_compute_the_same(name):
    model = ir.load(os.path.join(LIGHT, f"light_{name}.onnx"))
    run(model, "legalize,initialize{seed=3}")
    shape = tuple(model.graph.inputs[0].shape)
    feeds = {model.graph.inputs[0].name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    wanted = execute(model, feeds)
    run(model, "simplify,verify")
    np.testing.assert_allclose(execute(model, feeds)[0], wanted[0], rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_training_graph_keeps_its_effects_and_its_numbers():
    model = ir.load(os.path.join(LIGHT, "light_squeezenet.onnx"))
    run(model, "legalize,initialize,loss{kind=softmax_cross_entropy},autodiff,optimizer{name=sgd},allreduce", Context())
    plain = ir.from_proto(ir.to_proto(model))
    effects = [node.op_type for node in model.graph if has_effect(node)]
    state = sorted(model.graph.initializers)
    run(model, "simplify,verify")
    assert [node.op_type for node in model.graph if has_effect(node)] == effects
    assert sorted(model.graph.initializers) == state
    feeds = {
        "data_0": np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32),
        "label": np.array([7]),
    }
    results = []
    for graph in (plain.graph, model.graph):
        updated = {n.inputs[0].name: n.outputs[0] for n in graph if n.op_type == "SGD"}
        graph.outputs.extend(updated[name] for name in ("conv1_w_0", "conv10_b_0"))
        decompose_graph(graph, lambda node: False)
    for whole in (plain, model):
        results.append(execute(whole, feeds))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_the_parts_are_usable_alone():
    text = """<ir_version: 11, opset_import: ["" : 26]>
    g (float[2] x) => (float[2] y) { a = Exp (x) b = Exp (x) dead = Neg (x) one = Constant <value: tensor = float {1}> ()
       s = Mul (a, one) y = Add (s, b) }"""
    for part, nodes in (
        (dead_code_elimination, ["Exp", "Exp", "Constant", "Mul", "Add"]),
        (common_subexpressions, ["Exp", "Exp", "Neg", "Constant", "Mul", "Add"]),
        (fold_and_rewrite, ["Exp", "Exp", "Neg", "Constant", "Mul", "Add"]),
    ):
        model = from_text(text)
        assert part(model.graph)
        assert not part(model.graph)
        verify_model(model)
        assert [n.op_type for n in model.graph] == nodes


def test_float_arithmetic_on_parameters_is_not_folded():
    model = from_text("""<ir_version: 11, opset_import: ["" : 26]>
    g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> { e = Exp (w) t = Transpose (e) y = MatMul (x, t) }""")
    simplify_graph(model.graph)
    assert [n.op_type for n in model.graph] == ["Exp", "Gemm"]


def test_what_a_subgraph_uses_is_kept():
    model = from_text("""<ir_version: 11, opset_import: ["" : 26]>
    g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
       inner = Exp (x)
       again = Exp (x)
       y = If <then_branch: graph = t () => (float[2] a) { a = Add (again, w) },
               else_branch: graph = e () => (float[2] b) { b = Neg (inner) }> (c)
    }""")
    simplify_graph(model.graph)
    verify_model(model)
    assert [n.op_type for n in model.graph] == ["Exp", "If"]
    assert list(model.graph.initializers) == ["w"]
    x = np.array([0.5, -1], np.float32)
    np.testing.assert_allclose(execute(model, {"c": np.array(True), "x": x})[0], np.exp(x) + np.array([1, 2]), rtol=1e-6)


def test_infinite_and_missing_values_are_not_lost():
    """0 · x is no zero: x may be infinite."""
    model = from_text("""<ir_version: 11, opset_import: ["" : 26]>
    g (float[2] x) => (float[2] y) { nil = Constant <value: tensor = float {0}> () y = Mul (x, nil) }""")
    simplify_graph(model.graph)
    got = execute(model, {"x": np.array([np.inf, 1], np.float32)})[0]
    assert np.isnan(got[0])
    assert got[1] == 0


def test_equal_values_that_are_both_outputs_and_used():
    """The copy that keeps the second output's name stands at the end; what reads that value in between reads the first."""
    model = from_text("""<ir_version: 11, opset_import: ["" : 26]>
    g (float[2] x) => (float[2] a, float[2] b, float[2] c)
    { a = Exp (x)  b = Exp (x)  c = Neg (b) }""")
    simplify_graph(model.graph)
    verify_model(model)
    x = np.array([0.5, -1], np.float32)
    for got, expected in zip(execute(model, {"x": x}), (np.exp(x), np.exp(x), -np.exp(x)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def blocks(count: int) -> ir.Graph:
    """Of 13 nodes each, of which four are needed."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 16]))
    graph = ir.Graph([x], [], nodes=[], name="g", opset_imports={"": OPSET})
    op, y = Builder(graph), x
    for k in range(count):
        w = add_initializer(graph, f"w{k}", np.ones((16, 16), np.float32))
        h = op.Reshape(op.Reshape(op.MatMul(y, w), [-1]), op.shape(y))
        h = op.Mul(h, op.ones_like(h))
        y = op.Transpose(op.Transpose(op.Mul(op.Add(op.Relu(h), op.Relu(h)), op.Sqrt(op.const(np.float32(2))))))
    graph.outputs.append(y)
    return graph


@pytest.mark.large
def test_the_effort_grows_in_proportion() -> None:
    """3,000 nodes take about 0.2 s."""
    graph = blocks(100)
    assert len(graph) > 1200
    simplify_graph(graph)
    assert len(graph) < 100 * 4 + 3
    assert growth(blocks, simplify_graph, 120) < 8


def test_a_copy_is_not_touched():
    model = random_graph(1, symbolic=False)
    proto = ir.to_proto(model)
    before = copy.deepcopy(proto)
    simplify_graph(model.graph)
    assert proto.SerializeToString() == before.SerializeToString()
