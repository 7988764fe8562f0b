"""Weights beside the model: external data comes back as external data, and text files keep large tensors in a side file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.errors import ModelError
from graphc.training.inference import run_model
from tests.passes.legalize.legalize_cases import build, normal

WEIGHTS = {"w": normal(20, 25), "b": normal(25, seed=1), "few": normal(3, seed=2)}


def model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Constant", [], ["scale"], value=numpy_helper.from_array(normal(25, seed=3))),
        helper.make_node("Mul", ["a", "scale"], ["y"]),
    ]
    return build(nodes, {"x": ["n", 20]}, {"y": ["n", 25]}, WEIGHTS, opset=17)


@pytest.fixture
def external(tmp_path: Path) -> Path:
    path = tmp_path / "in.onnx"
    onnx.save(model(), path, save_as_external_data=True, location="in.weights", size_threshold=0)
    return path


def lies_apart(path: Path) -> bool:
    proto = onnx.load(path, load_external_data=False)
    (w,) = (t for t in proto.graph.initializer if t.name == "w")
    return w.data_location == TensorProto.EXTERNAL and path.with_name(f"{path.name}.data").exists()


@pytest.mark.full
def test_external_data_comes_back_as_external_data(external: Path, tmp_path: Path) -> None:
    x = normal(2, 20, seed=4)
    want = run_model(frontends.load(external), {"x": x})["y"]
    assert main(["opt", str(external), "-p", "legalize", "-o", str(tmp_path / "opt.onnx")]) == 0
    arguments = ["--loss", "mse", "--optimizer", "sgd:lr=0.1", "-o", str(tmp_path / "train.onnx")]
    assert main(["compile", str(external), *arguments]) == 0
    assert main(["compile", str(external), *arguments[:-1], str(tmp_path / "standard.onnx"), "--standard"]) == 0
    program = graphc.compile(str(external), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.0))
    with graphc.Trainer(program) as trainer:
        trainer.step({"x": x, "label": want})
        trainer.export(tmp_path / "trained.onnx")
    for name in ("opt", "train", "standard", "trained"):
        assert lies_apart(tmp_path / f"{name}.onnx"), name
    for name in ("opt", "trained"):
        np.testing.assert_allclose(run_model(frontends.load(tmp_path / f"{name}.onnx"), {"x": x})["y"], want, rtol=1e-6)


def test_a_model_in_one_file_stays_in_one_file(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "in.onnx")
    assert main(["opt", str(tmp_path / "in.onnx"), "-p", "legalize", "-o", str(tmp_path / "out.onnx")]) == 0
    assert not (tmp_path / "out.onnx.data").exists()


def test_text_with_a_side_file_is_read_exactly(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "in.onnx")
    path = tmp_path / "m.onnxtxt"
    assert main(["opt", str(tmp_path / "in.onnx"), "-p", "legalize", "-o", str(path)]) == 0
    text = path.read_text()
    assert len(text) < 3000
    assert '"location": "m.onnxtxt.data"' in text
    again, x = frontends.load(path), normal(2, 20, seed=4)
    np.testing.assert_array_equal(
        run_model(again, {"x": x})["y"], run_model(frontends.load(tmp_path / "in.onnx"), {"x": x})["y"]
    )
    assert main(["opt", str(path), "-p", "verify", "-o", str(tmp_path / "back.onnx")]) == 0
    (tmp_path / "m.onnxtxt.data").unlink()
    with pytest.raises(ModelError, match=r"m\.onnxtxt\.data.* is missing"):
        frontends.load(path)


def test_printed_text_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model(), tmp_path / "in.onnx")
    assert main(["opt", str(tmp_path / "in.onnx"), "-p", "legalize"]) == 0
    text = capsys.readouterr().out
    assert "float[20,25] w = <elided 500 floats>" in text
    assert "<elided 25 floats>" in text
