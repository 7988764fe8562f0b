"""Places the values of a plan in buffers: flat buckets, operands of collectives, the activation arena."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Capabilities
from graphc.errors import ModelError
from graphc.ir.declare import SHARD
from graphc.ir.facts import dtype_of, input_of, required, shape_of
from graphc.ir.ops.collectives import VARIADIC, collective_of
from graphc.ir.updates import converts, on_its_way
from graphc.pipe.tasks import Task
from graphc.plan.arena import Arena
from graphc.plan.steps import PlanStep, Slice, Transfer, UpdateGroup, shares
from graphc.plan.update_groups import between_collectives

ARENA, RESULTS, SUMS = "arena", "results", "sums"
"""The buffers that each plan owns: values that pass between steps, the results of a step, and in a pipeline sums over
micro-batches that no bucket holds.
"""

STASH = "stash/"
"""Prefix of a pipeline's buffers, one a stage: activations from the forward to the backward pass of one micro-batch."""

RECEIVED = "received/"
"""Prefix of a pipeline's buffers of state that another rank owns."""

Homes = Mapping[ir.Value, tuple[UpdateGroup, int]]

ACCESS = 16
"""Bytes of a GPU's widest memory access; an array must be aligned to it to be read in such pieces."""


def lay_out(
    graph: ir.Graph,
    steps: Sequence[PlanStep],
    groups: Sequence[UpdateGroup],
    views: Mapping[ir.Value, ir.Value],
    homes: Homes,
    capabilities: Capabilities,
) -> tuple[dict[ir.Value, Slice], dict[str, int]]:
    """Place every value that crosses steps; returns the size in bytes of each buffer, and fills in the steps' transfers.

    Sharded state and gradients get no place: a rank may hold any part of one, or nothing.
    """
    places: dict[ir.Value, Slice] = {}
    buffers: dict[str, int] = {}
    for group in groups:
        _place_group(group, places, buffers)
    blocks = _Blocks(views)
    waits = {step.transfer.tag: step for step in steps if step.transfer is not None and step.kind == "wait"}
    for step in steps:
        if step.transfer is not None and step.kind == "start":
            _place_transfer(step, waits[step.transfer.tag], homes, places, blocks)
    for view, source in views.items():
        if view in places:
            places[source] = replace(places[view], shape=shape_of(source))
    _place_activations(graph, steps, views, places, buffers, blocks, capabilities)
    for view, source in views.items():
        if source in places:
            places[view] = replace(places[source], shape=shape_of(view))
    return places, buffers


def _dtype(value: ir.Value) -> np.dtype[Any]:
    return np.dtype(dtype_of(value).numpy())


def _size(value: ir.Value) -> int:
    return math.prod(shape_of(value))


def _place_group(group: UpdateGroup, places: dict[ir.Value, Slice], buffers: dict[str, int]) -> None:
    """Place the flat buffers of a group: one for each state, and one for its gradients, which producers write in place.

    A gradient that is reduced in a low type is rounded from the memory that it is widened to.
    """
    for index in group.flat:
        dtype, name = group.dtype(index), group.buffer(index)
        buffers[name] = group.nbytes(index)
        if index in group.scattered:
            continue
        for node, offset in zip(group.nodes, group.offsets, strict=True):
            value = input_of(node, index)
            place = Slice(name, offset * dtype.itemsize, shape_of(value), dtype)
            for before in on_its_way(value):
                if before.dtype == value.dtype:
                    places.setdefault(before, place)
    for output, index in group.declaration.next_value.items():
        for node in group.nodes:
            state = node.inputs[index] if index < len(node.inputs) else None
            if state is not None and state in places and output < len(node.outputs):
                places[node.outputs[output]] = places[state]


@dataclass(slots=True, eq=False)
class _Block:
    """A range of a buffer, mostly of the arena, for the flat array of one collective; its members have one lifetime.

    Attributes:
        members: value as it is written → byte offset in the range.
        readers: (member, value) that shares its place: the results of the start and the wait.
        following: collectives that work on the results of this one, in the same memory.
    """

    transfer: Transfer
    members: dict[ir.Value, int]
    readers: list[tuple[ir.Value, ir.Value]]
    following: list[Transfer] = field(default_factory=list)

    def values(self) -> list[ir.Value]:
        """All values in the range."""
        return [*self.members, *(out for _, out in self.readers)]

    def settle(self, range_: tuple[str, int], places: dict[ir.Value, Slice]) -> None:
        """Place the values in a range of the size of the array: buffer and offset."""
        buffer, start = self.transfer.buffer, self.transfer.offset = range_
        for after in self.following:
            after.buffer, after.offset = range_
            if after.within:
                after.take_own(after.elements)
        for value, offset in self.members.items():
            places[value] = Slice(buffer, start + offset, shape_of(value), _dtype(value))
        for source, out in self.readers:
            places[out] = replace(places[source], shape=shape_of(out))


class _Blocks:
    def __init__(self, views: Mapping[ir.Value, ir.Value]) -> None:
        self.views = views
        self.of: dict[ir.Value, _Block] = {}
        self._resulting: dict[ir.Value, tuple[_Block, ir.Value]] = {}

    def add(
        self, transfer: Transfer, offsets: Sequence[int], written: Sequence[ir.Value], shared: Sequence[Sequence[ir.Value]]
    ) -> None:
        """Make a block whose array is first written through ``written``; the values of each of ``shared`` alias it."""
        roots = [self.views.get(v, v) for v in written]
        readers = [(root, out) for values in shared for root, out in zip(roots, values, strict=True) if out is not root]
        block = _Block(transfer, dict(zip(roots, offsets, strict=True)), readers)
        for root in roots:
            self.of[root] = block
        self._resulting.update((out, (block, root)) for root, out in readers)

    def follow(self, transfer: Transfer, operands: Sequence[ir.Value], shared: Sequence[Sequence[ir.Value]]) -> bool:
        """Let ``transfer`` work in the block whose results its operands are; False if they are not those of a block."""
        found = [self._resulting.get(value) for value in operands]
        block = found[0][0] if found[0] is not None else None
        if block is None or [root for one in found if one is not None and (root := one[1])] != list(block.members):
            return False
        transfer.elements, transfer.dtype = block.transfer.elements, block.transfer.dtype
        block.following.append(transfer)
        for values in shared:
            for one, out in zip(found, values, strict=True):
                root = required(one)[1]
                block.readers.append((root, out))
                self._resulting[out] = (block, root)
        return True

    def add_block(self, transfer: Transfer, written: ir.Value, members: Mapping[ir.Value, int]) -> None:
        """Make a block of ``members``, value → byte offset, which is first written through ``written``, one of them."""
        root = self.views.get(written, written)
        offsets = {root if value is written else value: offset for value, offset in members.items()}
        self.of[root] = _Block(transfer, offsets, [])


def _place_transfer(step: PlanStep, wait: PlanStep, homes: Homes, places: dict[ir.Value, Slice], blocks: _Blocks) -> None:
    """Place the operands of a collective in one contiguous range: a buffer of their group, or a block of the arena."""
    transfer = step.collective
    transfer.dtype = _dtype(step.outputs[0])
    if transfer.op not in VARIADIC:
        _single_block(step, wait, blocks)
        return
    home = _home(step, wait, homes)
    if home is None:
        _dense_block(step, wait, homes, blocks)
        return
    group, index = home
    transfer.elements = group.elements
    transfer.parts = group.parts if transfer.owner else None
    transfer.lengths = _distances(group.offsets, group.elements)
    if index not in group.scattered:
        transfer.buffer = group.buffer(index)
        if transfer.owner and not group.sharded:
            transfer.parts = shares(group.elements, transfer.owner, transfer.size)
        if transfer.within:
            transfer.take_own(group.elements)
        for source, flying, result in zip(step.inputs, step.outputs, wait.outputs, strict=True):
            places[flying] = places[result] = places[source]
        return
    if transfer.within:  # the part that the ReduceScatter before it has put there
        transfer.buffer, transfer.elements = group.buffer(index), group.owned[1] - group.owned[0]
        return
    gathers = transfer.op == "AllGather"
    offsets = _offsets_of(step.inputs if gathers else wait.outputs, group, index)
    if len(offsets) != len(group.offsets):
        raise ModelError(f"{transfer} takes a part of the bucket {group.name!r}")
    where = [offset * transfer.dtype.itemsize for offset in offsets]
    if gathers:
        transfer.source = group.buffer(index)
        blocks.add(transfer, where, step.outputs, [step.outputs, wait.outputs])
        return
    transfer.sink = group.buffer(index)
    _fill_gaps(transfer, offsets, step.inputs)
    blocks.add(transfer, where, step.inputs, [step.outputs])


def _offsets_of(values: Sequence[ir.Value], group: UpdateGroup, index: int) -> list[int]:
    """Element offset of each of ``values``, which are flat input ``index`` of the updates of ``group`` in any order."""
    pairs = zip(group.nodes, group.offsets, strict=True)
    found = {value: offset for node, offset in pairs for value in between_collectives(input_of(node, index))}
    return [found[value] for value in values]


def _home(step: PlanStep, wait: PlanStep, homes: Homes) -> tuple[UpdateGroup, int] | None:
    """The group and flat input whose state a collective gathers, or whose gradients it reduces."""
    for operands in (step.inputs, wait.outputs):
        found = [homes.get(v) for v in operands]
        first = found[0]
        if first is None:
            continue
        if any(f is None or f[0] is not first[0] or f[1] != first[1] for f in found):
            raise ModelError(f"the operands of {step.transfer} lie in several buffers")
        return first
    return None


def _offsets_of_rounded(wait: PlanStep, homes: Homes) -> tuple[list[int], int] | None:
    """Offsets and length, in elements, of the array of a group's gradients in a low type: those of the group."""
    values: Sequence[ir.Value] = wait.outputs
    while True:
        (user, *others) = values[0].consumers() or (None,)
        if user is None or others or list(user.inputs) != list(values):
            return None
        if collective_of(user) is None:
            break
        values = user.outputs
    if not converts(user):
        return None
    home = homes.get(user.outputs[0])
    if home is None:
        return None
    group, index = home
    offset_of = {node.inputs[index]: offset for node, offset in zip(group.nodes, group.offsets, strict=True)}
    if offset_of.keys() != set(user.outputs):
        return None
    return [offset_of[v] for v in user.outputs], group.elements


def _single_block(step: PlanStep, wait: PlanStep, blocks: _Blocks) -> None:
    """Place a collective of one value; of a stack this rank's entry is its operand or its result."""
    transfer, (flying,), (result,) = step.collective, step.outputs, wait.outputs
    if not step.inputs:
        transfer.elements = _size(result)
        blocks.add(transfer, [0], [flying], [[result]])
        return
    (operand,) = step.inputs
    transfer.elements = max(_size(operand), _size(result))
    each = transfer.elements // transfer.size * transfer.dtype.itemsize * transfer.place
    if transfer.op in ("AllGatherStack", "ReduceScatterStack"):
        transfer.parts = shares(transfer.elements, "even", transfer.size)
    entry = {"AllGatherStack": operand, "ReduceScatterStack": result}.get(transfer.op)
    blocks.add_block(transfer, operand, {value: each if value is entry else 0 for value in (operand, flying, result)})


def _dense_block(step: PlanStep, wait: PlanStep, homes: Homes, blocks: _Blocks) -> None:
    transfer = step.collective
    if any(_dtype(v) != transfer.dtype for v in step.inputs):
        raise ModelError(f"the operands of {transfer} differ in type")
    if blocks.follow(transfer, step.inputs, [step.outputs, wait.outputs]):
        transfer.parts = shares(transfer.elements, transfer.owner, transfer.size) if transfer.owner else None
        return
    alike = _offsets_of_rounded(wait, homes)
    if alike is not None:  # the layout of the gradients, so that one sweep converts all of them
        offsets, transfer.elements = alike
        order = sorted(zip(offsets, step.inputs, strict=True), key=lambda pair: pair[0])
        _fill_gaps(transfer, [offset for offset, _ in order], [value for _, value in order])
        where = [offset * transfer.dtype.itemsize for offset in offsets]
        blocks.add(transfer, where, step.inputs, [step.outputs, wait.outputs])
        return
    offsets, position, apart = [], 0, max(1, ACCESS // transfer.dtype.itemsize)
    for value in step.inputs:
        size = _size(value)
        if size > 1:  # scalars are packed densely: a padded buffer would send 64 bytes for each
            position = -(-position // apart) * apart
        offsets.append(position)
        position += size
    unit = transfer.size if transfer.owner == "even" else 1
    transfer.elements = -(-position // unit) * unit
    transfer.parts = shares(transfer.elements, transfer.owner, transfer.size) if transfer.owner else None
    transfer.lengths = _distances(offsets, transfer.elements)
    _fill_gaps(transfer, offsets, step.inputs)
    where = [offset * transfer.dtype.itemsize for offset in offsets]
    blocks.add(transfer, where, step.inputs, [step.outputs, wait.outputs])


def _fill_gaps(transfer: Transfer, offsets: Sequence[int], operands: Sequence[ir.Value]) -> None:
    used = sorted((o, o + _size(v)) for o, v in zip(offsets, operands, strict=True))
    following = [*(start for start, _ in used[1:]), transfer.elements]
    transfer.gaps = [(stop, start) for (_, stop), start in zip(used, following, strict=True) if stop < start]


def _distances(offsets: Sequence[int], end: int) -> list[int]:
    return [after - before for before, after in zip(offsets, [*offsets[1:], end], strict=True)]


def _place_activations(
    graph: ir.Graph,
    steps: Sequence[PlanStep],
    views: Mapping[ir.Value, ir.Value],
    places: dict[ir.Value, Slice],
    buffers: dict[str, int],
    blocks: _Blocks,
    capabilities: Capabilities,
) -> None:
    """Assign arena offsets by liveness: a value's range is freed after the last step that reads it or a view of it, or taken
    over by a result that this step may write in its place.

    Results of the step, and of its check, are adjacent, so that one transfer brings them to the host.
    """
    last_use: dict[ir.Value, int] = {}
    for k, step in enumerate(steps):
        for value in (*step.inputs, *(step.outputs if step.transfer is not None else ())):
            last_use[views.get(value, value)] = k
    kept = {views.get(value, value) for value in graph.outputs}
    arena, results = Arena(capabilities.alignment), Arena()
    crossing = _Crossing(steps, views)
    alone: dict[ir.Value, int] = {}  # the values that have a range of the arena for themselves
    for k, step in enumerate(steps):
        free = {root for v in step.inputs if (root := views.get(v, v)) in alone and last_use[root] == k}
        for value in step.outputs:
            if value in places or value.dtype is None:
                continue
            block = blocks.of.get(value)
            if block is not None:
                values = block.values()
                nbytes = block.transfer.nbytes
                dies = len(steps) if not kept.isdisjoint(values) else max(last_use[v] for v in values if v in last_use)
                found = crossing.take(step, values, nbytes)
                block.settle(found if found is not None else (ARENA, arena.take(nbytes, dies)), places)
            elif step.kind not in ("update", "start", "wait"):
                result = value in kept or step.kind == "check"
                apart = None if result else crossing.place(step, value)
                if apart is not None:
                    places[value] = apart
                    continue
                place = Slice(RESULTS if result else ARENA, 0, shape_of(value), _dtype(value))
                operand = None if result else _replaceable(step, value, free, views, capabilities)
                until = last_use.get(value, k)
                if operand is not None:
                    free.discard(operand)
                    place.offset = alone[operand]
                    arena.keep(place.offset, k, until)
                else:
                    place.offset = (results if result else arena).take(place.nbytes, until)
                if not result:
                    alone[value] = place.offset
                places[value] = place
        arena.free_after(k)
    buffers[ARENA] = arena.size
    buffers.update(crossing.buffers)
    if results.size:
        buffers[RESULTS] = results.size


def _replaceable(
    step: PlanStep, value: ir.Value, free: Set[ir.Value], views: Mapping[ir.Value, ir.Value], capabilities: Capabilities
) -> ir.Value | None:
    """The one of ``free``, which nothing reads after this step, in whose place the step may write a result."""
    if step.kind != "kernel" or not free:
        return None
    (node,) = step.nodes
    if node.attributes.get_string(SHARD, ""):
        return None  # a rank may hold any part of its operands
    index = capabilities.inplace(node).get(node.outputs.index(value))
    read = [views.get(v, v) if v is not None else None for v in node.inputs]
    found = read[index] if index is not None and index < len(read) else None
    if found not in free or found is None or read.count(found) > 1:
        return None
    return found if (found.dtype, _size(found)) == (value.dtype, _size(value)) else None


class _Crossing:
    """Places values of a pipeline that one task makes and another reads, since other tasks run in between.

    Attributes:
        buffers: name → bytes; of a stash for one micro-batch.
    """

    def __init__(self, steps: Sequence[PlanStep], views: Mapping[ir.Value, ir.Value]) -> None:
        self.buffers: dict[str, int] = {}
        self._arenas: dict[str, Arena] = {}
        self._tasks: dict[ir.Value, set[Task]] = {}
        for step in steps:
            for value in step.inputs if step.task is not None else ():
                self._tasks.setdefault(views.get(value, value), set()).add(required(step.task))

    def place(self, step: PlanStep, value: ir.Value) -> Slice | None:
        """The place of a value that ``step`` makes; None: only steps of its task read it."""
        place = Slice(ARENA, 0, shape_of(value), _dtype(value))
        found = self.take(step, [value], place.nbytes)
        return None if found is None else replace(place, buffer=found[0], offset=found[1])

    def take(self, step: PlanStep, values: Sequence[ir.Value], nbytes: int) -> tuple[str, int] | None:
        """Buffer and offset of a range for ``values``, the first of which ``step`` makes; None: only steps of its task read
        them.
        """
        if step.task is None or all(self._tasks.get(value, set()) <= {step.task} for value in values):
            return None
        if step.task.kind == "P":
            name = f"{RECEIVED}{step.name}/{step.outputs.index(values[0])}"  # the same in the plans for all shapes
        else:
            name = SUMS if step.kind == "accumulate" else f"{STASH}{step.task.stage}"
        offset = self._arenas.setdefault(name, Arena()).take(nbytes, -1)
        self.buffers[name] = self._arenas[name].size
        return name, offset
