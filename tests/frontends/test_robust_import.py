"""Models as they come: huge, shared, transposed, oddly named, of every opset, with the ops of other domains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.errors import FeedError, ModelError, UnsupportedOpError
from graphc.ir.facts import dims
from graphc.pipeline import Context, PassCall
from graphc.pipeline import run as run_passes
from graphc.training.inference import run_model
from tests.passes.legalize.legalize_cases import build, normal

MICROSOFT = {"com.microsoft": 1}


def train(model: onnx.ModelProto, feeds: dict[str, np.ndarray], path: Path, steps: int = 1) -> dict[str, np.ndarray]:
    """Train with SGD against a target ``t`` of the output ``y``; the initializers of the exported file."""
    program = graphc.compile(model, loss=graphc.losses.MSE(prediction="y", label="t"), optimizer=graphc.optim.SGD(lr=0.1))
    with graphc.Trainer(program) as trainer:
        for _ in range(steps):
            trainer.step(feeds)
        trainer.export(path)
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


# Size ------------------------------------------------------------------------------------------------------------------


def anonymous_memory() -> int:
    """Bytes that this process holds and that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.full
def test_more_than_two_gigabytes_are_mapped_and_never_copied(tmp_path: Path) -> None:
    rows, columns = 9000, 60_000  # 2.16 GB of zeros that take no room on the disk
    (tmp_path / "big.data").touch()
    with (tmp_path / "big.data").open("r+b") as file:
        file.truncate(rows * columns * 4)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, columns], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="big.data")
    model = build([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["n", rows]}, {"y": ["n", columns]}, {}, opset=17)
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "big.onnx")
    before = anonymous_memory()
    loaded = frontends.load(tmp_path / "big.onnx")
    legal = loaded.clone()
    run_passes(legal, [PassCall("legalize"), PassCall("simplify"), PassCall("check")])
    tensor = legal.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.nbytes > 2 << 30
    assert anonymous_memory() - before < 100 << 20


# Weights ---------------------------------------------------------------------------------------------------------------


def test_a_shared_weight_has_one_gradient_the_sum() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Tanh", ["h"], ["a"]),
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "wt"], ["y"]),
    ]
    w, x = normal(4, 3), normal(2, 4, seed=1)
    model = frontends.load(build(nodes, {"x": [2, 4]}, {"y": [2, 4]}, {"w": w}, opset=17)).clone()
    run_passes(model, [PassCall("legalize"), PassCall("autodiff", {"of": ["y"], "wrt": ["w"]})])
    gradients = [v for node in model.graph for v in node.outputs if v.metadata_props.get("graphc.gradient_of") == "w"]
    assert len(gradients) == 1
    model.graph.outputs.append(gradients[0])
    theirs = torch.tensor(w, requires_grad=True)
    (torch.tanh(torch.tensor(x) @ theirs) @ theirs.T).sum().backward()
    np.testing.assert_allclose(run_model(model, {"x": x})["w::grad"], theirs.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_weights_transposed_and_reshaped_at_export_return_in_the_layout_of_the_file(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["fc.weight"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["h"]),
        helper.make_node("Reshape", ["scale", "shape"], ["column"]),
        helper.make_node("Mul", ["h", "column"], ["y"]),
    ]
    weights = {"fc.weight": normal(3, 4), "scale": normal(3, 1, seed=1), "shape": np.array([3])}
    feeds = {"x": normal(5, 4, seed=2), "t": normal(5, 3, seed=3)}
    got = train(build(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, weights, opset=17), feeds, tmp_path / "out.onnx", steps=3)
    assert set(got) == set(weights)
    w, s = (torch.tensor(weights[k], requires_grad=True) for k in ("fc.weight", "scale"))
    optimizer = torch.optim.SGD([w, s], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        y = (torch.tensor(feeds["x"]) @ w.T) * s.reshape(3)
        torch.nn.functional.mse_loss(y, torch.tensor(feeds["t"])).backward()
        optimizer.step()
    np.testing.assert_allclose(got["fc.weight"], w.detach().numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["scale"], s.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_initializers_that_are_inputs_train_and_may_be_fed(tmp_path: Path) -> None:
    model = build(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4], "w": [4, 3]}, {"y": [2, 3]}, {"w": normal(4, 3)}, opset=9
    )
    x, other = normal(2, 4, seed=1), normal(4, 3, seed=2)
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], x @ normal(4, 3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run_model(model, {"x": x, "w": other})["y"], x @ other, rtol=1e-4, atol=1e-5)
    got = train(model, {"x": x, "t": normal(2, 3, seed=3)}, tmp_path / "out.onnx")
    assert not np.array_equal(got["w"], normal(4, 3))


# Shapes, names, bodies -----------------------------------------------------------------------------------------------------


def test_shape_arithmetic_folds_and_batch_and_length_stay_symbolic() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["batch"]),
        helper.make_node("Gather", ["s", "one"], ["length"]),
        helper.make_node("Unsqueeze", ["batch", "axis"], ["b1"]),
        helper.make_node("Unsqueeze", ["length", "axis"], ["l1"]),
        helper.make_node("Concat", ["b1", "l1", "heads", "minus"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "axis": np.array([0]),
        "heads": np.array([2]),
        "minus": np.array([-1]),
    }
    proto = build(nodes, {"x": ["batch", "length", 8]}, ["y"], constants, opset=17)
    model = frontends.load(proto).clone()
    run_passes(model, [PassCall("legalize"), PassCall("simplify")])
    assert dims(model.graph.outputs[0]) == ("batch", "length", 2, 4)
    static = build(nodes, {"x": [3, 5, 8]}, ["y"], constants, opset=17)
    fixed = frontends.load(static).clone()
    run_passes(fixed, [PassCall("legalize"), PassCall("simplify")])
    assert [node.op_type for node in fixed.graph if node.op_type != "Constant"] == ["Reshape"]
    x = normal(3, 5, 8)
    np.testing.assert_array_equal(run_model(proto, {"x": x})["y"], x.reshape(3, 5, 2, 4))


def test_empty_and_duplicate_node_names() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="n"), helper.make_node("Neg", ["a"], ["b"], name="n")]
    nodes.append(helper.make_node("Exp", ["b"], ["y"]))
    model = frontends.load(build(nodes, {"x": [4]}, ["y"], opset=17)).clone()
    run_passes(model, [PassCall("legalize"), PassCall("verify")])
    names = [node.name for node in model.graph]
    assert all(names)
    assert len(set(names)) == 3
    x = normal(4)
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], np.exp(-np.maximum(x, 0)), rtol=1e-6)


def test_a_branch_captures_a_weight_which_trains(tmp_path: Path) -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op, ["x", "w"], [name])], name, [], [out])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=branch("a", "Mul"), else_branch=branch("b", "Add")),
    ]
    weights = {"w": normal(4), "zero": np.array(0, np.float32)}
    model = build(nodes, {"x": [2, 4]}, {"y": [2, 4]}, weights, opset=17)
    x, t = np.abs(normal(2, 4, seed=1)), normal(2, 4, seed=2)
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], x * weights["w"], rtol=1e-6)
    np.testing.assert_allclose(run_model(model, {"x": -x})["y"], -x + weights["w"], rtol=1e-6)
    got = train(model, {"x": x, "t": t}, tmp_path / "out.onnx")
    w = torch.tensor(weights["w"], requires_grad=True)
    torch.nn.functional.mse_loss(torch.tensor(x) * w, torch.tensor(t)).backward()
    np.testing.assert_allclose(got["w"], (w - 0.1 * w.grad).detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_loop_may_count_by_tensors_of_one_element(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 6, opset_import: ["" : 11]> counted (float[n,3] x) => (float[n,3] y)
        <int64[1] count = {3}, bool[1] on = {1}, float[3] w = {0.5, 1.5, 0.25}> {
          y, every = Loop (count, on, x) <body = step (int64[1] k, bool[1] going, float[n,3] s)
            => (bool[1] more, float[n,3] z, float[1] f) {
            more = Identity (going)
            f = Cast <to = 1> (k)
            scaled = Mul (s, w)
            z = Add (scaled, f)
          }>
        }""")
    x, w = normal(4, 3), np.array([0.5, 1.5, 0.25], np.float32)
    expected = ((x * w) * w + 1) * w + 2
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], expected, rtol=1e-6)
    gradient = (2 * expected / x.size * (3 * x * w**2 + 1)).sum(0)
    np.testing.assert_allclose(
        train(model, {"x": x, "t": np.zeros_like(x)}, tmp_path / "m.onnx")["w"], w - 0.1 * gradient, rtol=1e-5
    )


def test_a_loop_may_collect_a_count_of_one_element() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 6, opset_import: ["" : 11]> counts (float[3] x) => (float[3] y, int64[c,1] every)
        <int64[1] n = {3}, bool[1] on = {1}> {
          y, every = Loop (n, on, x) <body = step (int64[1] k, bool[1] go, float[3] s) => (bool[1] go, float[3] z, int64[1] k) {
            z = Add (s, s)
          }>
        }""")
    found = run_model(model, {"x": np.ones(3, np.float32)})
    np.testing.assert_array_equal(found["y"], np.full(3, 8))
    np.testing.assert_array_equal(found["every"], [[0], [1], [2]])


def test_an_input_rules_out_a_branch_that_does_not_fit_the_others(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]> rates (float[n,t] x, int64 rate) => (float[n,u] y)
        <int64 low = {8}, float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[2,2] v = {1, 2, 3, 4}> {
          slow = Equal (rate, low)
          y = If (slow) <then_branch = a () => (float[n,u] p) { p = MatMul (x, v) },
                         else_branch = b () => (float[n,u] q) { q = MatMul (x, w) }>
        }""")
    w = numpy_helper.to_array(model.graph.initializer[1])
    x = normal(3, 4)
    np.testing.assert_allclose(run_model(model, {"x": x, "rate": np.array(16)})["y"], x @ w, rtol=1e-5)
    with pytest.raises(FeedError, match=r"feed 'rate' has shape \[1\], the model wants rank 0"):
        run_model(model, {"x": x, "rate": np.array([16])})
    feeds = {"x": x, "rate": np.array(16), "t": np.zeros((3, 2), np.float32)}
    with pytest.raises(FeedError, match=r"if the value of 'rate' rules the branch out, say so with inputs=\{'rate': …\}"):
        train(model, feeds, tmp_path / "m.onnx")
    given = {"shapes": {"x": (3, 4)}, "loss": graphc.losses.MSE(), "optimizer": graphc.optim.SGD(lr=0.1)}
    with pytest.raises(ModelError, match=r"MatMul rejects its inputs[\s\S]*if the value of 'rate' rules the branch out"):
        graphc.compile(model, **given)
    graphc.compile(model, inputs={"rate": 16}, **given)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_sparse_tensors_are_read_as_dense_ones(linear: bool, constant: bool, tmp_path: Path) -> None:
    w = np.zeros((4, 3), np.float32)
    w[[0, 2, 3], [1, 0, 2]] = 1.5, -2.0, 0.25
    places = np.flatnonzero(w) if linear else np.argwhere(w)
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(w[w != 0], "w"), numpy_helper.from_array(places.astype(np.int64), "places"), w.shape
    )
    nodes = [helper.make_node("Constant", [], ["w"], sparse_value=sparse)] if constant else []
    model = build([*nodes, helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4]}, {"y": [2, 3]}, opset=13)
    if not constant:
        model.graph.sparse_initializer.append(sparse)
    x = normal(2, 4)
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], x @ w, rtol=1e-6)
    trained = train(model, {"x": x, "t": np.zeros((2, 3), np.float32)}, tmp_path / "dense.onnx")
    np.testing.assert_allclose(trained["w"], w - 0.1 * 2 / 6 * x.T @ (x @ w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "indices", "message"),
    [
        ((4, 3), np.array([12]), "index beyond it"),
        ((4, 3), np.array([[-1, 0]]), "index beyond it"),
        ((4, 3), np.array([1, 2]), r"values of shape \[1\] and indices of shape \[2\]"),
        ((1 << 20, 1 << 20), np.array([0]), "takes more than 2.0 GiB"),
    ],
)
def test_sparse_tensors_that_do_not_fit_are_refused(shape: tuple[int, ...], indices: np.ndarray, message: str) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    model = build([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4]}, {"y": [2, 3]}, opset=13)
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices, "places"), shape)
    model.graph.sparse_initializer.append(sparse)
    with pytest.raises(ModelError, match=message):
        frontends.load(model)


def test_function_local_models_train(tmp_path: Path) -> None:
    dense = helper.make_function(
        "local", "Dense", ["x", "w", "b"], ["y"],
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    model = build(
        [helper.make_node("Dense", ["x", "w", "b"], ["y"], domain="local")],
        {"x": [2, 4]}, {"y": [2, 3]}, {"w": normal(4, 3), "b": normal(3, seed=1)}, opset=18, domains={"local": 1},
    )  # fmt: skip
    model.functions.append(dense)
    got = train(model, {"x": normal(2, 4, seed=2), "t": normal(2, 3, seed=3)}, tmp_path / "out.onnx")
    assert set(got) == {"w", "b"}
    assert not np.array_equal(got["b"], normal(3, seed=1))


@pytest.mark.parametrize("opset", range(7, onnx.defs.onnx_opset_version() + 1))
def test_every_opset_from_7_on(opset: int) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"], axis=1),
    ]
    model = build(nodes, {"x": [2, 4]}, {"y": [2, 3]}, {"w": normal(3, 4), "b": normal(3, seed=1)}, opset=opset)
    x = normal(2, 4, seed=2)
    h = np.maximum(x @ normal(3, 4).T + normal(3, seed=1), 0)
    want = np.exp(h) / np.exp(h).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], want, rtol=1e-4, atol=1e-6)


def test_opset_6_broadcasting() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["h"], broadcast=1, axis=1), helper.make_node("PRelu", ["h", "s"], ["y"])]
    model = build(nodes, {"x": [2, 3, 4]}, ["y"], {"b": normal(3), "s": normal(3, seed=1)}, opset=6)
    x = normal(2, 3, 4, seed=2)
    want = torch.nn.functional.prelu(torch.tensor(x + normal(3)[:, None]), torch.tensor(normal(3, seed=1))).numpy()
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], want, rtol=1e-5, atol=1e-6)


# Broken files ------------------------------------------------------------------------------------------------------------


def legalise(model: onnx.ModelProto) -> Context:
    context = Context()
    run_passes(frontends.load(model).clone(), [PassCall("legalize")], context)
    return context


@pytest.mark.parametrize("opset", [1, 3, 5])
def test_the_first_opsets_follow_pytorch(opset: int, tmp_path: Path) -> None:
    """Texts, attributes and inputs that opset 6 knows otherwise, in a network as the first exporters wrote them."""
    init = {"w": normal(4, 3, 3, 3), "s": np.abs(normal(4, seed=1)) + 1, "b": normal(4, seed=2), "m": normal(4, seed=3)}
    init |= {"v": np.abs(normal(4, seed=4)) + 1, "c": normal(4, seed=5), "w2": normal(5, 144, seed=6), "b2": normal(5, seed=7)}
    in_place = {"consumed_inputs": [0, 0]} if opset < 6 else {}
    pads, p = ({"paddings": [0, 0, 1, 1] * 2}, 2.0) if opset == 1 else ({"pads": [0, 0, 1, 1] * 2}, 2)
    shape = {"shape": [0, -1]} if opset < 5 else {}
    nodes = [
        helper.make_node("Pad", ["x"], ["padded"], mode="constant", **pads),
        helper.make_node("Conv", ["padded", "w"], ["h"], kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["h", "s", "b", "m", "v"], ["n"], is_test=1, consumed_inputs=[0, 0, 0, 1, 1]),
        helper.make_node("Add", ["n", "c"], ["a"], broadcast=1, axis=1, **in_place),
        helper.make_node("Relu", ["a"], ["r"], **in_place),
        helper.make_node("Dropout", ["r"], ["d", "mask"], is_test=1, ratio=0.5, **in_place),
        helper.make_node("LpPool", ["d"], ["l"], kernel_shape=[1, 1], p=p),
        helper.make_node("Cast", ["l"], ["k"], to="FLOAT"),
        helper.make_node("Concat", ["k", "r"], ["both"], **({} if opset == 1 else {"axis": 1})),
        helper.make_node("Split", ["both"], ["first", "second"], axis=1),
        helper.make_node("Sum", ["first", "second"], ["sum"], **in_place),
        helper.make_node("Reshape", ["sum"] if shape else ["sum", "flat"], ["f"], **shape, **(in_place if shape else {})),
        helper.make_node("Gemm", ["f", "w2", "b2"], ["y"], transB=1, broadcast=1),
    ]
    held = init if shape else {**init, "flat": np.array([0, -1])}
    model = build(nodes, {"x": [2, 3, 6, 6]}, {"y": [2, 5]}, held, opset=opset, ir_version=3)
    for name, array in held.items():  # an initializer was an input, too
        model.graph.input.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape))
    x = normal(2, 3, 6, 6, seed=9)
    found = {name: torch.tensor(array) for name, array in init.items()}
    h = torch.nn.functional.conv2d(torch.tensor(x), found["w"], padding=1)
    h = torch.nn.functional.batch_norm(h, found["m"], found["v"], found["s"], found["b"])
    r = (h + found["c"].view(1, 4, 1, 1)).relu()
    y = torch.nn.functional.linear((2 * r).flatten(1), found["w2"], found["b2"])
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], y, rtol=1e-4, atol=1e-4)
    trained = train(model, {"x": x, "t": np.zeros((2, 5), np.float32)}, tmp_path / "trained.onnx")
    assert not np.array_equal(trained["w"], init["w"])


def test_the_first_tile_repeats_one_axis() -> None:
    nodes = [helper.make_node("Tile", ["x", "times", "axis"], ["y"])]
    held = {"times": np.array([2], np.float32), "axis": np.array([1], np.float32)}
    model, x = build(nodes, {"x": [2, 3]}, {"y": [2, 6]}, held, opset=1, ir_version=3), normal(2, 3)
    np.testing.assert_array_equal(run_model(model, {"x": x})["y"], np.tile(x, (1, 2)))
    nodes.append(helper.make_node("LpPool", ["y"], ["z"], kernel_shape=[1], p=2.5))
    with pytest.raises(ModelError, match=r"p=2\.5, and whole numbers alone are supported"):
        run_model(build(nodes, {"x": [2, 3]}, {"z": [2, 6]}, held, opset=1, ir_version=3), {"x": x})


def test_a_cycle_is_named() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], name="one"), helper.make_node("Neg", ["a"], ["b"], name="two")]
    with pytest.raises(ModelError, match=r"cycle: .*(one → two|two → one)"):
        frontends.load(build(nodes, {"x": [2]}, ["b"], opset=17))


def test_an_op_of_an_unknown_domain_says_how_to_add_it() -> None:
    model = build([helper.make_node("Frob", ["x"], ["y"], domain="acme")], {"x": [2]}, ["y"], opset=17, domains={"acme": 1})
    with pytest.raises(UnsupportedOpError, match=r"acme::Frob.*custom_op"):
        legalise(model)


def test_nan_in_weights_is_a_warning_that_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = normal(4, 3)
    w[1, 1] = np.nan
    model = build([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4]}, {"y": [2, 3]}, {"w": w}, opset=17)
    assert any("NaN or infinity in 'w'" in line for line in legalise(model).log)
    onnx.save(model, tmp_path / "nan.onnx")
    assert any("NaN or infinity in 'w'" in line for line in check(tmp_path / "nan.onnx", capsys))


def check(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The warnings of ``graphc check``, and its line about the batch."""
    assert main(["check", str(path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return [*found["warnings"], found["batch"]]


def test_check_points_out_folded_batchnorm_and_a_baked_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Net(torch.nn.Module):
        def __init__(self, normalise: bool) -> None:
            super().__init__()
            layers: list[torch.nn.Module] = []
            for _ in range(3):
                layers += [torch.nn.Conv2d(2, 2, 3, padding=1), *([torch.nn.BatchNorm2d(2)] if normalise else [])]
            self.body = torch.nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def exported(name: str, **options: Any) -> Path:
        path = tmp_path / name
        torch.onnx.export(Net(True).eval(), (torch.zeros(4, 2, 6, 6),), str(path), dynamo=False, **options)
        return path

    folded = check(exported("folded.onnx"), capsys)
    assert any("folded into them" in line for line in folded)
    assert any("fixed at 4" in line for line in folded)
    kept = check(exported("kept.onnx", training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False), capsys)
    assert not any("folded" in line for line in kept)


def test_check_points_out_what_an_exporter_made_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "val_3"], ["h"]),
        helper.make_node("Add", ["h", "bias"], ["k"]),
        helper.make_node("Add", ["k", "bias"], ["y"]),
    ]
    weights = {"val_3": normal(4, 4), "bias": np.zeros(4, np.float32)}
    onnx.save(build(nodes, {"x": [2, 4]}, {"y": [2, 4]}, weights, opset=17), tmp_path / "optimised.onnx")
    found = check(tmp_path / "optimised.onnx", capsys)
    assert any("'val_3') came out of the exporter's constant folding" in line for line in found)
    assert any("'bias') serve several nodes" in line for line in found)


# onnxruntime's own ops -----------------------------------------------------------------------------------------------------

B, S, H, D = 2, 5, 4, 16
Q, K, V = (normal(B, S, H * D, seed=k) for k in range(3))
NARROW = [normal(B, S, 2 * D, seed=k) for k in (3, 4)]
TABLES = [normal(10, D // 2, seed=k) for k in (5, 6)]
PADDING = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
LENGTHS = [np.full(B, S - 1, np.int32), np.array(S, np.int32)]
IMAGE, FILTERS = normal(1, 3, 6, 6), normal(4, 3, 3, 3, seed=1)
GROUPS = {"num_heads": H, "kv_num_heads": 2}

FUSED: dict[str, tuple[str, Sequence[np.ndarray | None], dict[str, Any], int]] = {
    "attention": ("MultiHeadAttention", [Q, K, V], {"num_heads": H}, 1),
    "attention with bias": ("MultiHeadAttention", [Q, K, V, normal(3 * H * D, seed=9)], {"num_heads": H}, 1),
    "padding": ("MultiHeadAttention", [Q, K, V, None, PADDING], {"num_heads": H}, 1),
    "padding and scores": ("MultiHeadAttention", [Q, K, V, None, PADDING, normal(B, H, S, S)], {"num_heads": H}, 1),
    "causal": ("MultiHeadAttention", [Q, K, V], {"num_heads": H, "unidirectional": 1, "scale": 0.3}, 1),
    "rotary": ("RotaryEmbedding", [Q, np.array([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]), *TABLES], {}, 1),
    "rotary from an offset": ("RotaryEmbedding", [Q, np.array([3]), *TABLES], {}, 1),
    "rotary by heads": ("RotaryEmbedding", [normal(B, H, S, D), np.array([3]), *TABLES], {"interleaved": 1}, 1),
    "rotary of a part": (
        "RotaryEmbedding",
        [Q, np.array([0]), normal(10, 4), normal(10, 4, seed=1)],
        {"num_heads": H, "rotary_embedding_dim": 8},
        1,
    ),
    "groups": ("GroupQueryAttention", [Q, *NARROW, None, None, *LENGTHS], GROUPS, 3),
    "groups, rotated": ("GroupQueryAttention", [Q, *NARROW, None, None, *LENGTHS, *TABLES], {**GROUPS, "do_rotary": 1}, 3),
    "groups, packed": ("GroupQueryAttention", [normal(B, S, (H + 4) * D), None, None, None, None, *LENGTHS], GROUPS, 3),
    "convolution": ("FusedConv", [IMAGE, FILTERS, normal(4)], {"activation": "Relu"}, 1),
    "convolution and sum": (
        "FusedConv",
        [IMAGE, FILTERS, normal(4), normal(1, 4, 4, 4)],
        {"activation": "LeakyRelu", "activation_params": [0.2]},
        1,
    ),
}


def fused(case: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    op, operands, attributes, outputs = FUSED[case]
    feeds = {f"i{k}": array for k, array in enumerate(operands) if array is not None}
    names = [f"i{k}" if array is not None else "" for k, array in enumerate(operands)]
    node = helper.make_node(op, names, [f"y{k}" for k in range(outputs)], domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", inputs, results), opset_imports=opsets, ir_version=9), feeds


@pytest.mark.parametrize("case", FUSED)
def test_fused_ops_against_onnxruntime(case: str) -> None:
    model, feeds = fused(case)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, feeds)
    for backend in ("onnxruntime", "numpy"):
        got = list(run_model(model, feeds, backend, threads=1).values())
        for ours, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_form_without_counterpart_is_refused() -> None:
    nodes = [helper.make_node("FusedConv", ["x", "w"], ["y"], domain="com.microsoft", activation="Frobnicate")]
    model = build(nodes, {"x": [1, 3, 6, 6]}, ["y"], {"w": FILTERS}, opset=17, domains=MICROSOFT)
    with pytest.raises(UnsupportedOpError, match=r"this form of com\.microsoft::FusedConv"):
        legalise(model)


def test_gradient_operator_takes_its_operands_for_the_variables() -> None:
    """d(a·b)/da at other values than those of the graph: the operands stand for the names."""
    gradient = helper.make_node("Gradient", ["u", "b"], ["da", "db"], domain="ai.onnx.preview.training", xs=["a", "b"], y="c")
    nodes = [gradient, helper.make_node("Mul", ["a", "b"], ["h"]), helper.make_node("Tanh", ["h"], ["c"])]
    model = build(nodes, {"a": [3], "b": [3], "u": [3]}, ["da", "db", "c"], opset=17, domains={"ai.onnx.preview.training": 1})
    feeds = {name: normal(3, seed=k) for k, name in enumerate("abu")}
    u, b = (torch.tensor(feeds[name], requires_grad=True) for name in "ub")
    torch.tanh(u * b).sum().backward()
    got = run_model(model, feeds)
    np.testing.assert_allclose(got["da"], u.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got["db"], b.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got["c"], np.tanh(feeds["a"] * feeds["b"]), rtol=1e-5)
