"""Feeds of the benchmark models; separate, so that measuring graphc imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model's input shape without the batch, number of classes, global batch size, and vocabulary for token models."""

    inputs: tuple[int, ...]
    classes: int
    batch_size: int
    tokens: int = 0

    def batch(self, count: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Make ``count`` random samples: (float32 images or int64 tokens, int64 labels)."""
        rng = np.random.default_rng(seed)
        x: np.ndarray[Any, Any]
        if self.tokens:
            x = rng.integers(0, self.tokens, (count, *self.inputs), dtype=np.int64)
        else:
            x = rng.standard_normal((count, *self.inputs), dtype=np.float32)
        return x, rng.integers(0, self.classes, count, dtype=np.int64)


SPECS = {
    "mlp": BenchModel((784,), 10, 128),
    "lenet": BenchModel((1, 28, 28), 10, 64),
    "squeezenet": BenchModel((3, 224, 224), 1000, 4),
    "resnet50": BenchModel((3, 224, 224), 1000, 4),
    "transformer": BenchModel((128,), 10, 8, tokens=1000),
    "resnet18-small": BenchModel((3, 16, 16), 10, 8),
    "resnet18-smooth": BenchModel((3, 16, 16), 10, 8),
    "transformer-small": BenchModel((16,), 10, 8, tokens=100),
}
"""The first five are timed; the small ones serve parity tests."""

TIMED = ("mlp", "lenet", "squeezenet", "resnet50", "transformer")
