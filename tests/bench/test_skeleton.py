"""Models travel without weights and are filled with noise that keeps their scale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from graphc.bench.skeleton import fill, strip


def network() -> onnx.ModelProto:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[batch, 64] x) => (float[batch, 2048] y) {
      h = MatMul(x, w)  n = Mul(h, scale)  y = Reshape(n, shape) }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    values = {
        "w": rng.normal(0.5, 0.02, (64, 2048)).astype(np.float32),
        "scale": np.ones(2048, np.float32),
        "shape": np.array([-1, 2048]),
        "mask": np.where(np.tri(64, dtype=bool), 0, -np.inf).astype(np.float32),
        "signs": np.where(np.tri(64, dtype=bool), 1, -1).astype(np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model


def test_a_filled_skeleton_has_weights_of_the_same_scale() -> None:
    model = network()
    skeleton = strip(model)
    assert skeleton.ByteSize() < 40_000 < 500_000 < model.ByteSize()
    first, second = ({t.name: numpy_helper.to_array(t) for t in fill(strip(model)).graph.initializer} for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
    assert abs(first["w"].mean() - 0.5) < 1e-3
    assert abs(first["w"].std() - 0.02) < 1e-3
    assert (first["scale"] == 1).all()
    for tensor in model.graph.initializer:  # what is no weight stays as it is
        if tensor.name in ("shape", "mask", "signs"):
            np.testing.assert_array_equal(first[tensor.name], numpy_helper.to_array(tensor))
    onnx.checker.check_model(fill(skeleton))


@pytest.mark.full
def test_the_command_writes_a_whole_model(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "net.onnx")
    for what, source, target in (("strip", "net", "skeleton"), ("fill", "skeleton", "filled")):
        command = [sys.executable, "-m", "graphc.bench.skeleton", what]
        subprocess.run([*command, str(tmp_path / f"{source}.onnx"), str(tmp_path / f"{target}.onnx")], check=True)
    assert (tmp_path / "skeleton.onnx").stat().st_size < 40_000
    onnx.checker.check_model(onnx.load(tmp_path / "filled.onnx"))
