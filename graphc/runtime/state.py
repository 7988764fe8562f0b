"""The values that live from step to step: parameters, optimizer state, running statistics, counters, frozen weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphc.backend import Array
from graphc.errors import UsageError, nearest
from graphc.ir.declare import declaration_of
from graphc.ir.facts import state_updates
from graphc.ir.names import BY_RANK
from graphc.plan import update_groups
from graphc.steps import ALIGNMENT, UpdateGroup


def aligned_zeros(nbytes: int) -> Array:
    """Zeroed bytes whose address is a multiple of the cache line."""
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class State:
    """All initializers of a training graph as writable arrays, by name.

    State that belongs to a bucket is a slice of a flat buffer, so that one kernel updates the whole bucket.
    """

    def __init__(self, model: ir.Model) -> None:
        self.arrays: dict[str, Array] = {}
        self.flat: dict[str, Array] = {}
        self.updated = frozenset(state.name or "" for _, state, _ in state_updates(model.graph))
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                raise UsageError(f"initializer {name!r} has no value; run 'initialize'")
            if name not in self.updated:
                self.arrays[name] = _own(value)
        for group in update_groups(model.graph):
            declaration = declaration_of(group.nodes[0])
            assert declaration is not None
            for index in sorted(set(declaration.next_value.values()) & set(group.flat)):
                self._lay_out(group, index, group.buffer(index))

    def _lay_out(self, group: UpdateGroup, index: int, buffer: str) -> None:
        first = group.nodes[0].inputs[index]
        assert first is not None
        assert first.dtype is not None
        dtype = np.dtype(first.dtype.numpy())
        self.flat[buffer] = flat = aligned_zeros(group.elements * dtype.itemsize).view(dtype)
        for node, offset in zip(group.nodes, group.offsets, strict=True):
            value = node.inputs[index]
            assert value is not None
            name = value.name or ""
            source = value.const_value
            assert source is not None
            initial = np.asarray(source.numpy())
            view = flat[offset : offset + initial.size].reshape(initial.shape)
            np.copyto(view, initial)
            self.arrays[name] = view

    def snapshot(self) -> dict[str, Array]:
        """A copy of everything that trains or counts (what a checkpoint holds), by name; nothing that differs by rank."""
        return {name: self.arrays[name].copy() for name in sorted(self.updated)}

    def load(self, values: Mapping[str, Array]) -> None:
        """Overwrite state by name.

        Raises:
            UsageError: a name, shape or dtype that does not belong to this state; nothing is changed then.
        """
        for name, array in values.items():
            if name not in self.arrays:
                raise UsageError(f"there is no state {name!r}{nearest(name, self.arrays)}")
            have = self.arrays[name]
            if have.shape != array.shape or have.dtype != array.dtype:
                raise UsageError(
                    f"state {name!r} is {have.dtype}{list(have.shape)}, the value offered is {array.dtype}{list(array.shape)}"
                )
        for name, array in values.items():
            np.copyto(self.arrays[name], array)

    def replicated(self) -> dict[str, Array]:
        """Every array that must be equal on all ranks (views, not copies)."""
        return {name: array for name, array in sorted(self.arrays.items()) if name not in BY_RANK}


def _own(value: ir.Value) -> Array:
    tensor = value.const_value
    assert tensor is not None
    source = np.asarray(tensor.numpy())
    own = aligned_zeros(source.nbytes).view(source.dtype).reshape(source.shape)
    np.copyto(own, source)
    return own
