"""Where the values of a plan live: slices of flat buckets, operands of collectives, and the activation arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.declare import declaration_of
from graphc.ir.facts import static_dims
from graphc.steps import ALIGNMENT, Slice, Step, UpdateGroup


def lay_out(
    graph: ir.Graph, steps: Sequence[Step], groups: Sequence[UpdateGroup], views: Mapping[ir.Value, ir.Value]
) -> tuple[dict[ir.Value, Slice], dict[str, int]]:
    """Where every value lives that crosses steps, and the size in bytes of each buffer."""
    places: dict[ir.Value, Slice] = {}
    buffers: dict[str, int] = {}
    for group in groups:
        _place_group(group, places, buffers)
    for step in steps:
        if step.kind == "start":
            _place_collective(step, places, buffers)
    for step in steps:
        if step.kind in ("start", "wait"):
            for source, result in zip(step.inputs, step.outputs, strict=True):
                places[result] = places[source]
    for view, source in views.items():
        if view in places:
            places[source] = replace(places[view], shape=_shape(source))
    _place_activations(graph, steps, views, places, buffers)
    for view, source in views.items():
        if source in places:
            places[view] = replace(places[source], shape=_shape(view))
    return places, buffers


def _shape(value: ir.Value) -> tuple[int, ...]:
    found = static_dims(value)
    if found is None:
        raise ModelError(f"{value.name!r} has no static shape")
    return found


def _place_group(group: UpdateGroup, places: dict[ir.Value, Slice], buffers: dict[str, int]) -> None:
    """Flat buffers of a group: one for each state, and one for its gradients, which producers write in place."""
    declaration = declaration_of(group.nodes[0])
    assert declaration is not None
    for index in group.flat:
        first = group.nodes[0].inputs[index]
        assert first is not None
        assert first.dtype is not None
        dtype = np.dtype(first.dtype.numpy())
        name = group.buffer(index)
        buffers[name] = group.elements * dtype.itemsize
        for node, offset in zip(group.nodes, group.offsets, strict=True):
            value = node.inputs[index]
            assert value is not None
            place = Slice(name, offset * dtype.itemsize, _shape(value), dtype)
            producer = value.producer()
            if producer is not None and producer.op_type == "AllReduceWait":
                wait_index = value.index()
                assert wait_index is not None
                start_out = producer.inputs[wait_index]
                assert start_out is not None
                start = start_out.producer()
                assert start is not None
                operand = start.inputs[start_out.index() or 0]
                assert operand is not None
                value = operand
            places.setdefault(value, place)
    for output, index in declaration.next_value.items():
        for node in group.nodes:
            state = node.inputs[index] if index < len(node.inputs) else None
            if state is not None and output < len(node.outputs):
                places[node.outputs[output]] = places[state]


def _place_collective(step: Step, places: dict[ir.Value, Slice], buffers: dict[str, int]) -> None:
    """Operands of a collective are one contiguous range: the gradient buffer of their group, or a buffer of their own."""
    if all(v in places for v in step.inputs) and len({places[v].buffer for v in step.inputs}) == 1:
        return
    if any(v in places for v in step.inputs):
        raise ModelError(f"the operands of {step.tag} lie in several buffers")
    name = f"collective/{step.tag}"
    position = 0
    for value in step.inputs:
        assert value.dtype is not None
        dtype = np.dtype(value.dtype.numpy())
        places[value] = Slice(name, position, _shape(value), dtype)
        # Scalars pack densely: a padded buffer would send 64 bytes for each.
        position += places[value].nbytes
    buffers[name] = position


def _place_activations(
    graph: ir.Graph,
    steps: Sequence[Step],
    views: Mapping[ir.Value, ir.Value],
    places: dict[ir.Value, Slice],
    buffers: dict[str, int],
) -> None:
    """Arena offsets by liveness: a value's range is free again after the last step that reads it or a view of it."""
    last_use: dict[ir.Value, int] = {}
    for k, step in enumerate(steps):
        for value in step.inputs:
            last_use[views.get(value, value)] = k
    kept = {views.get(value, value) for value in graph.outputs}
    free: list[tuple[int, int]] = []
    size = 0
    expiring: dict[int, list[Slice]] = {}
    for k, step in enumerate(steps):
        for value in step.outputs:
            if value in places or value.dtype is None:
                continue
            shape, dtype = _shape(value), np.dtype(value.dtype.numpy())
            needed = _aligned(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            offset, size = _allocate(free, needed, size)
            places[value] = place = Slice("arena", offset, shape, dtype)
            dies = len(steps) if value in kept else last_use.get(value, k)
            expiring.setdefault(dies, []).append(place)
        for place in expiring.pop(k, []):
            _release(free, place.offset, _aligned(place.nbytes))
    buffers["arena"] = size


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def _allocate(free: list[tuple[int, int]], needed: int, size: int) -> tuple[int, int]:
    """Best fit: the smallest free range that holds ``needed`` bytes, else grow the arena."""
    best = min((r for r in free if r[1] >= needed), key=lambda r: r[1], default=None)
    if best is not None:
        free.remove(best)
        if best[1] > needed:
            free.append((best[0] + needed, best[1] - needed))
        return best[0], size
    tail = next((r for r in free if r[0] + r[1] == size), None)
    if tail is not None:
        free.remove(tail)
        return tail[0], tail[0] + needed
    return size, size + needed


def _release(free: list[tuple[int, int]], offset: int, count: int) -> None:
    for neighbour in [r for r in free if r[0] + r[1] == offset or r[0] == offset + count]:
        free.remove(neighbour)
        offset, count = min(offset, neighbour[0]), count + neighbour[1]
    free.append((offset, count))
