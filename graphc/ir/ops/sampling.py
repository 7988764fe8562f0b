"""Samples images between their elements: the formula behind GridSample, DeformConv and RoiAlign.

    y[b, q, c] = Σₖ w[b, q, k] · x[image of b, c, k-th tap of place (b, q)]

Taps and weights come from one coordinate per axis. Autodiff differentiates the nodes emitted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, input_of, rank
from graphc.ir.ops.convolution import Window, spatial


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Interpolation along one axis: taps at ``floor(c) + offsets``, whose weights are polynomials in r = c - floor(c).

    ``polynomials`` has a row per power of r, from 0 on, and a column per tap.
    """

    offsets: tuple[int, ...]
    polynomials: tuple[tuple[float, ...], ...]


KERNELS: Mapping[str, Interpolation] = {
    "nearest": Interpolation((0,), ((1.0,),)),  # for coordinates that are rounded already
    "linear": Interpolation((0, 1), ((1.0, 0.0), (-1.0, 1.0))),
    "cubic": Interpolation(  # Keys, Cubic convolution interpolation (1981), with a = -3/4
        (-1, 0, 1, 2), ((0.0, 1.0, 0.0, 0.0), (-0.75, 0.0, 0.75, 0.0), (1.5, -2.25, 1.5, -0.75), (-0.75, 1.25, -1.25, 0.75))
    ),
}


def extent(op: Builder, x: ir.Value, axis: int, like: ir.Value) -> Any:
    """The size of an axis as a scalar of ``like``'s type."""
    known = (dims(x) or {axis: None})[axis]
    if isinstance(known, int):
        return op.scalar(known, like)
    return op.cast_like(op.Squeeze(op.lengths((x, axis)), [0]), like)


def interpolate(op: Builder, x: ir.Value, images: Any, coordinates: Sequence[Any], kernel: Interpolation, padding: str) -> Any:
    """B × Q × C: the image x (N × C × spatial) at places given by one B × Q tensor per axis, in units of elements.

    Args:
        images: int64 of length B, the sample of x for each row of places.
        padding: value of taps outside the image: ``zeros``, ``border``, ``reflection`` or ``reflection at corners``.
    """
    rows, weights = taps(op, x, images, coordinates, kernel, padding)
    return op.Squeeze(op.MatMul(op.Unsqueeze(weights, [2]), rows), [2])


def taps(
    op: Builder, x: ir.Value, images: Any, coordinates: Sequence[Any], kernel: Interpolation, padding: str
) -> tuple[Any, Any]:
    """Values of the taps (B × Q × K × C) and their weights (B × Q × K)."""
    index: Any = op.Unsqueeze(images, [1])
    weights: Any = None
    for axis, c in enumerate(coordinates):
        size = op.lengths((x, axis + 2))
        position, weight = _one_axis(op, c, size, kernel, padding)
        between = list(range(2, 2 + axis))
        index = op.Add(op.Mul(op.Unsqueeze(index, [-1]), size), op.Unsqueeze(position, between) if between else position)
        weights = op.Mul(op.Unsqueeze(weights, [-1]), op.Unsqueeze(weight, between)) if between else weight
    channels_last = op.Transpose(x, perm=[0, *range(2, rank(x)), 1])
    rows = op.Reshape(channels_last, op.Concat(op.const([-1]), op.lengths((x, 1)), axis=0))
    return op.Gather(rows, op.Reshape(index, [0, 0, -1])), op.Reshape(weights, [0, 0, -1])


def _one_axis(op: Builder, c: Any, size: Any, kernel: Interpolation, padding: str) -> tuple[Any, Any]:
    """Positions inside the image and weights of the taps along one axis; taps are a new last axis."""
    floor = op.Floor(c)
    r = op.Unsqueeze(op.Sub(c, floor), [-1])
    weight: Any = op.ones_like(r)
    if len(kernel.polynomials) > 1:
        rows = [op.cast_like(op.const(np.array(row)), c) for row in kernel.polynomials]
        weight = rows[-1]
        for row in reversed(rows[:-1]):
            weight = op.Add(op.Mul(weight, r), row)
    position = op.Add(op.Cast(op.Unsqueeze(floor, [-1]), to=int(ir.DataType.INT64)), list(kernel.offsets))
    last = op.Sub(size, [1])
    if padding == "zeros":
        inside = op.And(op.GreaterOrEqual(position, [0]), op.LessOrEqual(position, last))
        weight = op.Where(inside, weight, op.scalar(0, c))
    if padding.startswith("reflection"):
        corners = padding == "reflection at corners"
        period = op.Max(op.Mul(last, [2]), [1]) if corners else op.Mul(size, [2])
        phase = op.Mod(position, period)
        return op.Min(phase, op.Sub(period, phase if corners else op.Add(phase, [1]))), weight
    return op.Max(op.Min(position, last), [0]), weight


def grid_sample(op: Builder, node: ir.Node) -> Any:
    """The output of a GridSample."""
    x, grid = input_of(node, 0), input_of(node, 1)
    mode = node.attributes.get_string("mode", "linear")
    padding = node.attributes.get_string("padding_mode", "zeros")
    corners = bool(node.attributes.get_int("align_corners", 0))
    count = rank(x) - 2
    if mode not in KERNELS:
        raise UnsupportedOpError(f"GridSample knows the modes {', '.join(KERNELS)}, not {mode!r}: {describe(node)}")
    coordinates = []
    for axis in range(count):
        given = op.Flatten(op.Gather(grid, np.int64(count - 1 - axis), axis=count + 1), axis=1)
        size = extent(op, x, axis + 2, grid)
        if corners:
            c = op.Mul(op.Add(given, 1.0), op.Mul(op.Sub(size, 1.0), 0.5))
        else:
            c = op.Sub(op.Mul(op.Add(given, 1.0), op.Mul(size, 0.5)), 0.5)
        coordinates.append(_bring_inside(op, op.Round(c) if mode == "nearest" else c, size, padding, corners))
    images = op.Range(np.int64(0), op.Squeeze(op.lengths((x, 0)), [0]), np.int64(1))
    if padding == "reflection" and corners:
        padding = "reflection at corners"
    sampled = interpolate(op, x, images, coordinates, KERNELS[mode], padding)  # N, Q, C
    return op.reshape_like(op.Transpose(sampled, perm=[0, 2, 1]), node.outputs[0])


def _bring_inside(op: Builder, c: Any, size: Any, padding: str, corners: bool) -> Any:
    """Move coordinates beyond the border (half an element outside, unless corners are aligned) as padding requires."""
    if padding == "zeros":
        return c
    last = op.Sub(size, 1.0)
    low, high = (op.scalar(0, c), last) if corners else (op.scalar(-0.5, c), op.Sub(size, 0.5))
    outside = op.Or(op.Less(c, low), op.Greater(c, high))
    if padding == "border":
        return op.Where(outside, op.Max(op.Min(c, last), 0.0), c)
    span = op.Sub(high, low)
    phase = op.Mod(op.Abs(op.Sub(c, low)), op.Max(op.Mul(span, 2.0), 1.0), fmod=1)
    mirrored = op.Sub(high, op.Abs(op.Sub(phase, span)))
    return op.Where(outside, mirrored, c)


def deform_conv(op: Builder, node: ir.Node) -> Any:
    """The output of a DeformConv."""
    x, w, offset = (input_of(node, k) for k in range(3))
    bias, mask = (*node.inputs, None, None)[3:5]
    n = rank(x) - 2
    group, parts = node.attributes.get_int("group", 1), node.attributes.get_int("offset_group", 1)
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    window = Window.of(attributes, spatial(x.shape), spatial(w.shape))
    channels = (dims(x) or (None, None))[1]
    if not isinstance(channels, int) or window.begin is None:
        raise UnsupportedOpError(f"DeformConv needs static channels and padding: {describe(node)}")
    count = int(np.prod(window.kernel))
    out = [(offset, 2 + k) for k in range(n)]
    moves = op.Reshape(offset, op.lengths((offset, 0), parts, count, n, *out))
    coordinates = []
    for axis in range(n):
        tap = np.indices(window.kernel)[axis].reshape(1, 1, -1, *[1] * n) * window.dilations[axis] - window.begin[axis]
        counted = op.Range(np.int64(0), op.Squeeze(op.lengths(out[axis]), [0]), np.int64(1))
        steps = op.Mul(counted, [window.strides[axis]])
        behind = list(range(1, n - axis))
        regular = op.cast_like(op.Add(tap.astype(np.int64), op.Unsqueeze(steps, behind) if behind else steps), x)
        place = op.Add(op.Gather(moves, np.int64(axis), axis=3), regular)
        coordinates.append(op.Flatten(op.Reshape(place, op.lengths(-1, count, *out)), axis=1))
    images = op.Reshape(x, op.lengths(-1, channels // parts, *((x, 2 + k) for k in range(n))))
    every = op.Range(np.int64(0), op.Squeeze(op.lengths((images, 0)), [0]), np.int64(1))
    read = interpolate(op, images, every, coordinates, KERNELS["linear"], "zeros")  # N·parts, count·out, C/parts
    if mask is not None:
        read = op.Mul(read, op.Reshape(mask, op.Concat(op.Shape(read, end=2), op.const([1]), axis=0)))
    columns = op.Reshape(op.Transpose(read, perm=[0, 2, 1]), op.lengths((x, 0), group, channels // group * count, -1))
    y = op.reshape_like(op.MatMul(op.Reshape(w, [group, -1, channels // group * count]), columns), node.outputs[0])
    return y if bias is None else op.Add(y, op.Unsqueeze(bias, list(range(1, n + 1))))
