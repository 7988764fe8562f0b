"""GridSample and DeformConv in the precision of their operands, written apart from graphc's own formulas, which it checks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from graphc.device import Array

_CUBIC = -0.75


def _keys(t: Array) -> Array:
    """The cubic convolution kernel at distance t."""
    near = ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1
    far = ((_CUBIC * t - 5 * _CUBIC) * t + 8 * _CUBIC) * t - 4 * _CUBIC
    return np.where(t <= 1, near, far)


_MODES: dict[str, tuple[Sequence[int], Callable[[Array], Array]]] = {
    "nearest": ((0,), np.ones_like),
    "linear": ((0, 1), lambda t: 1 - t),
    "cubic": ((-1, 0, 1, 2), _keys),
}
"""Mode → taps relative to the floor of a place, and their weight at a distance from it."""


def _reflect(place: Array, low: float, high: float) -> Array:
    span = high - low
    if span == 0:
        return np.full_like(place, low)
    phase = np.mod(place - low, 2 * span)
    return np.asarray(low + np.minimum(phase, 2 * span - phase))


def read(image: Array, places: Sequence[Array], mode: str, padding: str, corners: bool) -> Array:
    """C × places: the image (C × spatial) between its elements, at one coordinate per axis."""
    offsets, kernel = _MODES[mode]
    axes = []
    for place, size in zip(places, image.shape[1:], strict=True):
        low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
        c = np.rint(place) if mode == "nearest" else place
        outside = (c < low) | (c > high)
        if padding == "border":
            c = np.where(outside, np.clip(c, 0, size - 1), c)
        elif padding == "reflection":
            c = np.where(outside, _reflect(c, low, high), c)
        floor = np.rint(c) if mode == "nearest" else np.floor(c)
        taps = []
        for offset in offsets:
            at = floor + offset
            weight = kernel(np.abs(c - at))
            if padding == "zeros":
                weight = np.where((at >= 0) & (at < size), weight, 0)
            elif padding == "reflection":
                at = np.trunc(_reflect(at, low, high))
            taps.append((np.clip(at, 0, size - 1).astype(np.int64), weight))
        axes.append(taps)
    total = np.zeros((image.shape[0], *places[0].shape), dtype=image.dtype)
    for combination in itertools.product(*axes):
        weight = np.prod([w for _, w in combination], axis=0)
        total += (image[(slice(None), *(index for index, _ in combination))] * weight).astype(image.dtype)
    return total


class GridSample(OpRun):
    """y[n, c, o] = x[n, c] read at the place grid[n, o], whose last axis counts spatial axes from the end"""

    op_domain = ""

    def _run(
        self,
        X: Array,
        grid: Array,
        align_corners: int | None = None,
        mode: str | None = None,
        padding_mode: str | None = None,
    ) -> tuple[Array, ...]:
        sizes = X.shape[2:]
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode or "linear", mode or "linear")
        result = np.empty((*X.shape[:2], *grid.shape[1:-1]), dtype=X.dtype)
        for image, given, out in zip(X, grid, result, strict=True):
            places = []
            for axis, size in enumerate(sizes):
                g = given[..., len(sizes) - 1 - axis]
                places.append((g + 1) * (size - 1) / 2 if align_corners else ((g + 1) * size - 1) / 2)
            out[...] = read(image, places, mode, padding_mode or "zeros", bool(align_corners))
        return (result,)


_PLACES = (("dilations", 1), ("strides", 1), ("pads", 0))
"""Attribute of a convolution → its default for every dimension; pads at the end do not matter here."""


class DeformConv(OpRun):
    """A convolution whose taps are moved by offsets and weighted by a mask"""

    op_domain = ""

    def _run(
        self,
        X: Array,
        W: Array,
        offset: Array,
        B: Array | None = None,
        mask: Array | None = None,
        **conv: Any,
    ) -> tuple[Array, ...]:
        n, out, kernel = X.ndim - 2, offset.shape[2:], W.shape[2:]
        count, group, parts = math.prod(kernel), conv.get("group") or 1, conv.get("offset_group") or 1
        dilations, strides, pads = (
            conv.get(k) or d for k, d in (("dilations", [1] * n), ("strides", [1] * n), ("pads", [0] * n))
        )
        moves = offset.reshape(len(X), parts, count, n, *out)
        weights = np.ones((len(X), parts, count, *out), X.dtype) if mask is None else mask.reshape(len(X), parts, count, *out)
        steps = np.indices(out)
        result = np.zeros((len(X), W.shape[0], *out), dtype=X.dtype)
        for sample in range(len(X)):
            columns = []
            for part, channels in enumerate(np.split(X[sample], parts)):
                taps = []
                for t, tap in enumerate(np.ndindex(*kernel)):
                    regular = [steps[k] * strides[k] + tap[k] * dilations[k] - pads[k] for k in range(n)]
                    places = [r + moves[sample, part, t, k] for k, r in enumerate(regular)]
                    taps.append(read(channels, places, "linear", "zeros", True) * weights[sample, part, t])
                columns.append(np.stack(taps, axis=1))
            grouped = np.concatenate(columns).reshape(group, -1, *out)
            filters = W.reshape(group, W.shape[0] // group, -1)
            result[sample] = np.einsum("gmk,gk...->gm...", filters, grouped).reshape(result[sample].shape)
        return (result if B is None else result + B.reshape(-1, *[1] * n),)
