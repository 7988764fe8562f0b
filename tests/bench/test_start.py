"""What ``graphc bench --start`` measures: a whole start, to a device that is not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from graphc.backend import BACKENDS
from graphc.bench.gpu_specs import JOBS
from graphc.bench.start import measured


def test_a_second_start_finds_what_the_first_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, kept = JOBS["mlp-wide"].tiny(), tmp_path / "kept"
    weights = np.random.default_rng(0).standard_normal((16, job.classes)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], ["logits"])],
        "g",
        [helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", job.classes])],
        initializer=[numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    with BACKENDS.restored():
        found = measured(job, str(tmp_path / "m.onnx"), kept)
    assert found.keys() == {"import", "compile", "trainer", "step", "total"}
    assert min(found.values()) >= 0
    assert found["total"] == pytest.approx(sum(seconds for part, seconds in found.items() if part != "total"))
    before = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
    assert before
    monkeypatch.setattr("graphc.backends.cupy.compile_segment", lambda *_, **__: pytest.fail("it is compiled again"))
    with BACKENDS.restored():
        measured(job, str(tmp_path / "m.onnx"), kept)
    assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == before
