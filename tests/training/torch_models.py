"""Small models for tests of data-parallel training, as PyTorch modules and as the ONNX files exported from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from graphc import frontends
from tests.training.random_samples import Array, batch

__all__ = ["SHAPES", "Array", "Cnn", "Mlp", "batch", "make", "save"]


class Cnn(nn.Module):
    """Two convolutions with BatchNormalization on 8×8 images, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """20-32-10 with BatchNormalization and Dropout in between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU()]
        self.layers = nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {Cnn: (3, 8, 8), Mlp: (20,)}


def make(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().train()


def save(module: nn.Module, path: Path, example: torch.Tensor) -> str:
    """Export with a symbolic batch, input ``input`` and output ``logits``."""
    model = frontends.export(module, (example,), input_names=["input"], output_names=["logits"])
    frontends.save(model, str(path))
    return str(path)
