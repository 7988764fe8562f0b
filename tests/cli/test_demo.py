"""``graphc demo`` as a user sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from graphc import demo
from graphc.cli import main
from tests.cli.models import cli


@pytest.mark.mpi
def test_demo(tmp_path: Path) -> None:
    target = tmp_path / "trained.onnx"
    done = cli("demo", "-o", target, "--format", "json", timeout=180)
    assert done.returncode == 0, done.stderr.decode()
    events = [json.loads(line) for line in done.stdout.splitlines()]
    compiled, end, final = events[0], events[-2], events[-1]
    assert compiled["nodes_after"] > compiled["nodes_before"]
    assert compiled["allreduces_injected"] >= 8, "one for each parameter"
    assert compiled["allreduces_per_step"] < compiled["allreduces_injected"]
    assert compiled["bytes_per_step"] > 4 * 9978
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"{compiled['nodes_before']} nodes became {compiled['nodes_after']}:" in readme
    assert f"{compiled['allreduces_injected']} AllReduces injected" in readme
    assert end["world_size"] == 2
    assert final["onnxruntime_accuracy"] > 0.97
    epochs = [e for e in events if e["event"] == "epoch"]
    assert epochs[-1]["eval_accuracy"] == pytest.approx(final["onnxruntime_accuracy"])

    trained, given = onnx.load(target), onnx.load(demo.MODEL)
    assert [t.name for t in trained.graph.initializer] == [t.name for t in given.graph.initializer]
    for node in trained.graph.node:
        if node.op_type == "BatchNormalization":
            assert len(node.output) == 1
            assert not any(a.name == "training_mode" and a.i for a in node.attribute)
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    test = demo.load_digits().test
    (logits,) = session.run(None, {"image": test["image"]})
    assert np.mean(np.argmax(logits, axis=1) == test["label"]) == pytest.approx(final["onnxruntime_accuracy"])


@pytest.mark.full
def test_the_model_is_small_and_untrained() -> None:
    assert demo.MODEL.stat().st_size < 200_000
    test = demo.load_digits().test
    session = onnxruntime.InferenceSession(demo.MODEL, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": test["image"]})
    assert np.mean(np.argmax(logits, axis=1) == test["label"]) < 0.3
    kinds = {node.op_type for node in onnx.load(demo.MODEL).graph.node}
    assert {"Conv", "BatchNormalization", "Dropout", "Gemm"} <= kinds


@pytest.mark.full
def test_every_digit_is_used_once() -> None:
    digits = demo.load_digits()
    assert len(digits.train["label"]) + len(digits.test["label"]) == 1797
    assert digits.train["image"].dtype == np.float32
    assert digits.train["image"].max() == 1


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 1
    assert "pip install 'graphc[demo]'" in capfd.readouterr().err


@pytest.mark.large  # a script for developers, which needs PyTorch
def test_the_script_makes_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = Path(__file__).parent.parent.parent / "scripts" / "make_demo_model.py"
    again = tmp_path / "again.onnx"
    subprocess.run([sys.executable, script, again], check=True, capture_output=True, timeout=120)
    ours, theirs = onnx.load(demo.MODEL), onnx.load(again)
    assert [(n.op_type, list(n.input)) for n in ours.graph.node] == [(n.op_type, list(n.input)) for n in theirs.graph.node]
    for a, b in zip(ours.graph.initializer, theirs.graph.initializer, strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b))
