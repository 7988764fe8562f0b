"""The GPU through CuPy: memory, NVRTC with a cache on disk, launches, and nodes by library or, at last, on the host.

CuPy's own library calls refuse a capturing stream, so products go through cuBLASLt's bindings (:mod:`.cublaslt`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import onnx_ir as ir

from graphc.backend import BACKENDS
from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_graph import Recording, capture_graph
from graphc.backends.cupy.device.cuda_memory import CudaMemory, address
from graphc.backends.cupy.device.nvrtc_cache import Cubins, architecture, folder_name, nvrtc_compiler
from graphc.backends.cupy.device.protocol import CudaOptions
from graphc.backends.cupy.libraries.cublaslt import Products, version_of_products
from graphc.backends.cupy.libraries.gemm import Product
from graphc.backends.cupy.libraries.registry import LibraryOp, operands, results
from graphc.backends.cupy.libraries.tuning_cache import file_name
from graphc.backends.cupy.segment.disk_cache import SegmentCache
from graphc.device import Array, Run
from graphc.ir.facts import constant
from graphc.plan.segment_model import segment_model
from graphc.plan.steps import PlanStep

L = TypeVar("L")

CACHE = "GRAPHC_CACHE_DIR"
"""Environment variable: folder for compiled kernels and measured choices; by default ``~/.cache/graphc``."""


def cache_folder() -> Path:
    """The folder of compiled kernels and measured choices."""
    found = os.environ.get(CACHE)
    if found:
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graphc"


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
    def kept(self) -> SegmentCache:
        """Compiled segments; which epilogues pay was measured on this device with this version of the library."""
        words = (self.name, str(self.cupy.cuda.runtime.runtimeGetVersion()), version_of_products())
        return SegmentCache(cache_folder() / Path(file_name("segments", *words)).stem)

    @functools.cached_property
    def name(self) -> str:
        """What the GPU is called."""
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
        folder = cache_folder() / folder_name(target, int(self.cupy.cuda.runtime.runtimeGetVersion()))
        return Cubins(folder, nvrtc_compiler(nvrtc, target))

    def launch(self, kernel: Any, arrays: Sequence[Array], shape: Shape) -> Run:
        pointers = tuple(address(array) for array in arrays)
        grid, block, stream = (shape.blocks, 1, 1), (shape.threads, 1, 1), self.stream

        def run(held: Sequence[Array] = tuple(arrays)) -> None:  # whoever holds the launch holds its memory
            kernel(grid, block, pointers, stream=stream)

        return run

    # Nodes ------------------------------------------------------------------------------------------------------------

    def library(self, kind: Callable[[CudaDevice], L]) -> L:
        """The object through which this device uses a vendor's library; made when it is first asked for."""
        if kind not in self._libraries:
            self._libraries[kind] = kind(self)
        return cast("L", self._libraries[kind])

    def pays(self, joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
        return self.library(Products).pays(joined, apart, saved)

    def node(self, node: ir.Node, library: LibraryOp | None, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
        if library is not None:
            return library.bind(self, node, inputs, outputs)
        return self._on_host(node, inputs, outputs)

    def _on_host(self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
        read = [v for v in dict.fromkeys(operands(node)) if v is not None and constant(v) is None]
        model = segment_model(PlanStep("segment", node.op_type, [node], read, results(node)))
        sources = {v.name or "": a for v, a in zip(operands(node), inputs, strict=True) if v in read}
        written = [o.name or "" for o in results(node)]
        targets = list(zip(written, outputs, strict=True))
        engine = BACKENDS["auto" if "auto" in BACKENDS else "numpy"](threads=1)

        def run() -> None:
            results = engine.run_whole(model, {name: self.fetch(array) for name, array in sources.items()})
            for name, array in targets:
                self.copy(array, np.asarray(results[name]).reshape(array.shape))

        return run
