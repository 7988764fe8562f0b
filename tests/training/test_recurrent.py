"""PyTorch's recurrent modules, exported, train as they do in PyTorch; bodies run on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc.errors import DataDependentShapeError
from graphc.frontends.torch import export
from graphc.ir.builder import Builder
from graphc.ir.state import add_initializer
from graphc.ir.subgraphs import finish_body, new_body
from graphc.plan.partition import make_plan
from tests.gradient_check import new_model, normal
from tests.tiers import params

pytestmark = pytest.mark.full

BATCH, TIME, FEATURES, CLASSES = 8, 6, 5, 3


class Classifier(torch.nn.Module):
    """The last output of two recurrent layers, both directions, and a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(torch.nn, kind)(FEATURES, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(16, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(input)[0][:, -1])  # type: ignore[no-any-return]


def batches(count: int = 10) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((BATCH, TIME, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, BATCH)) for _ in range(count)
    ]


def torch_losses(module: torch.nn.Module) -> np.ndarray[Any, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def train(model: Any, backend: str = "onnxruntime") -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    program = graphc.compile(
        model,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.1, momentum=0.9),
        backend=backend,
    )
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [trainer.step({"input": x, "label": y})["loss"] for x, y in batches()]
        return np.array(losses), {name: np.array(array) for name, array in trainer.trained_values().items()}


@pytest.mark.parametrize(
    ("kind", "exporter", "backend"),
    [
        ("LSTM", "torchscript", "onnxruntime"),
        ("LSTM", "torchscript", "numpy"),
        ("LSTM", "dynamo", "onnxruntime"),
        pytest.param("GRU", "torchscript", "onnxruntime", marks=pytest.mark.large),
        pytest.param("GRU", "dynamo", "numpy", marks=pytest.mark.large),
        ("GRU", "dynamo", "onnxruntime"),
        ("RNN", "torchscript", "onnxruntime"),
        pytest.param("RNN", "dynamo", "onnxruntime", marks=pytest.mark.large),
    ],
)
def test_ten_steps_follow_pytorch(kind: str, exporter: str, backend: str) -> None:
    torch.manual_seed(0)
    module = Classifier(kind)
    model = export(module, torch.from_numpy(batches(1)[0][0]), exporter=exporter)
    assert any(node.op_type == kind for node in model.graph.all_nodes())
    losses, parameters = train(model, backend)
    np.testing.assert_allclose(losses, torch_losses(module), rtol=1e-4)
    for name, parameter in module.named_parameters():
        if name in parameters:
            np.testing.assert_allclose(parameters[name], parameter.detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def step_model(limit: int | None, *, until: float | None = None) -> ir.Model:
    """logits = input · v after a Loop of s ← tanh(s·w); w is an initializer of the body."""
    feeds = {"input": np.zeros((BATCH, FEATURES), np.float32)}
    model, (x,) = new_model(feeds)
    graph = model.graph
    v = add_initializer(graph, "v", normal(FEATURES, CLASSES).value.astype(np.float32))
    op = Builder(graph)
    body, inner, (_, going, s) = new_body(
        op,
        [
            ("t", ir.TensorType(ir.DataType.INT64), ir.Shape([])),
            ("going", ir.TensorType(ir.DataType.BOOL), ir.Shape([])),
            ("s", x.type, x.shape),
        ],
    )
    w = add_initializer(body, "w", normal(FEATURES, FEATURES, seed=1).value.astype(np.float32) / 2)
    after = inner.Tanh(inner.MatMul(s, w))
    more = going if until is None else inner.Greater(inner.ReduceSumSquare(after, keepdims=0), until)
    finish_body(inner, [more, after])
    (final,) = op.emit("Loop", [None if limit is None else np.int64(limit), np.bool_(True), x], {"body": body}, outputs=1)
    (y,) = op.emit("MatMul", [final, v], outputs=["logits"])
    graph.outputs.append(y)
    return model


def looped(w: torch.Tensor, v: torch.Tensor, limit: int, until: float | None) -> list[float]:
    optimizer = torch.optim.SGD([w, v], lr=0.1, momentum=0.9)
    losses = []
    for x, y in flat_batches():
        s, t = torch.from_numpy(x), 0
        while t < limit and (t == 0 or until is None or (s**2).sum().item() > until):
            s, t = torch.tanh(s @ w), t + 1
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(s @ v, torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat_batches() -> list[tuple[Any, Any]]:
    return [(x[:, 0] * (k + 1) / 5, y) for k, (x, y) in enumerate(batches())]


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
@pytest.mark.parametrize("until", [None, 2.0])
def test_a_weight_inside_a_loop_trains_and_returns_into_its_body(until: float | None, backend: str, tmp_path: Path) -> None:
    model = step_model(5, until=until)
    w, v = (torch.tensor(a.const_value.numpy(), requires_grad=True) for a in initializers(model))  # type: ignore[union-attr]
    program = graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1, momentum=0.9), backend=backend
    )
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [trainer.step({"input": x, "label": y})["loss"] for x, y in flat_batches()]
        trainer.export(tmp_path / "trained.onnx")
    np.testing.assert_allclose(losses, looped(w, v, 5, until), rtol=1e-4)
    written = ir.load(tmp_path / "trained.onnx")
    for ours, theirs in zip(initializers(written), (w, v), strict=True):
        np.testing.assert_allclose(ours.const_value.numpy(), theirs.detach().numpy(), rtol=1e-3, atol=1e-6)  # type: ignore[union-attr]


def initializers(model: ir.Model) -> tuple[ir.Value, ir.Value]:
    """w, from the body where it was put, and v."""
    loop = next(n for n in model.graph if n.op_type == "Loop")
    return loop.attributes["body"].as_graph().initializers["w"], model.graph.initializers["v"]


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_a_loop_without_a_bound_trains(backend: str) -> None:
    model = step_model(None, until=8.0)
    w, v = (torch.tensor(a.const_value.numpy(), requires_grad=True) for a in initializers(model))  # type: ignore[union-attr]
    program = graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1, momentum=0.9), backend=backend
    )
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [trainer.step({"input": x, "label": y})["loss"] for x, y in flat_batches()]
    np.testing.assert_allclose(losses, looped(w, v, 1000, 8.0), rtol=1e-4)


def test_a_loop_without_a_bound_is_refused_where_a_collective_stands_before_its_gradient() -> None:
    program = graphc.compile(
        step_model(None, until=8.0),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.1),
        strategy="zero:stage=3",
    )
    x, y = flat_batches()[0]
    with pytest.raises(DataDependentShapeError, match="constant trip count"):
        make_plan(program.model, {"input": x.shape, "label": y.shape}, world_size=2)


class Bags(torch.nn.Module):
    """The dynamo exporter writes EmbeddingBag as a Loop that appends to a sequence, with Ifs of known condition."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = torch.nn.EmbeddingBag(20, 6, mode="mean"), torch.nn.Linear(6, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.head(self.bags(input))  # type: ignore[no-any-return]


class Cells(torch.nn.Module):
    """The dynamo exporter writes LSTMCell with SplitToSequence and SequenceAt."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = torch.nn.LSTMCell(FEATURES, 8), torch.nn.Linear(8, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(input.shape[0], 8)
        for t in range(TIME):
            h, c = self.cell(input[:, t], (h, c))
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", params(["onnxruntime", "numpy"], large=["numpy"]))
@pytest.mark.parametrize("module", [Bags, Cells])
def test_sequences_in_exported_modules(module: type[torch.nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    peer = module()
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 20, (BATCH, 4)), y) for _, y in batches()] if module is Bags else batches()
    model = export(peer, torch.from_numpy(data[0][0]), exporter="dynamo")
    assert any("Sequence" in node.op_type for node in model.graph.all_nodes())
    program = graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), backend=backend
    )
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1)
    with graphc.Trainer(program, threads=1) as trainer:
        for x, y in data:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(peer(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            optimizer.step()
            assert trainer.step({"input": x, "label": y})["loss"] == pytest.approx(loss.item(), rel=1e-4)
