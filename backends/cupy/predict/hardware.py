"""Rates of one NVIDIA H200 for the cost model, each with its source.

graphc itself has never run on a GPU. Each figure is one of these:

    measured    on one H200 (driver 580, CUDA 13.0), outside graphc: NVIDIA's libraries and a copy, called alone
    data sheet  published by NVIDIA
    assumed     neither; a guess until it is measured

No rate of a generated kernel was measured. The launch shapes of ``codegen`` and ``fusion`` assume 132 multiprocessors too.
"""

from __future__ import annotations

import onnx_ir as ir

NAME = "NVIDIA H200"

MEMORY = 4.27e12
"""Bytes a second, read and written. Measured: a copy between two arrays of the device."""

KERNEL_MEMORY = 0.9 * MEMORY
"""Bytes a second of generated kernels, read and written. Assumed: 90 % of a copy's."""

MIN_LAUNCH, LAUNCH = 2.5e-6, 1e-6
"""Seconds of the shortest kernel inside a CUDA graph, and to start and drain a longer one. Assumed."""

INSTRUCTIONS = 132 * 128 * 1.7e9
"""Instructions a second. Data sheet: multiprocessors and lanes; assumed: a clock of 1.7 GHz under load."""

GEMM = {ir.DataType.BFLOAT16: 605e12, ir.DataType.FLOAT16: 605e12, ir.DataType.FLOAT: 320e12, ir.DataType.DOUBLE: 50e12}
"""FLOP/s of cuBLASLt. Measured: bfloat16, over the products of GPT-2's layers. Assumed: float16 (the same), TF32, float64."""

WIDE_GEMM_SIZE, WIDE_GEMM = 16384, 716e12
"""Rows or columns above which a half-precision product has another rate. Measured: GPT-2's head."""

CONVOLUTION, CONVOLUTION_MEMORY = 600e12, 3.2e12
"""FLOP/s and bytes a second of cuDNN; the slower one counts. Assumed: both lie within the measurements of ResNet-50's layers,
433 to 764 TFLOP/s (3×3) and 2.8 to 3.9 TB/s (1×1), bfloat16 with channels last, batch 256.
"""

STEM_CONVOLUTION = 53e12
"""FLOP/s with up to four input channels. Measured: ResNet-50's 7×7 stem, 3.0 ms forward and weight gradient, counting four."""

NARROW_CONVOLUTION = 150e12
"""FLOP/s with fewer than 64 input channels. Assumed: a third of the rate measured for 64."""

ATTENTION, ATTENTION_GRADIENT = 286e12, 229e12
"""FLOP/s of cuDNN attention; a causal one counts half. Measured: batch 16, 12 heads, 1024 tokens, 64 elements a head,
bfloat16.
"""

HOST_LINK = 20e9
"""Bytes a second to the host and back. Assumed."""

SECTOR = 32
"""Smallest memory transaction in bytes. Data sheet."""

CACHED = 25 << 20
"""Bytes that stay in the L2 cache between loops over the columns. Assumed: half of the data sheet's size."""
