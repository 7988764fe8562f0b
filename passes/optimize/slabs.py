"""Follows tensors to which parts of one axis are assigned, one after another.

    y1 = y with y1[:, 0] = a;   y2 = y1 with y2[:, 1] = b;   c = y2[:, 0]        y2 is Concat(a, b, y[:, 2:]), and c is a

A loop over the steps of a sequence writes its results like this, and each assignment would be a tensor of the whole size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of
from graphc.passes.optimize.identities import permutation, slice_of_everything

MOST = 4096
"""Parts of a tensor that are followed."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``start + count`` of ``Transpose(value, perm)``, along the axis of its :class:`Slabs`."""

    value: ir.Value
    perm: tuple[int, ...]
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Slabs:
    """A tensor, made of parts.

    Attributes:
        axis: along which the parts lie side by side.
        again: whether two or more of them were assigned.
    """

    axis: int
    parts: tuple[Part, ...]
    again: bool

    def between(self, begin: int, end: int) -> tuple[Part, ...]:
        """The parts of the elements from ``begin`` to ``end``."""
        found, place = [], 0
        for part in self.parts:
            low, high = max(begin - place, 0), min(end - place, part.count)
            if low < high:
                found.append(replace(part, start=part.start + low, count=high - low))
            place += part.count
        return tuple(found)

    def emit(self, op: Builder, parts: Sequence[Part]) -> ir.Value:
        """``parts`` side by side."""
        values = []
        for part in parts:
            moved = part.perm != tuple(range(len(part.perm)))
            value = op.Transpose(part.value, perm=list(part.perm)) if moved else part.value
            if (dims(value) or ())[self.axis] != part.count:
                value = op.Slice(value, [part.start], [part.start + part.count], [self.axis])
            values.append(value)
        return values[0] if len(values) == 1 else op.Concat(*values, axis=self.axis)


def assigned(held: Slabs | None, x: ir.Value, axis: int, start: int, update: ir.Value) -> Slabs | None:
    """``x``, which is ``held``, with ``update`` from ``start`` on along ``axis``; None: a size is not known."""
    sizes, own = dims(x), dims(update)
    if sizes is None or own is None:
        return None
    size, count, order = sizes[axis], own[axis], tuple(range(len(sizes)))
    if not isinstance(size, int) or not isinstance(count, int):
        return None
    again = held is not None and held.axis == axis and len(held.parts) < MOST
    base = held if held is not None and again else Slabs(axis, (Part(x, order, 0, size),), False)
    parts = (*base.between(0, start), Part(update, order, 0, count), *base.between(start + count, size))
    return Slabs(axis, parts, again)


def transposed(held: Slabs, node: ir.Node) -> Slabs | None:
    """What a Transpose of ``held`` is."""
    perm = permutation(node)
    if perm is None:
        return None
    parts = tuple(replace(part, perm=tuple(part.perm[k] for k in perm)) for part in held.parts)
    return Slabs(perm.index(held.axis), parts, held.again)


def read(held: Slabs, node: ir.Node) -> tuple[Part, bool] | None:
    """The one part that a Slice or Gather reads, and whether it reads it without the axis; None: it reads other elements."""
    size = sum(part.count for part in held.parts)
    if node.op_type == "Gather":
        at, axis = constant(input_of(node, 1)), node.attributes.get_int("axis", 0) % len(held.parts[0].perm)
        if at is None or at.size != 1 or at.ndim > 1 or axis != held.axis:
            return None
        begin = int(at.reshape(-1)[0])
        if not -size <= begin < size:
            return None
        begin %= size
        found = held.between(begin, begin + 1)
        return (found[0], at.ndim == 0)
    starts, ends, axes, steps = (constant(v) if v is not None else None for v in (*node.inputs, None, None)[1:5])
    if starts is None or ends is None or axes is None or not starts.size == ends.size == axes.size == 1:
        return None
    if (len(node.inputs) > 4 and (steps is None or steps[0] != 1)) or int(axes[0]) % len(held.parts[0].perm) != held.axis:
        return None
    begin, end, _ = slice(int(starts[0]), int(ends[0])).indices(size)
    found = held.between(begin, end)
    return (found[0], False) if len(found) == 1 else None


def same(op: Builder, node: ir.Node) -> bool:
    """Whether a Slice or an Identity passes on its operand as it is."""
    return node.op_type == "Identity" or (node.op_type == "Slice" and slice_of_everything(op, node) is not None)
