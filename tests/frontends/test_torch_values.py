"""Trained values come back into the module that was compiled."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphc

RATE = 0.1


class Tied(nn.Module):
    """A table of words that is also the weight of the last layer, and a counter of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.layer = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.words.weight
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.words(x))[0]
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        return self.head(hidden).square().mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight).square().mean()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).sigmoid().square().mean()


class Adversaries(nn.Module):
    """Generator and discriminator with one loss: neither trains by the loss of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        fake = self.generator(z)
        judged = nn.functional.softplus(-self.discriminator(x)) + nn.functional.softplus(self.discriminator(fake.detach()))
        held = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        fooled = nn.functional.softplus(-torch.func.functional_call(self.discriminator, held, (fake,)))
        return (judged + fooled).mean()


class Stack(nn.Sequential):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(nn.Linear(3, size), nn.Linear(size, 1))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self[0].weight.dtype)).float().square().mean()


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[type[nn.Module], tuple[torch.Tensor, ...]]] = {
    "tied": (Tied, (torch.arange(12).reshape(3, 4) % 7,)),
    "complex": (Complex, (_normal(3, 8),)),
    "normalised": (Normalised, (_normal(3, 3, 6, 6),)),
    "adversaries": (Adversaries, (_normal(4, 3), _normal(4, 5))),
}


def _trained(module: nn.Module, inputs: tuple[torch.Tensor, ...], into: Any, **options: Any) -> None:
    program = graphc.compile(
        module, example_inputs=inputs, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=RATE), **options
    )
    feeds = dict(zip([value.name for value in program.original.graph.inputs], [x.numpy() for x in inputs], strict=True))
    with graphc.Trainer(program) as trainer:
        for _ in range(3):
            trainer.step(feeds)
        trainer.load_into(into)


@pytest.mark.parametrize("name", CASES)
def test_the_module_is_as_if_pytorch_had_trained_it(name: str) -> None:
    kind, inputs = CASES[name]
    torch.manual_seed(0)
    module = kind()
    eager = copy.deepcopy(module)
    optimizer = torch.optim.SGD(eager.parameters(), lr=RATE)
    for _ in range(3):
        optimizer.zero_grad()
        eager(*inputs).backward()
        optimizer.step()
    places = {key: value.data_ptr() for key, value in module.state_dict().items()}
    _trained(module, inputs, module)
    for key, value in eager.state_dict().items():
        if not key.endswith(("running_var", "num_batches_tracked")):  # biased, as ONNX defines it; not in the file
            np.testing.assert_allclose(module.state_dict()[key].numpy(), value.numpy(), rtol=1e-4, atol=1e-6, err_msg=key)
    assert {key: value.data_ptr() for key, value in module.state_dict().items()} == places  # an optimizer may hold them


def test_a_module_in_bfloat16_gets_its_numbers_rounded() -> None:
    module = Stack(4, torch.bfloat16)
    module[0].bias.requires_grad = False
    before, full = copy.deepcopy(module), copy.deepcopy(module).float()
    _trained(module, (_normal(2, 3),), full)
    for old, own in zip(before.parameters(), module.parameters(), strict=True):
        assert torch.equal(old, own)  # the module that was compiled is as it was
    _trained(module, (_normal(2, 3),), module)
    for (name, old), new, own in zip(before.named_parameters(), full.parameters(), module.parameters(), strict=True):
        assert own.dtype is torch.bfloat16
        assert torch.equal(new.bfloat16(), own)
        assert torch.equal(old, own) == (name == "0.bias")


def test_another_module_is_refused_and_left_alone() -> None:
    module, other = Stack(4), Stack(5)
    values = copy.deepcopy(other.state_dict())
    for into, message in (
        (other, r"'0\.weight' has shape \(4, 3\), and in the module \(5, 3\)"),
        (module[1], r"no parameter '\d\.\w+', which was trained"),
        (values, r"a torch\.nn\.Module is expected, not OrderedDict"),
    ):
        with pytest.raises(graphc.GraphcError, match=message):
            _trained(module, (_normal(2, 3),), into)
    assert all(torch.equal(values[key], value) for key, value in other.state_dict().items())
