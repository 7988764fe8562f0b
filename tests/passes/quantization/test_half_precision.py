"""Files of 16-bit floats train in float32 and are written back in 16 bits; rounded activations hide no parameter from check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import graphc
from graphc import losses, optim
from graphc.cli import main

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 6)).astype(np.float32)
LABEL = RNG.integers(0, 4, 8)
WEIGHTS = {"w1": RNG.standard_normal((6, 5)), "b1": RNG.standard_normal(5), "w2": RNG.standard_normal((5, 4))}


def model(dtype: int) -> onnx.ModelProto:
    """Two layers, with a constant, an attribute and a body of an If in the same type."""
    value = helper.make_tensor_value_info
    then = helper.make_graph(
        [helper.make_node("Mul", ["h", "half"], ["t"])], "then", [], [value("t", dtype, ["n", 5])],
        [helper.make_tensor("half", dtype, [], [0.5])],
    )  # fmt: skip
    other = helper.make_graph([helper.make_node("Identity", ["h"], ["e"])], "else", [], [value("e", dtype, ["n", 5])])
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]),
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["i"], then_branch=then, else_branch=other),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["f"], ["l"], to=dtype),
        helper.make_node("MatMul", ["l", "w2"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [value("x", dtype, ["n", 6])],
        [value("logits", dtype, ["n", 4])],
        [helper.make_tensor(name, dtype, array.shape, array.ravel()) for name, array in WEIGHTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def torch_run(kind: torch.dtype, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of Adam in float32, from the weights that the file rounds."""
    given = {n: torch.tensor(a).to(kind).float().requires_grad_() for n, a in WEIGHTS.items()}
    optimizer, found = torch.optim.Adam(given.values(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = torch.relu(torch.tensor(X) @ given["w1"] + given["b1"]) * 0.5
        loss = torch.nn.functional.cross_entropy(hidden @ given["w2"], torch.tensor(LABEL))
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found, given


@pytest.mark.parametrize(("dtype", "kind"), [(TensorProto.FLOAT16, torch.float16), (TensorProto.BFLOAT16, torch.bfloat16)])
def test_a_16_bit_file_trains_as_in_float32_and_comes_back_in_16_bits(dtype: int, kind: torch.dtype, tmp_path: Path) -> None:
    program = graphc.compile(model(dtype), loss=losses.SoftmaxCrossEntropy(), optimizer=optim.Adam(lr=1e-2))
    wanted, weights = torch_run(kind, 6)
    with graphc.Trainer(program, threads=1) as trainer:
        found = [trainer.step({"x": X, "label": LABEL})["loss"] for _ in range(6)]
        trainer.export(tmp_path / "t.onnx")
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    written = onnx.load(tmp_path / "t.onnx")
    assert {t.data_type for t in written.graph.initializer} == {dtype}
    for tensor in written.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        near = weights[tensor.name].detach().to(kind).float().numpy()
        np.testing.assert_allclose(array, near, rtol=2**-7 if dtype == TensorProto.BFLOAT16 else 2**-10, atol=1e-6)
    onnx.checker.check_model(written, full_check=True)


def test_never_trains_in_the_types_of_the_file() -> None:
    program = graphc.compile(
        model(TensorProto.FLOAT16), loss=losses.SoftmaxCrossEntropy(), optimizer=optim.SGD(lr=0.1), dequantize="never"
    )
    assert program.model.graph.initializers["w1"].dtype == TensorProto.FLOAT16


def test_check_counts_the_parameters_behind_rounded_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = {"w": WEIGHTS["w1"].astype(np.float32), "s": np.float32(0.05), "z": np.uint8(128)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("QuantizeLinear", ["h", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    assert main(["check", str(tmp_path / "m.onnx"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 1
