"""Feeds of a trainer are converted by the rule of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import graphc
from graphc import losses, optim
from graphc.cli import main

W = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
GIVEN = [
    ("x", np.float64, True), ("x", np.float16, True), ("x", np.uint8, False), ("ids", np.int32, True), ("ids", np.uint8, True),
    ("ids", np.float32, False), ("ids", np.uint64, False),
]  # fmt: skip


def model() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "ids"], ["rows"]), helper.make_node("Add", ["rows", "x"], ["y"])],
        "net",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [onnx.numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("name", "dtype", "taken"), GIVEN)
def test_trainer_and_command_take_and_refuse_the_same(
    name: str, dtype: type[np.generic], taken: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feeds = {"x": np.ones((4, 3), np.float32), "ids": np.arange(4), "label": np.zeros((4, 3), np.float32)}
    program = graphc.compile(model(), loss=losses.MSE(), optimizer=optim.SGD(lr=0.1))
    with graphc.Trainer(program, threads=1) as trainer:
        wanted = trainer.evaluate([feeds])["loss"]
        feeds[name] = feeds[name].astype(dtype)
        if taken:
            assert trainer.step(feeds)["loss"] == pytest.approx(wanted, rel=1e-6)
        else:
            with pytest.raises(graphc.GraphcError, match=f"feed '{name}' is {np.dtype(dtype)}, the model wants"):
                trainer.step(feeds)
    onnx.save(model(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **feeds)
    options = ["--data", str(tmp_path / "d.npz"), "--loss", "mse", "--optimizer", "sgd:lr=0.1", "--batch-size", "4"]
    code = main(["train", str(tmp_path / "m.onnx"), *options])
    assert (code == 0) == taken
    assert taken or f"array '{name}' is {np.dtype(dtype)}, the model wants" in capsys.readouterr().err.replace("\n", " ")


def test_one_hot_labels_and_empty_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    arguments = ["train", str(tmp_path / "m.onnx"), "--loss", "softmax_cross_entropy", "--data", str(tmp_path / "d.npz")]
    for count, message in (
        (4, "save label.argmax(-1), or give the loss label_kind=probabilities"),
        (0, "the data has no samples"),
    ):
        label = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]] if count else np.zeros(0, np.int64)
        np.savez(tmp_path / "d.npz", x=np.ones((count, 3), np.float32), ids=np.arange(count), label=label)
        assert main([*arguments, "--optimizer", "sgd:lr=0.1"]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
