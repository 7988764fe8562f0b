"""Ops that only move elements, as maps from a result's index to an operand's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.fusion.indexing import ZERO, Linear, Map, flatten, unflatten
from graphc.ir.facts import constant, shape_of


@dataclass(frozen=True, slots=True)
class Piece:
    """The source of a result's element.

    Attributes:
        operand: index of the node's input; None: the constant ``fill``.
        index: the element of that input.
        when: (linear, low, high): the piece applies if low ≤ linear < high for each; later pieces take the rest.
        fill: operand (an input's index, or None for zero) for elements outside.
    """

    operand: int | None
    index: Map = ()
    when: tuple[tuple[Linear, int, int], ...] = ()
    fill: int | None = None


def integers(node: ir.Node, index: int) -> list[int] | None:
    """The constant integers of an operand; None if they are not known or the operand is omitted."""
    value = node.inputs[index] if index < len(node.inputs) else None
    found = constant(value)
    return None if found is None else [int(v) for v in found.reshape(-1)]


def broadcast(index: Map, shape: Sequence[int]) -> Map:
    """The index in an operand of ``shape`` that is broadcast to the element at ``index``."""
    tail = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else part for part, size in zip(tail, shape, strict=True))


def identity(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    return [Piece(0, index)]


def reshape(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    return [Piece(0, unflatten(flatten(index, shape_of(node.outputs[0])), shape_of(node.inputs[0])))]


def expand(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    return [Piece(0, broadcast(index, shape_of(node.inputs[0])))]


def transpose(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    order = node.attributes["perm"].as_ints() if "perm" in node.attributes else list(reversed(range(len(index))))
    source: list[Linear] = [Linear()] * len(index)
    for part, axis in zip(index, order, strict=True):
        source[axis] = part
    return [Piece(0, tuple(source))]


def sliced(node: ir.Node, output: int, index: Map) -> Sequence[Piece] | None:
    shape = shape_of(node.inputs[0])
    starts, steps = integers(node, 1), integers(node, 4)
    axes = integers(node, 3)
    if starts is None or (len(node.inputs) > 4 and node.inputs[4] is not None and steps is None):
        return None
    axes = list(range(len(starts))) if axes is None else axes
    source = list(index)
    for start, axis, step in zip(starts, axes, steps or [1] * len(starts), strict=True):
        at = axis % len(shape)
        size = shape[at]
        begin = max(start + size, 0) if start < 0 else start
        begin = min(begin, size - 1 if step < 0 else size)
        source[at] = index[at] * step + begin
    return [Piece(0, tuple(source))]


def split(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    axis = node.attributes.get_int("axis", 0) % len(index)
    before = sum(shape_of(out)[axis] for out in node.outputs[:output])
    return [Piece(0, (*index[:axis], index[axis] + before, *index[axis + 1 :]))]


def concat(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    axis = node.attributes.get_int("axis", 0) % len(index)
    pieces, start = [], 0
    for k, value in enumerate(node.inputs):
        size = shape_of(value)[axis]
        if size:
            inside = (*index[:axis], index[axis] + -start, *index[axis + 1 :])
            pieces.append(Piece(k, inside, ((index[axis], start, start + size),)))
        start += size
    return pieces


def pad(node: ir.Node, output: int, index: Map) -> Sequence[Piece] | None:
    pads, axes = integers(node, 1), integers(node, 3)
    if pads is None or node.attributes.get_string("mode", "constant") != "constant":
        return None
    if len(node.inputs) > 3 and node.inputs[3] is not None and axes is None:
        return None
    shape = shape_of(node.inputs[0])
    axes = list(range(len(shape))) if axes is None else [a % len(shape) for a in axes]
    source, when = list(index), []
    for k, axis in enumerate(axes):
        source[axis] = index[axis] + -pads[k]
        when.append((source[axis], 0, shape[axis]))
        if shape[axis] == 1:
            source[axis] = Linear()  # the only index inside
    fill = 2 if len(node.inputs) > 2 and node.inputs[2] is not None else None
    return [Piece(0, tuple(source), tuple(when)), Piece(None, fill=fill)]


def tile(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    return [Piece(0, tuple(part % size for part, size in zip(index, shape_of(node.inputs[0]), strict=True)))]


def depth_to_space(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    size = node.attributes["blocksize"].as_int()
    batch, channel, row, column = index
    channels = shape_of(node.outputs[0])[1]
    inner = (row % size) * size + column % size
    if node.attributes.get_string("mode", "DCR") == "DCR":
        source = inner * channels + channel
    else:
        source = channel * (size * size) + inner
    return [Piece(0, (batch, source, row // size, column // size))]


def space_to_depth(node: ir.Node, output: int, index: Map) -> Sequence[Piece]:
    size = node.attributes["blocksize"].as_int()
    batch, channel, row, column = index
    channels = shape_of(node.inputs[0])[1]
    inner = channel // channels
    return [Piece(0, (batch, channel % channels, row * size + inner // size, column * size + inner % size))]
