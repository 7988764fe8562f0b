"""Random samples and their labels, for processes that need no PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def batch(shape: tuple[int, ...], count: int, seed: int, classes: int = 10) -> tuple[Array, Array]:
    """``count`` random float32 samples and their int64 labels."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape), dtype=np.float32), rng.integers(0, classes, count, dtype=np.int64)
