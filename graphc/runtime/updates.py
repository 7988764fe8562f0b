"""Binds updates, and reductions over their gradients, to the flat buffers of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import HOST, Array, HostSync, Memory, Run, in_order
from graphc.ir.facts import inputs_of, required
from graphc.plan.segment_model import bind_op
from graphc.plan.steps import UpdateGroup
from graphc.runtime.buffers import BufferMap


class Updates:
    """Binds the updates of a plan.

    Args:
        host: runs the updates whose state lies in the host's memory, where ``backend`` works elsewhere.
    """

    def __init__(self, places: BufferMap, backend: Backend, host: Backend | None) -> None:
        self._places, self._backend, self._host = places, backend, host

    def bind(self, group: UpdateGroup) -> Run:
        """Bind one call for all updates of ``group``."""
        inputs: list[Array | None] = []
        for index, value in enumerate(group.nodes[0].inputs):
            if value is None:
                inputs.append(None)
            else:
                inputs.append(self._places.part(group, index) if index in group.flat else self._places.array(value))
        if self.is_offloaded(group):
            return self._bind_on_host(group, inputs)
        return self._bind(group, inputs, self._backend, self._places.memory)

    def is_offloaded(self, group: UpdateGroup) -> bool:
        """Whether the update runs on the host while the graph runs elsewhere."""
        return any(group.buffer(index) in self._places.state.offloaded for index in group.flat)

    def _bind(self, group: UpdateGroup, inputs: Sequence[Array | None], backend: Backend, memory: Memory) -> Run:
        node = group.nodes[0]
        following = group.declaration.next_value
        targets: list[Array | None] = []
        for output in range(len(node.outputs)):
            index = following[output]
            targets.append(inputs[index] if index < len(inputs) else None)
        if backend.prefers_native(node):
            start, stop = group.owned
            # An output whose state is left out (RMSprop without momentum, say) is written to memory nobody reads; on a device
            # it is not written at all.
            dtype = required(targets[0]).dtype
            size = dtype.itemsize * (stop - start) if memory.on_host else 0
            unread = [memory.zeros(size).view(dtype) if t is None else t for t in targets]
            return backend.bind_kernel(node, inputs, unread, dict(following))
        results = [None if t is None else memory.zeros(t.nbytes).view(t.dtype).reshape(t.shape) for t in targets]
        run = bind_op(backend, node.op_type, node.attributes, inputs, results, domain=node.domain)
        pairs = [(t, r) for t, r in zip(targets, results, strict=True) if t is not None and r is not None]
        return in_order([run, *(memory.bind_copy(target, result) for target, result in pairs)])

    def _bind_on_host(self, group: UpdateGroup, inputs: Sequence[Array | None]) -> Run:
        """Bind the update to host mirrors of device buffers; the new parameters are copied back.

        A mirror of parameters is read once: after that the update itself keeps it equal to the device's.
        """
        memory, state = self._places.memory, self._places.state
        following = group.declaration.next_value
        kept = {following[output] for output in range(len(group.nodes[0].outputs))}
        held: list[Array | None] = []
        fetched: list[tuple[Array, Array]] = []
        sent: list[tuple[Array, Array]] = []
        parameters: list[str] = []
        for index, array in enumerate(inputs):
            if array is None or (index in group.flat and group.buffer(index) in state.offloaded):
                held.append(array)
                continue
            if index in kept:
                mirror = state.mirror(group.buffer(index), array)
                parameters.append(group.buffer(index))
                sent.append((array, mirror))
            else:
                mirror = memory.pinned(array.nbytes).view(array.dtype).reshape(array.shape)
                fetched.append((mirror, array))
            held.append(mirror)
        run = self._bind(group, held, required(self._host), HOST)

        def update() -> None:
            for buffer in parameters:
                state.refresh(buffer)
            for mirror, array in fetched:
                memory.copy(mirror, array)
            memory.synchronize()
            run()
            for array, mirror in sent:
                memory.copy(array, mirror)

        return HostSync(update)

    def bind_over_parts(self, node: ir.Node) -> Run:
        """Bind a reduction over sharded gradients: its result is over this rank's part."""
        places, backend = self._places, self._backend
        outputs = [places.array(v) for v in node.outputs]
        parts: dict[str, Array] = {}
        for value in inputs_of(node):
            group, index = places.plan.homes[value]
            parts[group.buffer(index)] = places.part(group, index)
        inputs: list[Array | None] = [array for array in parts.values() if array.size]
        if not inputs:
            return places.memory.bind_fill(outputs[0], 0)
        if backend.prefers_native(node):
            return backend.bind_kernel(node, inputs, outputs, {})
        return bind_op(backend, node.op_type, node.attributes, inputs, outputs)


def owns_nothing(group: UpdateGroup) -> bool:
    """Whether the group has elements, but none for this rank to update."""
    start, stop = group.owned
    return start == stop and group.elements > 0
