"""Native kernels of the onnxruntime backend; importing this registers them."""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels import (
    activations,
    attention,
    convolution,
    linear,
    losses,
    normalization,
    pooling,
    random,
    synchronized,
    transforms,
    updates,
)
from graphc.backends.onnxruntime.kernels.updates import nonfinite_count

__all__ = [
    "activations",
    "attention",
    "convolution",
    "linear",
    "losses",
    "nonfinite_count",
    "normalization",
    "pooling",
    "random",
    "synchronized",
    "transforms",
    "updates",
]
