"""Sums values over the micro-batches of a step; plans for different shapes share the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Choice, Run, in_order
from graphc.ir.facts import input_of
from graphc.plan.buffers import ARENA, RESULTS, SUMS
from graphc.plan.segment_model import bind_op
from graphc.runtime.buffers import BufferMap


@dataclass(slots=True)
class MicroBatchCursor:
    """Which micro-batch of a step runs now.

    Attributes:
        depth: levels of a sum by a tree.
    """

    index: int = 0
    last: bool = True
    depth: int = 0

    def place(self) -> int:
        """0: the first of several, 1: the only one, 2: between first and last, 3: the last."""
        return 2 * bool(self.index) + self.last

    def carries(self) -> int:
        """Full levels: as in a binary counter, level k holds the sum of 2ᵏ neighbours until the next 2ᵏ are summed."""
        return (~self.index & (self.index + 1)).bit_length() - 1

    def place_in_tree(self) -> int:
        """The number of full levels, and ``depth`` more in the end."""
        return self.carries() + self.depth * self.last


@dataclass(frozen=True, slots=True)
class _Sum:
    """``x`` is added to ``levels[0]``, which becomes ``y`` at the end; a tree sum has one level for each power of two."""

    x: Array
    levels: list[Array]
    y: Array


def bind_sums(nodes: Sequence[ir.Node], places: BufferMap, backend: Backend, turn: MicroBatchCursor) -> Run:
    """One call for the sums of a step of a plan."""
    tree = bool(nodes[0].attributes.get_int("tree", 0))
    sums = [_sum_of(node, places, tree) for node in nodes]
    if places.memory.on_host:
        return _tree_on_host(sums, turn) if tree else _on_host(sums, turn)
    return _tree_on_device(sums, places, backend, turn) if tree else _on_device(sums, places, backend, turn)


def _sum_of(node: ir.Node, places: BufferMap, tree: bool) -> _Sum:
    value, result = input_of(node), node.outputs[0]
    y = places.array(result)
    steps = node.attributes["steps"].as_int() // (places.plan.mesh.replicas if tree else 1)
    levels = max(1, steps.bit_length() - 1) if tree else 1
    shared = places.plan.places[result].buffer not in (ARENA, RESULTS, SUMS) and not tree  # y outlives the plan
    names = [f"accumulated/{result.name}/{level}" for level in range(levels)]
    own = [] if shared else [places.state.buffer(name, y.nbytes).view(y.dtype).reshape(y.shape) for name in names]
    return _Sum(places.array(value), own or [y], y)


def _on_host(sums: Sequence[_Sum], turn: MicroBatchCursor) -> Run:
    def accumulate() -> None:
        for one in sums:
            out = one.y if turn.last else one.levels[0]
            if turn.index == 0:
                np.copyto(out, one.x)
            else:
                with np.errstate(over="ignore", invalid="ignore"):  # the check reports what is not finite
                    np.add(one.levels[0], one.x, out=out)

    return accumulate


def _tree_on_host(sums: Sequence[_Sum], turn: MicroBatchCursor) -> Run:
    def accumulate() -> None:
        carries = turn.carries()
        for one in sums:
            total = one.x
            for level in range(carries):
                total = np.add(one.levels[level], total, out=one.levels[level])
            np.copyto(one.y if turn.last else one.levels[carries], total)

    return accumulate


def _on_device(sums: Sequence[_Sum], places: BufferMap, backend: Backend, turn: MicroBatchCursor) -> Run:
    copy = places.memory.bind_copy
    begin = [in_order([copy(s.levels[0], s.x) for s in sums]), in_order([copy(s.y, s.x) for s in sums])]
    keep = [bind_op(backend, "Add", {}, [s.levels[0], s.x], [s.levels[0]], domain="") for s in sums]
    end = [bind_op(backend, "Add", {}, [s.levels[0], s.x], [s.y], domain="") for s in sums]
    further = [in_order(keep), in_order(end)]

    return Choice([*begin, *further], turn.place)


def _tree_on_device(sums: Sequence[_Sum], places: BufferMap, backend: Backend, turn: MicroBatchCursor) -> Run:
    copy, depth = places.memory.bind_copy, len(sums[0].levels)
    totals = [[s.x, *s.levels] for s in sums]  # the sum that arrives at a level
    add = [
        in_order([bind_op(backend, "Add", {}, [t[k + 1], t[k]], [t[k + 1]], domain="") for t in totals]) for k in range(depth)
    ]
    keep = [in_order([copy(t[k + 1], t[k]) for t in totals]) for k in range(depth)]
    end = [in_order([copy(s.y, t[k]) for s, t in zip(sums, totals, strict=True)]) for k in range(depth + 1)]

    turn.depth = depth
    return Choice([in_order([*add[:k], last[k]]) for last in (keep, end) for k in range(len(last))], turn.place_in_tree)
