"""Batches, and steps of PyTorch's SGD, beside which exported modules train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import graphc


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples of six numbers, and labels of four."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def feeds(seed: int, rows: slice = slice(None)) -> dict[str, np.ndarray[Any, Any]]:
    x, label = batch(seed)
    return {"x": x.numpy()[rows], "label": label.numpy()[rows]}


def in_torch(module: torch.nn.Module, seeds: Iterable[int], **options: float) -> list[float]:
    """The losses of a step of SGD with ``options`` for each seed."""
    losses, optimizer = [], torch.optim.SGD(module.parameters(), **options)  # type: ignore[arg-type]
    for seed in seeds:
        x, label = batch(seed)
        loss = functional.mse_loss(module(x), label)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def follow(
    program: graphc.Program, module: torch.nn.Module, x: torch.Tensor, goal: torch.Tensor, rate: float, steps: int
) -> Mapping[str, Any]:
    """Assert that ``steps`` of SGD have the losses of the module, which takes them too; returns the trained values."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.mse_loss(module(x), goal)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    with graphc.Trainer(program, threads=1) as trainer:
        given = {"x": x.numpy(), next(v.name for v in program.model.graph.inputs if v.name != "x"): goal.numpy()}
        np.testing.assert_allclose([trainer.step(given)["loss"] for _ in losses], losses, rtol=1e-5)
        return trainer.trained_values()


def compare(values: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Assert that parameters, except those that ``forward`` does not read, are the module's."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            np.testing.assert_allclose(values[name], parameter.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
