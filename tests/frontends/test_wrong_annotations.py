"""Files that say little or nothing true about the shapes of their values: they train as if they said it right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import graphc
from graphc.pipeline import warnings_in
from tests.frontends.annotation_cases import losses, of_pytorch
from tests.passes.legalize.legalize_cases import build, normal


def two_layers() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    weights = {"w": normal(4, 3)}
    return build(nodes, {"x": ["n", 4]}, ["y"], weights, opset=17), weights


WRONG = {
    "other size": (TensorProto.FLOAT, ["n", 5]),
    "other rank": (TensorProto.FLOAT, ["n", 3, 1]),
    "rank 0": (TensorProto.FLOAT, []),
    "zeros": (TensorProto.FLOAT, [0, 0]),
    "negative": (TensorProto.FLOAT, [-1, -1]),
    "other names": (TensorProto.FLOAT, ["k", "k"]),
    "other type": (TensorProto.INT64, ["n", 3]),
    "double": (TensorProto.DOUBLE, None),
    "no name": (TensorProto.FLOAT, ["", "?"]),
    "none": (TensorProto.FLOAT, None),
}


@pytest.mark.parametrize("where", ["value", "output"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_file_says_of_a_computed_value_changes_nothing(wrong: str, where: str) -> None:
    model, weights = two_layers()
    kind, shape = WRONG[wrong]
    if where == "value":
        model.graph.value_info.append(helper.make_tensor_value_info("h", kind, shape))
    else:
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", kind, shape))
    x, target = normal(5, 4, seed=1), normal(5, 3, seed=2)
    got = losses(model, {"x": x, "label": target}, graphc.losses.MSE())
    want = of_pytorch(lambda w: ((torch.tensor(x) @ w).relu() - torch.tensor(target)).square().mean(), weights)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_contradiction_is_a_warning_that_names_the_value() -> None:
    model, _ = two_layers()
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [2, 5]))
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    (text,) = warnings_in(program.log)
    assert "'h' is float[2, 5], but its node makes float[n, 3]" in text


def test_unknown_sizes_under_one_name_may_differ() -> None:
    kernel = normal(2, 3, 3, 3)
    nodes = [helper.make_node("Conv", ["x", "k"], ["c"]), helper.make_node("GlobalAveragePool", ["c"], ["y"])]
    for unknown in ("?", "", "None", "-1"):
        model = build(nodes, {"x": ["n", 3, unknown, unknown]}, ["y"], {"k": kernel}, opset=17)
        x, target = normal(2, 3, 8, 12, seed=1), normal(2, 2, 1, 1, seed=2)

        def loss(k: torch.Tensor, x: np.ndarray = x, target: np.ndarray = target) -> torch.Tensor:
            y = torch.nn.functional.conv2d(torch.tensor(x), k).mean((2, 3), keepdim=True)
            return (y - torch.tensor(target)).square().mean()

        got = losses(model, {"x": x, "label": target}, graphc.losses.MSE())
        np.testing.assert_allclose(got, of_pytorch(loss, {"k": kernel}), rtol=1e-5, err_msg=unknown)


@pytest.mark.parametrize("decided", ["by its reader", "by its condition"])
def test_an_if_whose_branches_differ_in_rank_takes_the_one_that_fits(decided: str) -> None:
    """PyTorch writes ``squeeze(1)`` of an axis that may be longer than 1 so."""
    then = helper.make_graph(
        [helper.make_node("Squeeze", ["x", "axis"], ["a"])],
        "t",
        [],
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])], "e", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)]
    )
    fixed = decided == "by its condition"
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "axis"], ["d"]),
        helper.make_node("Squeeze", ["d"], ["d0"]),
        helper.make_node("Equal", ["d0", "one"], ["c"]),
        helper.make_node("If", ["c"], ["u"], then_branch=then, else_branch=other),
        helper.make_node("Conv", ["u", "k"], ["v"]),
        helper.make_node("ReduceMean", ["v"], ["y"], keepdims=0),
    ]
    kernel = normal(2, 2, 3)
    constants = {"axis": np.array([1]), "one": np.array(1)}
    model = build(nodes, {"x": ["n", 2 if fixed else "c", "t"]}, ["y"], {"k": kernel, **constants}, opset=17)
    x = normal(2, 2, 9, seed=1)
    want = of_pytorch(lambda k: torch.nn.functional.conv1d(torch.tensor(x), k).mean(), {"k": kernel})
    np.testing.assert_allclose(losses(model, {"x": x}, graphc.losses.Output()), want, rtol=1e-5, atol=1e-6)


RANKS: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "Conv": (
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        {"w": normal(2, 3, 3)},
        (2, 3, 9),
        lambda x, w: torch.nn.functional.conv1d(x, w),
    ),
    "ConvTranspose": (
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"])],
        {"w": normal(3, 2, 2, 2)},
        (2, 3, 4, 5),
        lambda x, w: torch.nn.functional.conv_transpose2d(x, w),
    ),
    "Transpose": (
        [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), helper.make_node("MatMul", ["t", "w"], ["y"])],
        {"w": normal(3, 2)},
        (2, 3, 4),
        lambda x, w: x.transpose(1, 2) @ w,
    ),
    "Gemm": (
        [helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Gemm", ["t", "w"], ["y"])],
        {"w": normal(3, 2)},
        (4, 3),
        lambda x, w: x.relu() @ w,
    ),
    "MaxPool": (
        [helper.make_node("MaxPool", ["x"], ["t"], kernel_shape=[2]), helper.make_node("Mul", ["t", "w"], ["y"])],
        {"w": normal(3, 1)},
        (2, 3, 6),
        lambda x, w: torch.nn.functional.max_pool1d(x, 2, 1) * w,
    ),
}


@pytest.mark.parametrize("case", RANKS)
def test_the_rank_of_an_input_without_a_shape_is_found_by_what_reads_it(case: str) -> None:
    nodes, weights, size, forward = RANKS[case]
    model = build(nodes, {}, ["y"], weights, opset=17)
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, None))
    x = normal(*size, seed=3)
    y = forward(torch.tensor(x), *(torch.tensor(w) for w in weights.values()))
    target = normal(*y.shape, seed=4)
    got = losses(model, {"x": x, "label": target}, graphc.losses.MSE())
    want = of_pytorch(lambda w: (forward(torch.tensor(x), w) - torch.tensor(target)).square().mean(), weights)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_multi_device_fields_are_named_once() -> None:
    model, _ = two_layers()
    model.configuration.add(name="two", num_devices=2)
    node = model.graph.node[0].device_configurations.add(configuration_id="two")
    node.sharding_spec.add(tensor_name="w", device=[0, 1])
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    (text,) = warnings_in(program.log)
    assert "places nodes on devices" in text


def test_a_scaler_in_front_of_a_layer_keeps_the_shape() -> None:
    """As scikit-learn's exporters write pipelines; ONNX infers no shape for it."""
    scaled = helper.make_node(
        "Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[1.0, 0.0, 0.0, 0.0], scale=[2.0, 1.0, 1.0, 1.0]
    )
    nodes = [scaled, helper.make_node("MatMul", ["s", "w"], ["y"])]
    weights = {"w": normal(4, 3)}
    model = build(nodes, {"x": ["n", 4]}, ["y"], weights, opset=17, domains={"ai.onnx.ml": 3})
    x, target = normal(5, 4, seed=1), normal(5, 3, seed=2)
    seen = torch.tensor((x - [1, 0, 0, 0]) * [2, 1, 1, 1], dtype=torch.float32)
    want = of_pytorch(lambda w: (seen @ w - torch.tensor(target)).square().mean(), weights)
    np.testing.assert_allclose(losses(model, {"x": x, "label": target}, graphc.losses.MSE()), want, rtol=1e-5)
