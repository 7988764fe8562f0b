"""Chooses which classes of axes are sharded: those that a user names, or all that the automatic plan finds.

The automatic plan is that of Megatron-LM (Shoeybi et al. 2019): in the order of the graph, every class that holds an axis of a
weight and may be sharded is, unless a value of it has a sharded axis already. Of a chain of products that makes the first
weight sharded by columns and the next by rows; of an attention, the heads; of embeddings, the rows of the table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.facts import dims, is_parameter, known_nbytes
from graphc.passes.sharding.axis_classes import Axis, AxisClasses, AxisShard
from graphc.passes.sharding.ratio import Ratio
from graphc.passes.sharding.relations import keep_whole, relate

AUTO, SEQUENCE = "auto", "auto:sequence"
"""Plans that graphc makes: Megatron-LM's, and the same with activations between products divided along the sequence."""


def choose(graph: ir.Graph, ranks: int, wanted: Sequence[str]) -> dict[ir.Value, AxisShard]:
    """The sharded values of ``graph``.

    Where an op can be divided in several ways, as a Reshape of batch and heads, the one is taken that divides most.

    Args:
        wanted: ``auto``, ``auto:sequence``, or texts ``GLOB=AXIS`` over names of parameters, or of other values where no
            parameter matches.

    Raises:
        UsageError: a text that names no axis, or one that cannot be sharded.
    """
    named = None if list(wanted) in ([AUTO], [SEQUENCE]) else [axis for text in wanted for axis in _named(graph, text)]
    picks: dict[Hashable, int] = {}
    best = _plan(graph, ranks, named, picks)
    for key, count in best.offered.items():
        for alternative in range(1, count):
            other = _plan(graph, ranks, named, {**picks, key: alternative})
            if other.rank > best.rank:
                best, picks = other, {**picks, key: alternative}
    if best.failure:
        raise UsageError(best.failure)
    return best.shards


@dataclass(frozen=True, slots=True)
class _Plan:
    """Attributes:
    shards: the sharded values.
    divided: named axes that are divided.
    nbytes: of the divided parameters.
    failure: why a named axis is not divided; empty where all are.
    offered: alternatives of the relations.
    """

    shards: dict[ir.Value, AxisShard]
    divided: int
    nbytes: int
    failure: str
    offered: Mapping[Hashable, int]

    @property
    def rank(self) -> tuple[int, int]:
        """What a better plan has more of."""
        return self.divided, self.nbytes


def _plan(graph: ir.Graph, ranks: int, named: Sequence[Axis] | None, picks: Mapping[Hashable, int]) -> _Plan:
    classes = AxisClasses(ranks, picks)
    keep_whole(classes, graph.inputs, "an input of the model is whole on every rank")
    keep_whole(classes, graph.outputs, "an output of the model is whole on every rank")
    for node in graph:
        relate(classes, node)
    if named is None:
        shards = _most(classes, [axis for axis in _axes(graph) if len(dims(axis[0]) or ()) > 1])
        return _Plan(shards, 0, _nbytes(shards), "", classes.offered)
    shards, divided, failure = {}, 0, ""
    for axis in named:
        if axis[0] in shards and shards[axis[0]].axis == axis[1]:
            divided += 1
            continue
        found = problem(classes, axis, shards)
        if not found:
            shards |= _shards(classes, axis)
            divided += 1
        elif not failure:
            failure = f"axis {axis[1]} of {axis[0].name!r} cannot be divided by {ranks}: {found}"
    return _Plan(shards, divided, _nbytes(shards), failure, classes.offered)


def _nbytes(shards: Iterable[ir.Value]) -> int:
    return sum(known_nbytes(value) for value in shards if is_parameter(value))


MOST_TRIALS = 200
"""Classes that :func:`_most` leaves out by way of trial."""

GAIN = 1.01
"""How much more has to be divided without a class for it to be left out."""


def _most(classes: AxisClasses, axes: Sequence[Axis]) -> dict[ir.Value, AxisShard]:
    """Shard classes that exclude each other so that most is divided: in order, and without those that stand in the way."""
    candidates = list[dict[ir.Value, AxisShard]]()
    seen: set[Axis] = set()
    for axis in axes:
        root = classes.find(axis)[0]
        if root not in seen and not problem(classes, axis, {}):
            candidates.append(_shards(classes, axis))
        seen.add(root)
    weights = [_nbytes(one) for one in candidates]
    holders: dict[ir.Value, list[int]] = {}
    for k, one in enumerate(candidates):
        for value in one:
            holders.setdefault(value, []).append(k)
    rivals: list[set[int]] = [set() for _ in candidates]
    for group in holders.values():
        for k in group if len(group) > 1 else ():
            rivals[k].update(other for other in group if other != k)

    def greedy(without: Set[int]) -> list[int]:
        chosen, excluded = [], set(without)
        for k in range(len(candidates)):
            if k not in excluded:
                chosen.append(k)
                excluded |= rivals[k]
        return chosen

    without: set[int] = set()
    best = greedy(without)
    for _, k in zip(range(MOST_TRIALS), [k for k in best if rivals[k]], strict=False):
        other = greedy(without | {k})
        if sum(weights[j] for j in other) > GAIN * sum(weights[j] for j in best):
            best, without = other, without | {k}
    return {value: shard for k in best for value, shard in candidates[k].items()}


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
        raise UsageError(
            f"shard={text!r}: write {AUTO}, {SEQUENCE}, or a pattern of parameters and an axis, as in 'fc1.weight=1'"
        )
    known = {name: value for name, value in graph.initializers.items() if is_parameter(value)}
    names = fnmatch.filter(known, glob)
    if not names:  # the result of a node, which takes the parameters with it
        known = {out.name or "": out for node in graph for out in node.outputs}
        names = fnmatch.filter(known, glob)
    if not names:
        raise UsageError(f"shard={text!r} matches no parameter and no value; 'graphc inspect --show params' lists the first")
    found = []
    for name in names:
        rank = len(dims(known[name]) or ())
        if not -rank <= int(number) < rank:
            raise UsageError(f"shard={text!r}: {name!r} has {rank} axes")
        found.append((known[name], int(number) % rank))
    return found


def problem(classes: AxisClasses, axis: Axis, shards: Mapping[ir.Value, AxisShard]) -> str:
    """Why the class of ``axis`` cannot be sharded; empty where it can."""
    reason = classes.reason(axis)
    if reason:
        return reason
    members = classes.members(axis)
    if members is None:
        return "its blocks do not fit together"
    for (value, index), blocks in {axis: members[axis], **members}.items():
        size = (dims(value) or ())[index]
        if size is None:
            return f"axis {index} of {value.name!r} has no fixed size"
        for parts in (Ratio.of(size), *classes.units((value, index))):
            fault = _indivisible(parts / blocks, classes.ranks)
            if fault:
                elements = "elements" if parts == Ratio.of(size) else "parts"
                return f"axis {index} of {value.name!r} has {parts.size} {elements}; {fault}"
        if value in shards:
            return f"axis {shards[value].axis} of {value.name!r} is sharded already"
    if len({value for value, _ in members}) < len(members):
        return "a value of it would be divided along two axes"
    return ""


def _indivisible(parts: Ratio, ranks: int) -> str:
    """Why the parts of a block cannot be shared evenly; empty where they can."""
    size = parts.size
    if not isinstance(size, int):
        return "they are not known to be divisible"
    if size % ranks == 0:
        return ""
    fitting = ", ".join(str(n) for n in range(2, size + 1) if size % n == 0)
    return f"{fitting or 'nothing'} would divide it"


def _shards(classes: AxisClasses, axis: Axis) -> dict[ir.Value, AxisShard]:
    found = {}
    for (value, index), blocks in (classes.members(axis) or {}).items():
        known, each = blocks.size, (Ratio.of((dims(value) or ())[index] or 0) / blocks).size
        assert isinstance(each, int)
        found[value] = AxisShard(index, known if isinstance(known, int) else None, each // classes.ranks)
    return found
