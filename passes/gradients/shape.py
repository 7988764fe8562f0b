"""Gradients of ops that move, copy or drop elements along whole axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of, rank, required

zero_gradient("Shape", "Size", "Constant", "ConstantOfShape", "EyeLike", "graphc::StopGradient", origin=__name__)

_END, _FAR = np.iinfo(np.int64).max, np.iinfo(np.int32).max
"""Indices beyond any axis: as far as there are, and the least that exporters write."""


def scatter_back(op: Builder, x: ir.Value, dy: ir.Value, pick: Callable[[Any], Any]) -> Any:
    """Gradient of an op ``pick`` that only copies elements of x: runs it on their positions and adds dy there."""
    positions = op.Reshape(op.Range(np.int64(0), op.Size(x), np.int64(1)), op.shape(x))
    flat = op.Reshape(pick(positions), [-1])
    zeros = op.Expand(op.scalar(0, x), op.Reshape(op.Size(x), [1]))
    return op.Reshape(op.ScatterElements(zeros, flat, op.Reshape(dy, [-1]), reduction="add"), op.shape(x))


@gradient("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x in another shape;  ∂x = dy in the shape of x"""
    return op.reshape_like(dy, *operands(node, 1))


@gradient("graphc::MaskGradient")
def mask_gradient(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x;  ∂x = dy, and 0 where hidden"""
    return op.Where(input_of(node, 1), op.scalar(0, dy), dy), None


@gradient("Transpose")
def transpose(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with permuted axes;  ∂x = dy with the inverse permutation"""
    perm = node.attributes.get_ints("perm", None)
    return op.Transpose(dy, perm=[int(k) for k in np.argsort(perm)] if perm is not None else None)


@gradient("Expand")
def expand(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x broadcast;  ∂x = dy, which the engine sums"""
    return dy


@gradient("graphc::ReduceSumTo")
def reduce_sum_to(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x summed to a smaller shape;  ∂x = dy broadcast"""
    return op.expand_like(dy, *operands(node, 1))


@gradient("Range")
def range_(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """yᵢ = start + i·delta;  ∂start = Σ dy,  ∂delta = Σ i·dy; the limit only says how many there are"""

    def ddelta() -> Any:
        numbers = op.Range(np.int64(0), op.Squeeze(op.lengths((dy, 0)), [0]), np.int64(1))
        return op.ReduceSum(op.Mul(dy, op.cast_like(numbers, dy)), keepdims=0)

    return lambda: op.ReduceSum(dy, keepdims=0), None, ddelta


@gradient("Tile")
def tile(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x repeated r times along each axis;  ∂x = dy summed over the repeats"""
    x, repeats = operands(node, 2)
    known = constant(repeats)
    if known is None:
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape(x), [1]), axis=1)
        return op.ReduceSum(op.Reshape(dy, op.Reshape(pairs, [-1])), list(range(0, 2 * rank(x), 2)), keepdims=0)
    parts: list[int | tuple[ir.Value, int]] = []
    axes = []
    for axis, count in enumerate(known):
        if count != 1:
            axes.append(len(parts))
            parts.append(int(count))
        parts.append((x, axis))
    return op.ReduceSum(op.Reshape(dy, op.lengths(*parts)), axes, keepdims=0) if axes else dy


@gradient("Concat")
def concat(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = [a, b, …];  (∂a, ∂b, …) = dy, split"""
    inputs = [v for v in node.inputs if v is not None]
    if len(inputs) == 1:
        return dy
    axis = node.attributes.get_int("axis", 0) % rank(dy)

    @functools.cache
    def parts() -> Any:
        return op.Split(dy, op.lengths(*((v, axis) for v in inputs)), axis=axis, _outputs=len(inputs))

    return tuple((lambda k=k: parts()[k]) for k in range(len(inputs)))


@gradient("Split")
def split(op: Builder, node: ir.Node, *dys: ir.Value | None) -> Any:
    """(a, b, …) = x;  ∂x = [da, db, …], with zeros for the parts that have no gradient"""
    parts = [op.zeros_like(out) if dy is None else dy for out, dy in zip(node.outputs, dys, strict=True)]
    return op.Concat(*parts, axis=node.attributes.get_int("axis", 0)) if len(parts) > 1 else parts[0]


@gradient("Slice")
def slice_(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[start:end:step];  ∂x = dy amid zeros"""
    x = input_of(node)
    starts, ends, axes, steps = (*node.inputs, None, None)[1:5]
    first, named, strides = constant(starts), constant(axes), constant(steps)

    def scattered() -> Any:
        return scatter_back(op, x, dy, lambda positions: op.Slice(positions, starts, ends, axes, steps))

    count = named.size if named is not None else None if axes is not None else _length(required(starts), 0)
    if not isinstance(count, int) or (steps is not None and strides is None):
        return scattered()
    where = [int(a) % rank(x) for a in (named.reshape(-1) if named is not None else range(count))]
    if first is None:
        return scattered() if strides is not None and (strides != 1).any() else _surround_from(op, x, dy, where, starts)
    begins = [int(s) for s in first.reshape(-1)]
    by = [1] * len(where) if strides is None else [int(s) for s in strides.reshape(-1)]
    turned = [k for k, axis in enumerate(where) if by[k] == -1 and _is_whole(begins[k], ends, k)]
    if turned:
        count = len(turned)
        dy = op.Slice(dy, [_END] * count, [-_END] * count, [where[k] for k in turned], [-1] * count)
        where, begins, by = ([n for k, n in enumerate(found) if k not in turned] for found in (where, begins, by))
        if not where:
            return dy
    lengths = [(_length(x, axis), _length(dy, axis)) for axis in where]
    if any(step != 1 and not all(isinstance(d, int) for d in pair) for step, pair in zip(by, lengths, strict=True)):
        return scattered()
    for k, (axis, step) in enumerate(zip(where, by, strict=True)):
        if step == 1:
            continue
        full, taken = lengths[k]
        begins[k] = min(max(begins[k] + full if begins[k] < 0 else begins[k], 0), full - (step < 0))
        if step < 0:
            dy = op.Slice(dy, [_END], [-_END], [axis], [-1])
            begins[k] += (taken - 1) * step
        if abs(step) > 1:
            dy = _with_gaps(op, dy, axis, taken, abs(step))
    return _surround(op, x, dy, where, begins)


def _is_whole(start: int, ends: ir.Value | None, k: int) -> bool:
    """Whether a Slice with steps of -1 takes every element of an axis, whose length may be unknown."""
    known = constant(ends)
    return (start == -1 or start >= _FAR) and known is not None and int(known.reshape(-1)[k]) <= -_FAR


def _length(value: ir.Value, axis: int) -> Any:
    """The length of an axis: a number, the name of a symbol, or None where it has none."""
    known = dims(value)
    return None if known is None else known[axis]


def _with_gaps(op: Builder, dy: ir.Value, axis: int, count: int, step: int) -> Any:
    """``step`` - 1 zeros between the ``count`` elements along an axis."""
    apart = op.Pad(op.Unsqueeze(dy, [axis + 1]), [0, step - 1], None, [axis + 1])
    sizes = [count * step if k == axis else (dy, k) for k in range(rank(dy))]
    return op.Slice(op.Reshape(apart, op.lengths(*sizes)), [0], [max(count * step - step + 1, 0)], [axis])


def _surround(op: Builder, x: ir.Value, dy: ir.Value, axes: Sequence[int], starts: Sequence[int]) -> Any:
    """Zeros of the shape of x with dy in them, from ``starts`` on; negative starts count from the end."""
    befores: list[Any] = []
    afters: list[Any] = []
    for axis, start in zip(axes, starts, strict=True):
        full, taken = _length(x, axis), _length(dy, axis)
        if isinstance(full, int) and isinstance(taken, int):
            before = min(max(start + full if start < 0 else start, 0), full)
            befores.append(op.const([before]))
            afters.append(op.const([full - before - taken]))
            continue
        size = op.lengths((x, axis))
        before_value = op.const([start]) if start >= 0 else op.Max(op.Add(size, op.const([start])), op.const([0]))
        befores.append(before_value)
        rest = op.Sub(size, op.lengths((dy, axis)))
        afters.append(rest if start == 0 else op.Sub(rest, before_value))
    pieces = [*befores, *afters]
    known = [constant(p) for p in pieces]
    pads = op.Concat(*pieces, axis=0)
    if all(k is not None for k in known):
        pads = op.const(np.concatenate([k for k in known if k is not None]))
    return pad_to(op, x, dy, pads, axes)


def _surround_from(op: Builder, x: ir.Value, dy: ir.Value, axes: Sequence[int], starts: Any) -> Any:
    """As :func:`_surround`, of starts that a run computes; a plan for given sizes often knows them."""
    sizes, zero = op.lengths(*((x, axis) for axis in axes)), op.const([0])
    starts = op.Cast(starts, to=int(ir.DataType.INT64))
    before = op.Max(op.Min(op.Where(op.Less(starts, zero), op.Add(starts, sizes), starts), sizes), zero)
    after = op.Sub(op.Sub(sizes, before), op.lengths(*((dy, axis) for axis in axes)))
    return pad_to(op, x, dy, op.Concat(before, after, axis=0), axes)


def pad_to(op: Builder, x: ir.Value, dy: ir.Value, pads: Any, axes: Sequence[int]) -> Any:
    """dy surrounded by zeros, in the shape of x; for symbolic sizes, whose shape inference of ``Pad`` could not find."""
    padded = op.Pad(dy, pads, None, op.const(list(axes)))
    padded.shape = ir.Shape(x.shape.dims) if x.shape is not None else None
    return padded


@gradient("Pad")
def pad(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with a margin;  ∂x = dy without it; a reflected or repeated margin is added where it was copied from"""
    x, pads = input_of(node, 0), input_of(node, 1)
    fill, axes = (*node.inputs, None, None)[2:4]
    mode = node.attributes.get_string("mode", "constant")
    if mode != "constant":
        margins = _margins(x, pads, axes, mode)
        if margins is None:
            return scatter_back(op, x, dy, lambda positions: op.Pad(positions, pads, None, axes, mode=mode))
        for axis, (size, before, after) in margins.items():
            dy = _folded(op, dy, axis, size, before, after, mode)
        return dy

    @functools.cache
    def inner() -> Any:
        known = constant(pads)
        if known is None or (known < 0).any():
            return op.Pad(dy, op.Neg(pads), None, axes)
        before, after = np.split(known.reshape(-1), 2)
        return op.Slice(dy, before, np.where(after > 0, -after, _END), axes)

    def filled() -> Any:
        return op.Reshape(op.Sub(op.ReduceSum(dy, keepdims=0), op.ReduceSum(inner(), keepdims=0)), op.shape(required(fill)))

    return inner, None, filled


def _margins(x: ir.Value, pads: ir.Value, axes: ir.Value | None, mode: str) -> dict[int, tuple[int, int, int]] | None:
    """Size and margins of each axis that has any; None where they are unknown, or a side copies an element twice."""
    sizes, widths = dims(x), constant(pads)
    chosen = constant(axes) if axes is not None else np.arange(len(sizes or ()))
    if sizes is None or widths is None or chosen is None:
        return None
    named = [int(a) % len(sizes) for a in chosen.reshape(-1)]
    before, after = (half.astype(int).tolist() for half in np.split(widths.reshape(-1), 2))
    found: dict[int, tuple[int, int, int]] = {}
    for axis, first, last in zip(named, before, after, strict=True):
        size = sizes[axis]
        if first == last == 0:
            continue
        most = {"reflect": size - 1, "wrap": size}.get(mode, first + last) if isinstance(size, int) else -1
        if not isinstance(size, int) or min(first, last) < 0 or max(first, last) > most:
            return None
        found[axis] = size, first, last
    return found


def _folded(op: Builder, dy: Any, axis: int, size: int, before: int, after: int, mode: str) -> Any:
    """dy without the margins of one axis, which are added where they were copied from."""

    def part(first: int, count: int, step: int = 1) -> Any:
        if step == 1:
            return op.Slice(dy, [first], [first + count], [axis])
        return op.Slice(dy, [first + count - 1], [first - 1 if first else -_END], [axis], [-1])

    def onto(margin: Any, place: int, count: int) -> Any:
        return op.Pad(margin, op.const([place, size - place - count]), None, op.const([axis]))

    total = part(before, size)
    for first, count, edge in ((0, before, 0), (before + size, after, size - 1)):
        if not count:
            continue
        if mode == "edge":
            added = onto(op.ReduceSum(part(first, count), [axis]), edge, 1)
        elif mode == "reflect":
            added = onto(part(first, count, -1), size - 1 - count if edge else 1, count)
        else:
            added = onto(part(first, count), 0 if first else size - count, count)
        total = op.Add(total, added)
    return total


@gradient("SpaceToDepth")
def space_to_depth(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = blocks of x as channels;  ∂x = channels of dy as blocks"""
    return op.DepthToSpace(dy, blocksize=node.attributes["blocksize"].as_int())


@gradient("DepthToSpace")
def depth_to_space(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = channels of x as blocks;  ∂x = blocks of dy as channels, in the order that ``mode`` says"""
    (x,), size = operands(node, 1), node.attributes["blocksize"].as_int()
    if node.attributes.get_string("mode", "DCR") == "DCR":
        return op.SpaceToDepth(dy, blocksize=size)
    blocks = op.Reshape(dy, op.lengths((dy, 0), (dy, 1), (x, 2), size, (x, 3), size))
    return op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x)


@gradient("Trilu")
def trilu(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = a triangle of x, else 0;  ∂x = the same triangle of dy"""
    return op.Trilu(dy, *node.inputs[1:], upper=node.attributes.get_int("upper", 1))


@gradient("ReverseSequence")
def reverse_sequence(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with the front of each sequence reversed;  ∂x = dy, reversed again"""
    return op.ReverseSequence(dy, node.inputs[1], **node.attributes)


@gradient("Compress")
def compress(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = the slices of x that are selected;  ∂x = dy at the places they came from"""
    (x,) = operands(node, 1)
    return scatter_back(op, x, dy, lambda positions: op.Compress(positions, node.inputs[1], **node.attributes))
