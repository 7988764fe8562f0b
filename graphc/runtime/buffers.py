"""Maps the values of a bound plan to arrays in its buffers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.device import Array, HostSync, Memory, Run
from graphc.errors import ModelError
from graphc.ir.facts import constant, dtype_of, static_dims
from graphc.plan.buffers import ARENA, RESULTS, STASH, SUMS
from graphc.plan.partition import Plan
from graphc.plan.skip_flag import STOP
from graphc.plan.steps import Slice, UpdateGroup
from graphc.runtime.input_staging import Feeds
from graphc.runtime.state import State

OWN = (ARENA, RESULTS, SUMS)
"""Buffers whose contents are of one plan only; all plans share the others. Arenas may share memory (:class:`Arenas`)."""


class Arenas:
    """Activation arenas of plans of which one runs at a time: nothing in them outlives a step, so the plans share memory.

    Args:
        memory: of the backend.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: Array | None = None

    def take(self, nbytes: int) -> Array:
        """Return the arena of one more plan.

        A plan that needs more than those before it gets new memory, which later plans share. It is half as large again as
        needed, so that shapes that grow slowly do not each get memory of their own; the host gives pages only for what is
        written.
        """
        held = self._held
        if held is None or held.nbytes < nbytes:
            held = self._held = self._memory.zeros(nbytes if held is None else nbytes + nbytes // 2)
        return held[:nbytes]

    def forget(self) -> None:
        """Share what was taken so far with no further plan: it is free once the plans that use it are."""
        self._held = None


class BufferMap:
    """Finds the array of every value of ``plan``.

    Args:
        arenas: gives the plan's arena; None: it has one of its own.

    Attributes:
        reusable_buffers: buffers that hold results of segments: the arena, and the buffers of gradients.
        feeds: brings the graph's inputs to the device.
        inputs, outputs: the arrays of the graph's inputs and outputs, by name.
    """

    def __init__(self, plan: Plan, state: State, memory: Memory, arenas: Arenas | None = None) -> None:
        self.plan, self.state, self.memory = plan, state, memory
        self.buffers: dict[str, Array] = {}
        if not memory.on_host:
            state.lay_side_by_side({n: nbytes for n, nbytes in plan.buffers.items() if n not in OWN})
        for name, nbytes in plan.buffers.items():
            if name.startswith(STASH):
                continue  # one for each micro-batch in flight
            if name == ARENA and arenas is not None:
                self.buffers[name] = arenas.take(nbytes)
            else:
                self.buffers[name] = memory.zeros(nbytes) if name in OWN else state.buffer(name, nbytes)
        self.reusable_buffers = [*([self.buffers[ARENA]] if plan.buffers.get(ARENA) else []), *state.reusable_buffers]
        specs = {v.name or "": _spec(v) for v in plan.model.graph.inputs}
        self.feeds = Feeds(memory, specs, turns=1 if plan.stop is None else 2)
        self.inputs = self.feeds.inputs
        self._views: dict[ir.Value, Array] = {v: self.inputs[v.name or ""] for v in plan.model.graph.inputs}
        if plan.stop is not None:
            self._views[plan.stop] = self.stop
        self._lent: dict[ir.Value, tuple[Array, Array]] = {}
        self.outputs = {v.name or "": self.array(v) for v in plan.model.graph.outputs}

    def writers(self) -> tuple[list[Array], list[Array]]:
        """The arrays in buffers shared by all plans: those that one ``GatherGrad`` alone writes, and all others.

        Where ranks exchange gradients, or micro-batches add to them, nothing is written alone.
        """
        shared = [(v, p) for v, p in self.plan.places.items() if p.buffer not in OWN and p.buffer in self.buffers]
        rows: set[ir.Value] = set()
        if {step.kind for step in self.plan.steps} <= {"segment", "kernel", "check", "update"}:
            kernels = [step.nodes[0] for step in self.plan.steps if step.kind == "kernel"]
            rows = {node.outputs[0] for node in kernels if node.op_type == "GatherGrad"}
        by_buffer: dict[str, list[tuple[ir.Value, Slice]]] = {}
        for value, place in shared:
            by_buffer.setdefault(place.buffer, []).append((value, place))
        alone: list[Array] = []
        others: list[Array] = []
        for value, place in shared:
            lonely = value in rows and not any(v is not value and _overlap(place, p) for v, p in by_buffer[place.buffer])
            (alone if lonely else others).append(self.array(value))
        return alone, others

    @property
    def stop(self) -> Array:
        """The flag of a NaN or an infinity, on a device, which stays set until the host clears it."""
        return self.state.buffer(STOP, 1).view(np.bool_).reshape(())

    def new(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Zeroed memory that nothing else uses."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.memory.zeros(nbytes).view(dtype).reshape(shape)

    def array(self, value: ir.Value) -> Array:
        """The array of ``value``."""
        view = self._views.get(value)
        if view is None:
            place = self.plan.places.get(value)
            if place is not None:
                view = self._view(place)
            elif value in self.plan.views:
                view = self.array(self.plan.views[value]).reshape(static_dims(value) or ())
            elif value.is_initializer():
                view = self.state.placed(value)
            else:
                view = self._constant(value)
            self._views[value] = view
        return view

    def within_reach(self, value: ir.Value) -> Array:
        """The array from which the backend reads ``value``: a device copy where the state is in host memory."""
        array = self.array(value)
        if not value.is_initializer() or not self.state.is_offloaded(value.name or ""):
            return array
        if value not in self._lent:
            self._lent[value] = self.state.lend(value.name or ""), array
        return self._lent[value][0]

    def bind_lent(self) -> Run | None:
        """A closure that updates the copies of :meth:`within_reach`; None: there are none."""
        copy, lent = self.memory.copy, list(self._lent.values())

        def run() -> None:
            for here, there in lent:
                copy(here, there)

        return HostSync(run) if lent else None

    def _view(self, place: Slice) -> Array:
        buffer = self.buffers[place.buffer]
        return buffer[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)

    def _constant(self, value: ir.Value) -> Array:
        known = constant(value)
        if known is None:
            raise ModelError(f"value {value.name!r} has no place in the plan")
        held = np.require(known, requirements=("C", "A"))  # the bytes of a file may begin anywhere
        if self.memory.on_host:
            return held
        found = self.new(held.shape, held.dtype)
        self.memory.copy(found, held)
        return found

    def part(self, group: UpdateGroup, index: int) -> Array:
        """The elements of flat input ``index`` that this rank updates."""
        array = self.buffers[group.buffer(index)].view(group.dtype(index))
        return array if index in group.scattered else array[slice(*group.owned)]


def _overlap(a: Slice, b: Slice) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _spec(value: ir.Value) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    return static_dims(value) or (), np.dtype(dtype_of(value).numpy())
