"""Bags of embeddings are computed side by side, whatever their lengths, and train as in PyTorch."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import graphc
from graphc.frontends.torch import export
from graphc.pipeline import PassCall, run
from tests.tiers import params

pytestmark = pytest.mark.full  # each case is exported


class OfMatrix(nn.Module):
    def __init__(self, mode: str, last: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8, mode=mode, include_last_offset=last, padding_idx=padding)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bags(x))


class OfOffsets(OfMatrix):
    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.head(self.bags(x, offsets))


OFFSETS = [0, 5, 5, 11, 20, 33, 40]
"""Of 40 indices: the second bag is empty, and so is the last one."""


BAGS = [
    ("matrix", "sum"),
    ("matrix", "mean"),
    ("matrix", "max"),
    ("offsets", "sum"),
    ("last offset", "mean"),
    ("offsets", "max"),
]
"""How bags are given, and what becomes of their rows."""


@pytest.mark.parametrize(
    ("kind", "mode", "exporter"),
    params(
        [(*case, exporter) for case in BAGS for exporter in ("dynamo", "torchscript")],
        large=[(*case, "torchscript") for case in BAGS if "matrix" not in case],
    ),
)
def test_bags_train_as_in_pytorch_without_a_loop(kind: str, mode: str, exporter: str) -> None:
    torch.manual_seed(0)
    if kind == "matrix":
        module, inputs = OfMatrix(mode), (torch.randint(0, 50, (7, 6)),)
    else:
        module, inputs = OfOffsets(mode, kind == "last offset"), (torch.randint(0, 50, (40,)), torch.tensor(OFFSETS))
    label = torch.randint(0, 5, (6 if kind == "last offset" else 7,))
    trains_as_in_pytorch(module, inputs, label, exporter)


@pytest.mark.parametrize(
    ("padding", "mode"), params(product((3, -50), ("sum", "mean", "max")), large=[(3, "sum"), (3, "max"), (-50, "mean")])
)
def test_padding_is_left_out_of_bags(mode: str, padding: int) -> None:
    torch.manual_seed(0)
    matrix = torch.where(torch.rand(7, 6) < 0.4, padding % 50, torch.randint(0, 50, (7, 6)))
    matrix[4] = padding % 50
    label = torch.randint(0, 5, (7,))
    for kind, inputs in ((OfMatrix, (matrix,)), (OfOffsets, (matrix.reshape(-1)[:40], torch.tensor(OFFSETS)))):
        trains_as_in_pytorch(kind(mode, padding=padding), inputs, label, "dynamo")


def trains_as_in_pytorch(module: nn.Module, inputs: tuple[torch.Tensor, ...], label: torch.Tensor, exporter: str) -> None:
    model = export(module, inputs, exporter=exporter)
    program = graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5))
    ops = {node.op_type for node in program.model.graph}
    assert not ops & {"Loop", "Scan"}
    assert ("CumSum" in ops) == (len(inputs) > 1)
    feeds = {**dict(zip(("x", "offsets"), (value.numpy() for value in inputs), strict=False)), "label": label.numpy()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(4):
            loss = nn.functional.cross_entropy(module(*inputs), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(feeds)["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_loop_that_may_end_earlier_stays() -> None:
    model = ir.to_proto(export(OfMatrix("sum"), (torch.randint(0, 50, (7, 6)),), exporter="torchscript"))
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    (body,) = (attribute.g for attribute in loop.attribute if attribute.name == "body")
    (going,) = (node for node in body.node if node.output[0] == body.output[0].name)
    going.CopyFrom(onnx.helper.make_node("Less", [body.input[0].name, "two"], [body.output[0].name]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2), "two"))
    changed = ir.from_proto(model)
    run(changed, [PassCall("legalize")])
    assert "Loop" in {node.op_type for node in changed.graph}
