"""Resize by lines and curves, and its gradient: each element of a result is a sum of few neighbours along each axis.

    along the last axis:   a vector of neighbouring results is a product of what they read and a band of weights
    along another axis:    a row is a sum of rows

onnxruntime makes lines longer one element at a time, and the gradient as products with whole matrices has work and memory of
both lengths multiplied. A number that is not finite makes NaN of up to a vector of results around those that read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.vectors.averaging import sum_of_rows
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.backends.onnxruntime.vectors.windows import banded_product
from graphc.device import Array, Run, in_order
from graphc.ir.facts import required, shape_of_result, static_dims
from graphc.ir.ops.resampling import (
    RESIZE,
    ResizedAxis,
    interpolation_taps,
    precision_of,
    resized_axes,
    static_axes,
)

ROWS = 8
"""Rows of which the last axis is resized at once: as many sums as hide the latency of an addition."""

GRAIN = 1 << 14
"""Elements of a result worth handing to another thread."""


@dataclass(frozen=True, slots=True)
class WeightedSums:
    """Results that are weighted sums of few of ``length`` elements each.

    Attributes:
        places: int64 (results, most), the elements of each, in order and then rubbish.
        weights: float32 (results, most), 0 for rubbish.
        counts: int64 (results,).
    """

    length: int
    places: Array
    weights: Array
    counts: Array

    @classmethod
    def of(cls, results: Array, places: Array, weights: Array, count: int, length: int) -> WeightedSums:
        """``count`` sums, as a list of (result, element, weight); an element may be there twice."""
        some = weights != 0
        flat, which = np.unique(results[some] * length + places[some], return_inverse=True)
        added = np.bincount(which, weights[some], len(flat))
        owner, element = flat // length, flat % length
        counts = np.bincount(owner, minlength=count)
        most = max(1, int(counts.max(initial=0)))
        at = owner, np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = cls(length, np.zeros((count, most), np.int64), np.zeros((count, most), np.float32), counts.astype(np.int64))
        found.places[at], found.weights[at] = element, added
        return found


def _changes(node: ir.Node, shape: ir.Shape | None, y: ir.Value) -> dict[int, ResizedAxis] | None:
    """The axes that a Resize from ``shape`` to y changes; None where facts are missing, and where a fused kernel is better.

    Such kernels repeat elements, or pick them, and add up what was repeated.
    """
    attributes = _attributes(node)
    size = None if shape is None else [d for d in shape.dims if isinstance(d, int)]
    if not size or len(size) != len(shape or ()) or 0 in size or static_dims(y) is None:
        return None
    roi, scales, sizes = (node.inputs[k] if k < len(node.inputs) else None for k in _operands(node))
    facts = static_axes(shape, y, roi, scales, sizes, attributes)
    if facts is None or attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        return None
    picks = attributes["mode"] == "nearest"
    if picks and (node.op_type == "Resize" or all(axis.after % axis.before == 0 for axis in facts)):
        return None
    return dict(zip(resized_axes(y, attributes), facts, strict=True))


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: node.attributes[name].value if name in node.attributes else value for name, value in RESIZE.items()}


def _operands(node: ir.Node) -> range:
    """Of roi, scales and sizes."""
    return range(2, 5) if node.op_type == "ResizeGrad" else range(1, 4)


@kernel("onnxruntime", "Resize", when=lambda node: _changes(node, required(node.inputs[0]).shape, node.outputs[0]) is not None)
def resize(k: Binding) -> Run:
    """Milliseconds in two threads of AVX-512 cores, here and in onnxruntime: 8 × 64 lines of 500 twice as long, 0.04 and 1.3;
    4 × 16 images of 32 × 32 with sides 8 times as long, 0.35 and 0.6.
    """
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    return _resized(k, required(k.node.inputs[0]).shape, k.node.outputs[0], x, y, backwards=False)


@kernel(
    "onnxruntime",
    "graphc::ResizeGrad",
    when=lambda node: _changes(node, shape_of_result(node.inputs[1]), required(node.inputs[0])) is not None,
)
def resize_grad(k: Binding) -> Run:
    """An element's gradient is the sum of those of the results that read it, with the same weights.

    Milliseconds for the same two: 0.05 and 0.56, and as products with matrices 1.2 and 10.
    """
    (dy,), (dx,) = given(k.inputs, 1), given(k.outputs, 1)
    return _resized(k, shape_of_result(k.node.inputs[1]), required(k.node.inputs[0]), dy, dx, backwards=True)


def _resized(k: Binding, shape: ir.Shape | None, y: ir.Value, source: Array, target: Array, *, backwards: bool) -> Run:
    attributes, changes = _attributes(k.node), _changes(k.node, shape, y)
    assert changes is not None
    steps: list[tuple[float, int, WeightedSums]] = []
    for axis, facts in changes.items():
        taps, weights = interpolation_taps(facts, attributes, precision_of(y, attributes))
        results = np.broadcast_to(np.arange(facts.after)[:, None], taps.shape)
        if backwards:
            sums = WeightedSums.of(taps, results, weights, facts.before, facts.after)
        else:
            sums = WeightedSums.of(results, taps, weights, facts.after, facts.before)
        if not (facts.before == facts.after and (sums.counts == 1).all() and (sums.weights[:, 0] == 1).all()):
            steps.append((len(sums.counts) / sums.length, axis, sums))
    last = source.ndim - 1
    # what becomes shorter first; the last axis while there are few rows
    steps.sort(key=lambda step: (step[0], (step[1] == last) == (step[0] < 1)))
    if not steps:
        return k.pool.bind(_copied, (source.reshape(-1), target.reshape(-1)), 1)
    sizes = [list(source.shape)]
    for _, axis, sums in steps:
        sizes.append([*sizes[-1][:axis], len(sums.counts), *sizes[-1][axis + 1 :]])
    between = scratchpad_of(k.pool).floats(*(tuple(size) for size in sizes[1:-1])) if len(steps) > 1 else []
    arrays = [source, *between, target]
    return in_order([_along(k.pool, axis, sums, *arrays[n : n + 2]) for n, (_, axis, sums) in enumerate(steps)])


def _along(pool: Pool, axis: int, sums: WeightedSums, x: Array, y: Array) -> Run:
    """Bind the sums along one axis."""
    inner = math.prod(x.shape[axis + 1 :])
    if inner > 1:
        units, planes = y.size // inner, x.reshape(-1, sums.length, inner)
        of_rows = (planes, 4 * inner * sums.places, sums.weights, sums.counts, y.reshape(units, inner))
        return pool.bind(_along_rows, of_rows, units, max(1, GRAIN // inner))
    count = len(sums.counts)
    rows, blocks = y.size // count, -(-count // LANES)
    bands, starts, depths = _bands(sums, blocks)
    known = {band.tobytes(): k for k, band in enumerate(bands)}
    lengths = [len(bands[k]) for k in known.values()]
    offsets = dict(zip(known, np.cumsum([0, *lengths]), strict=False))
    places = np.array([4 * LANES * offsets[band.tobytes()] for band in bands], dtype=np.int64)
    weights = np.concatenate([bands[k] for k in known.values()])
    arguments = (x.reshape(rows, -1), starts, depths, places, weights, y.reshape(rows, count))
    return pool.bind(_along_columns, arguments, -(-rows // ROWS), max(1, GRAIN // (ROWS * count)))


def _bands(sums: WeightedSums, blocks: int) -> tuple[list[Array], Array, Array]:
    """For each vector of results the weights of all that it reads (depth × LANES), where that starts, and its depth."""
    most = sums.places.shape[1]
    used = np.arange(most) < sums.counts[:, None]
    low = np.where(used, sums.places, sums.length).min(axis=1)
    high = np.where(used, sums.places + 1, 0).max(axis=1)
    bands, starts, depths = [], [], []
    for block in range(blocks):
        part = slice(block * LANES, (block + 1) * LANES)
        start = int(low[part].min())
        depth = max(0, int(high[part].max()) - start)
        band = np.zeros((max(1, depth), LANES), np.float32)
        lane, tap = np.nonzero(used[part])
        band[sums.places[part][lane, tap] - start, lane] = sums.weights[part][lane, tap]
        bands.append(band)
        starts.append(start if depth else 0)
        depths.append(depth)
    return bands, np.array(starts, dtype=np.int64), np.array(depths, dtype=np.int64)


_sum_of_rows = sum_of_rows()
_of_many, _of_one = banded_product(ROWS), banded_product(1)


@jit
def _copied(x, y, start, stop):
    for k in range(x.size):
        y[k] = x[k]


@jit
def _along_rows(x, offsets, weights, counts, y, start, stop):
    width, results = y.shape[1], len(counts)
    plane = 4 * x.shape[1] * width
    for unit in range(start, stop):
        source, r = x.ctypes.data + unit // results * plane, unit % results
        target = y.ctypes.data + 4 * unit * width
        _sum_of_rows(source, offsets[r].ctypes.data, weights[r].ctypes.data, counts[r], width, target)


@jit
def _along_columns(x, starts, depths, places, weights, y, start, stop):
    rows, before, after = x.shape[0], 4 * x.shape[1], 4 * y.shape[1]
    for group in range(start, stop):
        first = group * ROWS
        last = min(rows, first + ROWS)
        for block in range(len(starts)):
            source, left = x.ctypes.data + 4 * starts[block], y.shape[1] - block * LANES
            target, band = y.ctypes.data + 4 * block * LANES, weights.ctypes.data + places[block]
            if last - first == ROWS:
                _of_many(source + first * before, before, band, depths[block], target + first * after, after, left)
            else:
                for row in range(first, last):
                    _of_one(source + row * before, before, band, depths[block], target + row * after, after, left)
