"""``graphc run`` with what is no tensor of numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphc.cli import main
from tests.cli.models import write_blobs, write_mlp


@pytest.mark.parametrize("backend", ["numpy", "onnxruntime"])
def test_sequences_are_numbered_arrays(tmp_path: Path, backend: str) -> None:
    sequence = helper.make_tensor_sequence_value_info
    graph = helper.make_graph(
        [helper.make_node("SequenceInsert", ["s", "x"], ["o"]), helper.make_node("SequenceLength", ["o"], ["n"])],
        "g",
        [sequence("s", TensorProto.FLOAT, None), helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [sequence("o", TensorProto.FLOAT, None), helper.make_tensor_value_info("n", TensorProto.INT64, [])],
    )
    path, out = tmp_path / "sequence.onnx", tmp_path / "out.npz"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    arrays = {"s.0": np.ones(3, np.float32), "s.1": np.zeros(1, np.float32), "x": np.full(2, 7, np.float32)}
    np.savez(tmp_path / "in.npz", **arrays)
    assert main(["run", str(path), "--inputs", str(tmp_path / "in.npz"), "-o", str(out), "--backend", backend]) == 0
    got = np.load(out)
    assert sorted(got) == ["n", "o.0", "o.1", "o.2"]
    assert int(got["n"]) == 3
    for name, source in (("o.0", "s.0"), ("o.1", "s.1"), ("o.2", "x")):
        np.testing.assert_array_equal(got[name], arrays[source])


def _strings(name: str) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.STRING, [2])]


@pytest.mark.parametrize("backend", ["numpy", "onnxruntime"])
def test_shapes_that_depend_on_data_and_strings(tmp_path: Path, backend: str) -> None:
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["where"]), helper.make_node("StringConcat", ["a", "a"], ["twice"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]), *_strings("a")],
        [helper.make_tensor_value_info("where", TensorProto.INT64, None), *_strings("twice")],
    )
    path, out = tmp_path / "strings.onnx", tmp_path / "out.npz"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    np.savez(tmp_path / "in.npz", x=np.array([0, 3, 0, 2], np.float32), a=np.array(["ab", "c"]))
    assert main(["run", str(path), "--inputs", str(tmp_path / "in.npz"), "-o", str(out), "--backend", backend]) == 0
    got = np.load(out)
    np.testing.assert_array_equal(got["where"], [[1, 3]])
    np.testing.assert_array_equal(got["twice"], ["abab", "cc"])


def test_labels_in_the_data_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    assert main(["run", str(tmp_path / "mlp.onnx"), "--inputs", str(tmp_path / "d.npz")]) == 0
    out, err = capfd.readouterr()
    assert "logits" in out
    assert "the model has no input 'label', which is left out" in err
