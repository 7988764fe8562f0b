"""The GPU backend: runs a segment as generated CUDA kernels and library calls.

    segment ─► decompose ─► group ─► kernels (text, launch shape) and library nodes, in order ─► bound to addresses

Each folder imports only those before it (``backends/fusion`` comes first):

    codegen · device · libraries · rewrite · fusion · kernels · updates · segment · predict

Only ``device/cuda_*`` and the library calls need a GPU; in the tests the same kernels run on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

import graphc.backends.cupy.kernels
import graphc.backends.cupy.libraries.cudnn_attention
import graphc.backends.cupy.libraries.cudnn_convolution
import graphc.backends.cupy.rewrite.products
import graphc.backends.cupy.updates.finite_check  # noqa: F401 - these five fill the registry, as cublaslt does
from graphc.backend import BACKENDS, PLANNERS, Backend, Fallback, PlannedMemory, Whole
from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.cuda_memory import ALIGNMENT
from graphc.backends.cupy.device.planning_device import PlannedDevice
from graphc.backends.cupy.device.protocol import CudaOptions, Device
from graphc.backends.cupy.libraries import registry
from graphc.backends.cupy.libraries.cublaslt import Products, version_of_products
from graphc.backends.cupy.libraries.gemm import Choose, Product, by_rule
from graphc.backends.cupy.segment.bind import BoundSegment, SegmentScratch
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.disk_cache import SegmentCache
from graphc.backends.cupy.segment.host_fallbacks import LOG, fallbacks_of, warn
from graphc.backends.cupy.segment.program import Segment
from graphc.backends.cupy.updates.bind import bind_update, is_elementwise, join_updates
from graphc.backends.fusion.op_kernels import is_expression, op_kernel
from graphc.cache_folder import cache_path
from graphc.device import Array, Arrays, Memory, Run


class CupyBackend(Backend):
    """Runs segments on one device.

    Args:
        threads, spin: host options of other backends; ignored.
        device: the device; None: this worker's GPU, by its local rank.
        cache: segments that earlier processes compiled for such a device; None: every segment is compiled.
        choose: decides which epilogues of products to use; for the worker's own GPU, measurements decide.
        tf32, deterministic, loose_gelu: see :class:`.protocol.CudaOptions`; they apply if ``device`` is None.
    """

    name = "cupy"
    alignment = ALIGNMENT
    rewrites = "rows,flash_attention,channels_last"
    state_rewrites = "master_weights{low_gradients=false,vectors=false}"

    def __init__(
        self,
        *,
        threads: int = 1,
        spin: bool = False,
        device: Device | None = None,
        cache: SegmentCache | None = None,
        choose: Choose = by_rule,
        tf32: bool = False,
        deterministic: bool = False,
        loose_gelu: bool = False,
    ) -> None:
        del threads, spin
        if device is None:
            device, cache, choose = _gpu(CudaOptions(tf32, deterministic, loose_gelu))
        self.device, self._cache, self._choose = device, cache, choose
        self.memory: Memory = device
        self._scratch = SegmentScratch(device, warn)

    def prefers_native(self, node: ir.Node) -> bool:
        return is_elementwise(node)

    def holds(self, node: ir.Node) -> bool:
        kernel = op_kernel(node)
        if kernel.decomposed_first or kernel.epilogue is not None:
            return True
        return is_expression(node) or registry.special(node) is not None

    def computes_halves(self, node: ir.Node) -> bool:
        return True

    def bind_segment(
        self, model: onnx.ModelProto, inputs: Arrays, outputs: Arrays, *, reusable_buffers: Sequence[Array] = ()
    ) -> Run:
        return BoundSegment(
            self._compiled(model), self.device, self._scratch, inputs, outputs, reusable_buffers=reusable_buffers
        )

    def _compiled(self, model: onnx.ModelProto) -> Segment:
        device, options = self.device, self.device.options

        def compiled() -> Segment:
            return compile_segment(model, device=device.writes_cuda, choose=self._choose, loose_gelu=options.loose_gelu)

        return compiled() if self._cache is None else self._cache.of(model, f"{device.writes_cuda} {options}", compiled)

    def bind_whole(self, model: onnx.ModelProto) -> Whole:
        """Models that a plan cannot hold (data-dependent shapes, sequences, strings) run on the host."""
        LOG.warning("the model runs on the host as a whole: it has sequences, strings, or shapes that depend on data")
        return BACKENDS["numpy"](threads=1).bind_whole(model)

    def bind_kernel(
        self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]
    ) -> Run:
        """An in-place update of flat arrays."""
        if not is_elementwise(node):
            return super().bind_kernel(node, inputs, outputs, aliases)
        return bind_update(self.device, node, inputs)

    def settle(self) -> None:
        self._scratch.settle()

    def record(self, runs: Sequence[Run]) -> Run:
        return self.device.record(join_updates(runs))


def _gpu(options: CudaOptions) -> tuple[CudaDevice, SegmentCache, Choose]:
    """This worker's GPU, the compiled segments for its kind and library versions, and a function that measures epilogues."""
    device = CudaDevice(options=options)
    words = (device.name, str(device.runtime_version), version_of_products())

    def choose(joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
        return device.library(Products).pays(joined, apart, saved)

    return device, SegmentCache(cache_path("segments", *words)), choose


class CupyPlanner(CupyBackend):
    """The backend without a GPU: it counts what binding a plan needs, and runs nothing.

    Args:
        cache: folder of compiled segments; None: every segment is compiled.
    """

    memory: PlannedMemory

    def __init__(self, *, writes_cuda: bool = True, cache: Path | None = None) -> None:
        held = None if cache is None else SegmentCache(cache)
        super().__init__(device=PlannedDevice(writes_cuda=writes_cuda), cache=held)
        self._scratch = SegmentScratch(self.device)

    @property
    def scratch(self) -> int:
        return self._scratch.nbytes

    def fallbacks(self, model: onnx.ModelProto) -> Sequence[Fallback]:
        return fallbacks_of(self._compiled(model))


PLANNERS["cupy"] = CupyPlanner
BACKENDS.register("cupy", CupyBackend, origin=__name__)
