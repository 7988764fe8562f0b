"""Groups updates into calls over flat buffers, and decides which part of them a rank keeps.

State of a sharded group (attribute ``shard`` of its updates) is kept only for the elements that this rank owns, unless the
graph makes it whole again: the next value of whole state is the operand of an ``AllGather``. Of a gradient, a rank keeps its
part where the ``ReduceScatter`` that made it is ``transient``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import ALIGNMENT
from graphc.errors import ModelError
from graphc.ir.declare import OFFLOAD, SHARD, Role, is_update, required_declaration
from graphc.ir.facts import describe, dtype_of, input_of, shape_of
from graphc.ir.names import BUCKET
from graphc.ir.ops.collectives import collective_of
from graphc.ir.updates import is_reduced, on_its_way, role_of, source_of, state_of, updates_of
from graphc.plan.steps import UpdateGroup, shares


def update_groups(graph: ir.Graph, world_size: int = 1, rank: int = 0) -> list[UpdateGroup]:
    """The update groups of a training graph; they depend on its state, not on the shapes of feeds.

    Raises:
        ModelError: state without a static shape, or sharded state that something reads whole.
    """
    groups: list[UpdateGroup] = []
    divided = {key for node in updates_of(graph) if is_reduced(node) and _is_divided(node) for key in [_bucket(node)] if key}
    taken: set[str] = set()
    units = _units(graph)
    for nodes in _gather_nodes(graph):
        first = nodes[0]
        name = _bucket(first) or f"{state_of(first).name}"
        while name in taken:
            name += "'"
        taken.add(name)
        unit = units[_bucket(first) or name]
        offsets, position = _offsets(nodes, unit)
        placement = required_declaration(first).attribute_values(first)
        owner = placement[SHARD]
        if owner == "even" or _bucket(first) in divided:
            position = -(-position // (unit * world_size)) * unit * world_size
        group = UpdateGroup(name, nodes, offsets, position, _flat_inputs(first))
        group.parts, group.rank = shares(position, owner if world_size > 1 else "", world_size), rank
        group.offload = bool(placement[OFFLOAD])
        if owner and world_size > 1:
            group.scattered = frozenset(k for k in group.flat if not _whole(group, k))
        groups.append(group)
    _name_buffers(groups)
    return groups


def find_homes(groups: Sequence[UpdateGroup]) -> dict[ir.Value, tuple[UpdateGroup, int]]:
    """State, its next value, or a gradient (as its update reads it, or between collectives) → its group and flat input."""
    homes: dict[ir.Value, tuple[UpdateGroup, int]] = {}
    for group in groups:
        for node in group.nodes:
            for output, index in group.declaration.next_value.items():
                state = node.inputs[index] if index in group.flat else None
                if state is not None and output < len(node.outputs):
                    homes[state] = homes[node.outputs[output]] = (group, index)
    for group in groups:
        for node in group.nodes:
            for index in group.flat:
                value = input_of(node, index)
                for before in between_collectives(value):
                    homes.setdefault(before, (group, index))
    return homes


def between_collectives(value: ir.Value) -> Iterator[ir.Value]:
    """The value, and its earlier forms between the collectives of which it is the result."""
    yield value
    while (wait := value.producer()) is not None and collective_of(wait) is not None and wait.op_type.endswith("Wait"):
        flying = input_of(wait, value.index() or 0)
        start = flying.producer()
        if start is None:
            return
        value = input_of(start, flying.index() or 0)
        before = value.producer()
        if before is None or collective_of(before) is None:
            return
        yield value


def offloaded_buffers(groups: Sequence[UpdateGroup]) -> frozenset[str]:
    """The flat buffers in host memory: optimizer state, and parameters of which the graph reads a copy."""
    found = {group.buffer(k) for group in groups if group.offload for k in group.states()}
    read = {group.buffer(group.declaration.main) for group in groups if group.offload}
    return frozenset(found - (read - copied_buffers(groups)))


def copied_buffers(groups: Sequence[UpdateGroup]) -> set[str]:
    """The flat buffers of parameters of which other state is a copy in a lower type."""
    copies = (group for group in groups if role_of(group.nodes[0]) is Role.COPY)
    return {group.buffer(group.source) for group in copies if group.source is not None}


def _bucket(node: ir.Node) -> str:
    return node.attributes.get_string(BUCKET, "")


def _gather_nodes(graph: ir.Graph) -> list[list[ir.Node]]:
    """The updates of a bucket that have equal ops, attributes and scalars."""
    found: dict[tuple[Any, ...], list[ir.Node]] = {}
    for node in updates_of(graph):
        values = required_declaration(node).attribute_values(node)
        name = values[BUCKET]
        flat = _flat_inputs(node)
        shared = tuple(id(v) for k, v in enumerate(node.inputs) if k not in flat)
        key = (name, node.op_type, repr(sorted(values.items())), shared) if name else (id(node),)
        found.setdefault(key, []).append(node)
    return list(found.values())


def _units(graph: ir.Graph) -> dict[str, int]:
    """Bucket (or state) → alignment of its slices in elements, that of the narrowest type, so that all its arrays have
    one layout.
    """
    narrowest: dict[str, int] = {}
    for node in updates_of(graph):
        name = _bucket(node) or f"{state_of(node).name}"
        for index in _flat_inputs(node):
            size = int(np.dtype(dtype_of(input_of(node, index)).numpy()).itemsize)
            narrowest[name] = min(narrowest.get(name, ALIGNMENT), size)
    return {name: max(1, ALIGNMENT // size) for name, size in narrowest.items()}


def _offsets(nodes: Sequence[ir.Node], unit: int) -> tuple[list[int], int]:
    """Where each node's slice begins, and where the last one ends, in elements."""
    offsets, position = [], 0
    for node in nodes:
        offsets.append(position)
        position += -(-math.prod(shape_of(state_of(node))) // unit) * unit
    return offsets, position


def _flat_inputs(node: ir.Node) -> tuple[int, ...]:
    """Inputs with an element for each element of the state: the states, and the gradient or other source."""
    return tuple(k for k in required_declaration(node).flat if k < len(node.inputs) and node.inputs[k] is not None)


def _whole(group: UpdateGroup, index: int) -> bool:
    """Whether a rank of a sharded group has all elements of flat input ``index``."""
    kinds = set()
    for node in group.nodes:
        value = input_of(node, index)
        outputs = [k for k, state in group.declaration.next_value.items() if state == index and k < len(node.outputs)]
        if outputs:
            whole = any(_is_gathered(node.outputs[k]) for k in outputs)
            if not whole:
                _refuse_readers(value)
            kinds.add(whole)
        else:
            kinds.add(not any(_is_transient(p) for v in on_its_way(value) if (p := v.producer()) is not None))
    if len(kinds) > 1:
        raise ModelError(f"bucket {group.name!r} is gathered in part: an AllGather takes all of a bucket or none of it")
    return kinds.pop()


def _is_divided(node: ir.Node) -> bool:
    """Whether a ReduceScatter divides the gradients of an update among the ranks, on their way."""
    found = (v.producer() for v in on_its_way(source_of(node)))
    return any(p is not None and collective_of(p) == "ReduceScatter" for p in found)


def _is_transient(node: ir.Node) -> bool:
    return collective_of(node) == "ReduceScatter" and node.attributes.get_int("transient", 0) != 0


def _is_gathered(value: ir.Value) -> bool:
    return any(collective_of(user) == "AllGather" for user in value.consumers())


def _refuse_readers(state: ir.Value) -> None:
    for user in state.consumers():
        if not is_update(user) and collective_of(user) != "AllGather":
            raise ModelError(f"{state.name!r} is sharded, but it is read whole by {describe(user)}")


def _name_buffers(groups: Sequence[UpdateGroup]) -> None:
    """Name the buffers: each state has its own; a source that is another update's next value shares the buffer of that
    state.
    """
    owners = {out: (group, output) for group in groups for n in group.nodes for output, out in enumerate(n.outputs)}
    for group in groups:
        group.names = {index: f"{group.name}/{group.declaration.inputs[index].name}" for index in group.flat}
    for group in groups:
        other, source = _updated_before(group, owners), group.source
        if other is not None and source is not None:
            group.names[source] = other[0].buffer(other[1])
            group.scattered = group.scattered - {source} | ({source} if other[1] in other[0].scattered else frozenset())


def _updated_before(group: UpdateGroup, owners: Mapping[ir.Value, tuple[UpdateGroup, int]]) -> tuple[UpdateGroup, int] | None:
    """The group and flat input whose next value is the source of ``group``."""
    if group.source is None:
        return None
    values = [input_of(node, group.source) for node in group.nodes]
    found = [owners[v] for v in values if v in owners]
    if not found:
        return None
    other, output = found[0]
    if [n.outputs[output] for n in other.nodes] != values or other.offsets != group.offsets:
        raise ModelError(f"bucket {group.name!r} reads the new state of {other.name!r}, which lies in another order")
    return other, other.declaration.next_value[output]
