"""A pool in front of a Relu and a Concat gives the gradients that it gives behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.frontends.torch import export


class Fire(torch.nn.Module):
    """Two convolutions whose results a Relu, a Concat and a pool pass; what comes in are whole numbers, so many are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Conv2d(2, 3, 1), torch.nn.Conv2d(2, 3, 3, padding=1)
        self.head = torch.nn.Linear(6 * 4 * 5, 3)
        for p in self.parameters():
            p.data = torch.round(p.data * 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], dim=1)
        return self.head(torch.nn.functional.max_pool2d(y, 3, 2, 1).flatten(1))


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_trains_as_in_pytorch(backend: str) -> None:
    torch.manual_seed(0)
    module = Fire()
    rng = np.random.default_rng(1)
    x, y = rng.integers(-2, 3, (4, 2, 8, 10)).astype(np.float32), rng.integers(0, 3, 4)
    program = graphc.compile(
        export(module, (torch.from_numpy(x),)),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.01),
        backend=backend,
    )
    assert [n.op_type for n in program.model.graph if n.op_type in ("MaxPool", "Concat")][:3] == [
        "MaxPool",
        "MaxPool",
        "Concat",
    ]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
    with graphc.Trainer(program, threads=1) as trainer:
        feeds = {"x": x, "label": y}
        losses = [trainer.step(feeds)["loss"] for _ in range(3)]
        weights = trainer.trained_values()
    np.testing.assert_allclose(losses[-1], loss.item(), rtol=1e-5)
    assert weights.keys() == dict(module.named_parameters()).keys()
    for name, value in module.named_parameters():
        np.testing.assert_allclose(weights[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)
