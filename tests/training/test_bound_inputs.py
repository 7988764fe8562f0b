"""Inputs without samples, and inputs whose samples lie on another axis: recurrent state, a sampling rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import graphc
from graphc import losses, optim
from graphc.cli import main

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 5, 3)).astype(np.float32)
STATE = RNG.standard_normal((1, 12, 4)).astype(np.float32)
LABEL = RNG.standard_normal((12, 2)).astype(np.float32)


class Net(nn.Module):
    """A GRU whose state is an input [1, b, 4], and a gain that depends on a rate."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Any, state: Any, rate: float) -> Any:
        return self.head(self.cell(x, state)[0][:, -1]) * (rate / 8000)


def file_of(net: Net, path: Path, batch: str | int = "b", state_batch: str | int | None = "b") -> str:
    """The network as a file, written by hand so that its inputs have the shapes in question."""
    cell, node = net.cell, helper.make_node
    order = [k for gate in (1, 0, 2) for k in range(4 * gate, 4 * gate + 4)]  # PyTorch's r, z, n → ONNX's z, r, h
    held = {
        "w": cell.weight_ih_l0.detach().numpy()[order][None],
        "r": cell.weight_hh_l0.detach().numpy()[order][None],
        "bias": np.concatenate([cell.bias_ih_l0.detach().numpy()[order], cell.bias_hh_l0.detach().numpy()[order]])[None],
        "head": net.head.weight.detach().numpy(),
        "head_bias": net.head.bias.detach().numpy(),
        "axis": np.array([0]),
        "base": np.float32(8000),
    }
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("GRU", ["t", "w", "r", "bias", "", "state"], ["", "h"], hidden_size=4, linear_before_reset=1),
        node("Squeeze", ["h", "axis"], ["s"]),
        node("Gemm", ["s", "head", "head_bias"], ["g"], transB=1),
        node("Cast", ["rate"], ["f"], to=TensorProto.FLOAT),
        node("Div", ["f", "base"], ["gain"]),
        node("Mul", ["g", "gain"], ["y,0"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [1, state_batch, 4]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 5, 3]),
            helper.make_tensor_value_info("rate", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y,0", TensorProto.FLOAT, [batch, 2])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def torch_run(net: Net, state: Array, batch: int, epochs: int) -> tuple[Array, list[float]]:
    """The head's weight and the losses after SGD in PyTorch."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(epochs):
        total = 0.0
        for k in range(0, 12, batch):
            optimizer.zero_grad()
            y = net(torch.tensor(X[k : k + batch]), torch.tensor(state[:, k : k + batch]), 16000.0)
            loss = ((y - torch.tensor(LABEL[k : k + batch])) ** 2).mean()
            loss.backward()
            optimizer.step()
            total += float(loss) * batch / 12
        found.append(total)
    return net.head.weight.detach().numpy(), found


def head(path: str | Path) -> Array:
    (tensor,) = (t for t in onnx.load(path).graph.initializer if t.name == "head")
    return onnx.numpy_helper.to_array(tensor)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(("batch", "state_batch"), [("b", "b"), ("b", None), (1, 1), ("b", "m")])
def test_state_and_rate_come_from_the_command_line(
    net: Net, tmp_path: Path, batch: str | int, state_batch: str | int | None
) -> None:
    model, out = file_of(net, tmp_path / "m.onnx", batch, state_batch), tmp_path / "t.onnx"
    np.savez(tmp_path / "d.npz", x=X, label=LABEL)
    options = ["--data", str(tmp_path / "d.npz"), "--loss", "mse:prediction=y,0", "--optimizer", "sgd:lr=0.1", "--epochs", "2"]
    given = ["--input", "state=zeros:1,1,4", "--batch-axis", "state=1", "--input", "rate=16000"]
    assert main(["train", model, *options, *given, "--batch-size", "4", "--no-shuffle", "-o", str(out)]) == 0
    wanted, _ = torch_run(net, np.zeros_like(STATE), 4, 2)
    np.testing.assert_allclose(head(out), wanted, rtol=1e-5, atol=1e-6)
    assert [v.name for v in onnx.load(out).graph.input] == ["state", "x", "rate"]


@pytest.mark.parametrize("layout", ["of the model", "samples first"])
def test_the_samples_of_an_input_lie_on_its_batch_axis(net: Net, tmp_path: Path, layout: str) -> None:
    model, out = file_of(net, tmp_path / "m.onnx"), tmp_path / "t.onnx"
    state = STATE if layout == "of the model" else STATE.swapaxes(0, 1)
    np.savez(tmp_path / "d.npz", state=state, x=X, label=LABEL)
    options = ["--data", str(tmp_path / "d.npz"), "--loss", "mse", "--optimizer", "sgd:lr=0.1", "--epochs", "2", "--no-shuffle"]
    split = ["--batch-size", "4", "-n", "2", "--transport", "threads", "--accumulate", "2"]
    given = ["--batch-axis", "state=1", "--input", "rate=16000"]
    assert main(["train", model, *options, *given, *split, "-o", str(out)]) == 0
    wanted, _ = torch_run(net, STATE, 4, 2)
    np.testing.assert_allclose(head(out), wanted, rtol=1e-5, atol=1e-6)


def test_in_python_constants_are_arrays_or_numbers(net: Net, tmp_path: Path) -> None:
    program = graphc.compile(
        file_of(net, tmp_path / "m.onnx"),
        loss=losses.MSE(),
        optimizer=optim.SGD(lr=0.1),
        inputs={"rate": 16000, "state": np.zeros((1, 1, 4), np.float32)},
        batch_axis={"state": 1},
    )
    with graphc.Trainer(program, threads=1) as trainer:
        batches = [{"x": X[k : k + 4], "label": LABEL[k : k + 4]} for k in (0, 4, 8)]
        loss = trainer.fit(batches)["loss"]
        evaluated = trainer.evaluate([{"x": X[:5], "label": LABEL[:5]}, {"x": X[5:], "label": LABEL[5:]}])["loss"]
    _, (wanted,) = torch_run(net, np.zeros_like(STATE), 4, 1)
    assert loss == pytest.approx(wanted, rel=1e-5)
    y = net(torch.tensor(X), torch.zeros(1, 12, 4), 16000.0)
    assert evaluated == pytest.approx(float(((y - torch.tensor(LABEL)) ** 2).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("inputs", "axes", "message"),
    [
        (["rat=1"], [], "no input 'rat'"),
        (["rate=fast"], [], "input 'rate': 'fast' is no value; give zeros:SHAPE"),
        (["rate=0.5"], [], "input 'rate': 0.5 is no int64"),
        (["state=zeros:1,1,5"], [], r"input 'state': a value of shape \[1, 1, 5\] does not fit state:float\[1,b,4\]"),
        (["state=absent.npy"], [], "input 'state': 'absent.npy' is no value"),
        (["state"], [], "'state' says nothing of an input; write it as in sr=16000"),
        ([], ["state=3"], r"batch axis 3: state:float\[1,b,4\] has no such axis"),
        ([], ["state=x"], "state=x names no axis"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(
    net: Net, tmp_path: Path, inputs: list[str], axes: list[str], message: str
) -> None:
    with pytest.raises(graphc.GraphcError, match=message):
        graphc.compile(
            file_of(net, tmp_path / "m.onnx"), loss=losses.MSE(), optimizer=optim.SGD(lr=0.1), inputs=inputs, batch_axis=axes
        )
