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

from graphc.ir.builder import Builder
from graphc.ir.facts import dims, rank
from graphc.passes.gradients.shape import lengths


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
    return op.cast_like(op.Squeeze(lengths(op, (x, axis)), [0]), like)


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
        size = lengths(op, (x, axis + 2))
        position, weight = _one_axis(op, c, size, kernel, padding)
        between = list(range(2, 2 + axis))
        index = op.Add(op.Mul(op.Unsqueeze(index, [-1]), size), op.Unsqueeze(position, between) if between else position)
        weights = op.Mul(op.Unsqueeze(weights, [-1]), op.Unsqueeze(weight, between)) if between else weight
    channels_last = op.Transpose(x, perm=[0, *range(2, rank(x)), 1])
    rows = op.Reshape(channels_last, op.Concat(op.const([-1]), lengths(op, (x, 1)), axis=0))
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
