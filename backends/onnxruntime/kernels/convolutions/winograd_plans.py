"""How :mod:`.winograd` cuts results into tiles for threads, and whether it takes less time than oneDNN, by estimates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphc.backends.onnxruntime.vectors.functions import LANES, PANEL
from graphc.device import Array
from graphc.ir.ops.convolution import Window

WIDEST = 2048
"""Pixels in a row of an image, at most, where weights have gradients to sum as the definition says."""
TILES = 64
"""Tiles of a block, about."""
SUMMED = 32
"""Tiles below which gradients of weights are left to oneDNN: where few positions are summed, many gradients are small."""


WEIGHTS, FAR_WEIGHTS, FAR = (
    {"forward": 32, "input": 32, "weight": 4},
    {"forward": 128, "input": 128, "weight": 48},
    1 << 15,
)
"""Multiplications that transforming a weight costs for each of its 16 numbers; where as many pairs of channels leave the cache,
on cores whose products are twice as fast (AVX-512), it costs more."""


def is_faster(kind: str, window: Window, x: tuple[int, ...], y: tuple[int, ...]) -> bool:
    """Whether these kernels take less time than oneDNN's.

    Args:
        kind: ``"forward"``, ``"input"`` or ``"weight"``.
        x: shape of the convolution's operand.
        y: shape of its result.
    """
    if window.kernel != (3, 3) or window.strides != (1, 1) or window.dilations != (1, 1) or window.begin is None:
        return False
    direct = 9.0 * x[0] * y[2] * y[3] * x[1] * y[1]
    if kind == "weight":
        return (
            x[3] <= WIDEST
            and x[0] * -(-y[2] // 2) * -(-y[3] // 2) >= SUMMED
            and multiplications(kind, x, y) < 0.95 * 1.3 * direct
        )
    return multiplications(kind, x, y) < 0.95 * direct


def multiplications(kind: str, x: tuple[int, ...], y: tuple[int, ...]) -> float:
    """An estimate of the time, in multiplications of a product's inner loop; arguments as in :func:`is_faster`.

    Transforming an image or a result costs some for each of its 16 numbers in a tile, and so do the weights, which are
    transformed once. Measured on AVX2 cores, where products run at 0.9 of their peak on both sides.
    """
    channels, outs = x[1], y[1]
    height, width = (x if kind == "input" else y)[2:]  # of what is cut into tiles
    tiles = x[0] * -(-height // 2) * -(-width // 2)
    if kind == "weight":
        columns, transformed = whole_units(channels, PANEL) * outs, 9 * (channels + outs)
    else:
        read, written = (channels, outs) if kind == "forward" else (outs, channels)
        columns, transformed = read * whole_units(written, PANEL), 9 * read + 6 * written
    weights = (FAR_WEIGHTS if LANES == 16 and channels * outs > FAR else WEIGHTS)[kind]
    return 16 * (tiles * (1.1 * columns + transformed) + weights * channels * outs)


def whole_units(channels: int, unit: int) -> int:
    """The least multiple of ``unit`` that holds so many channels."""
    return -(-channels // unit) * unit


@dataclass(frozen=True, slots=True)
class TileCut:
    """How threads share the tiles of a result: each takes a part of the blocks, and a range of the channels there.

    Attributes:
        strips, blocks: rows of tiles in a block, and blocks.
        tall, wide: rows of tiles in an image, and tiles in such a row.
        parts, ranges: of the blocks, and of the channels of the result.
    """

    strips: int
    blocks: int
    tall: int
    wide: int
    parts: int
    ranges: int

    @property
    def shares(self) -> int:
        """Of all parts and ranges."""
        return self.parts * self.ranges

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.strips * self.wide

    @property
    def most_rows(self) -> int:
        """Most rows of pixels that a block copies of one image."""
        return 2 * min(self.strips, self.tall) + 2

    def geometry(self, *others: int) -> Array:
        """What compiled code knows of it."""
        numbers = (self.strips, self.tall, self.wide, *others, self.blocks, self.parts, self.ranges)
        return np.array(numbers, dtype=np.int64)


HELD = 4.0
"""Multiplications that a block costs for each weight, or sum, that passes through the cache."""


def cut_tiles(
    y: Array, threads: int, units: int, of_tile: float, of_unit: float, weights: int, *, sums: bool = False
) -> TileCut:
    """Share the tiles of y so that the busiest thread has the least to do.

    Images of few pixels have too few tiles for many threads, which take channels of their own there: each then transforms the
    images that it reads by itself.

    Args:
        units: into which the channels of y are divided.
        of_tile, of_unit: multiplications for a tile, and for a unit of its channels besides.
        weights: of a unit.
        sums: every part has a sum of all weights, which are added.
    """
    tall, wide = -(-y.shape[2] // 2), -(-y.shape[3] // 2)
    rows = y.shape[0] * tall

    def shared(parts: int) -> tuple[float, TileCut]:
        ranges = min(threads // parts, units)
        blocks = min(rows, whole_units(-(-rows // max(1, TILES // wide)), parts))
        strips = -(-rows // blocks)
        blocks = -(-rows // strips)
        busiest, each = -(-blocks // parts), -(-units // ranges)
        time = busiest * (strips * wide * (of_tile + each * of_unit) + HELD * each * weights)
        if sums:
            time += HELD * units * weights * parts / threads
        return time, TileCut(strips, blocks, tall, wide, min(parts, blocks), ranges)

    return min((shared(parts) for parts in range(1, min(threads, rows) + 1)), key=lambda found: found[0])[1]
