"""Regions of the convolutions in :mod:`.direct`, and whether these take less time than oneDNN's, by estimates.

The figures are measured on Zen 5 cores, with AVX-512 and with AVX2, over some 90 shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.backends.onnxruntime.vectors.windows import BLOCK, MOST_LINES, MOST_ROWS, MOST_TAPS, VECTORS
from graphc.device import Array
from graphc.ir.ops.convolution import Window

REGION = 48 << 10
"""Most floats of a region, which stays in a core's own cache."""

LINE = 16
"""Floats of a line of the cache; planes are an odd number of lines, so that lines of all channels spread over its sets."""

COPY_TIMES, SINGLE_TIME, RESULT_TIME = {1: 0.6, 2: 1.5, 4: 3.0}, 10.0, 0.5
"""Cycles of copying a number into the region by the stride along lines, for other strides, and of a result out of it."""

WHOLE_SHARE, WIDE_SHARE, GROUP_SHARE = (0.95, 0.55, 0.7) if LANES == 16 else (0.95, 0.6, 0.4)
"""The share of its peak that oneDNN reaches with whole vectors of channels, along wide windows, and in groups of a vector or
less."""

WIDEST = 20 if LANES == 16 else 8
"""The longest span of a line for which oneDNN has fast kernels."""

GRADIENT_SHARE, LONG_SHARE, HALF_SHARE = (0.9, 0.24, 0.3) if LANES == 16 else (0.72, 0.7, 0.1)
"""For weight gradients: the same, for long lines of taps, and what half a vector leaves."""

LONGEST, FARTHEST = 14, 64
"""Taps and span of a line beyond which oneDNN has no fast kernels for weight gradients, nor for dilated ones of volumes."""

BLOCKED_TIME = 1.0
"""Cycles of copying a number of an image to or from oneDNN's own layouts."""

FEWEST = 4
"""Fewest channels of an image that oneDNN's weight gradients pad to a vector."""

RATE, CALL_TIME, TOTAL_TIME = 2.0 if LANES == 16 else 1.2, 14, 3
"""Additions of products a cycle, as measured, and cycles of a call that adds them up, and of the sum of a vector."""

WORTH = 1 << 18
"""Multiplications that are worth waking a thread."""

LARGEST = 1 << 21
"""Most numbers in the sums of all threads, which are memory that nothing else needs."""

MARGIN = 1.15
"""How much faster the estimate must be, which knows nothing of memory."""


@dataclass(frozen=True, slots=True)
class RegionSizes:
    """How results are cut into regions, and how a region lies in memory.

    Attributes:
        rows, columns: results of a region.
        pitch, plane: elements from one line to the next, and of a plane of one remainder of rows and columns.
        time: an estimate for all regions, in cycles of one thread.
    """

    rows: int
    columns: int
    pitch: int
    plane: int
    time: float


def blocks_of(
    samples: int, group: int, channels: int, results: int, out: Sequence[int], window: Window, threads: int, copies: int = 0
) -> RegionSizes:
    """The regions that take the least time by an estimate, for a group of ``channels`` and ``results``."""
    (depth, height, width), (_, stride_h, stride_w) = out, window.strides
    more = [(k - 1) * d // s for k, d, s in zip(window.kernel, window.dilations, window.strides, strict=True)]
    taps, layers = math.prod(window.kernel), channels * window.kernel[0]
    found = []
    for columns in sorted({-(-width // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)}):
        for rows in sorted({-(-height // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, height)}):
            pitch = columns + more[2]
            plane = (-(-(rows + more[1]) * pitch // LINE) | 1) * LINE
            size = layers * stride_h * stride_w * plane + copies * rows * pitch
            if size > REGION and (rows, columns) != (1, 1):
                continue
            line = (rows - 1) * pitch + columns
            sums = 0.0
            for count, tile in _tiles(results):
                whole = VECTORS[tile] * LANES
                sums += count * -(-line // whole) * whole * taps * channels * _cycles(tile)
            each = sums + COPY_TIMES.get(stride_w, SINGLE_TIME) * size + RESULT_TIME * results * rows * columns
            units = samples * group * depth * -(-height // rows) * -(-width // columns)
            found.append(RegionSizes(rows, columns, pitch, plane, each * -(-units // threads)))
    return min(found, key=lambda blocks: blocks.time)


def _tiles(results: int) -> list[tuple[int, int]]:
    """Counts and rows of the tiles that compute as many results."""
    tiles = -(-results // MOST_ROWS)
    few, more = results // tiles, results % tiles
    return [(count, rows) for count, rows in ((more, few + 1), (tiles - more, few)) if count]


def _cycles(rows: int) -> float:
    """Cycles for a tap of one window: two additions a cycle, or two loads; one across two lines of the cache counts twice."""
    vectors = VECTORS[rows]
    return max(rows * vectors, (2 if LANES == 16 else 1.5) * vectors + rows + 1) / 2 / (vectors * LANES)


def is_faster(x: Array, w: Array, y: Array, group: int, window: Window, threads: int, *, turned: bool = False) -> bool:
    """Whether :func:`convolve` takes less time than oneDNN, by estimates.

    oneDNN computes whole vectors of results, and of more than a vector of channels. Windows of one pixel are products of
    matrices, and :mod:`.depthwise` knows of groups of one channel.

    Args:
        turned: y is the gradient of the operand of a convolution, which oneDNN would compute as such.
    """
    channels, results = w.shape[1], len(w) // group
    if not _is_taken(x, w, y, group, window):
        return False
    wide = channels if (channels < LANES and not turned) or group > 1 else _padded(channels)
    products = len(x) * group * math.prod(y.shape[2:]) * math.prod(window.kernel) * _padded(results) * wide
    share = WIDE_SHARE if window.span[-1] > WIDEST else GROUP_SHARE if group > 1 and results <= LANES else WHOLE_SHARE
    own = blocks_of(len(x), group, channels, results, size_of(y), lifted(window), threads)
    copied = x.size + y.size if wide >= LANES else y.size
    return bool(MARGIN * own.time < (products / (2 * LANES * share) + BLOCKED_TIME * copied) / threads)


def gradient_is_faster(x: Array, w: Array, y: Array, group: int, window: Window, threads: int) -> bool:
    """Whether :func:`weight_gradient` takes less time than oneDNN, by estimates; w and y have the shapes of the gradients."""
    channels, results = w.shape[1], len(w) // group
    if not _is_taken(x, w, y, group, window) or (w.size * threads > LARGEST and not are_results_apart(w, group, threads)):
        return False
    apart = x.ndim == 5 and max(window.dilations) > 1
    share = LONG_SHARE if window.kernel[-1] > LONGEST or window.span[-1] > FARTHEST or apart else GRADIENT_SHARE
    if group > 1 and channels <= LANES:
        share *= 0.8 * (HALF_SHARE if channels < 8 else 1)
    wide = channels if channels < FEWEST or group > 1 else _padded(channels)
    taps, pixels = math.prod(window.kernel), math.prod(y.shape[2:])
    products = len(x) * group * pixels * taps * _padded(results) * wide
    window = lifted(window)
    blocks = blocks_of(len(x), group, channels, results, size_of(y), window, threads, copies=results)
    vectors = ((blocks.rows - 1) * blocks.pitch + blocks.columns + LANES - 1) // LANES
    whole, rest = divmod(taps, MOST_TAPS)
    time = 0.0
    for lines, count in ((MOST_LINES, results // MOST_LINES), (results % MOST_LINES, 1)):
        for several, times in ((MOST_TAPS, whole), (rest, 1)):
            if lines and several:
                loads = lines + several * (2 if LANES == 16 else 1.5)
                each = vectors * max(lines * several, loads) / RATE + CALL_TIME + TOTAL_TIME * lines * several
                time += count * times * each
    layers = channels * window.kernel[0] * math.prod(window.strides[1:])
    copies = COPY_TIMES.get(window.strides[-1], SINGLE_TIME) * layers * blocks.plane
    each = channels * time + copies + results * blocks.rows * blocks.pitch
    units = len(x) * group * math.prod(-(-n // b) for n, b in zip(size_of(y), (1, blocks.rows, blocks.columns), strict=True))
    others = products / (2 * LANES * share) + BLOCKED_TIME * (x.size + y.size)
    return bool(MARGIN * each * -(-units // threads) < others / threads)


def threads_for(y: Array, w: Array, threads: int) -> int:
    """As many threads as the products of a convolution are worth waking."""
    products = int(y.size) * math.prod(int(n) for n in w.shape[1:])
    return max(1, min(threads, products // WORTH))


def are_results_apart(w: Array, group: int, threads: int) -> bool:
    """Whether threads share the results of a weight gradient, and not its regions, so that they need no sums of their own."""
    return bool(w.size * threads > LARGEST and group == 1 and len(w) >= MOST_LINES * threads)


def _is_taken(x: Array, w: Array, y: Array, group: int, window: Window) -> bool:
    full = 0 not in (x.size, w.size, y.size) and window.pads is not None
    alone = group > 1 and w.shape[1] == 1 and x.ndim < 5
    return full and not alone and max(window.kernel) > 1


def size_of(y: Array) -> tuple[int, int, int]:
    """Depth, height and width."""
    depth, height, width = (1, 1, *y.shape[2:])[-3:]
    return depth, height, width


def _padded(channels: int) -> int:
    return -(-channels // LANES) * LANES


def lifted(window: Window) -> Window:
    """The window with three axes: others have a size of one."""
    (begin, end), lift = window.padding, 3 - len(window.kernel)
    ones, none = (1,) * lift, (0,) * lift
    kernel, strides, dilations = (ones + given for given in (window.kernel, window.strides, window.dilations))
    return Window(kernel, strides, dilations, none + begin, none + end)


@dataclass(frozen=True, slots=True)
class RegionArrays:
    """The regions of a convolution as arrays for compiled code.

    Attributes:
        cuts: groups, sizes of the results, rows and columns of a region, pitch, and the regions down and across.
        copies: sizes of an image, strides, padding in front, pitch, plane, and the layers of a window and their distance.
        offsets: of each channel and tap, in bytes from a window's place in the region.
        size: floats of a region with what is read behind it.
        line: floats from the first window of a region to the one behind the last.
        units: number of regions.
    """

    cuts: Array
    copies: Array
    offsets: Array
    size: int
    line: int
    units: int

    @staticmethod
    def of(images: Array, w: Array, results: Array, window: Window, group: int, blocks: RegionSizes) -> RegionArrays:
        """Of images and results with three axes of space, and a window of three."""
        size, out, channels = images.shape[2:], results.shape[2:], w.shape[1]
        (_, stride_h, stride_w), begin = window.strides, window.padding[0]
        c, z, *rest = np.indices((channels, *window.kernel)).reshape(4, -1)
        steps = [tap * step for tap, step in zip(rest, window.dilations[1:], strict=True)]
        layers = c * window.kernel[0] + z
        phases = (layers * stride_h + steps[0] % stride_h) * stride_w + steps[1] % stride_w
        offsets = 4 * (phases * blocks.plane + steps[0] // stride_h * blocks.pitch + steps[1] // stride_w)
        region = channels * window.kernel[0] * stride_h * stride_w * blocks.plane + BLOCK
        down, across = -(-out[1] // blocks.rows), -(-out[2] // blocks.columns)
        cuts = np.array([group, *out, blocks.rows, blocks.columns, blocks.pitch, down, across], dtype=np.int64)
        shape = [blocks.pitch, blocks.plane, window.kernel[0], window.dilations[0]]
        copies = np.array([*size, *window.strides, *begin, *shape], dtype=np.int64)
        line = (blocks.rows - 1) * blocks.pitch + blocks.columns
        return RegionArrays(cuts, copies, offsets, region, line, len(images) * group * out[0] * down * across)
