"""Update groups: which updates run as one call over flat buffers, and what of those buffers a rank keeps.

State of a sharded group (attribute ``shard`` of its updates) is kept only for the elements that this rank owns, unless the
graph makes it whole again: the next value of whole state is the operand of an ``AllGather``. What a rank keeps of a gradient
is its part where the ``ReduceScatter`` that made it is ``transient``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import ALIGNMENT
from graphc.errors import ModelError
from graphc.ir.declare import OFFLOAD, SHARD, declaration_of, is_update
from graphc.ir.facts import describe, static_dims
from graphc.ir.names import BUCKET
from graphc.ir.ops.collectives import collective_of
from graphc.plan.steps import UpdateGroup, shares


def update_groups(graph: ir.Graph, world_size: int = 1, rank: int = 0) -> list[UpdateGroup]:
    """The update groups of a training graph; they depend on its state, not on the shapes of feeds.

    Raises:
        ModelError: state without a static shape, or sharded state that something reads whole.
    """
    groups: list[UpdateGroup] = []
    taken: set[str] = set()
    units = _units(graph)
    for nodes in _gather_nodes(graph):
        first = nodes[0]
        assert first.inputs[0] is not None
        name = _bucket(first) or f"{first.inputs[0].name}"
        while name in taken:
            name += "'"
        taken.add(name)
        unit = units[_bucket(first) or name]
        offsets, position = _offsets(nodes, unit)
        declaration = declaration_of(first)
        assert declaration is not None
        owner = declaration.attribute_values(first)[SHARD] if SHARD in declaration.attributes else ""
        if owner == "even":
            position = -(-position // (unit * world_size)) * unit * world_size
        group = UpdateGroup(name, nodes, offsets, position, _flat_inputs(first))
        group.parts, group.rank = shares(position, owner if world_size > 1 else "", world_size), rank
        group.offload = bool(declaration.attribute_values(first).get(OFFLOAD, 0))
        if owner and world_size > 1:
            group.scattered = frozenset(k for k in group.flat if not _whole(group, k))
        groups.append(group)
    _name_buffers(groups)
    return groups


def find_homes(groups: Sequence[UpdateGroup]) -> dict[ir.Value, tuple[UpdateGroup, int]]:
    """State, its next value, or a gradient (as its update reads it) → its group and flat input."""
    homes: dict[ir.Value, tuple[UpdateGroup, int]] = {}
    for group in groups:
        declaration = declaration_of(group.nodes[0])
        assert declaration is not None
        for node in group.nodes:
            for output, index in declaration.next_value.items():
                state = node.inputs[index] if index in group.flat else None
                if state is not None and output < len(node.outputs):
                    homes[state] = homes[node.outputs[output]] = (group, index)
    for group in groups:
        for node in group.nodes:
            for index in group.flat:
                value = node.inputs[index]
                assert value is not None
                homes.setdefault(value, (group, index))
    return homes


def offloaded_buffers(groups: Sequence[UpdateGroup]) -> frozenset[str]:
    """The flat buffers that lie in the host's memory: optimizer state, and parameters of which the graph reads a copy."""
    copied = {group.buffer(1) for group in groups if group.nodes[0].op_type == "Narrow"}
    found = {group.buffer(k) for group in groups if group.offload for k in group.states()}
    read = {group.buffer(0) for group in groups if group.offload}
    return frozenset(found - (read - copied))


def _bucket(node: ir.Node) -> str:
    return node.attributes.get_string(BUCKET, "")


def _gather_nodes(graph: ir.Graph) -> list[list[ir.Node]]:
    """The updates of a bucket that have equal ops, attributes and scalars."""
    found: dict[tuple[Any, ...], list[ir.Node]] = {}
    for node in graph:
        declaration = declaration_of(node)
        if declaration is None or not declaration.next_value:
            continue
        values = declaration.attribute_values(node)
        name = values.get(BUCKET) or ""
        flat = _flat_inputs(node)
        shared = tuple(id(v) for k, v in enumerate(node.inputs) if k not in flat)
        key = (name, node.op_type, repr(sorted(values.items())), shared) if name else (id(node),)
        found.setdefault(key, []).append(node)
    return list(found.values())


def _units(graph: ir.Graph) -> dict[str, int]:
    """Bucket (or state) → elements to which slices are aligned: for the narrowest type, so that all its arrays are alike."""
    narrowest: dict[str, int] = {}
    for node in graph:
        if not is_update(node):
            continue
        first = node.inputs[0]
        assert first is not None
        name = _bucket(node) or f"{first.name}"
        for index in _flat_inputs(node):
            value = node.inputs[index]
            if value is not None and value.dtype is not None:
                narrowest[name] = min(narrowest.get(name, ALIGNMENT), int(np.dtype(value.dtype.numpy()).itemsize))
    return {name: max(1, ALIGNMENT // size) for name, size in narrowest.items()}


def _offsets(nodes: Sequence[ir.Node], unit: int) -> tuple[list[int], int]:
    """Where each node's slice begins, and where the last one ends, in elements."""
    offsets, position = [], 0
    for node in nodes:
        state = node.inputs[0]
        assert state is not None
        shape = static_dims(state)
        if shape is None:
            raise ModelError(f"state {state.name!r} has no static shape")
        offsets.append(position)
        position += -(-int(np.prod(shape, dtype=np.int64)) // unit) * unit
    return offsets, position


def _flat_inputs(node: ir.Node) -> tuple[int, ...]:
    """Inputs with one element per parameter element: the states, and input 1 where it is a gradient or the like."""
    declaration = declaration_of(node)
    assert declaration is not None
    states = set(declaration.next_value.values())
    if 1 in declaration.reduces or declaration.elementwise:
        states.add(1)
    return tuple(sorted(k for k in states if k < len(node.inputs) and node.inputs[k] is not None))


def _whole(group: UpdateGroup, index: int) -> bool:
    """Whether a rank of a sharded group has all elements of flat input ``index``."""
    kinds = set()
    for node in group.nodes:
        declaration = declaration_of(node)
        assert declaration is not None
        value = node.inputs[index]
        assert value is not None
        outputs = [k for k, state in declaration.next_value.items() if state == index and k < len(node.outputs)]
        if outputs:
            whole = any(_is_gathered(node.outputs[k]) for k in outputs)
            if not whole:
                _refuse_readers(value)
            kinds.add(whole)
        else:
            producer = value.producer()
            kinds.add(producer is None or not _is_transient(producer))
    if len(kinds) > 1:
        raise ModelError(f"bucket {group.name!r} is gathered in part: an AllGather takes all of a bucket or none of it")
    return kinds.pop()


def _is_transient(node: ir.Node) -> bool:
    return collective_of(node) == "ReduceScatter" and node.attributes.get_int("transient", 0) != 0


def _is_gathered(value: ir.Value) -> bool:
    return any(collective_of(user) == "AllGather" for user in value.consumers())


def _refuse_readers(state: ir.Value) -> None:
    for user in state.consumers():
        if not is_update(user) and collective_of(user) != "AllGather":
            raise ModelError(f"{state.name!r} is sharded, but it is read whole by {describe(user)}")


def _name_buffers(groups: Sequence[UpdateGroup]) -> None:
    """A state has a buffer of its own; input 1 may be the next value of another update's state, which lies in that one's."""
    owners = {out: (group, output) for group in groups for n in group.nodes for output, out in enumerate(n.outputs)}
    for group in groups:
        declaration = declaration_of(group.nodes[0])
        assert declaration is not None
        group.names = {index: f"{group.name}/{declaration.inputs[index].name}" for index in group.flat}
    for group in groups:
        other = _source(group, owners)
        if other is not None:
            group.names[1] = other[0].buffer(other[1])
            group.scattered = group.scattered - {1} | ({1} if other[1] in other[0].scattered else frozenset())


def _source(group: UpdateGroup, owners: Mapping[ir.Value, tuple[UpdateGroup, int]]) -> tuple[UpdateGroup, int] | None:
    """The group and flat input whose next value is input 1 of ``group``."""
    if 1 not in group.flat or 1 in group.states():
        return None
    values = [node.inputs[1] for node in group.nodes]
    found = [owners[v] for v in values if v is not None and v in owners]
    if not found:
        return None
    other, output = found[0]
    declaration = declaration_of(other.nodes[0])
    assert declaration is not None
    if [n.outputs[output] for n in other.nodes] != values or other.offsets != group.offsets:
        raise ModelError(f"bucket {group.name!r} reads the new state of {other.name!r}, which lies in another order")
    return other, declaration.next_value[output]


__all__ = ["find_homes", "update_groups"]
