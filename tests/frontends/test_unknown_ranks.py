"""Ranks that only the sizes of the feeds decide: the plan finds them, ``shapes`` fixes them, and errors name what to fix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

import graphc
from graphc.cli import main
from graphc.errors import GraphcError, UnknownRankError, UsageError
from tests.frontends.annotation_cases import losses, of_pytorch
from tests.passes.legalize.legalize_cases import build, normal

Sgd = graphc.optim.SGD(lr=0.1)


def squeezed(*behind: onnx.NodeProto, **constants: np.ndarray) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """x @ w without its axes of size 1, which only the feed tells."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Squeeze", ["a"], ["s"]), *behind]
    weights = {"w": normal(10, 4)}
    return build(nodes, {"x": ["n", "k", 10]}, ["y"], {**weights, **constants}, opset=17), weights


def mean_of_a_gather() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    return squeezed(
        helper.make_node("Gather", ["s", "rows"], ["g"]),
        helper.make_node("Mul", ["g", "g"], ["m"]),
        helper.make_node("ReduceMean", ["m"], ["y"], keepdims=0),
        rows=np.array([1, 0, 1]),
    )


@pytest.mark.parametrize("size", [(2, 1, 10), (1, 3, 10), (2, 3, 10)])
def test_a_squeeze_without_axes_has_the_rank_that_the_feed_gives(size: tuple[int, ...]) -> None:
    model, weights = mean_of_a_gather()
    x = normal(*size, seed=1)
    want = of_pytorch(lambda w: (torch.tensor(x) @ w).squeeze()[[1, 0, 1]].square().mean(), weights)
    np.testing.assert_allclose(losses(model, {"x": x}, graphc.losses.Output()), want, rtol=1e-5)


def test_one_trainer_takes_feeds_of_several_ranks() -> None:
    model, weights = mean_of_a_gather()
    program = graphc.compile(model, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.0))
    with graphc.Trainer(program) as trainer:
        for size in ((2, 1, 10), (2, 3, 10)):
            x = normal(*size, seed=1)
            want = (torch.tensor(x) @ torch.tensor(weights["w"])).squeeze()[[1, 0, 1]].square().mean()
            assert trainer.step({"x": x})["loss"] == pytest.approx(want.item(), rel=1e-5)


def test_shapes_fix_dimensions_by_number_and_name() -> None:
    model, weights = mean_of_a_gather()
    x = normal(2, 1, 10, seed=1)
    want = of_pytorch(lambda w: (torch.tensor(x) @ w).squeeze()[[1, 0, 1]].square().mean(), weights, steps=1)
    for shapes in ({"x": (2, 1, 10)}, {"x": ("n", 1, None)}, ["x=?,1,10"], "x=2,1,10"):
        program = graphc.compile(model, loss=graphc.losses.Output(), optimizer=Sgd, shapes=shapes)
        assert not any(node.op_type == "LateGradient" for node in program.model.graph) or shapes != {"x": (2, 1, 10)}
        with graphc.Trainer(program) as trainer:
            assert trainer.step({"x": x})["loss"] == pytest.approx(want[0], rel=1e-5)


def test_a_gradient_graph_of_fixed_shapes_is_standard() -> None:
    model, weights = mean_of_a_gather()
    found = graphc.grad(model, of="y", wrt="w", shapes={"x": (2, 1, 10)})
    assert {node.domain for node in found.graph} == {""}
    with pytest.raises(GraphcError, match=r"needs shapes that are not known; fix those of the inputs with --shape"):
        graphc.grad(model, of="y", wrt="w")
    assert weights


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"z": (1,)}, "there is no input 'z'"),
        ({"x": (2, 10)}, "has 3 dimensions, not 2"),
        ({"x": (2, 0, 10)}, "'0' is neither a size"),
        ("x", "not of the form NAME=2,3,48,192"),
        ({"x": (2, 1, 9)}, "MatMul rejects its inputs"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: object, text: str) -> None:
    model, _ = mean_of_a_gather()
    with pytest.raises(GraphcError, match=text):
        graphc.compile(model, loss=graphc.losses.Output(), optimizer=Sgd, shapes=shapes)


def test_one_name_of_a_dimension_has_one_size() -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("MatMul", ["s", "w"], ["y"])]
    model = build(nodes, {"a": ["n", 4], "b": ["n", 4]}, ["y"], {"w": normal(4, 2)}, opset=17)
    with pytest.raises(UsageError, match="the dimension 'n' has the size 2 elsewhere"):
        graphc.compile(model, loss=graphc.losses.MSE(), optimizer=Sgd, shapes={"a": (2, 4), "b": (3, 4)})
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=Sgd, shapes={"a": (2, 4)})
    assert [list(v.shape or ()) for v in program.model.graph.inputs if v.name in "ab"] == [[2, 4], [2, 4]]


def test_where_nothing_tells_the_node_and_the_input_are_named() -> None:
    model, _ = squeezed(helper.make_node("Relu", ["s"], ["y"]))
    with pytest.raises(UnknownRankError) as error:
        graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=Sgd)
    text = str(error.value)
    assert "the rank of 's' is unknown" in text
    assert "Squeeze(a:float[n,k,4])" in text
    assert "x:float[n,k,10]" in text
    assert "--shape x=N,K,10" in text


def test_a_training_graph_that_waits_for_shapes_is_saved_and_read(tmp_path: Path) -> None:
    from graphc.ir.text import from_text, to_text

    model, _ = mean_of_a_gather()
    program = graphc.compile(model, loss=graphc.losses.Output(), optimizer=Sgd)
    again = from_text(to_text(program.model, weights=True))
    assert [n.op_type for n in again.graph] == [n.op_type for n in program.model.graph]
    ir.save(program.model, tmp_path / "train.onnx")


def test_the_command_line_fixes_dimensions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("Squeeze", ["x"], ["s"]), helper.make_node("MatMul", ["s", "w"], ["y"])]
    model = build(nodes, {}, ["y"], {"w": normal(4, 3)}, opset=17)
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "?", 4]))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=normal(8, 1, 4), label=np.arange(8) % 3)
    arguments = ["train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--batch-size", "4"]
    arguments += ["--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.1", "--format", "json"]
    assert main(arguments) == 1
    assert "--shape x=N,?,4" in capsys.readouterr().err
    assert main([*arguments, "--shape", "x=4,1,4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 2


def test_rules_that_look_at_axes_wait_too() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Squeeze", ["a"], ["s"]),
        helper.make_node("LogSoftmax", ["s"], ["p"], axis=1),
        helper.make_node("NegativeLogLikelihoodLoss", ["p", "label"], ["y"]),
    ]
    model = build(nodes, {"x": ["n", "k", 10]}, ["y"], {"w": normal(10, 4)}, opset=17)
    model.graph.input.append(helper.make_tensor_value_info("label", TensorProto.INT64, ["n"]))
    x, label = normal(3, 1, 10, seed=1), np.array([0, 3, 1])

    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((torch.tensor(x) @ w).squeeze(), torch.tensor(label))

    got = losses(model, {"x": x, "label": label}, graphc.losses.Output())
    np.testing.assert_allclose(got, of_pytorch(loss, {"w": normal(10, 4)}), rtol=1e-5)
