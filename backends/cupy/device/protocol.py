"""The device protocol: memory, compiled kernels, library calls and host calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.device import Array, Memory, Run


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Numerical options of a job.

    Attributes:
        tf32: whether float32 products and convolutions may round their operands to TF32 (10 mantissa bits instead of 23).
        deterministic: every run gives the same bits: nothing is chosen by measuring, and every sum has a fixed order.
        loose_gelu: whether the exact Gelu may be computed in the tanh form, which products have as epilogue: values
            differ by up to 5e-4, slopes by up to 9e-4.
    """

    tf32: bool = False
    deterministic: bool = False
    loose_gelu: bool = False


class LibraryCall(Protocol):
    """A library call as a device sees it."""

    @property
    def bind(self) -> Callable[[Any, ir.Node, Sequence[Array | None], Sequence[Array]], Run]:
        """(device, node, inputs, outputs) → closure that queues the call."""

    @property
    def workspace(self) -> tuple[str, int] | None:
        """Name and bytes of the library's workspace on a device; calls with the same name share it."""

    @property
    def launches_kernels(self) -> bool:
        """Whether the call launches kernels of this package, which every device runs."""


HostFunction: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
"""Computes results in host memory from host arrays."""


class Device(Memory, Protocol):
    """A GPU and its memory; in tests, the host.

    Attributes:
        writes_cuda: whether kernels are written in CUDA C; otherwise in C++ for the host.
    """

    writes_cuda: bool
    options: CudaOptions

    def empty(self, nbytes: int) -> Array:
        """Allocate uninitialised memory, as a flat array of bytes."""

    def put(self, array: Array) -> Array:
        """Copy a host array to the device."""

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        """Compile kernels by name."""

    def launch(self, kernel: Any, arrays: Sequence[Array], shape: Shape) -> Run:
        """A closure that launches a compiled kernel on these arrays."""

    def call_library(
        self, library: LibraryCall, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]
    ) -> Run:
        """A closure that runs one node through ``library``."""

    def call_host(self, function: HostFunction, inputs: Sequence[Array], outputs: Sequence[Array]) -> Run:
        """A closure that fetches ``inputs``, calls ``function`` on the host, and copies its results to ``outputs``."""

    def record(self, runs: Sequence[Run]) -> Run:
        """Combine closures that only queue work into one; see :meth:`graphc.backend.Backend.record`."""
