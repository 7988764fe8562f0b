"""A chain of values that are read at other places, as a running product, stays in kernels of a bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphc
from graphc.backends.host import compiler
from tests.frontends.torch_steps import follow

pytestmark = pytest.mark.full


class Sums(torch.nn.Module):
    """Logarithms of running sums, which are written as sums of two, of four and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Any) -> Any:
        return torch.logcumsumexp(x * self.scale, -1) * torch.relu(x)


class Rays(torch.nn.Module):
    """How much light reaches each sample of a ray."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Any) -> Any:
        alpha = 1 - torch.exp(-torch.relu(x) * self.scale)
        passed = torch.cumprod(torch.cat([torch.ones(len(x), 1), 1 - alpha + 1e-10], -1), -1)
        return alpha * passed[:, :-1]


class Delta(torch.nn.Module):
    """The inverse of a triangular matrix, a row at a time, as in delta rules by chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Any) -> Any:
        a = (x * self.scale).reshape(-1, 24, 24).tril(-1)
        for i in range(1, 24):
            row, above = a[..., i, :i].clone(), a[..., :i, :i].clone()
            a[..., i, :i] = row + (row[..., None] * above).sum(-2)
        return a


def test_what_is_assigned_row_after_row_is_put_together_in_steps() -> None:
    """Without a bound, the places that a kernel reads double with each row: the first step never came."""
    torch.manual_seed(0)
    module, x, goal = Delta(), torch.randn(4, 576) * 0.3, torch.rand(4, 24, 24)
    program = graphc.compile(module, example_inputs=(x,), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    trained = follow(program, module, x, goal, rate=0.1, steps=3)
    assert abs(float(trained["scale"]) - module.scale.item()) < 1e-6


@pytest.mark.parametrize("kind", [Sums, Rays])
def test_a_running_chain_trains_as_in_pytorch(
    kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))  # where an earlier run has left no kernels
    sizes: list[int] = []
    plain = compiler.Compiler.compile

    def noting(own: compiler.Compiler, source: Any, loops: Any, **options: Any) -> Any:
        sizes.append(source.body.count("\n"))
        return plain(own, source, loops, **options)

    monkeypatch.setattr(compiler.Compiler, "compile", noting)
    torch.manual_seed(0)
    module, x = kind(), torch.randn(2048, 64)
    goal = torch.rand(2048, 64)
    program = graphc.compile(module, example_inputs=(x,), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    trained = follow(program, module, x, goal, rate=0.1, steps=3)
    assert abs(float(trained["scale"]) - module.scale.item()) < 1e-6
    assert 0 < max(sizes) < 500, "one kernel for all of it has 8,600 lines, which LLVM takes more than a minute for"
