"""Holds state: parameters, optimizer state, running statistics, counters, frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import ALIGNMENT, HOST, Array, Memory
from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.errors import UsageError, nearest
from graphc.ir.declare import Role, declaration_of
from graphc.ir.facts import array_of, input_of, state_updates, static_dims
from graphc.ir.names import BY_RANK, STEP
from graphc.ir.ops.collectives import collective_of
from graphc.ir.updates import role_of, source_of
from graphc.plan.steps import UpdateGroup
from graphc.plan.update_groups import offloaded_buffers, update_groups
from graphc.runtime.parts import Parts
from graphc.runtime.scalars import ROOM, Scalars


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a sharded tensor: element ``offset`` of the array that ``group`` divides."""

    group: UpdateGroup
    buffer: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def mine(self) -> tuple[slice, slice]:
        """This rank's elements as a slice of its part of the flat array, and as a slice of the flattened tensor."""
        start, stop = self.group.owned
        low, high = max(self.offset, start), min(self.offset + self.size, stop)
        if high <= low:
            return slice(0), slice(0)
        return slice(low - start, high - start), slice(low - self.offset, high - self.offset)


class State:
    """All initializers of a training graph as writable arrays, by name.

    State that belongs to a bucket is a slice of a flat buffer, so that one kernel updates the whole bucket. Of sharded state
    a rank keeps the elements that it owns; such a tensor is in :attr:`shards` instead of :attr:`arrays`.
    Local state (``local`` in the declaration of its update) differs from rank to rank; its sum is what counts.

    Args:
        model: the training graph.
        rank, size: of this worker on the data axis.
        memory: where it lies, but for what updates offload: that lies in the host's.
        meeting: the communicators of the mesh, where it has other axes.

    Attributes:
        parts: state that is divided over the tensor axis: :attr:`arrays` hold this rank's part. By name it is whole.
    """

    def __init__(
        self, model: ir.Model, rank: int = 0, size: int = 1, memory: Memory = HOST, meeting: Groups | None = None
    ) -> None:
        self.parts = Parts(model.graph, meeting)
        self.memory = memory
        self.arrays: dict[str, Array] = {}
        self.flat: dict[str, Array] = {}
        self.shards: dict[str, Shard] = {}
        self._whole: dict[str, Array] = {}
        self._lent: dict[str, Array] = {}
        self._buffers: dict[tuple[str, int], Array] = {}
        self.reusable_buffers: list[Array] = []
        self._initial = model.graph.initializers
        self.scalars = Scalars(memory, sum(static_dims(v) == () for v in self._initial.values()))
        self._mirrors: dict[str, tuple[Array, Array]] = {}
        self._fresh: set[str] = set()
        self._adopted: Mapping[str, Array] = {}
        states = {state.name or "" for _, state, _ in state_updates(model.graph)}
        self.copies = narrow_copies(model.graph)
        self.local = local_states(model.graph)
        self.averaged = averaged_states(model.graph)
        self.updated = updated_states(model.graph)
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                raise UsageError(f"initializer {name!r} has no value; run 'initialize'")
            if name not in states:
                initial = self._own_initial(name)
                self.arrays[name] = self._alone(value, initial.dtype, initial.nbytes).reshape(initial.shape)
                memory.copy(self.arrays[name], initial)
        groups = update_groups(model.graph, size, rank)
        self._offloaded_names: set[str] = set()
        self.offloaded: frozenset[str] = frozenset() if memory.on_host else offloaded_buffers(groups)
        for group in groups:
            for index in group.states():
                self._lay_out(group, index)

    @property
    def names(self) -> set[str]:
        """The names of all state, whole or sharded."""
        return {*self.arrays, *self.shards}

    def _lay_out(self, group: UpdateGroup, index: int) -> None:
        buffer, dtype, nbytes = group.buffer(index), group.dtype(index), group.nbytes(index)
        first = group.nodes[0].inputs[index]
        if len(group.nodes) == 1 and not group.sharded and first is not None and buffer not in self.offloaded:
            flat = self._alone(first, dtype, nbytes)
        else:
            flat = self.memory_of(buffer).zeros(nbytes).view(dtype)
        self.flat[buffer] = flat
        for node, offset in zip(group.nodes, group.offsets, strict=True):
            name = input_of(node, index).name or ""
            initial = self._own_initial(name)
            if buffer in self.offloaded:
                self._offloaded_names.add(name)
            if index in group.scattered:
                self.shards[name] = Shard(group, buffer, offset, initial.shape)
            else:
                self.arrays[name] = flat[offset : offset + initial.size].reshape(initial.shape)
            self._write(name, initial)

    def _alone(self, value: ir.Value, dtype: np.dtype[Any], nbytes: int) -> Array:
        """Memory of one tensor outside all buckets, as a flat array."""
        if static_dims(value) == () and nbytes <= ROOM:
            return self.scalars.place(value.name or "", dtype, nbytes)
        return self.memory.zeros(nbytes).view(dtype)

    def memory_of(self, buffer: str) -> Memory:
        """The memory that holds the flat ``buffer``."""
        return HOST if buffer in self.offloaded else self.memory

    def buffer(self, name: str, nbytes: int) -> Array:
        """The bytes of buffer ``name``: of state, or of gradients and sums, which the plans for all shapes share."""
        if name in self.flat:
            return self.flat[name].view(np.uint8)
        if (name, nbytes) not in self._buffers:
            self._buffers[name, nbytes] = self.memory_of(name).zeros(nbytes)
        return self._buffers[name, nbytes]

    def lay_side_by_side(self, sizes: Mapping[str, int]) -> None:
        """Allocate those of these buffers (name → bytes) that do not exist yet, in one piece of device memory."""
        new = {n: b for n, b in sizes.items() if n not in self.flat and (n, b) not in self._buffers and n not in self.offloaded}
        steps = {name: -(-nbytes // ALIGNMENT) * ALIGNMENT for name, nbytes in new.items()}
        if not steps:
            return
        whole, start = self.memory.zeros(sum(steps.values())), 0
        self.reusable_buffers.append(whole)
        for name, step in steps.items():
            self._buffers[name, new[name]] = whole[start : start + new[name]]
            start += step

    def mirror(self, buffer: str, part: Array) -> Array:
        """Host memory for ``part`` of flat ``buffer``, whose update runs there; always the same array."""
        if buffer not in self._mirrors:
            self._mirrors[buffer] = self.memory.pinned(part.nbytes).view(part.dtype), part
        return self._mirrors[buffer][0]

    def lend(self, name: str) -> Array:
        """Device memory for a copy of state ``name``, which is in host memory; all plans share it."""
        if name not in self._lent:
            array = self.array(name)
            self._lent[name] = _like(self.memory, array, array.shape)
        return self._lent[name]

    def refresh(self, buffer: str) -> None:
        """Queue a copy to the mirror of ``buffer`` if the state was written since the last one.

        The code that updates the mirror also copies it to the device, so nothing else makes them differ.
        """
        if buffer not in self._fresh:
            self.memory.copy(*self._mirrors[buffer])
            self._fresh.add(buffer)

    def initial(self, name: str) -> Array:
        """The initial value of state ``name`` in the graph, whole."""
        found = array_of(self._initial[name])
        return self.parts.initial(name, found) if name in self.parts else found

    def _own_initial(self, name: str) -> Array:
        return self.parts.mine(name, self.initial(name)) if name in self.parts else self.initial(name)

    def array(self, name: str) -> Array:
        """State ``name``, whole; for sharded state the copy that :meth:`gather` made.

        Raises:
            UsageError: sharded state that was not gathered.
        """
        found = self.arrays.get(name) if name not in self.parts else None
        if found is None:
            found = self._whole.get(name)
        if found is None:
            raise UsageError(f"state {name!r} is sharded over the ranks; it has to be gathered first")
        return found

    def placed(self, value: ir.Value) -> Array:
        """The state that a graph calls ``value``: this rank's part where the graph has the shape of that, else all of it."""
        name = value.name or ""
        part = self.arrays.get(name) if name in self.parts else None
        return part if part is not None and part.shape == static_dims(value) else self.array(name)

    def fetch(self, name: str) -> Array:
        """State ``name`` in host memory: the array itself where it is there, else a copy; sharded state must be gathered."""
        return self._home(name).fetch(self.array(name))

    def gather(self, comm: Communicator, names: Iterable[str]) -> dict[str, Array]:
        """Gather whole copies of the sharded state among ``names``, in place; every rank calls it with the same names."""
        names, comm = list(names), self.parts.replicas(comm)
        wanted = [n for n in names if n in self.shards]
        parts: dict[str, Array] = {}
        for buffer in dict.fromkeys(self.shards[n].buffer for n in wanted):
            members = [n for n in wanted if self.shards[n].buffer == buffer]
            shard, memory, flat = self.shards[members[0]], self.memory_of(buffer), self.flat[buffer]
            whole = _like(memory, flat, (shard.group.elements,))
            memory.copy(whole[slice(*shard.group.owned)], flat)
            comm.wait(comm.start(whole, "sum", f"state/{buffer}", kind="all_gather", parts=shard.group.parts))
            for name in members:
                one, found = self.shards[name], parts if name in self.parts else self._whole
                if name not in found:
                    found[name] = _like(memory, flat, one.shape)
                memory.copy(found[name], whole[one.offset : one.offset + one.size].reshape(one.shape))
        for name in sorted(set(names) & self.parts.cuts.keys()):
            memory, part = self._home(name), parts[name] if name in parts else self.arrays[name]
            whole = self.parts.gather(name, memory.fetch(part))
            if name not in self._whole:
                self._whole[name] = _like(memory, part, whole.shape)
            memory.copy(self._whole[name], whole)
            wanted.append(name)
        return {n: self._whole[n] for n in dict.fromkeys(wanted)}

    def apart(self) -> list[str]:
        """State that differs between ranks since the last average (local SGD)."""
        done = self.scalars.read(STEP) if self.averaged else 0
        return sorted(n for n, (every, since) in self.averaged.items() if done > since and (not every or done % every))

    def snapshot(self, comm: Communicator | None = None) -> dict[str, Array]:
        """Copy all state of a checkpoint, by name; nothing in it differs by rank.

        The copy is in host memory. Sharded state is gathered over ``comm``, so every rank calls this then. Local state is
        summed
        over the ranks (:meth:`broadcast` gives each of any number of ranks an equal part of it); state that is averaged
        every few
        steps is averaged.
        """
        sharded = sorted(self.updated & (self.shards.keys() | self.parts.cuts.keys()))
        if sharded and comm is None:
            raise UsageError(f"state {sharded[0]!r} is sharded over the ranks: a snapshot needs their communicator")
        before = set(self._whole)
        made = self.gather(comm, sharded).keys() - before if comm is not None else set()
        found = {name: self._copy(name) for name in sorted(self.updated)}
        for name in made:
            del self._whole[name]
        if comm is not None and comm.size > 1:
            for names, reduce in ((self.apart(), "mean"), (sorted(self.local), "sum")):
                for name in names:
                    comm.allreduce(found[name].reshape(-1), reduce, f"state/{name}")
        return found

    def _copy(self, name: str) -> Array:
        found = self.fetch(name)
        return found.copy() if self._home(name).on_host else found

    def load(self, values: Mapping[str, Array]) -> None:
        """Overwrite state by name; of sharded state this rank's part. Copies in a narrower type follow.

        Raises:
            UsageError: a name, shape or dtype that does not belong to this state; nothing is changed then.
        """
        for name, array in values.items():
            if name not in self.arrays and name not in self.shards:
                raise UsageError(f"there is no state {name!r}{nearest(name, self.arrays)}")
            shape, dtype = self._spec(name)
            if shape != array.shape or dtype != array.dtype:
                raise UsageError(
                    f"state {name!r} is {dtype}{list(shape)}, the value offered is {array.dtype}{list(array.shape)}"
                )
        for name, array in values.items():
            self._write(name, array)
            for low in self.copies.get(name, ()):
                self._write(low, array.astype(self._spec(low)[1]))
        self._written()

    def adopt(self, values: Mapping[str, Array]) -> None:
        """Use ``values``, host arrays that others write, as state; see :meth:`receive`."""
        self._adopted = values
        for name, array in values.items():
            if self.memory.on_host:
                self.arrays[name] = array
                if name in self.scalars:
                    self.scalars.adopt(name, array)
            elif name not in self.arrays:
                self.arrays[name] = _like(self.memory, array, array.shape)

    def receive(self) -> None:
        """Copy the adopted arrays to the device; in host memory they are the state itself."""
        if not self.memory.on_host:
            for name, array in self._adopted.items():
                self.memory.copy(self.arrays[name], array)
            self._written()

    def _spec(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        shard = self.shards.get(name)
        if shard is not None:
            shape, dtype = shard.shape, self.flat[shard.buffer].dtype
        else:
            shape, dtype = self.arrays[name].shape, self.arrays[name].dtype
        return (self.parts.cuts[name].whole_shape(shape) if name in self.parts else shape), dtype

    def is_offloaded(self, name: str) -> bool:
        """Whether state ``name`` is in host memory while the graph runs elsewhere."""
        return name in self._offloaded_names

    def _home(self, name: str) -> Memory:
        """The memory that holds state ``name``."""
        return HOST if self.is_offloaded(name) else self.memory

    def _write(self, name: str, array: Array) -> None:
        shard, memory = self.shards.get(name), self._home(name)
        if name in self.parts and array.shape != (shard.shape if shard is not None else self.arrays[name].shape):
            array = self.parts.mine(name, memory.fetch(array))
        if shard is None:
            memory.copy(self.arrays[name], array)
            return
        here, there = shard.mine
        memory.copy(self.flat[shard.buffer][here], array.reshape(-1)[there])

    def _written(self) -> None:
        """Note that host copies of the state are out of date."""
        self.scalars.forget()
        self._fresh.clear()

    def broadcast(self, comm: Communicator, values: Mapping[str, Array] | None = None) -> None:
        """Send the state of rank 0 to every rank, and an equal part of the local state, whose sum rank 0 holds.

        Args:
            values: of sharded state on rank 0, whole; None: the initial values of the graph.
        """
        local = sorted(self.local)
        for array in (*self.replicated().values(), *(self.arrays[name] for name in local)):
            comm.broadcast(array.reshape(-1), 0)
        for name in local:
            self._write(name, self.fetch(name) / comm.size)
        for name in sorted({*self.shards, *self.parts.cuts}):
            shape, _ = self._spec(name)
            like = self.flat[self.shards[name].buffer] if name in self.shards else self.arrays[name]
            memory, whole = self._home(name), _like(self._home(name), like, shape)
            if comm.rank == 0:
                memory.copy(whole, self._first(name, values))
            comm.broadcast(whole.reshape(-1), 0)
            self._write(name, whole)
            del whole  # free it before the next is allocated
        self._written()

    def _first(self, name: str, values: Mapping[str, Array] | None) -> Array:
        if values is not None and name in values:
            return values[name]
        master = next((wide for wide, lows in self.copies.items() if name in lows), None)
        if values is None or master is None:  # what does not train is in no checkpoint
            return self.initial(name)
        return values[master].astype(self._spec(name)[1])

    def replicated(self) -> dict[str, Array]:
        """Every array that must be equal on all ranks (views, not copies)."""
        return {
            name: array for name, array in sorted(self.arrays.items()) if name not in {*BY_RANK, *self.local, *self.parts.cuts}
        }


def updated_states(graph: ir.Graph) -> frozenset[str]:
    """The states that training changes, without copies in a narrower type: what a checkpoint holds."""
    copies = {low for lows in narrow_copies(graph).values() for low in lows}
    return frozenset({state.name or "" for _, state, _ in state_updates(graph)} - copies)


def averaged_states(graph: ir.Graph) -> dict[str, tuple[int, int]]:
    """State that ranks update on their own (local SGD) → (every, since) of the AllReduce that averages it; (0, 0): none."""
    found: dict[str, tuple[int, int]] = {}
    alone: set[ir.Node] = set()
    for node, state, following in state_updates(graph):
        averages = [user for user in following.consumers() if collective_of(user) == "AllReduce"]
        if averages:
            alone.add(node)
            attributes = averages[0].attributes
            found[state.name or ""] = attributes.get_int("every", 1), attributes.get_int("since", 0)
        elif node in alone:
            found[state.name or ""] = 0, 0
    return found


def local_states(graph: ir.Graph) -> frozenset[str]:
    """The states that differ from rank to rank."""
    found: set[str] = set()
    for node in graph:
        declaration = declaration_of(node)
        indices = declaration.local if declaration is not None else ()
        found.update(v.name or "" for i in indices if (v := node.inputs[i]) is not None)
    return frozenset(found)


def narrow_copies(graph: ir.Graph) -> dict[str, list[str]]:
    """Parameter → the states that are its copy in a lower type, which no checkpoint needs."""
    found: dict[str, list[str]] = {}
    state_of = {following: state for _, state, following in state_updates(graph)}
    for node, low, _ in state_updates(graph):
        wide = state_of.get(source_of(node)) if role_of(node) is Role.COPY else None
        if wide is not None:
            found.setdefault(wide.name or "", []).append(low.name or "")
    return found


def _like(memory: Memory, array: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of ``shape`` in ``memory``, of the type of ``array``."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
    return memory.zeros(nbytes).view(array.dtype).reshape(shape)
