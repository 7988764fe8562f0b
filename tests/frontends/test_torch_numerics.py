"""Functions of large and of tiny numbers: exported modules have the values and gradients that PyTorch has in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import graphc  # noqa: E402
from graphc.errors import ModelError  # noqa: E402

pytestmark = pytest.mark.full

F = torch.nn.functional
WIDE = torch.tensor([-300.0, -100, -88, -20, -5, -1, -0.1, -1e-3, -1e-6, 0, 1e-9, 1e-6, 1e-3, 0.1, 1, 5, 20, 88, 100, 300])
MILD = WIDE.clamp(-9, 9)
POSITIVE = torch.tensor([1e-30, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.4, 0.6, 1, 2, 10, 1e4, 1e8])
TIES = torch.tensor([-2.0, -1, -0.5, 0, 0.5, 1, 2, 6, 7])


def other(x: Any) -> Any:
    return x.detach().flip(0) * 0.7 + 0.05


def labels(x: Any) -> Any:
    return (other(x) > 0).to(x.dtype)


CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "logsigmoid": (F.logsigmoid, WIDE),
    "binary_cross_entropy_with_logits": (lambda x: F.binary_cross_entropy_with_logits(x, labels(x), reduction="none"), WIDE),
    "with a weight of the positive": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, labels(x), pos_weight=torch.tensor(3.0, dtype=x.dtype), reduction="none"
        ),
        WIDE,
    ),
    "sigmoid": (torch.sigmoid, WIDE),
    "a ranking loss": (lambda x: -torch.log(torch.sigmoid(x) + 1e-10), WIDE),
    "logaddexp": (lambda x: torch.logaddexp(x, other(x)), WIDE),
    "logaddexp of equal numbers": (lambda x: torch.logaddexp(x, 2 * x - x.detach()), WIDE),
    "logaddexp2": (lambda x: torch.logaddexp2(x, other(x)), WIDE),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), WIDE),
    "log1p": (torch.log1p, POSITIVE),
    "log1p of negative numbers": (lambda x: torch.log1p(-torch.exp(-1 - x.abs())), MILD),
    "expm1": (lambda x: torch.expm1(x.clamp(max=80)), WIDE),
    "sinc": (torch.sinc, MILD),
    "erfc": (torch.erfc, MILD.clamp(-9, 5)),
    "erfcx": (torch.special.erfcx, MILD.clamp(-5, 9)),
    "erfcx of large numbers": (torch.special.erfcx, POSITIVE[:-2]),
    "log_ndtr": (torch.special.log_ndtr, MILD),
    "log_ndtr far down": (torch.special.log_ndtr, WIDE.clamp(max=5)),
    "clamp": (lambda x: x.clamp(-1, 1), TIES),
    "clamp from below": (lambda x: x.clamp(min=0), TIES),
    "clamp from above": (lambda x: x.clamp(max=6), TIES),
    "clamp by tensors": (lambda x: torch.clamp(x, other(x) * 0 - 1, other(x) * 0 + 1), TIES),
    "hardtanh": (F.hardtanh, TIES),
    "relu6": (F.relu6, TIES),
}


class Probabilities(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Some are exactly 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Any, y: Any) -> Any:
        chances = torch.sigmoid(x * self.scale)
        return F.binary_cross_entropy(chances, y) + (x[:, :1] * 0 * self.scale).norm(p=3) + torch.arange(1, 4.0).mean()


def test_probabilities_of_zero_and_one_have_a_finite_loss() -> None:
    module, x, y = Probabilities(), torch.tensor([[-200.0, -20, -1, 0, 1, 20, 200]]).T.repeat(1, 2), torch.ones(7, 2)
    y[:, 0] = 0
    loss = module(x, y)
    loss.backward()
    program = graphc.compile(module, example_inputs=(x, y), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=1.0))
    with graphc.Trainer(program) as trainer:
        np.testing.assert_allclose(trainer.step({"x": x.numpy(), "y": y.numpy()})["loss"], loss.item(), rtol=1e-6)
        slope = 1.0 - trainer.trained_values()["scale"]
    np.testing.assert_allclose(slope, module.scale.grad.numpy(), rtol=1e-5)


def test_targets_of_another_shape_are_refused_as_in_pytorch() -> None:
    """They would be repeated otherwise, and the loss be that of other pairs."""
    with pytest.raises(ModelError, match="target size"):
        graphc.frontends.export(Probabilities(), (torch.ones(3, 2), torch.ones(3, 1)))


class Each(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Every function of its numbers. The gradients of two zeros tell all: of what is added the slope, of a factor the value."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        zeros = [torch.zeros(len(numbers), dtype=dtype) for _, numbers in CASES.values()]
        self.added = torch.nn.ParameterList([torch.nn.Parameter(z) for z in zeros])
        self.factors = torch.nn.ParameterList([torch.nn.Parameter(z.clone()) for z in zeros])

    def forward(self, x: Any) -> Any:
        total, start = 0.0, 0
        for (function, numbers), added, factor in zip(CASES.values(), self.added, self.factors, strict=True):
            values = function(x[0, start : start + len(numbers)] + added)
            total = total + (values * (1 + factor)).clamp(-1e30, 1e30).sum()
            start += len(numbers)
        return total


@functools.cache
def computed() -> dict[str, tuple[Any, ...]]:
    """name → value and slope here, in PyTorch's float32 and in its float64."""
    x = torch.cat([numbers for _, numbers in CASES.values()])[None]
    program = graphc.compile(Each(), example_inputs=(x,), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=1.0))
    with graphc.Trainer(program) as trainer:
        trainer.step({"x": x.numpy()})
        trained = trainer.trained_values()
    found = {name: [-trained[f"{part}.{k}"] for part in ("factors", "added")] for k, name in enumerate(CASES)}
    for dtype in (torch.float32, torch.float64):
        module = Each(dtype)
        module(x.to(dtype)).backward()
        for name, factor, added in zip(CASES, module.factors, module.added, strict=True):
            found[name] += [factor.grad.numpy(), added.grad.numpy()]
    return {name: tuple(values) for name, values in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_values_and_slopes_are_those_of_double_precision(name: str) -> None:
    value, slope, of_value, of_slope, exact_value, exact_slope = computed()[name]
    for have, theirs, exact in ((value, of_value, exact_value), (slope, of_slope, exact_slope)):
        allowed = 2e-5 * np.abs(exact) + 10 * np.abs(theirs - exact) + 1e-30
        assert np.all((np.abs(have - exact) <= allowed) | (have == theirs)), (CASES[name][1], have, exact)


def test_a_learned_bound_has_the_gradient_of_what_it_cuts() -> None:
    class Pact(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.bound = torch.nn.Parameter(torch.tensor(0.8))

        def forward(self, x: Any) -> Any:
            return torch.clamp(x, -self.bound, self.bound).square().mean()

    torch.manual_seed(0)
    module, x = Pact(), torch.randn(64, 5)
    module(x).backward()
    program = graphc.compile(module, example_inputs=(x,), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=1.0))
    with graphc.Trainer(program) as trainer:
        trainer.step({"x": x.numpy()})
        np.testing.assert_allclose(0.8 - trainer.trained_values()["bound"], module.bound.grad.numpy(), rtol=1e-6)
