"""Chooses which classes of axes are sharded: those that a user names, or all that the automatic plan finds.

The automatic plan is that of Megatron-LM (Shoeybi et al. 2019): in the order of the graph, every class that holds an axis of a
weight and may be sharded is, unless a value of it has a sharded axis already. Of a chain of products that makes the first
weight sharded by columns and the next by rows; of an attention, the heads; of embeddings, the rows of the table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.facts import dims, is_parameter
from graphc.passes.sharding.axis_classes import Axis, AxisClasses, AxisShard
from graphc.passes.sharding.relations import keep_whole, relate

AUTO = "auto"


def choose(graph: ir.Graph, ranks: int, wanted: Sequence[str]) -> dict[ir.Value, AxisShard]:
    """The sharded values of ``graph``.

    Args:
        wanted: ``auto``, or texts ``GLOB=AXIS`` over names of parameters.

    Raises:
        UsageError: a text that names no axis of a parameter, or one that cannot be sharded.
    """
    classes = AxisClasses()
    keep_whole(classes, graph.inputs, "an input of the model is whole on every rank")
    keep_whole(classes, graph.outputs, "an output of the model is whole on every rank")
    for node in graph:
        relate(classes, node, ranks)
    shards: dict[ir.Value, AxisShard] = {}
    for axis in _axes(graph):
        if list(wanted) == [AUTO] and len(dims(axis[0]) or ()) > 1 and not problem(classes, axis, ranks, shards):
            _add(classes, axis, shards)
    if list(wanted) != [AUTO]:
        for text in wanted:
            for axis in _named(graph, text):
                if axis[0] in shards and shards[axis[0]].axis == axis[1]:
                    continue
                found = problem(classes, axis, ranks, shards)
                if found:
                    raise UsageError(f"axis {axis[1]} of {axis[0].name!r} cannot be divided by {ranks}: {found}")
                _add(classes, axis, shards)
    return shards


def _axes(graph: ir.Graph) -> list[Axis]:
    """The axes of all weights in the order of their first use, the last axis first: products by columns come first."""
    found: dict[Axis, None] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None and is_parameter(value):
                found.update(dict.fromkeys((value, axis) for axis in reversed(range(len(dims(value) or ())))))
    return list(found)


def _named(graph: ir.Graph, text: str) -> list[Axis]:
    glob, equals, number = text.rpartition("=")
    if not equals or not number.lstrip("-").isdecimal():
        raise UsageError(f"shard={text!r}: write {AUTO}, or a pattern of parameters and an axis, as in 'fc1.weight=1'")
    known = {name: value for name, value in graph.initializers.items() if is_parameter(value)}
    names = fnmatch.filter(known, glob)
    if not names:
        raise UsageError(f"shard={text!r} matches no parameter; 'graphc inspect --show params' lists them")
    found = []
    for name in names:
        rank = len(dims(known[name]) or ())
        if not -rank <= int(number) < rank:
            raise UsageError(f"shard={text!r}: {name!r} has {rank} axes")
        found.append((known[name], int(number) % rank))
    return found


def problem(classes: AxisClasses, axis: Axis, ranks: int, shards: Mapping[ir.Value, AxisShard]) -> str:
    """Why the class of ``axis`` cannot be sharded; empty where it can."""
    reason = classes.reason(axis)
    if reason:
        return reason
    members = classes.members(axis)
    if members is None:
        return "its blocks do not fit together"
    for (value, index), blocks in members.items():
        size = (dims(value) or ())[index]
        if not isinstance(size, int):
            return f"axis {index} of {value.name!r} has no fixed size"
        if size % (blocks * ranks):
            units = size // blocks if size % blocks == 0 else size
            fitting = ", ".join(str(n) for n in range(2, units + 1) if units % n == 0)
            return f"axis {index} of {value.name!r} has {size} elements; {fitting or 'nothing'} would divide it"
        if value in shards:
            return f"axis {shards[value].axis} of {value.name!r} is sharded already"
    if len({value for value, _ in members}) < len(members):
        return "a value of it would be divided along two axes"
    return ""


def _add(classes: AxisClasses, axis: Axis, shards: dict[ir.Value, AxisShard]) -> None:
    for (value, index), blocks in (classes.members(axis) or {}).items():
        shards[value] = AxisShard(index, blocks)
