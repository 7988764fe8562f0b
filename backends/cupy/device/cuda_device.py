"""The GPU through CuPy: memory, cached NVRTC kernels, launches, library calls and host calls.

The device keeps one object per library in use, and knows no library itself. CuPy's own library calls refuse a
capturing stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_graph import Recording, capture_graph
from graphc.backends.cupy.device.cuda_memory import CudaMemory, address
from graphc.backends.cupy.device.nvrtc_cache import Cubins, architecture, folder_name, nvrtc_compiler
from graphc.backends.cupy.device.protocol import CudaOptions, HostFunction, LibraryCall
from graphc.cache_folder import cache_folder
from graphc.device import Array, Run

L = TypeVar("L")


class CudaDevice(CudaMemory):
    """One GPU: its memory, compiled kernels and libraries."""

    writes_cuda = True

    def __init__(self, index: int | None = None, options: CudaOptions | None = None) -> None:
        super().__init__(index)
        self.options = options or CudaOptions()
        self._libraries: dict[Any, Any] = {}

    def put(self, array: Array) -> Array:
        held = self.zeros(array.nbytes).view(array.dtype).reshape(array.shape)
        self.copy(held, array)
        return held

    def record(self, runs: Sequence[Run]) -> Run:
        return Recording(runs, functools.partial(capture_graph, self))

    @functools.cached_property
    def runtime_version(self) -> int:
        """The version of the CUDA runtime, 13000 for 13.0."""
        return int(self.cupy.cuda.runtime.runtimeGetVersion())

    @functools.cached_property
    def name(self) -> str:
        """The name of the GPU."""
        return str(self.cupy.cuda.runtime.getDeviceProperties(self.device.id)["name"].decode())

    # Kernels ----------------------------------------------------------------------------------------------------------

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        found = {}
        for name, cubin in self._cubins.of(texts).items():
            module = self.cupy.cuda.function.Module()
            module.load(cubin)
            found[name] = module.get_function(name)
        return found

    @functools.cached_property
    def _cubins(self) -> Cubins:
        nvrtc = self.cupy.cuda.compiler.nvrtc
        target = architecture(int(self.device.compute_capability), nvrtc.getSupportedArchs())
        folder = cache_folder() / folder_name(target, self.runtime_version)
        return Cubins(folder, nvrtc_compiler(nvrtc, target))

    def launch(self, kernel: Any, arrays: Sequence[Array], shape: Shape) -> Run:
        pointers = tuple(address(array) for array in arrays)
        grid, block, stream = (shape.blocks, 1, 1), (shape.threads, 1, 1), self.stream

        def run(held: Sequence[Array] = tuple(arrays)) -> None:  # the closure keeps the arrays alive
            kernel(grid, block, pointers, stream=stream)

        return run

    # Nodes ------------------------------------------------------------------------------------------------------------

    def library(self, kind: Callable[[CudaDevice], L]) -> L:
        """The object through which this device uses a vendor library, created on first use."""
        if kind not in self._libraries:
            self._libraries[kind] = kind(self)
        return cast("L", self._libraries[kind])

    def call_library(
        self, library: LibraryCall, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]
    ) -> Run:
        return library.bind(self, node, inputs, outputs)

    def call_host(self, function: HostFunction, inputs: Sequence[Array], outputs: Sequence[Array]) -> Run:
        read, written = tuple(inputs), tuple(outputs)

        def run() -> None:
            for array, result in zip(written, function([self.fetch(array) for array in read]), strict=True):
                self.copy(array, result)

        return run
