"""Modules that go to the frequencies of a signal and back train as they do in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.frontends.torch import export
from tests.frontends.torch_steps import follow

pytestmark = pytest.mark.full

CASES: dict[str, dict[str, Any]] = {
    "plain": {"n_fft": 16},
    "normalised": {"n_fft": 16, "hop_length": 4, "normalized": True},
    "short window": {"n_fft": 16, "hop_length": 5, "win_length": 12},
    "longer": {"n_fft": 16, "hop_length": 4, "length": 70},
    "shorter": {"n_fft": 16, "hop_length": 4, "length": 50},
}


class Filter(torch.nn.Module):
    """A gain for each frequency."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.randn(options["n_fft"] // 2 + 1, 1))
        self.options = options
        self.window = 0.1 + torch.hann_window(options.get("win_length", options["n_fft"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {name: value for name, value in self.options.items() if name != "length"}
        spectrum = torch.stft(x, window=self.window, return_complex=True, **options)
        return torch.istft(spectrum * self.gain, window=self.window, **self.options)


def test_long_frames_make_few_nodes() -> None:
    exported = export(Filter({"n_fft": 64, "hop_length": 16}), (torch.randn(2, 256),), exporter="dynamo")
    program = graphc.compile(exported, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    assert len(program.model.graph) < 150  # PyTorch's own form makes 347


@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_pytorch(name: str) -> None:
    torch.manual_seed(3)
    module, x = Filter(CASES[name]), torch.randn(4, 64)
    goal = torch.randn_like(module(x).detach())
    program = graphc.compile(
        export(module, (x[:2],), exporter="dynamo"), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1)
    )
    trained = follow(program, module, x, goal, rate=0.1, steps=3)
    np.testing.assert_allclose(trained["gain"], module.gain.detach().numpy(), rtol=1e-4, atol=1e-6)
