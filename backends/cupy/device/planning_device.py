"""A planning device: plans bind to it and allocate, but nothing runs.

A plan bound to it asks for exactly the memory it will ask a GPU for, so the plan's memory is known without a GPU. The
arrays lie in reserved address space that never needs physical memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_memory import UNIT
from graphc.backends.cupy.device.protocol import CudaOptions, HostFunction, LibraryCall
from graphc.device import PASSED, Array, Event, Run, Unqueued

CONTEXT = 640 << 20
"""Bytes that CUDA's context, cuBLASLt, cuDNN and NCCL keep for themselves on a device: a round estimate, not yet measured."""


class PlannedDevice(Unqueued):
    """Counts the memory and kernels that a plan asks of a GPU.

    Attributes:
        allocated: bytes on the device, rounded as CuPy's pool does.
        host: bytes of pinned memory.
        workspaces: bytes of library workspaces, by name.
        kernels: names of the kernels to load.
    """

    on_host = False
    context = CONTEXT

    def __init__(self, *, writes_cuda: bool = True, options: CudaOptions | None = None) -> None:
        self.writes_cuda = writes_cuda
        self.options = options or CudaOptions()
        self.allocated = self.host = 0
        self.workspaces: dict[str, int] = {}
        self.kernels: set[str] = set()

    def zeros(self, nbytes: int) -> Array:
        self.allocated += -(-max(nbytes, 1) // UNIT) * UNIT
        return _reserved(nbytes)

    empty = zeros

    def pinned(self, nbytes: int) -> Array:
        self.host += nbytes
        return np.zeros(nbytes, dtype=np.uint8)

    def put(self, array: Array) -> Array:
        return self.zeros(array.nbytes).view(array.dtype).reshape(array.shape)

    def adopt(self, array: object) -> Array | None:
        return array if isinstance(array, np.ndarray) and _is_reserved(array) else None

    def copy(self, target: Array, source: Array) -> None:
        """Does nothing: the arrays have no contents."""

    def fetch(self, array: Array) -> Array:
        return np.zeros(array.shape, array.dtype)

    def bind_copy(self, target: Array, source: Array) -> Run:
        """A copy that brings zeros to the host, as :meth:`fetch` does."""
        return partial(target.fill, 0) if target.flags.writeable else _nothing

    def bind_feed(self, target: Array) -> Callable[[Array], None]:
        return partial(self.copy, target)

    def bind_fill(self, target: Array, value: float) -> Run:
        return _nothing

    def send(self, target: Array, source: Array, after: Event | None = None) -> Event:
        return PASSED

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        self.kernels |= texts.keys()
        return dict.fromkeys(texts)

    def launch(self, kernel: Any, arrays: Sequence[Array], shape: Shape) -> Run:
        return _nothing

    def call_library(
        self, library: LibraryCall, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]
    ) -> Run:
        if library.workspace is not None:
            name, nbytes = library.workspace
            if name not in self.workspaces:
                self.workspaces[name] = nbytes
                self.zeros(nbytes)
        return library.bind(self, node, inputs, outputs) if library.launches_kernels else _nothing

    def call_host(self, function: HostFunction, inputs: Sequence[Array], outputs: Sequence[Array]) -> Run:
        return _nothing

    def record(self, runs: Sequence[Run]) -> Run:
        return _nothing


def _reserved(nbytes: int) -> Array:
    """Reserve read-only address space, which the system need not back with memory."""
    space = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    return np.frombuffer(space, dtype=np.uint8, count=nbytes)


def _is_reserved(array: Array) -> bool:
    """Whether a planning device reserved this array."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def _nothing() -> None:
    """Does nothing: this device runs no work."""
