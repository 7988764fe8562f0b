"""Runs compiled segments on the host: generated kernels in C++, other nodes in numpy.

One thread plays every role of the device, so this tests what kernels compute, not how fast or in which order of sums.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.backends.cupy.device.protocol import CudaOptions
from graphc.backends.cupy.libraries.cublaslt import Products
from graphc.backends.cupy.libraries.cudnn import Dnn
from graphc.backends.cupy.libraries.gemm import DOMAIN, Choose, Product, product_of
from graphc.backends.cupy.segment.bind import BoundSegment, SegmentScratch
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import Segment
from graphc.ir.facts import shape_of
from tests.backends.host_compiler import compile_kernels
from tests.backends.host_cudnn import HostDnn
from tests.backends.host_products import bind_product
from tests.backends.strict import DeviceArray, StrictMemory, host_of


def is_aligned(array: Any) -> bool:
    """Whether the array's address suits vector accesses: vectors have a size that divides the array's, up to 16 bytes."""
    return bool(array.ctypes.data % math.gcd(array.nbytes or 16, 16) == 0)


class HostDevice(StrictMemory):
    """The test device in place of a GPU: the host cannot access its memory, and work runs when somebody waits."""

    writes_cuda = False
    options = CudaOptions()

    def put(self, array: Any) -> Any:
        target = self.empty(array.nbytes).view(array.dtype).reshape(array.shape)
        self.copy(target, array)
        return target

    def record(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        return Recording(runs, self.capture)

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        return compile_kernels(texts)

    def launch(self, kernel: Any, arrays: Sequence[Any], shape: Shape) -> Callable[[], None]:
        assert all(a.flags.c_contiguous for a in arrays)
        assert all(isinstance(a, DeviceArray) for a in arrays), "a kernel cannot reach the host's memory"
        held = [host_of(a) for a in arrays]
        assert all(is_aligned(a) for a in held), "a GPU cannot read an operand in vectors"
        pointers = (ctypes.c_void_p * len(held))(*[a.ctypes.data for a in held])

        def run(held: Any = held) -> None:  # keeps the arrays alive as long as the launch
            kernel(pointers, ctypes.c_longlong(shape.blocks))

        return self.queued(run)

    def library(self, kind: Any) -> Any:
        """The host's replacement for a vendor library."""
        assert kind is Dnn
        return self.dnn

    @functools.cached_property
    def dnn(self) -> HostDnn:
        return HostDnn(self)

    def call_library(self, library: Any, node: ir.Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], None]:
        assert all(a is None or isinstance(a, DeviceArray) for a in (*inputs, *outputs)), (
            "a library cannot reach the host's memory"
        )
        if node.domain == DOMAIN:
            return self.queued(bind_product(product_of(node), [host_of(a) for a in inputs], [host_of(a) for a in outputs]))
        run = library.bind(self, node, inputs, outputs)
        return run if library.launches_kernels else self.queued(run)  # launches queue themselves

    def call_host(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], None]:
        read, written = [host_of(a) for a in inputs], [host_of(a) for a in outputs]

        def run() -> None:
            for array, result in zip(written, function(read), strict=True):
                np.copyto(array, result)

        return self.queued(run)


class EmulatedDevice(HostDevice):
    """The test device that runs CUDA C itself, thread by thread.

    Attributes:
        order: the order of threads between barriers, and of blocks: 0: ascending, 1: descending, above: random.
        watched: check every memory access of a kernel: no thread may read what another wrote without a barrier between, read
            shared memory that nothing wrote, or touch anything but the kernel's operands.
    """

    writes_cuda = True

    def __init__(self, order: int = 0, *, watched: bool = False) -> None:
        super().__init__()
        self.order, self.watched = order, watched

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        return {name: (name, run) for name, run in compile_kernels(texts, emulate=True, watch=self.watched).items()}

    def launch(self, kernel: Any, arrays: Sequence[Any], shape: Shape) -> Callable[[], None]:
        assert all(isinstance(a, DeviceArray) for a in arrays), "a kernel cannot reach the host's memory"
        held = [host_of(a) for a in arrays]
        assert all(is_aligned(a) for a in held), "a GPU cannot read an operand in vectors"
        pointers = (ctypes.c_void_p * len(held))(*[a.ctypes.data for a in held])
        name, function = kernel

        def run(held: Any = held) -> None:  # keeps the arrays alive as long as the launch
            more = self._ranges(held, name) if self.watched else ()
            wrong = function(pointers, ctypes.c_longlong(shape.blocks), shape.threads, self.order, *more)
            assert wrong is None, f"{name}: {wrong.decode()}"

        return self.queued(run)

    def _ranges(self, operands: Sequence[Any], name: str) -> tuple[ctypes.c_void_p, int]:
        """(begin, end, element bytes) of the memory that a kernel may touch; 0 bytes for the rest of the device's memory."""
        if name.startswith("t"):  # the kernel finds its arrays through a table
            operands = [host_of(a) for a in self.allocations]
        found: list[list[int]] = []
        for begin, nbytes, unit in sorted((a.ctypes.data, a.nbytes, a.itemsize) for a in operands if a.nbytes):
            if found and begin < found[-1][1]:
                found[-1][1:] = max(found[-1][1], begin + nbytes), min(found[-1][2], unit)
            else:
                found.append([begin, begin + nbytes, unit])
        table = list(found)
        for array in (host_of(a) for a in self.allocations):
            at, end = array.ctypes.data, array.ctypes.data + array.nbytes
            for low, high, _ in [f for f in found if f[0] < end and f[1] > at]:
                table += [[at, low, 0]] if at < low else []
                at = max(at, high)
            table += [[at, end, 0]] if at < end else []
        self._table = np.array(table, dtype=np.int64)
        return ctypes.c_void_p(self._table.ctypes.data), len(table)


def every_epilogue(joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
    """Take every epilogue, so that every one is tested."""
    return True


def cupy_on(device: HostDevice) -> CupyBackend:
    """The GPU backend on a test device."""
    return CupyBackend(device=device, choose=every_epilogue)


def run_segment(
    model: onnx.ModelProto,
    feeds: Mapping[str, Any],
    device: Any,
    *,
    splits: int | None = None,
    loose_gelu: bool = False,
    choose: Choose | None = None,
) -> tuple[dict[str, Any], Segment]:
    """Compile and run a segment; returns its outputs by name, and the compiled segment.

    Args:
        splits: blocks that share a row of more than 3 columns.
        choose: which epilogues to take; None: those that save time on a GPU, all of them on the host.
    """
    if choose is None:
        choose = every_epilogue if isinstance(device, HostDevice) else device.library(Products).pays
    share = None if splits is None else lambda rows, columns, _: splits if columns > 3 else 1
    segment = compile_segment(model, device=device.writes_cuda, splits=share, choose=choose, loose_gelu=loose_gelu)
    inputs = {v.name: device.put(np.ascontiguousarray(feeds[v.name]).reshape(shape_of(v))) for v in segment.graph.inputs}
    outputs = {}
    for value in segment.graph.outputs:
        dtype, shape = np.dtype(value.dtype.numpy()), shape_of(value)
        outputs[value.name] = device.empty(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
    bound = BoundSegment(segment, device, SegmentScratch(device), inputs, outputs)
    for _ in range(2):  # the second run finds memory that the first has used
        bound()
    return {name: device.fetch(array) for name, array in outputs.items()}, segment
