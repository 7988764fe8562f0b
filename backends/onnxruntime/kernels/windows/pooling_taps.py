"""Maxima of pooling windows that keep which tap they were, and the gradient that reads it.

Milliseconds of both in two threads of Zen 5 cores, in brackets those of MaxPool and a gradient that searches for the maximum,
then those of oneDNN's pair in the same layout: 8 × 64 × 112 × 112 by 3 × 3 and stride 2, 2.0 (4.4), 2.4; 8 × 128 × 28 × 28 by
3 × 3 and stride 1, 0.44 (0.95), 0.49; 8 × 64 × 56 × 56 by 2 × 2, 0.25 (0.25), 0.41. In blocks of channels, a layout of its own,
oneDNN takes 1.2, 0.19 and 0.11.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, have_spatial_axes
from graphc.backends.onnxruntime.kernels.common.jit import exact, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.kernels.windows.averaging import geometry
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.backends.onnxruntime.vectors.pooling import (
    LONGEST_STEP,
    MOST_TAPS,
    WINDOW_TAPS,
    copied_bytes,
    copied_row,
    highest_taps,
    sums_at_taps,
)
from graphc.device import Array, Run
from graphc.ir.ops.convolution import Window


def _is_native(node: ir.Node) -> bool:
    if not have_spatial_axes(node, (0,), 3):
        return False
    attributes = node.attributes
    taps, strides, dilations = (attributes.get(key) for key in ("kernel_shape", "strides", "dilations"))
    sizes = [] if taps is None else [*taps.as_ints()]
    step = 1 if strides is None else strides.as_ints()[-1]
    plain = dilations is None or {*dilations.as_ints()} == {1}
    return bool(sizes) and plain and math.prod(sizes) <= WINDOW_TAPS and sizes[-1] <= MOST_TAPS and step <= LONGEST_STEP


BAND = 1 << 16
"""Bytes of the padded rows that a thread holds at a time."""


class _Bands:
    """Rows of one tensor that are computed from few rows of another, which are copied between padding before.

    Args:
        sources: int64 (rows, n): what each row reads; -1: nothing.
        nbytes: of a padded row that is read.

    Attributes:
        starts: the first row of each band, and the number of all rows.
        copied, ends: the rows that the bands read, one band's after the other's, and where those of each end.
        places: as ``sources``, the places among the rows that the band has copied; the last place for -1.
        most: rows that a band reads, at most.
    """

    def __init__(self, sources: Array, nbytes: int) -> None:
        height = max(1, min(len(sources), BAND // nbytes))
        self.starts = np.append(np.arange(0, len(sources), height), len(sources))
        bands = [np.unique(sources[a:b][sources[a:b] >= 0]) for a, b in itertools.pairwise(self.starts)]
        self.copied, self.ends = np.concatenate(bands).astype(np.int64), np.cumsum([0, *map(len, bands)])
        self.most = max(map(len, bands))
        self.places = np.concatenate(
            [np.searchsorted(band, sources[a:b]) for band, (a, b) in zip(bands, itertools.pairwise(self.starts), strict=True)]
        )
        self.places[sources < 0] = self.most


@kernel("onnxruntime", "graphc::MaxPoolTaps", when=_is_native)
def max_pool_taps(k: Binding) -> Run:
    """Tap after tap from the last, where the highest of equal ones that is left is the first. Rows with NaN go one by one."""
    (x,), (y, tap) = given(k.inputs, 1), given(k.outputs, 2)
    window, planes = Window.of(k.attributes, x.shape[2:]), x.shape[0] * x.shape[1]
    rows, columns = geometry(window, x.shape[2:], y.shape[2:])
    source, target, found = (array.reshape(planes, -1, array.shape[-1]) for array in (x, y, tap))
    (taps, stride), begin, width = (window.kernel[-1], window.strides[-1]), -int(columns[0, 0]), x.shape[-1]
    under = np.ascontiguousarray(rows.T)
    wide = max(begin + width, stride * (target.shape[2] + LANES) + taps) + 2 * LANES
    bands = _Bands(under, 4 * wide)
    parts = max(1, min(k.pool.threads, planes * (len(bands.starts) - 1), x.size // 4096))
    lines, special = on_lines((parts, bands.most + 1, wide)), on_lines((parts, bands.most + 1), np.bool_)
    lines[:], special[:] = np.nan, False
    offsets = bands.places * lines.strides[1]
    arguments = (source, target, found, under, bands.starts, bands.copied, bands.ends, bands.places, offsets, begin)
    return k.pool.bind(_max_pool_taps(under.shape[1], taps, stride), (*arguments, lines, special), parts)


@specialized
def _max_pool_taps(rows: int, taps: int, stride: int) -> Callable[..., None]:
    copy, search = copied_row(), highest_taps(rows, taps, stride)

    @exact
    def max_pool_taps(x, y, tap, under, starts, copied, ends, places, offsets, begin, lines, special, start, stop):
        parts, width, columns, bands = lines.shape[0], x.shape[2], y.shape[2], len(starts) - 1
        every = len(y) * bands
        for part in range(start, stop):
            held = lines[part]
            for unit in range(every * part // parts, every * (part + 1) // parts):
                plane, band = unit // bands, unit % bands
                for slot in range(ends[band + 1] - ends[band]):
                    row = x[plane, copied[ends[band] + slot]]
                    special[part, slot] = copy(row.ctypes.data, width, held[slot, begin:].ctypes.data)
                for r in range(starts[band], starts[band + 1]):
                    best, found = y[plane, r], tap[plane, r]
                    search(held.ctypes.data, offsets[r].ctypes.data, best.ctypes.data, found.ctypes.data, columns)
                    slow = False
                    for i in range(rows):
                        slow |= special[part, places[r, i]]
                    if slow:
                        for q in range(columns):
                            value, chosen = np.float32(-np.inf), 0
                            for i in range(rows):
                                for j in range(taps):
                                    w = q * stride + j - begin
                                    if under[r, i] >= 0 and 0 <= w < width:
                                        other = x[plane, under[r, i], w]
                                        if chosen == 0 or other > value or other != other:
                                            value, chosen = other, i * taps + j + 1
                            best[q], found[q] = value, chosen

    return max_pool_taps


@kernel("onnxruntime", "graphc::MaxPoolTapsGrad", when=_is_native)
def max_pool_taps_grad(k: Binding) -> Run:
    """Each element of a row of dx receives what the windows give whose maximum it is, so that each row is written once."""
    (dy, tap), (dx,) = given(k.inputs[:2], 2), given(k.outputs, 1)
    window, planes = Window.of(k.attributes, dx.shape[2:]), dx.shape[0] * dx.shape[1]
    rows, columns = geometry(window, dx.shape[2:], dy.shape[2:])
    slopes, found, target = (array.reshape(planes, -1, array.shape[-1]) for array in (dy, tap, dx))
    (taps, stride), begin, width = (window.kernel[-1], window.strides[-1]), -int(columns[0, 0]), dx.shape[-1]
    over, numbers = _windows_over(np.ascontiguousarray(rows.T), target.shape[1])
    ahead, windows = -(-((taps - 1) // stride) // LANES) * LANES, -(-(begin + width) // stride)
    wide = ahead + -(-(max(dy.shape[-1], windows) + 2 * LANES) // LANES) * LANES
    bands = _Bands(over, 5 * wide)
    parts = max(1, min(k.pool.threads, planes * (len(bands.starts) - 1), dx.size // 4096))
    at, values = on_lines((parts, (bands.most + 1) * wide), np.uint8), on_lines((parts, (bands.most + 1) * wide))
    sums = on_lines((parts, stride * (windows + LANES)))
    at[:], values[:] = 0, 0
    offsets = bands.places * wide
    arguments = (slopes, found, target, bands.starts, bands.copied, bands.ends, offsets, numbers * taps + 1, begin, windows)
    loop = _max_pool_taps_grad(over.shape[1], taps, stride)
    return k.pool.bind(loop, (*arguments, ahead, wide, at, values, sums), parts)


def _windows_over(under: Array, rows: int) -> tuple[Array, Array]:
    """For each of the ``rows`` of x the rows of windows over it, -1 where there are fewer, and which of their rows it is."""
    of_windows, of_taps = np.nonzero(under >= 0)
    reached = under[of_windows, of_taps]
    order = np.argsort(reached, kind="stable")
    reached, counts = reached[order], np.bincount(reached, minlength=rows)
    place = np.arange(len(reached)) - (np.cumsum(counts) - counts)[reached]
    over, numbers = np.full((rows, max(1, counts.max())), -1), np.zeros((rows, max(1, counts.max())), dtype=np.int64)
    over[reached, place], numbers[reached, place] = of_windows[order], of_taps[order]
    return over, numbers


@specialized
def _max_pool_taps_grad(rows: int, taps: int, stride: int) -> Callable[..., None]:
    copy, gather = copied_bytes(), sums_at_taps(rows, taps, stride)

    @exact
    def max_pool_taps_grad(
        dy, tap, dx, starts, copied, ends, offsets, numbers, begin, windows, ahead, wide, at, values, sums, start, stop
    ):
        parts, columns, width, bands = sums.shape[0], dy.shape[2], dx.shape[2], len(starts) - 1
        every = len(dx) * bands
        for part in range(start, stop):
            found, slopes, line = at[part, ahead:].ctypes.data, values[part, ahead:].ctypes.data, sums[part].ctypes.data
            for unit in range(every * part // parts, every * (part + 1) // parts):
                plane, band = unit // bands, unit % bands
                for slot in range(ends[band + 1] - ends[band]):
                    row = copied[ends[band] + slot]
                    copy(tap[plane, row].ctypes.data, columns, found + slot * wide)
                    copy(dy[plane, row].ctypes.data, 4 * columns, slopes + 4 * slot * wide)
                for row in range(starts[band], starts[band + 1]):
                    gather(found, slopes, offsets[row].ctypes.data, numbers[row].ctypes.data, line, windows)
                    copy(line + 4 * begin, 4 * width, dx[plane, row].ctypes.data)

    return max_pool_taps_grad
