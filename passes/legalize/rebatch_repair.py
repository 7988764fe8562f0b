"""Repairs single nodes whose operands are fixed to one batch size (:mod:`graphc.passes.legalize.rebatch`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.facts import Dim, constant, dims


@dataclass(frozen=True, slots=True)
class Change:
    """The context of a repair.

    Attributes:
        op: builds nodes before the node to repair.
        symbol: name of the new batch dimension.
        declared: the old batch size.
        before: shape that each value had for the old batch size.
        source: a graph input whose first dimension is the batch.
        outer: for values that share the batch axis with an outer dimension (time × batch): the size of that dimension.
    """

    op: Builder
    symbol: str
    declared: int
    before: Mapping[ir.Value, tuple[Dim, ...] | None]
    source: ir.Value
    outer: dict[ir.Value, int] = field(default_factory=dict)

    def axis(self, value: ir.Value | None) -> int | None:
        """Return the axis of ``value`` that holds the batch; None when there is none.

        Raises:
            ModelError: the batch is in several axes.
        """
        found = dims(value) if value is not None else None
        axes = [k for k, d in enumerate(found or ()) if isinstance(d, str) and self.symbol in d.split("*")]
        if len(axes) > 1:
            raise ModelError(f"the batch is in several dimensions of {value.name if value else None!r}: {found}")
        return axes[0] if axes else None

    def old(self, value: ir.Value) -> list[int] | None:
        """The old shape, when all its dimensions are numbers."""
        found = self.before.get(value)
        return (
            None
            if found is None or not all(isinstance(d, int) for d in found)
            else [int(d) for d in found if isinstance(d, int)]
        )

    def inherit(self, node: ir.Node) -> None:
        """Record the outer size of an output whose batch axis is as long as an input's: its order is the same."""
        for out in node.outputs:
            axis = None if out in self.outer else self.axis(out)
            for value in node.inputs if axis is not None else ():
                place = self.axis(value) if value in self.outer else None
                if value is not None and place is not None and (dims(value) or ())[place] == (dims(out) or ())[axis or 0]:
                    self.outer[out] = self.outer[value]

    def repeated(self, value: ir.Value, axis: int) -> ir.Value:
        """Repeat ``value``, which has size 1 or the old batch size along ``axis``, for the new batch."""
        rank = self.op.rank(value)
        if (dims(value) or ())[axis] != 1:
            value = self.op.Slice(value, [0], [1], [axis])
        size = self.op.Shape(self.source, start=0, end=1)
        ones = np.ones(1, dtype=np.int64)
        target = self.op.Concat(*(size if k == axis else ones for k in range(rank)), axis=0) if rank > 1 else size
        return self.op.Expand(value, target)  # type: ignore[no-any-return]


Repair = Callable[[Change, ir.Node], None]


def _reshape(change: Change, node: ir.Node) -> None:
    """Make the Reshape's target follow the batch: ``[1, 1024]`` becomes ``[0, 1024]``."""
    x, target = node.inputs[0], constant(node.inputs[1])
    axis = change.axis(x)
    if x is None or axis is None or target is None:
        return
    source, result = change.old(x), change.old(node.outputs[0])
    if source is None or result is None:
        raise ModelError(f"the target shape {target.tolist()} is fixed while other dimensions are symbolic")
    position = math.prod(source[:axis]) * change.outer.get(x, 1)
    place = batch_place(position, result, change.declared)
    if place is None:
        raise ModelError(f"it is not clear where the batch (dimension {axis} of {source}) goes in {result}")
    outer = position // math.prod(result[:place])
    if outer > 1:
        change.outer[node.outputs[0]] = outer
    same = place == axis and result[place] == source[axis] and math.prod(result[:place]) == math.prod(source[:axis])
    new = [(0 if same else -1) if k == place else d for k, d in enumerate(result)]
    node.attributes.pop("allowzero", None)
    node.replace_input_with(1, change.op.const(np.array(new, dtype=np.int64)))


def batch_place(position: int, result: Sequence[int], batch: int) -> int | None:
    """Return the axis of ``result`` that takes the batch; ``position`` is the product of the sizes before it.

    Reshape keeps the order of elements, so that product is the same before and after. A batch of 1 leaves a choice: first an
    axis
    that holds only the batch, then the axis after that product; never the last axis (the features) if the axis before it fits.
    """
    candidates = []
    for k, size in enumerate(result):
        start = math.prod(result[:k])
        if start <= position and position * batch <= start * size and position % start == 0 and size % batch == 0:
            candidates.append(k)
    exact = [k for k in candidates if result[k] == batch and math.prod(result[:k]) == position]
    if exact:
        return exact[0]
    if len(candidates) > 1 and candidates[-1] == len(result) - 1:
        return candidates[-2]
    return candidates[-1] if candidates else None


def _expand(change: Change, node: ir.Node) -> None:
    """Make the target of an Expand 1 along the batch: an Expand to the old size does nothing there."""
    x, target = node.inputs[0], constant(node.inputs[1])
    axis = change.axis(x)
    if x is None or axis is None or target is None:
        return
    place = len(target) - change.op.rank(x) + axis
    if 0 <= place < len(target) and target[place] != 1:
        new = target.copy()
        new[place] = 1
        node.replace_input_with(1, change.op.const(new))


def _slice(change: Change, node: ir.Node) -> None:
    """Extend a Slice that took the whole old batch to the whole new one."""
    x = node.inputs[0]
    axis = change.axis(x)
    starts, ends = constant(node.inputs[1]), constant(node.inputs[2])
    if x is None or axis is None or starts is None or ends is None:
        return
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else np.arange(len(starts))
    steps = constant(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else np.ones_like(starts)
    size = (change.before.get(x) or ())[axis]
    if axes is None or steps is None or not isinstance(size, int):
        return
    new = ends.copy()
    for k, a in enumerate(axes):
        if int(a) % change.op.rank(x) == axis and starts[k] == 0 and steps[k] == 1 and size <= ends[k]:
            new[k] = np.iinfo(ends.dtype).max
    if not np.array_equal(new, ends):
        node.replace_input_with(2, change.op.const(new))


def _resize(change: Change, node: ir.Node) -> None:
    """Replace sizes that include the batch by sizes of the other axes."""
    sizes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    x, axis = node.inputs[0], change.axis(node.inputs[0])
    if x is None or sizes is None or axis is None or "axes" in node.attributes:
        return
    others = [k for k in range(change.op.rank(x)) if k != axis]
    node.attributes["axes"] = ir.AttrInt64s("axes", others)
    node.replace_input_with(3, change.op.const(sizes[others]))


def _concat(change: Change, node: ir.Node) -> None:
    """Repeat operands of the old batch size (a class token) for the new batch size."""
    places = {axis for v in node.inputs if (axis := change.axis(v)) is not None}
    if len(places) != 1:
        return
    (axis,) = places
    rank = change.op.rank(node.outputs[0])
    if node.attributes["axis"].as_int() % rank == axis:
        return
    _repeat_operands(change, node, range(len(node.inputs)), axis)


def _recurrent(change: Change, node: ir.Node) -> None:
    """Repeat initial states of the old batch size for the new batch size."""
    axis = 0 if "layout" in node.attributes and node.attributes["layout"].as_int() else 1
    if change.axis(node.inputs[0]) == axis:
        _repeat_operands(change, node, range(5, min(7, len(node.inputs))), axis)


def _repeat_operands(change: Change, node: ir.Node, indices: Sequence[int], axis: int) -> None:
    for index in indices:
        value = node.inputs[index]
        if value is None or change.axis(value) is not None:
            continue
        found = change.before.get(value) or dims(value)
        if found is not None and found[axis] == change.declared:
            node.replace_input_with(index, change.repeated(value, axis))


REPAIRS: dict[str, Repair] = {
    "Concat": _concat,
    "Expand": _expand,
    "GRU": _recurrent,
    "LSTM": _recurrent,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
}
"""Op type → repair of a node, applied before its outputs are inferred again."""
