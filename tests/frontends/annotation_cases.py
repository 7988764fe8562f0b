"""Losses of a few steps of SGD, by graphc and by PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import torch

import graphc

SGD = graphc.optim.SGD(lr=0.1)


def losses(model: onnx.ModelProto, feeds: dict[str, np.ndarray], loss: graphc.losses.Loss, steps: int = 3) -> list[float]:
    with graphc.Trainer(graphc.compile(model, loss=loss, optimizer=SGD)) as trainer:
        return [trainer.step(feeds)["loss"] for _ in range(steps)]


def of_pytorch(forward: Callable[..., torch.Tensor], weights: dict[str, np.ndarray], steps: int = 3) -> list[float]:
    """The losses of SGD in PyTorch; ``forward`` maps the weights to a loss."""
    tensors = {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}
    optimizer, found = torch.optim.SGD(tensors.values(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = forward(**tensors)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
