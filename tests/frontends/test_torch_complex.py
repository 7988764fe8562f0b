"""Modules that compute with complex numbers train as they do in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.frontends.torch import export
from tests.frontends.torch_steps import follow

pytestmark = pytest.mark.full


class Spectral(torch.nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies times complex weights."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3, *[3] * axes, dtype=torch.cfloat) / 3)
        self.pointwise = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        axes, letters = x.dim() - 2, "xyz"[: x.dim() - 2]
        low = (..., *[slice(0, 3)] * axes)
        found = torch.fft.rfftn(x, dim=tuple(range(2, 2 + axes)))
        kept = torch.zeros(found.shape, dtype=torch.cfloat)
        kept[low] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", found[low], self.weight)
        y = torch.fft.irfftn(kept, s=x.shape[2:], dim=tuple(range(2, 2 + axes)))
        return (y + self.pointwise(x.transpose(1, -1)).transpose(1, -1)).tanh().flatten(1)


class StateSpace(torch.nn.Module):
    """A diagonal state space layer as a long convolution, as in S4D."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a = torch.nn.Parameter(torch.randn(4, 8, 2) / 4), torch.nn.Parameter(torch.rand(4, 8))
        self.b, self.step = torch.nn.Parameter(3 * torch.rand(4, 8)), torch.nn.Parameter(0.1 + torch.rand(4) / 10)

    def forward(self, x: torch.Tensor) -> Any:
        poles = -torch.exp(self.a) + 1j * self.b
        moved = poles * self.step.unsqueeze(-1)
        factors = torch.view_as_complex(self.c) * (torch.exp(moved) - 1.0) / poles
        kernel = 2 * torch.einsum("hn,hnl->hl", factors, torch.exp(moved.unsqueeze(-1) * torch.arange(16))).real
        return torch.fft.irfft(torch.fft.rfft(x, n=32) * torch.fft.rfft(kernel, n=32), n=32)[..., :16].flatten(1)


class Others(torch.nn.Module):
    """Operators one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> Any:
        z = torch.view_as_complex(x)
        product = z @ self.weight
        batched = torch.bmm(product.unsqueeze(-1), product.unsqueeze(1))
        some = torch.zeros_like(batched)
        some[:, 1] = batched.select(1, 2)
        some = (some + torch.full((4,), 2.0, dtype=torch.cfloat).unsqueeze(0).unsqueeze(-2).expand(-1, 4, -1)) * (1 - 2j)
        real = torch.einsum("bij->bji", some) + torch.einsum("bij,j->bij", some, torch.arange(4.0))
        wider = torch.constant_pad_nd(torch.nn.functional.pad(real, (1, 0, 0, 2)), (0, 1), 0)
        return torch.view_as_real(wider.tanh()).flatten(1) * 0.1


CASES = {
    "FNO, lines": (lambda: Spectral(1), (3, 16)),
    "FNO, images": (lambda: Spectral(2), (3, 8, 6)),
    "S4D": (StateSpace, (4, 16)),
    "others": (Others, (3, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_pytorch(name: str) -> None:
    torch.manual_seed(2)
    make, size = CASES[name]
    module, example, x = make(), torch.randn(2, *size), torch.randn(5, *size)
    goal = torch.randn_like(module(x).detach())
    program = graphc.compile(
        export(module, (example,), exporter="dynamo"), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.02)
    )
    trained = follow(program, module, x, goal, rate=0.02, steps=4)
    for of, parameter in module.named_parameters():
        value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        np.testing.assert_allclose(trained[of], value.detach().numpy(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("options", [{"mode": "reflect"}, {"value": 1.0}], ids=str)
def test_pads_that_have_no_translation_are_named(options: dict[str, Any]) -> None:
    class Padded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.view_as_real(torch.nn.functional.pad(torch.view_as_complex(x), (1, 1), **options))

    with pytest.raises(graphc.errors.ModelError, match="pad of complex numbers"):
        export(Padded(), (torch.randn(2, 3, 2),), exporter="dynamo")


def test_what_has_no_translation_is_named() -> None:
    class Three(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> Any:
            z = torch.view_as_complex(x)
            return torch.einsum("bi,i,i->b", z, self.weight, self.weight).abs()

    with pytest.raises(graphc.errors.ModelError, match="complex"):
        export(Three(), (torch.randn(2, 3, 2),))


def test_float64_stays_float64() -> None:
    class Double(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, dtype=torch.cdouble))

        def forward(self, x: torch.Tensor) -> Any:
            found = torch.fft.rfft(x)
            kept = torch.zeros(found.shape, dtype=torch.cdouble)
            kept[:, :3] = found[:, :3].exp() * self.weight
            return torch.fft.irfft(kept + torch.full((1,), 0.5, dtype=torch.cdouble), n=x.shape[1])

    torch.manual_seed(0)
    module, x = Double(), torch.randn(4, 8, dtype=torch.float64)
    program = graphc.compile(
        export(module, (x,), exporter="dynamo"), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1)
    )
    goal = next(v.name for v in program.model.graph.inputs if v.name != "x")
    with graphc.Trainer(program, threads=1) as trainer:
        loss = trainer.step({"x": x.numpy(), goal: np.zeros((4, 8))})["loss"]
    np.testing.assert_allclose(loss, (module(x) ** 2).mean().item(), rtol=1e-6)
