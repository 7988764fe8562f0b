"""What a bound segment needs of the machine that runs it: memory, compiled kernels, and libraries for single nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.libraries.gemm import Product
from graphc.backends.cupy.libraries.registry import LibraryOp
from graphc.device import Array, Memory, Run

if TYPE_CHECKING:
    from graphc.backends.cupy.segment.disk_cache import SegmentCache


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """What a job asks of the backend.

    Attributes:
        tf32: whether products and convolutions of float32 may round their operands to TF32 (10 bits in place of 23).
        deterministic: the same bits in every run: nothing is chosen by measuring, and every sum has a fixed order.
        loose_gelu: whether the exact Gelu may be computed in the tanh form, which products have as epilogue: values
            differ by up to 5e-4, slopes by up to 9e-4.
    """

    tf32: bool = False
    deterministic: bool = False
    loose_gelu: bool = False


class Device(Memory, Protocol):
    """A GPU and its memory; in tests, the host.

    Attributes:
        writes_cuda: whether kernels are written in CUDA C; otherwise in C++ for the host.
    """

    writes_cuda: bool
    options: CudaOptions

    @property
    def kept(self) -> SegmentCache | None:
        """Compiled segments on disk, for this kind of device and these versions of its libraries; None: nothing is kept."""

    def pays(self, joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
        """Whether products take less time with an epilogue than without it and a kernel that moves ``saved`` bytes."""

    def empty(self, nbytes: int) -> Array:
        """New memory, whatever it holds, as a flat array of bytes."""

    def put(self, array: Array) -> Array:
        """A copy of a host array on the device."""

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        """Compile kernels by name."""

    def launch(self, kernel: Any, arrays: Sequence[Array], shape: Shape) -> Run:
        """A closure that launches a compiled kernel on these arrays."""

    def node(self, node: ir.Node, library: LibraryOp | None, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
        """A closure that runs one node by ``library``, or on the host where that is None."""

    def record(self, runs: Sequence[Run]) -> Run:
        """One closure for work that only queues; see :meth:`graphc.backend.Backend.record`."""
