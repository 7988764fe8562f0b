"""Convolutions with one window train as products, with PyTorch's losses and weights."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import graphc
from graphc.frontends.torch import export
from tests.tiers import params


class Squeeze(nn.Module):
    """Squeeze and excitation: two 1 × 1 convolutions of what a global pool leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.relu(self.down(x.mean((2, 3), keepdim=True)))
        return (x * torch.sigmoid(self.up(scale))).flatten(1)


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules, nn.Flatten())


CASES = {
    "whole image": (lambda: layers(nn.Conv2d(3, 7, (4, 5))), (3, 4, 5), 1),
    "no bias": (lambda: layers(nn.Conv2d(3, 7, 4, bias=False)), (3, 4, 4), 1),
    "stride": (lambda: layers(nn.Conv2d(3, 7, 2, stride=3)), (3, 4, 4), 1),
    "overhang": (lambda: layers(nn.Conv2d(3, 7, 3, stride=2, padding=1)), (3, 2, 1), 1),
    "line": (lambda: layers(nn.Conv1d(3, 7, 5)), (3, 5), 1),
    "volume": (lambda: layers(nn.Conv3d(2, 7, (2, 3, 1))), (2, 2, 3, 1), 1),
    "dilated": (lambda: layers(nn.Conv2d(3, 7, 3, dilation=2, padding=1)), (3, 3, 3), 0),
    "two windows": (lambda: layers(nn.Conv2d(3, 7, 3)), (3, 3, 4), 0),
    "groups": (lambda: layers(nn.Conv2d(4, 8, 3, groups=2)), (4, 3, 3), 0),
    "squeeze": (Squeeze, (6, 4, 4), 2),
    "from a pixel": (lambda: layers(nn.ConvTranspose2d(5, 3, (4, 3))), (5, 1, 1), 1),
    "from a padded pixel": (lambda: layers(nn.ConvTranspose2d(5, 3, 4, padding=1)), (5, 1, 1), 0),
    "from a point": (lambda: layers(nn.ConvTranspose1d(5, 3, 4, stride=2, bias=False)), (5, 1), 1),
}


@pytest.mark.parametrize(
    ("case", "backend"),
    params(
        product(CASES, ("onnxruntime", "numpy")),
        large=[
            (case, backend)
            for k, case in enumerate(CASES)
            for backend in ("onnxruntime", "numpy")
            if k % (6 if backend == "numpy" else 2)
        ],
    ),
)
def test_trains_as_in_pytorch(case: str, backend: str) -> None:
    make, shape, products = CASES[case]
    torch.manual_seed(0)
    first = nn.Conv1d if len(shape) == 2 else nn.Conv2d if len(shape) == 3 else nn.Conv3d
    module = nn.Sequential(first(shape[0], shape[0], 1), make())  # the images need a gradient too
    found = module(torch.zeros(1, *shape))
    module.append(nn.Linear(found.shape[1], 4))
    x, y = torch.randn(6, *shape), torch.randint(0, 4, (6,))
    program = graphc.compile(
        export(module, (x,)),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.05),
        backend=backend,
    )
    if case != "squeeze" and max(shape[1:]) > 1:  # else the first layer has one window too
        assert sum(node.op_type in ("Conv", "ConvTranspose") for node in program.model.graph) == 2 - products
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with graphc.Trainer(program, threads=1) as trainer:
        feeds = {"input": x.numpy(), "label": y.numpy()}
        np.testing.assert_allclose([trainer.step(feeds)["loss"] for _ in range(3)], losses, rtol=1e-5)
        weights = trainer.trained_values()
    for name, value in module.named_parameters():
        np.testing.assert_allclose(weights[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_any_number_of_samples() -> None:
    program = graphc.compile(
        export(layers(nn.Conv2d(3, 4, 3)), (torch.zeros(2, 3, 3, 3),)),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.1),
    )
    assert not any(node.op_type == "Conv" for node in program.model.graph)
    with graphc.Trainer(program, threads=1) as trainer:
        for count in (1, 3):
            feeds = {"input": np.ones((count, 3, 3, 3), np.float32), "label": np.zeros(count, np.int64)}
            assert np.isfinite(trainer.step(feeds)["loss"])
