"""Native kernels of the onnxruntime backend; importing this registers them.

Loops are compiled without bounds checks. A loop whose index is data compares it first (labels, in ``losses``), or says why it
lies inside; ``tests/backends/onnxruntime/test_kernel_memory.py`` runs every kernel beside closed pages.
"""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels import (
    activations,
    attention,
    averaging,
    columns,
    convolution,
    ctc,
    finite,
    fourier,
    grouped,
    indexing,
    linear,
    linear_algebra,
    losses,
    normalization,
    pooling,
    pooling_taps,
    random,
    resampling,
    sampling,
    scans,
    sorting,
    synchronized,
    transforms,
    updates,
)
from graphc.backends.onnxruntime.kernels.finite import bind_search, is_tested

__all__ = [
    "activations",
    "attention",
    "averaging",
    "bind_search",
    "columns",
    "convolution",
    "ctc",
    "finite",
    "fourier",
    "grouped",
    "indexing",
    "is_tested",
    "linear",
    "linear_algebra",
    "losses",
    "normalization",
    "pooling",
    "pooling_taps",
    "random",
    "resampling",
    "sampling",
    "scans",
    "sorting",
    "synchronized",
    "transforms",
    "updates",
]
