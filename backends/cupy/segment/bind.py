"""Binds a segment to memory: every address is fixed, and a run calls a list of closures.

Values that never leave a segment lie in one scratch buffer. All segments of a backend share it, since they run one after
another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.device.cuda_memory import ALIGNMENT
from graphc.backends.cupy.device.protocol import Device
from graphc.backends.cupy.segment.control_flow import bind
from graphc.backends.cupy.segment.host_fallbacks import HostNode
from graphc.backends.cupy.segment.program import Call, Control, KernelCall, NodeCall, Segment, reads, writes
from graphc.backends.cupy.segment.scratch_reuse import OutputScratch
from graphc.backends.fusion.expressions import compute_type
from graphc.backends.fusion.graph_queries import operands, results
from graphc.device import Array, Run
from graphc.errors import GraphcError, InternalError
from graphc.ir.facts import constant, dtype_of, shape_of, size_of
from graphc.plan.arena import Arena


class SegmentScratch:
    """Scratch memory that bound segments share.

    Its size and the list of kernels are known once the last segment of a plan is bound. :meth:`settle` then allocates the
    scratch,
    compiles all kernels together, and gives the segments their addresses.

    Args:
        report: called with the segments that are settled together.
    """

    def __init__(self, device: Device, report: Callable[[Sequence[Segment]], None] | None = None) -> None:
        self.device, self._report = device, report
        self.nbytes = 0
        self._memory: Array | None = None
        self._waiting: list[BoundSegment] = []

    def add(self, segment: BoundSegment, nbytes: int) -> None:
        """Register a segment that needs ``nbytes``; segments that are already bound keep their memory."""
        if nbytes > self.nbytes:
            self.nbytes, self._memory = nbytes, None
        self._waiting.append(segment)

    def _allocate(self) -> Array:
        try:
            return self.device.empty(self.nbytes)
        except GraphcError:
            self.nbytes = 0  # the next plan, perhaps a smaller one, asks only for its own need
            raise

    def settle(self) -> None:
        """Bind the waiting segments."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._report is not None:
            self._report([segment.segment for segment in waiting])
        if self._memory is None:
            self._memory = self._allocate()
        kernels = self.device.compile({name: text for segment in waiting for name, text in segment.texts().items()})
        for segment in waiting:
            segment.bind(kernels, self._memory)


class BoundSegment:
    """A callable that runs ``segment``.

    Args:
        inputs, outputs: device arrays for the inputs and outputs of the segment's graph, by name.
        constants: device arrays of constants, if several bindings of one segment share them.
        reusable_buffers: see :meth:`graphc.backend.Backend.bind_segment`.
    """

    def __init__(
        self,
        segment: Segment,
        device: Device,
        scratch: SegmentScratch,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        constants: dict[ir.Value, Array] | None = None,
        reusable_buffers: Sequence[Array] = (),
    ) -> None:
        self.segment = segment
        self._device, self._scratch = device, scratch
        self._arrays: dict[ir.Value, Array] = {v: inputs[v.name or ""] for v in segment.graph.inputs}
        self._arrays.update((v, outputs[v.name or ""]) for v in segment.graph.outputs)
        self._reusable, self._in_outputs = reusable_buffers, dict[ir.Value, tuple[int, int]]()
        places = scratch_layout(segment, set(self._arrays))
        if reusable_buffers:
            in_outputs: dict[ir.Value, tuple[int, int]] = {}
            other = scratch_layout(
                segment, set(self._arrays), _output_scratch(segment, reusable_buffers, inputs, outputs), in_outputs
            )
            if other[2] <= places[2]:
                places, self._in_outputs = other, in_outputs
        self._offsets, self._partials, nbytes = places
        self._constants = {} if constants is None else constants
        self._counters: dict[int, tuple[int, int]] = {}
        self._zeros: Array | None = None
        self._runs: list[Run] = []
        scratch.add(self, nbytes)

    def texts(self) -> dict[str, str]:
        """Kernel texts of the segment and its bodies, by name."""
        return _texts(self.segment)

    def bind(self, kernels: Mapping[str, Any], memory: Array) -> None:
        """Bind every call to its kernel and addresses; ``memory`` is the scratch."""
        self._kernels, self._memory = kernels, memory
        count = 0
        for k, call in enumerate(self.segment.calls):
            if isinstance(call, KernelCall) and call.source.finishes:
                self._counters[k] = count, count + call.shape.blocks // call.shape.splits
                count = self._counters[k][1]
        self._zeros = self._device.zeros(4 * count).view(np.uint32) if count else None
        self._runs = [self._bind(k, call) for k, call in enumerate(self.segment.calls)]

    @property
    def queued(self) -> bool:
        """Whether a run only queues work."""
        return self.segment.queued

    def calls(self) -> list[tuple[KernelCall | NodeCall | Control, Run]]:
        """Every call and its closure, once the segment is bound."""
        return list(zip(self.segment.calls, self._runs, strict=True))

    def __call__(self) -> None:
        if not self._runs:
            self._scratch.settle()
        for run in self._runs:
            run()

    def _bind(self, index: int, call: Call) -> Run:
        if isinstance(call, Control):
            inner = SegmentScratch(self._device)
            run = bind(call, self._device, self._array, functools.partial(_bind_body, self._device, inner))
            inner.settle()
            return run
        if isinstance(call, NodeCall):
            outputs = [self._array(v) for v in results(call.node)]
            if call.library is None:
                fallback = HostNode(call.node)
                return self._device.call_host(fallback, [self._array(v) for v in fallback.reads], outputs)
            inputs = [None if v is None else self._array(v) for v in operands(call.node)]
            return self._device.call_library(call.library, call.node, inputs, outputs)
        arrays = [self._array(v) for v in call.source.operands]
        for dtype, offset in zip(call.source.partials, self._partials.get(index, ()), strict=True):
            kind = np.dtype(np.float32 if compute_type(dtype) == "float" else dtype.numpy())
            count = call.parts * (call.source.totals or call.source.rows)
            arrays.append(self._memory[offset : offset + count * kind.itemsize].view(kind))
        if self._zeros is not None and index in self._counters:  # its own: calls on another stream may count at the same time
            arrays.append(self._zeros[slice(*self._counters[index])])
        return self._device.launch(self._kernels[call.name], arrays, call.shape)

    def _array(self, value: ir.Value) -> Array:
        found = self._arrays.get(value)
        if found is None:
            base = self.segment.aliases.get(value)
            if base is not None:
                found = self._array(base).reshape(shape_of(value))
            elif value in self._offsets:
                found = _part(self._memory, self._offsets[value], value)
            elif value in self._in_outputs:
                buffer, offset = self._in_outputs[value]
                found = _part(self._reusable[buffer], offset, value)
            elif not size_of(value):
                found = self._device.empty(0).view(_dtype(value)).reshape(shape_of(value))
            else:
                known = constant(value)
                if known is None:
                    if value.const_value is None:
                        raise InternalError(f"{value.name!r} has no memory")
                    known = value.const_value.numpy()
                if value not in self._constants:
                    self._constants[value] = self._device.put(np.ascontiguousarray(known).reshape(known.shape))
                found = self._constants[value]
            self._arrays[value] = found
        return found


def _part(memory: Array, offset: int, value: ir.Value) -> Array:
    return memory[offset : offset + _nbytes(value)].view(_dtype(value)).reshape(shape_of(value))


def _texts(segment: Segment) -> dict[str, str]:
    found = {call.name: call.text for call in segment.calls if isinstance(call, KernelCall)}
    for call in segment.calls:
        if isinstance(call, Control):
            for body in call.bodies:
                found.update(_texts(body))
    return found


def _bind_body(
    device: Device,
    scratch: SegmentScratch,
    segment: Segment,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    constants: dict[ir.Value, Array],
) -> Run:
    return BoundSegment(segment, device, scratch, inputs, outputs, constants=constants)


def _output_scratch(
    segment: Segment, reusable_buffers: Sequence[Array], inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> OutputScratch:
    """The outputs in ``reusable_buffers``, as scratch until they are written."""
    base = _bases(segment)
    written: dict[ir.Value, int] = {}
    for k, call in enumerate(segment.calls):
        for value in map(base, writes(call)):
            written.setdefault(value, k)
    results = [(outputs[v.name or ""], written[v]) for v in dict.fromkeys(segment.graph.outputs) if v in written]
    return OutputScratch(reusable_buffers, results, inputs.values())


def _bases(segment: Segment) -> Callable[[ir.Value], ir.Value]:
    """Map each value to the value whose memory it uses."""

    def base(value: ir.Value) -> ir.Value:
        while value in segment.aliases:
            value = segment.aliases[value]
        return value

    return base


def scratch_layout(
    segment: Segment,
    placed: set[ir.Value],
    outputs: OutputScratch | None = None,
    in_outputs: dict[ir.Value, tuple[int, int]] | None = None,
) -> tuple[dict[ir.Value, int], dict[int, tuple[int, ...]], int]:
    """Scratch offsets in bytes of values, and of partial totals by call, and the total size.

    Args:
        placed: the values that have memory already.
        outputs: output buffers to try first; ``in_outputs`` receives (buffer, offset) of each value placed there.
    """
    base = _bases(segment)
    last = {base(v): k for k, call in enumerate(segment.calls) for v in (*reads(call), *writes(call))}
    arena = Arena(ALIGNMENT)
    offsets: dict[ir.Value, int] = {}
    partials: dict[int, tuple[int, ...]] = {}
    found: dict[ir.Value, tuple[int, int]] = {} if in_outputs is None else in_outputs
    for k, call in enumerate(segment.calls):
        for value in map(base, writes(call)):
            if value in placed or value in offsets or value in found:
                continue
            place = None if outputs is None else outputs.take(_nbytes(value), k, last[value])
            if place is None:
                offsets[value] = arena.take(_nbytes(value), last[value])
            else:
                found[value] = place
        if isinstance(call, KernelCall) and call.source.partials:
            if call.shape.splits > 1 or call.source.totals:
                last_read = k if call.source.finishes else k + 1
                partials[k] = tuple(arena.take(size, last_read) for size in call.source.partial_bytes(call.parts))
            else:
                partials[k] = partials[k - 1]
        arena.free_after(k)
    return offsets, partials, arena.size


def _dtype(value: ir.Value) -> np.dtype[np.generic]:
    return np.dtype(dtype_of(value).numpy())


def _nbytes(value: ir.Value) -> int:
    return int(np.prod(shape_of(value), dtype=np.int64)) * _dtype(value).itemsize
