"""Native kernels of the onnxruntime backend; importing this registers them.

    common         compilation by Numba, arrays, lines of images, scratch memory, elementary functions
    onednn         the library, and its primitives over fixed arrays
    products       matrices, and what consists of their products: attention, systems of equations, Fourier transforms
    convolutions   one algorithm a module; ``convolution`` chooses
    windows        pooling, resizing, sampling and folding
    rows           norms, activations, losses, running sums, orders, rows at indices, random numbers
    steps          from gradients to parameters: transforms, updates, the test for NaN

Loops are compiled without bounds checks. A loop whose index is data compares it first (labels, in ``losses``), or says why it
lies inside; ``tests/backends/onnxruntime/test_kernel_memory.py`` runs every kernel beside closed pages.
"""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels.convolutions import convolution
from graphc.backends.onnxruntime.kernels.products import attention, fourier, grouped, linear, linear_algebra
from graphc.backends.onnxruntime.kernels.rows import (
    activations,
    batch_normalization,
    ctc,
    indexing,
    losses,
    normalization,
    random,
    scans,
    sorting,
    synchronized,
)
from graphc.backends.onnxruntime.kernels.steps import finite, transforms, updates
from graphc.backends.onnxruntime.kernels.steps.finite import bind_search, is_tested
from graphc.backends.onnxruntime.kernels.windows import averaging, columns, pooling, pooling_taps, resampling, sampling

__all__ = [
    "activations",
    "attention",
    "averaging",
    "batch_normalization",
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
