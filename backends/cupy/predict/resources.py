"""Lists the generated kernels of a plan with what each takes of a GPU, as the real NVRTC compiles them; needs no GPU.

A plan is bound to a device that only keeps the texts and launches that it is given; then every kernel is compiled once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.codegen.launch_shape import WARP, Shape
from graphc.backends.cupy.device.nvrtc_library import cubin_of
from graphc.backends.cupy.device.planning_device import PlannedDevice
from graphc.backends.cupy.predict.cost_model import CostModel
from graphc.backends.cupy.predict.cubin import Resources, read_cubin
from graphc.backends.cupy.predict.hardware import DEFAULT, GPUS, REGISTERS, REGISTERS_AT_ONCE, SHARED_OF_BLOCK, Gpu
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from graphc.backends.cupy.updates.bind import bind_update, is_elementwise, join_updates
from graphc.device import Array, Run
from graphc.ir.facts import dtype_of, known_nbytes
from graphc.plan.partition import make_plan
from graphc.plan.segment_model import segment_model
from graphc.plan.state_rewrites import adapted

LEAST_WARPS, MOST_STACK = 12, 32
"""What :func:`faults` asks of each kernel: warps of a multiprocessor that may run at once, and bytes of spilled registers.

Twelve warps hide memory if each has 16 bytes or more for each thread under way; eight words that a thread needs once a row cost
less than a block that does not fit.
"""

LARGE, LEAST_IN_FLIGHT = 64 << 20, 16 << 10
"""Bytes of a kernel that must keep the memory busy, and bytes that each multiprocessor then needs in flight.

132 of them at 16 KiB, 600 ns after the request, give 3.6 TB/s (Little's law).
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One generated kernel of a plan.

    Attributes:
        name: the kernel's; it follows from its text.
        result: the first value that it writes in its first launch.
        calls: launches in a step.
        shape: of its first launch.
        moved: bytes that all launches move, as the cost model counts.
        resources: as compiled.
        streams: whether it reads whole arrays, by vectors where they allow it.
    """

    name: str
    result: str
    calls: int
    shape: Shape
    moved: int
    resources: Resources
    streams: bool = False

    def blocks(self, gpu: Gpu) -> int:
        """Blocks that a multiprocessor has room for."""
        warps = -(-self.shape.threads // WARP)
        registers = -(-max(1, self.resources.registers) * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * warps
        shared = max(SHARED_OF_BLOCK, self.resources.shared)
        return min(gpu.blocks, gpu.threads // self.shape.threads, REGISTERS // registers, gpu.shared // shared)

    def warps(self, gpu: Gpu) -> int:
        """Warps that a multiprocessor has room for."""
        return self.blocks(gpu) * -(-self.shape.threads // WARP)

    def in_flight(self, gpu: Gpu) -> int:
        """Bytes that a multiprocessor has requested from memory at once, in the loop that loads most."""
        blocks = min(self.blocks(gpu), -(-self.shape.blocks // gpu.multiprocessors))
        return blocks * self.shape.threads * self.resources.in_flight


def compiled_kernels(
    model: ir.Model, shapes: Mapping[str, Sequence[int]], *, architecture: str = "sm_90", gpu: Gpu = GPUS[DEFAULT]
) -> list[Compiled]:
    """The generated kernels of a training graph's step, those that move most first.

    Raises:
        GraphcError: NVRTC is not installed, or a kernel does not compile.
    """
    device = _ListingDevice()
    backend = CupyBackend(device=device)
    plan = make_plan(adapted(model, backend), shapes, backend)
    calls: dict[str, list[KernelCall]] = {}
    for step in plan.steps:
        if step.kind == "segment":
            for call in compile_segment(segment_model(step)).calls:
                if isinstance(call, KernelCall):
                    calls.setdefault(call.name, []).append(call)
    _bind_updates([step.group.nodes[0] for step in plan.steps if step.group is not None], device)
    texts = {name: found[0].text for name, found in calls.items()} | device.texts
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        cubins = dict(zip(texts, pool.map(lambda name: cubin_of(name, texts[name], architecture), texts), strict=True))
    costs = CostModel(gpu)
    found = []
    for name, cubin in cubins.items():
        own = calls.get(name, [])
        launches = [call.shape for call in own] or list(device.launches[name].elements())
        result = own[0].source.operands[own[0].source.reads :] if own else ()
        streams = bool(own) and bool(own[0].source.traffic)
        moved = sum(costs.call(call).nbytes for call in own)
        label = (result[0].name or "") if result else "updates" if not own else own[0].source.operands[-1].name or ""
        found.append(Compiled(name, label, len(launches), launches[0], moved, read_cubin(cubin, name), streams))
    return sorted(found, key=lambda kernel: -kernel.moved)


def faults(kernels: Sequence[Compiled], gpu: Gpu = GPUS[DEFAULT]) -> list[str]:
    """What keeps kernels from using the GPU, one line each."""
    found = []
    for kernel in kernels:
        where = f"{kernel.name} ({kernel.result})"
        if kernel.resources.stack > MOST_STACK:
            found.append(f"{where} spills {kernel.resources.stack} bytes a thread; at most {MOST_STACK} are allowed")
        if kernel.warps(gpu) < LEAST_WARPS:
            found.append(f"{where} fits {kernel.warps(gpu)} warps on a multiprocessor; at least {LEAST_WARPS} are needed")
        if kernel.streams and kernel.moved >= LARGE * kernel.calls and kernel.in_flight(gpu) < LEAST_IN_FLIGHT:
            found.append(
                f"{where} has {kernel.in_flight(gpu)} bytes in flight on a multiprocessor; {LEAST_IN_FLIGHT} are needed"
            )
    return found


def table(kernels: Sequence[Compiled], gpu: Gpu = GPUS[DEFAULT]) -> list[tuple[str, ...]]:
    """A head and a row for each kernel."""
    head = (
        "kernel",
        "calls",
        "MB",
        "threads",
        "registers",
        "stack",
        "shared",
        "warps",
        "bytes in flight",
        "KB a multiprocessor",
    )
    return [
        head,
        *(
            (
                f"{kernel.name[:9]} {kernel.result}",
                str(kernel.calls),
                f"{kernel.moved / 1e6:.0f}",
                str(kernel.shape.threads),
                str(kernel.resources.registers),
                str(kernel.resources.stack),
                str(kernel.resources.shared),
                str(kernel.warps(gpu)),
                str(kernel.resources.in_flight),
                f"{kernel.in_flight(gpu) / 1024:.0f}",
            )
            for kernel in kernels
        ),
    ]


class _ListingDevice(PlannedDevice):
    """Keeps the texts of kernels and the shapes of their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.launches: dict[str, Counter[Shape]] = {}

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        self.texts |= texts
        return {name: name for name in texts}

    def launch(self, kernel: Any, arrays: Sequence[Array], shape: Shape) -> Run:
        self.launches.setdefault(kernel, Counter())[shape] += 1
        return super().launch(kernel, arrays, shape)


def _bind_updates(nodes: Sequence[ir.Node], device: _ListingDevice) -> None:
    """Have the device list the kernels of these updates, joined as a trainer joins them."""
    updates = []
    for node in nodes:
        if is_elementwise(node):
            arrays = [None if v is None else device.zeros(known_nbytes(v)).view(dtype_of(v).numpy()) for v in node.inputs]
            updates.append(bind_update(device, node, arrays))
    join_updates(updates)
    device.texts = {name: text for name, text in device.texts.items() if name in device.launches}
