"""Which elements a kernel walks: readers that see a value in lines of another length divide nothing in the innermost loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.backends.host import compiler
from tests.frontends.torch_steps import follow

pytestmark = pytest.mark.full


class MixedHeads(torch.nn.Module):
    """Attention weights of heads that talk to each other: a product whose operand has the heads last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Any) -> Any:
        return torch.einsum("bhij,hg->bgij", x, self.mix).softmax(-1)


class SoftArgmax(torch.nn.Module):
    """The expected place of each map's mass: a softmax over all pixels, whose rows and columns are weighted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        weights = (x * self.scale).flatten(2).softmax(-1).reshape(x.shape)
        across, down = torch.linspace(-1, 1, x.shape[3]), torch.linspace(-1, 1, x.shape[2])
        return torch.stack([(weights * across).sum((2, 3)), (weights * down[:, None]).sum((2, 3))], -1)


class Windows(torch.nn.Module):
    """An affine map of each channel's blocks of 32 numbers, which have a factor each."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.randn(12))

    def forward(self, x: Any) -> Any:
        blocks = x.reshape(x.shape[0], 12, 32) * self.factor[:, None]
        return torch.nn.functional.gelu(blocks.reshape(x.shape)) * torch.sigmoid(x)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(MixedHeads, (3, 6, 40, 44)), (SoftArgmax, (4, 3, 24, 32)), (SoftArgmax, (4, 3, 7, 48)), (Windows, (50, 384))],
    ids=["heads", "pixels", "odd", "blocks"],
)
def test_no_innermost_loop_divides(
    module: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))  # where an earlier run has left no kernels
    texts: list[str] = []
    kernels: list[str] = []
    plain = compiler.Compiler.compile

    def noting(own: compiler.Compiler, source: Any, loops: Any, **options: Any) -> Any:
        kernels.append(source.body)
        inner = ([*loops.rows, *loops.columns] or [("", 0)])[-1][0]
        texts.extend(re.findall(rf"\(\b{inner}\b\) [/%] \d+|\b{inner}\) [/%] \d+", source.body) if inner else [])
        return plain(own, source, loops, **options)

    monkeypatch.setattr(compiler.Compiler, "compile", noting)
    torch.manual_seed(0)
    made, x = module(), torch.randn(shape)
    goal = torch.rand(made(x).shape)
    program = graphc.compile(made, example_inputs=(x,), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    trained = follow(program, made, x, goal, rate=0.1, steps=3)
    for name, parameter in made.named_parameters():
        np.testing.assert_allclose(trained[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert kernels
    assert not texts
