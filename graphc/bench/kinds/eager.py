"""A training step of PyTorch eager with fused AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def stepper(module: nn.Module, inputs: tuple[torch.Tensor, ...], label: torch.Tensor, rate: float) -> Callable[[], float]:
    """A function that takes a step and returns its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, fused=True)
    module.train()

    def step() -> float:
        optimizer.zero_grad()
        logits = module(*inputs)
        if label.dim() == 2:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten())
        else:
            loss = nn.functional.cross_entropy(logits, label)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item())

    return step
