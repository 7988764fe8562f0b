"""GPUs, and the constants of the cost model, each with its source.

Each figure is one of these:

    measured    on one H100 (80 GB HBM3, driver 580, CUDA 13.0) in steps of the jobs of ``make gpu-bench`` on 2026-11-26; where
                an H200 is named, on one, outside graphc: NVIDIA's libraries and a copy, alone
    data sheet  published by NVIDIA
    assumed     neither; a guess until it is measured

A constant of the model is a pair: what it is if all goes well, and if little does. A prediction is the step's time for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from graphc.errors import UsageError, nearest


class Figure(NamedTuple):
    """One figure of the model; ``fast`` gives the least time, ``slow`` the most."""

    fast: float
    slow: float
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as its driver calls it, without the variant.
        multiprocessors, lanes: multiprocessors, and float32 lanes of each.
        clock: Hz under load.
        memory: bytes a second of a copy, read and written.
        cache: bytes of the L2 cache.
        peak: FLOP/s of dense products by element type.
        product: share of ``peak`` that a product of many whole tiles reaches.
        threads, blocks, shared: threads, blocks and bytes of shared memory that a multiprocessor holds.
    """

    name: str
    multiprocessors: int
    lanes: int
    clock: Figure
    memory: Figure
    cache: int
    peak: Mapping[ir.DataType, float]
    product: Figure
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 << 10


def _peak(half: float, tf32: float, double: float) -> dict[ir.DataType, float]:
    """Data sheet: without sparsity, sums in float32."""
    types = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return dict(zip(types, (half, half, tf32, double), strict=True))


H200 = Figure(0.74, 0.67, "measured on an H200: 0.72 for GPT-2's head, 0.61 over its layers, at the power limit")
H100 = Figure(0.85, 0.76, "measured: 0.85 for GPT-2's head, 0.75 to 0.80 for its layers without an epilogue")

GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(
        "NVIDIA A100", 108, 64, Figure(1.41e9, 1.30e9, "data sheet: boost; assumed: 8 % less under load"),
        Figure(1.82e12, 1.73e12, "data sheet: 2.04 TB/s (80 GB); assumed: 85 to 89 % of it"), 40 << 20,
        _peak(312e12, 156e12, 19.5e12), Figure(0.88, 0.78, "assumed"), shared=164 << 10,
    ),
    "h100": Gpu(
        "NVIDIA H100", 132, 128, Figure(1.75e9, 1.60e9, "assumed: under load, of 1.98 GHz boost"),
        Figure(3.02e12, 2.84e12, "measured: copies of 1 GiB and of 256 MB; 85 to 90 % of the data sheet's 3.35 TB/s"), 50 << 20,
        _peak(989e12, 495e12, 67e12), H100,
    ),
    "h200": Gpu(
        "NVIDIA H200", 132, 128, Figure(1.75e9, 1.60e9, "assumed: under load, of 1.98 GHz boost"),
        Figure(4.27e12, 4.27e12, "measured on an H200: a copy between two arrays; 89 % of the data sheet's 4.8 TB/s"), 50 << 20,
        _peak(989e12, 495e12, 67e12), H200,
    ),
    "b200": Gpu(
        "NVIDIA B200", 148, 128, Figure(1.85e9, 1.65e9, "assumed: under load, of 1.97 GHz boost"),
        Figure(7.1e12, 6.6e12, "data sheet: 8 TB/s; assumed: 83 to 89 % of it"), 126 << 20,
        _peak(2250e12, 1125e12, 37e12), Figure(0.74, 0.58, "assumed, at the power limit"),
    ),
    "l4": Gpu(
        "NVIDIA L4", 58, 128, Figure(1.8e9, 1.2e9, "assumed: 72 W hold the clock below the data sheet's 2.04 GHz"),
        Figure(0.27e12, 0.25e12, "data sheet: 0.30 TB/s; assumed: 83 to 89 % of it"), 48 << 20,
        _peak(121e12, 60e12, 0.47e12), Figure(0.70, 0.42, "assumed: 72 W hold the clock down"),
        threads=1536, blocks=24, shared=100 << 10,
    ),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", 128, 128, Figure(2.6e9, 2.4e9, "data sheet: boost 2.52 GHz; assumed: around it"),
        Figure(0.93e12, 0.88e12, "data sheet: 1.01 TB/s; assumed: 87 to 92 % of it"), 72 << 20,
        _peak(165e12, 82.6e12, 1.29e12), Figure(0.95, 0.82, "assumed"), threads=1536, blocks=24, shared=100 << 10,
    ),
}  # fmt: skip
"""Name on the command line → GPU."""

DEFAULT = "h200"

REGISTERS, REGISTERS_AT_ONCE = 1 << 16, 256
"""Registers of a multiprocessor, and how many a warp is given at once. Data sheet."""

SHARED_OF_BLOCK = 1 << 10
"""Bytes of shared memory that the system takes of each block. Data sheet."""

KERNEL_MEMORY = Figure(1.02, 0.90, "measured: share of a copy's rate that generated kernels of 100 MB and more reach")
LATENCY = Figure(6.0e-7, 9.0e-7, "assumed: seconds from a load to its result while memory is busy")
ISSUE = Figure(1.0, 0.8, "assumed: share of the cycles in which a multiprocessor issues")
OVERLAP = Figure(0.0, 0.25, "assumed: share of the shorter of memory and instructions that the longer does not hide")

MIN_LAUNCH = Figure(2.6e-6, 5.0e-6, "measured: the shortest kernels of a step, each between two events")
LAUNCH = Figure(0.8e-6, 1.5e-6, "assumed: seconds to start and drain a longer one")
TICKET = Figure(0.8e-6, 2.0e-6, "assumed: seconds of the last block's fences, its atomic addition and its first load")
LAST_BLOCK = Figure(75e9, 35e9, "assumed: bytes a second that one block reads from the cache")
FINISH = Figure(3.0e-6, 5.0e-6, "measured: a kernel that adds up the totals of 342 blocks, 5.0 to 5.5 µs with its two events")

STEP = Figure(60e-6, 150e-6, "assumed: seconds of Python a step; an empty step took 92 µs on a CPU")
"""The feeds, the launch of the graph, and reading the results. A step that is queued early hides it behind the one before."""

BETWEEN = Figure(6e-6, 15e-6, "assumed: seconds between two graphs: copies of results and feeds, and the launch")

STEPS_OF_TILE = Figure(30.0, 90.0, "assumed: what starting and storing a tile takes, in elements of the summed dimension")
EPILOGUE = Figure(1.32, 1.56, "measured: time of a product with a Gelu or its gradient in its epilogue ÷ without, at k = 768")
TRANSPOSED_TF32 = Figure(0.98, 0.82, "measured: rate of a TF32 product of which one operand is not contiguous along the sum")
TURNED_TF32 = Figure(0.63, 0.56, "measured: as above, of which neither is")
TF32 = Figure(1.0, 0.95, "measured: share of the half-precision products' share of the peak")

CONVOLUTION = Figure(0.70, 0.56, "measured: 0.41 to 0.79 of the peak in ResNet-50's 3×3 layers, bfloat16, channels last")
CONVOLUTION_MEMORY = Figure(0.96, 0.82, "measured: 0.81 to 0.97 of a copy's rate in ResNet-50's 1×1 layers")
STEM_CONVOLUTION = Figure(0.055, 0.052, "measured on an H200: ResNet-50's 7×7 stem, 3 ms with its gradient, as of 4 channels")
NARROW_CONVOLUTION = Figure(0.23, 0.15, "measured: 0.15 for 16 channels, 0.23 for their weight gradient")

ATTENTION = Figure(0.32, 0.29, "measured: cuDNN, batch 16, 12 heads, 1024 tokens, 64 elements a head, bfloat16; causal: half")
ATTENTION_GRADIENT = Figure(0.23, 0.21, "measured: as above")
SHORT = 512
SHORT_ATTENTION = Figure(0.55, 0.45, "measured: rate for 128 keys ÷ the rate for 1024; taken for fewer than 512")

HOST_LINK = Figure(25e9, 15e9, "assumed: bytes a second to the host and back")

SECTOR = 32
"""Smallest memory transaction in bytes. Data sheet."""


def gpu_of(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        UsageError: no such GPU is described.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise UsageError(f"no GPU {name!r} is described{nearest(name.lower(), GPUS)}; there are {', '.join(GPUS)}")
    return found


def gpu_named(driver: str) -> Gpu:
    """The GPU that the driver calls so, such as ``NVIDIA H100 80GB HBM3``; the default if it is not described."""
    return next((gpu for gpu in GPUS.values() if driver.startswith(gpu.name)), GPUS[DEFAULT])


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU in one of the two cases, as plain numbers."""

    gpu: Gpu
    fast: bool

    def of(self, constant: Figure) -> float:
        """The constant in this case."""
        return constant.fast if self.fast else constant.slow

    @property
    def memory(self) -> float:
        """Bytes a second of a copy."""
        return self.of(self.gpu.memory)

    @property
    def kernel_memory(self) -> float:
        """Bytes a second of a generated kernel that has enough loads in flight."""
        return self.memory * self.of(KERNEL_MEMORY)

    @property
    def instructions(self) -> float:
        """Instructions a second of all lanes."""
        return self.gpu.multiprocessors * self.gpu.lanes * self.of(self.gpu.clock) * self.of(ISSUE)

    def peak(self, share: Figure) -> float:
        """FLOP/s at this share of the half-precision peak."""
        return self.gpu.peak[ir.DataType.BFLOAT16] * self.of(share)

    def launched(self, seconds: float, least: Figure = MIN_LAUNCH) -> float:
        """Seconds of a kernel whose work takes ``seconds``."""
        return max(self.of(least), self.of(LAUNCH) + seconds)
