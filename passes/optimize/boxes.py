"""boxes: write a scatter over a box of elements as a choice between two tensors.

    before   y = ScatterND(x, Concat(Expand(samples), Expand([[1], [2], [3]]), Expand([[4, 5]]), axis=-1), u)
    after    y = Where(inside, Pad(u), x)                                       # y[:, 1:4, 4:6] = u

    before   y = ScatterElements(x, Expand(-1, [batch, 1]), u, axis=1)          # y[:, -1] = u
    after    y = Where(inside, Pad(u), x)

    before   y1 = ScatterElements(y, …, a, axis=1);  y2 = ScatterElements(y1, …, b, axis=1)    # y[:, 0] = a, y[:, 1] = b
    after    y2 = Concat(a, b, y[:, 2:])

Exporters write an assignment to slices like this, with an index of every axis for each element: eight bytes an axis for the
four of a number, read one by one, and a gradient that gathers by them. Pad and Where cost no pass over memory inside a
generated kernel, and their gradients are slices and choices. A scatter stays as it is if its indices hold anything but
neighbours, a ScatterND with as many axes of them as there are indices of an element, if it reduces, or if it writes beyond the
ends: what runs it says so then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import Dim, constant, dims, input_of, required
from graphc.passes.optimize import slabs
from graphc.passes.optimize.axis_order import RESHAPES
from graphc.passes.optimize.simplify import replace_each
from graphc.pipeline import Context, graph_pass

MOVES = RESHAPES | {"Transpose", "Cast", "Identity"}


@graph_pass("boxes", requires=("legalize",), changes="form")
def boxes(model: ir.Model, ctx: Context) -> bool:
    """Replace every scatter that writes a box of its operand, and what reads one of several parts that were written."""
    graph = model.graph
    written = _Written(graph)
    count = replace_each(graph, _SCATTERS | {"Slice", "Gather", "Transpose"}, written.replaced)
    if count:
        ctx.note(f"boxes: {counted(count, 'box', 'boxes')} written by a choice")
    return count > 0


class _Written:
    """What the scatters of a graph write, and what is read of it; found before any node is replaced."""

    def __init__(self, graph: ir.Graph) -> None:
        self._slabs: dict[ir.Value, slabs.Slabs] = {}
        self._passed: dict[ir.Value, ir.Value] = {}  # a value that is another one as it is → that one
        self._reads: dict[ir.Node, tuple[slabs.Slabs, slabs.Part, bool]] = {}
        self._now: dict[ir.Value, ir.Value] = {}  # what was replaced → by what
        op = Builder(graph)
        followed = [node for node in graph if node.domain == "" and node.op_type in _FOLLOWED and node.inputs[0] is not None]
        for node in followed:
            source = self._passed.get(input_of(node), input_of(node))
            if node.op_type in _SCATTERS:
                self._follow_scatter(node, source)
            elif source in self._slabs:
                self._follow_reader(op, node, source)
        self._needed = self._with_other_readers(followed)

    def _follow_scatter(self, node: ir.Node, source: ir.Value) -> None:
        box, out, updates = _box(node), node.outputs[0], input_of(node, 2)
        if box is not None and not box.within:
            self._passed[out] = self._passed.get(updates, updates)
        elif box is not None and len(box.within) == 1:
            (axis,) = box.within
            made = slabs.assigned(self._slabs.get(source), source, axis, box.starts[axis], updates)
            if made is not None:
                self._slabs[out] = made

    def _follow_reader(self, op: Builder, node: ir.Node, source: ir.Value) -> None:
        held, out = self._slabs[source], node.outputs[0]
        if slabs.same(op, node):
            self._passed[out] = source
        elif node.op_type == "Transpose":
            turned = slabs.transposed(held, node)
            if turned is not None:
                self._slabs[out] = turned
        else:
            part = slabs.read(held, node)
            if part is not None:
                self._reads[node] = (held, *part)

    def _with_other_readers(self, followed: Sequence[ir.Node]) -> set[ir.Value]:
        """The followed values that something else reads than what follows them."""
        needed: set[ir.Value] = set()
        for node in reversed(followed):
            (out, *_) = node.outputs
            if out not in self._slabs and out not in self._passed:
                continue
            for user, index in out.uses():
                (made, *_) = user.outputs
                if made in self._passed:
                    wanted = made in needed and index == (2 if user.op_type in _SCATTERS else 0)
                else:
                    wanted = user not in self._reads and not (index == 0 and made in self._slabs and self._slabs[made].again)
                if wanted:
                    needed.add(out)
            if out.is_graph_output():
                needed.add(out)
        return needed

    def replaced(self, op: Builder, node: ir.Node) -> ir.Value | None:
        """What takes the place of a node's result."""
        out = node.outputs[0]
        if node in self._reads:
            held, part, alone = self._reads[node]
            value = held.emit(op, [replace(part, value=self._as_now(part.value))])
            made = op.Squeeze(value, [held.axis]) if alone else value
        elif out in self._slabs and self._slabs[out].again:
            held = self._slabs[out]
            parts = [replace(part, value=self._as_now(part.value)) for part in held.parts]
            made = held.emit(op, parts) if out in self._needed else None
        else:
            made = _chosen(op, node) if node.op_type in _SCATTERS else None
        if made is not None:
            self._now[out] = made
        return made

    def _as_now(self, value: ir.Value) -> ir.Value:
        while value in self._now:
            value = self._now[value]
        return value


_SCATTERS = frozenset({"ScatterElements", "ScatterND"})

_FOLLOWED = _SCATTERS | {"Slice", "Gather", "Transpose", "Identity"}


@dataclass(frozen=True, slots=True)
class _Box:
    """Where a scatter writes.

    Attributes:
        starts: the first index along each axis.
        within: the axes along which it writes a part.
    """

    starts: list[int]
    within: list[int]


def _box(node: ir.Node) -> _Box | None:
    x, indices, updates = (input_of(node, k) for k in range(3))
    sizes, own = dims(x), dims(updates)
    if sizes is None or own is None or len(own) != len(sizes) or x.dtype == ir.DataType.STRING:
        return None
    starts = _starts(indices, own) if node.op_type == "ScatterND" else _starts_along(node, indices, own)
    before = _from_the_front(starts, sizes, own) if starts is not None else None
    if starts is None or before is None or node.attributes.get_string("reduction", "none") != "none":
        return None
    sides = zip(before, sizes, own, strict=True)
    whole = [k >= len(starts) or (start == 0 and size is not None and size == n) for k, (start, size, n) in enumerate(sides)]
    return _Box(before, [axis for axis, all_ in enumerate(whole) if not all_])


def _chosen(op: Builder, node: ir.Node) -> ir.Value | None:
    box = _box(node)
    if box is None:
        return None
    x, updates = input_of(node), input_of(node, 2)
    sizes, own = dims(x) or (), dims(updates) or ()
    after, inside = [], None
    for axis, (start, size, count) in enumerate(zip(box.starts, sizes, own, strict=True)):
        if axis not in box.within:
            after.append(0)
            continue
        if isinstance(size, int) and isinstance(count, int):
            after.append(size - start - count)
            among: Any = op.const(_between(size, start, count))
        else:
            rest = op.Sub(op.Sub(op.lengths((x, axis)), op.lengths((updates, axis))), op.const([start]))
            after.append(rest)
            ones = op.Expand(op.const(np.array(True)), op.lengths((updates, axis)))
            among = op.Pad(ones, op.Concat(op.const([start]), rest, axis=0), op.const(np.array(False)))
        others = [k - axis for k in range(axis + 1, len(sizes))]
        among = op.Unsqueeze(among, op.const(others)) if others else among
        inside = among if inside is None else op.And(inside, among)
    if inside is None:
        return updates
    if all(isinstance(part, int) for part in after):
        pads = op.const([*box.starts, *after])
    else:
        pads = op.Concat(op.const(box.starts), *(op.const([p]) if isinstance(p, int) else p for p in after), axis=0)
    return op.Where(inside, op.Pad(updates, pads), x)  # type: ignore[no-any-return]


def _from_the_front(starts: list[int], sizes: Sequence[Dim], counts: Sequence[Dim]) -> list[int] | None:
    """The place of the box along every axis; None if its end is counted from, and not known, or it lies beyond an end."""
    found = []
    for start, size, count in zip([*starts, *[0] * (len(sizes) - len(starts))], sizes, counts, strict=True):
        if start < 0:
            if not isinstance(size, int):
                return None
            start += size
        if start < 0 or (isinstance(size, int) and isinstance(count, int) and start + count > size):
            return None
        found.append(start)
    return found


def _between(size: int, start: int, count: int) -> np.ndarray[Any, Any]:
    places = np.arange(size)
    return (places >= start) & (places < start + count)


def _starts(indices: ir.Value, box: Sequence[Dim]) -> list[int] | None:
    """The first index along each axis; None unless index k of an element follows its place along axis k alone."""
    known, node = constant(indices), indices.producer()
    shape = dims(indices)
    if known is None and shape is not None and len(shape) == 2 and shape[-1] == 1:  # rows
        start = _start(_before_expand(indices, 1), 0, box[0], 1)
        return None if start is None else [start]
    if shape is None or not isinstance(shape[-1], int) or len(shape) != shape[-1] + 1:
        return None
    count = shape[-1]
    if known is not None:
        parts: list[Any] = [known[..., k] for k in range(count)]
    elif node is not None and node.op_type == "Concat" and node.attributes["axis"].as_int() in (-1, count):
        if len(node.inputs) != count:
            return None
        parts = [_before_expand(required(value), count) for value in node.inputs]
    else:
        return None
    found = [_start(part, axis, box[axis], count) for axis, part in enumerate(parts)]
    return None if any(start is None for start in found) else [start for start in found if start is not None]


def _starts_along(node: ir.Node, indices: ir.Value, box: Sequence[Dim]) -> list[int] | None:
    """The first index along the axis of a ScatterElements, 0 along the others; None unless neighbours follow it everywhere."""
    axis = node.attributes.get_int("axis", 0) % len(box)
    known, source = constant(indices), indices.producer()
    if known is None and source is not None and source.op_type == "Expand" and not source.domain:
        known = constant(source.inputs[0])
        if known is not None and known.size != 1:
            return None
    if known is None or not known.size or not isinstance(box[axis], int):
        return None
    start = _start(known if known.size > 1 else known.reshape((1,) * len(box)), axis, box[axis], len(box))
    return None if start is None else [start if k == axis else 0 for k in range(len(box))]


def _before_expand(value: ir.Value, rank: int) -> ir.Value | None:
    """What became one index of every element: the operand of its Unsqueeze and Expand."""
    node = value.producer()
    if node is None or node.op_type != "Unsqueeze" or (dims(value) or (None,))[-1] != 1:
        return None
    axes = constant(node.inputs[1])
    if axes is None or axes.reshape(-1).tolist() not in ([-1], [rank]):
        return None
    value = input_of(node)
    node = value.producer()
    return input_of(node) if node is not None and node.op_type == "Expand" else value


def _start(part: Any, axis: int, count: Dim, rank: int) -> int | None:
    """The first of an axis's indices, which lie side by side; None if they do not, or there are others than ``count``."""
    if part is None:
        return None
    known = part if isinstance(part, np.ndarray) else constant(part)
    if known is None:
        lengths = dims(part)
        if lengths is None or len(lengths) < rank - axis or len(lengths) > rank:
            return None
        own = len(lengths) - (rank - axis)
        if isinstance(lengths[own], int) and lengths[own] != count:
            return None  # one index for all
        return 0 if all(n == 1 for k, n in enumerate(lengths) if k != own) and _counts(part) else None
    known = known.reshape((1,) * (rank - known.ndim) + known.shape)
    if not known.size or not isinstance(count, int) or known.shape[axis] != count:
        return None
    start = int(known.reshape(-1)[0])
    places = np.arange(count).reshape([count if k == axis else 1 for k in range(rank)])
    if not np.array_equal(known, np.broadcast_to(start + places, known.shape)):
        return None
    return start if start >= 0 or start + count <= 0 else None  # not from the end on to the start


def _counts(value: ir.Value) -> bool:
    """Whether the elements are 0, 1, 2 …"""
    node = value.producer()
    while node is not None and node.domain == "":
        if node.op_type == "Range":
            return _is(node.inputs[0], 0) and _is(node.inputs[2], 1)
        if node.op_type == "NonZero":
            return _is_filled(input_of(node))
        first = node.op_type == "Slice" and _is(node.inputs[1], 0) and (len(node.inputs) < 5 or _is(node.inputs[4], 1))
        if node.op_type not in MOVES and not first and not (node.op_type == "Mul" and _is(node.inputs[1], 1)):
            return False
        node = input_of(node).producer()
    return False


def _is_filled(value: ir.Value) -> bool:
    """Whether the value is a row of equal numbers that are not 0."""
    node = value.producer()
    if node is None or node.op_type != "ConstantOfShape" or len(dims(value) or ()) != 1 or "value" not in node.attributes:
        return False
    return bool(node.attributes["value"].as_tensor().numpy().all())


def _is(value: ir.Value | None, number: int) -> bool:
    known = constant(value)
    return known is not None and known.size == 1 and known.reshape(-1)[0] == number
