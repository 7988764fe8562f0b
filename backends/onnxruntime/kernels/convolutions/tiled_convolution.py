"""Convolutions with strides of one and their gradients on the matrix tiles of AMX, by their definition.

    y[n, m, p]  = Σ over channels c and taps t   w[m, c, t] · x[n, c, p + t]
    dw[m, c, t] = Σ over samples n, positions p  dy[n, m, p] · x[n, c, p + t]
    dx          = y of dy and the turned weights

Images are split once (:mod:`..products.tiles`), with their padding, so that the rows of a tile are neighbouring pixels of SIDE
channels wherever a tap begins. Samples of a group lie side by side at each pixel: narrow images fill tiles, too.

    image of a group: SIDE channels after another, rows, pixels, samples; PIXEL_BYTES each

Weights are split for each step as well. A thread takes a row of results after another, of images that it has split if it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graphc.backend import Pool
from graphc.backends.host.processor import has_matrix_tiles
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.convolutions.tiled_loops import (
    DEEP,
    MOST_SAMPLES,
    MOST_TAPS,
    convolve_rows,
    multiply_slopes,
    split_images,
    split_slopes,
    split_weights,
    write_gradient,
)
from graphc.backends.onnxruntime.kernels.products.tiles import counters
from graphc.backends.onnxruntime.vectors.tiles import PIXEL_BYTES, SIDE, STEP_BYTES
from graphc.device import Array, Run
from graphc.ir.ops.convolution import Window

ROOM, NEAR = 1 << 24, 1 << 20
"""Bytes of split images that are held at a time, and of split weights that a thread uses for one row of results."""

PAST = SIDE * PIXEL_BYTES
"""Bytes behind split images that products read."""

STEP_TIME, WRITE_TIME, SUM_TIME, IMAGE_TIME, SLOPE_TIME, WEIGHT_TIME = 149, 1100, 700, 0.5, 0.5, 0.6
"""Nanoseconds of a step, of writing a square of results, of adding one, and of splitting a number of an image, a slope and a
weight."""

LARGEST_SHARE = {"forward": 0.55, "input": 0.55, "weight": 0.65}
"""Of the time of other kernels that a convolution may take here to be worth it, where cores are shared
(:mod:`..products.tiles`).
"""

FEWEST_SUMS = 32
"""Sums of a weight gradient that threads take in turn, whatever their number: the bits of the gradient do not depend on it."""

FEWEST_TAPS = 4
"""A product of matrices splits less for a window of one tap."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A convolution of images of ``height`` × ``width`` pixels; lines are images of one row.

    Attributes:
        group, groups: samples that lie side by side, and how many such groups there are.
        kernel, dilations, begin: of the window; ``begin`` is the padding before an image.
    """

    samples: int
    channels: int
    outs: int
    height: int
    width: int
    kernel: tuple[int, int]
    dilations: tuple[int, int]
    begin: tuple[int, int]
    group: int

    @property
    def groups(self) -> int:
        return -(-self.samples // self.group)

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of an image with its padding."""
        (k, m), (d, e) = self.kernel, self.dilations
        return self.height + d * (k - 1), self.width + e * (m - 1)

    @property
    def plane(self) -> int:
        """Bytes of SIDE channels of a group."""
        rows, columns = self.padded
        return rows * columns * self.group * PIXEL_BYTES

    @property
    def taps(self) -> list[int]:
        """Bytes from a result's pixel to those that its taps read."""
        (k, m), (d, e), columns = self.kernel, self.dilations, self.padded[1]
        return [(i * d * columns + j * e) * self.group * PIXEL_BYTES for i in range(k) for j in range(m)]

    @property
    def strips(self) -> int:
        """Strips of SIDE pixels in a row of results."""
        return -(-self.width * self.group // SIDE)

    @property
    def squares(self) -> tuple[int, int]:
        """SIDE channels in an image, and in a result."""
        return -(-self.channels // SIDE), -(-self.outs // SIDE)

    def sizes(self, *others: int) -> Array:
        """What compiled code knows of it."""
        numbers = (self.group, *self.padded, *self.begin, self.plane, self.plane * self.squares[0], len(self.taps))
        return np.array([*numbers, self.height, self.width, self.strips, *others], dtype=np.int64)

    def chunks(self) -> list[tuple[int, int]]:
        """First group and number of groups that are held at a time."""
        together = max(1, ROOM // (self.plane * self.squares[0]))
        return [(first, min(together, self.groups - first)) for first in range(0, self.groups, together)]


def _shape(kind: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], window: Window) -> _Shape | None:
    """The convolution that computes a result, or the one whose weights a gradient is of; None: not on tiles."""
    if len(x) not in (3, 4) or window.begin is None or window.pads is None or min(window.pads) < 0:
        return None
    if any(s != 1 for s in window.strides) or not FEWEST_TAPS <= math.prod(window.kernel) <= MOST_TAPS:
        return None
    kernel, dilations, begin = tuple(window.kernel), tuple(window.dilations), tuple(window.begin)
    if kind == "input":
        reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        if any(pad > most for pad, most in zip(window.pads, reach * 2, strict=True)):
            return None
        begin = tuple(most - b for most, b in zip(reach, begin, strict=True))
    lift = (1,) * (4 - len(x))
    channels, outs, result = (y[1], x[1], x) if kind == "input" else (x[1], y[1], y)
    height, width = lift + tuple(result[2:])
    sizes = [1 << k for k in range(1 if kind == "weight" else 0, 5) if 1 << k <= min(x[0], MOST_SAMPLES)]
    if not sizes or 0 in (height, width):
        return None

    def waste(group: int) -> tuple[float, int]:
        return -(-width * group // SIDE) * SIDE / group * -(-x[0] // group) * group, group

    group = min(sizes, key=waste)
    pad = (0,) * len(lift)
    return _Shape(x[0], channels, outs, height, width, lift + kernel, lift + dilations, pad + begin, group)  # type: ignore[arg-type]


def is_faster(
    kind: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], window: Window, pool: Pool, others: float
) -> bool:
    """Whether this processor takes less time on tiles.

    Args:
        kind: ``"forward"``, ``"input"`` or ``"weight"``.
        others: nanoseconds that other kernels take in one thread.
    """
    if not has_matrix_tiles() or pool.bf16_products:
        return False
    shape = _shape(kind, x, w, y, window)
    if shape is None:
        return False
    (deep, wide), taps = shape.squares, len(shape.taps)
    rows, columns = shape.padded
    images = shape.groups * shape.group * deep * SIDE * rows * columns * IMAGE_TIME
    strips = shape.groups * shape.height * shape.strips
    if kind == "weight":
        products = deep * wide * taps * (strips * STEP_TIME + -(-strips // DEEP) * SUM_TIME)
        rest = strips * SIDE * wide * SIDE * SLOPE_TIME + deep * wide * taps * SIDE * SIDE * WEIGHT_TIME
    else:
        products = strips * wide * (deep * taps * STEP_TIME + WRITE_TIME)
        rest = deep * wide * taps * SIDE * SIDE * WEIGHT_TIME
    return images + products + rest < LARGEST_SHARE[kind] * others


def convolve(
    kind: str, pool: Pool, x: Array, w: Array, bias: Array | None, y: Array, window: Window, otherwise: Callable[[], Run]
) -> Run:
    """y = Conv(x, w, bias), or x as the ``"input"`` gradient of y, where :func:`is_faster`.

    Args:
        otherwise: makes what computes it where a result is not finite.
    """
    shape = _shape(kind, x.shape, w.shape, y.shape, window)
    assert shape is not None
    read, written = (y, x) if kind == "input" else (x, y)
    read, written = _with_rows(read), _with_rows(written)
    deep, wide = shape.squares
    steps = deep * len(shape.taps)
    near = max(1, NEAR // (steps * STEP_BYTES))  # strips of weights
    weights = wide * steps * STEP_BYTES
    scratch = scratchpad_of(pool)
    chunks = shape.chunks()
    scratch.reserve(weights + max(count for _, count in chunks) * shape.plane * deep + PAST)
    offsets = [square * shape.plane + tap for square in range(deep) for tap in shape.taps]
    table, failed = np.array(offsets, dtype=np.int64), np.zeros(1, dtype=np.int64)
    row = np.empty((0,), dtype=np.float32) if bias is None else bias
    sizes = shape.sizes(weights, deep, wide, near, 0)
    taken = counters(pool, len(chunks), -(-wide // near))
    taps = w.reshape(*w.shape[:2], -1)
    runs = [pool.bind(split_weights, (taps, sizes, int(kind == "input"), scratch.cell), deep * wide)]
    for k, (first, count) in enumerate(chunks):
        runs.append(pool.bind(split_images, (read, sizes, first, count, scratch.cell), count * deep * shape.padded[0]))
        arguments = (row, written, sizes, table, first, count, taken[k], failed, scratch.cell)
        runs.append(pool.bind(convolve_rows, arguments, pool.threads))
    return _checked(runs, taken, failed, otherwise)


def weight_gradient(pool: Pool, x: Array, w: Array, y: Array, window: Window, otherwise: Callable[[], Run]) -> Run:
    """w as the gradient of the weights of y = Conv(x, w), where :func:`is_faster`."""
    shape = _shape("weight", x.shape, w.shape, y.shape, window)
    assert shape is not None
    x, y = _with_rows(x), _with_rows(y)
    (deep, wide), taps, chunks = shape.squares, len(shape.taps), shape.chunks()
    most = max(count for _, count in chunks)
    blocks = most * shape.height * shape.strips
    parts = max(1, min(-(-FEWEST_SUMS // (deep * wide)), blocks // DEEP))
    sums, slopes = parts * deep * wide * taps * SIDE * SIDE * 4, wide * blocks * STEP_BYTES
    scratch = scratchpad_of(pool)
    scratch.reserve(sums + slopes + most * shape.plane * deep + PAST)
    step = shape.padded[1] * shape.group * PIXEL_BYTES
    offsets = [
        n * shape.plane * deep + i * step + s * SIDE * PIXEL_BYTES
        for n in range(most)
        for i in range(shape.height)
        for s in range(shape.strips)
    ]
    table, failed = np.array(offsets, dtype=np.int64), np.zeros(1, dtype=np.int64)
    shifts = np.array(shape.taps, dtype=np.int64)
    taken, runs = counters(pool, len(chunks)), []
    for k, (first, count) in enumerate(chunks):
        sizes = shape.sizes(sums + slopes, deep, wide, parts, 1)
        runs.append(pool.bind(split_images, (x, sizes, first, count, scratch.cell), count * deep * shape.padded[0]))
        runs.append(pool.bind(split_slopes, (y, sizes, first, count, sums, scratch.cell), count * wide * shape.height))
        arguments = (sizes, table, shifts, count, sums, k, taken[k], scratch.cell)
        runs.append(pool.bind(multiply_slopes, arguments, pool.threads))
    gradient = w.reshape(*w.shape[:2], -1)
    runs.append(pool.bind(write_gradient, (gradient, parts, failed, scratch.cell), deep * wide))
    return _checked(runs, taken, failed, otherwise)


def _with_rows(images: Array) -> Array:
    return images if images.ndim == 4 else images[:, :, None]


def _checked(runs: list[Run], taken: Array, failed: Array, otherwise: Callable[[], Run]) -> Run:
    """All of ``runs``; then what ``otherwise`` makes, if a result is not finite."""
    again: list[Run] = []

    def go() -> None:
        taken.fill(0)
        for run in runs:
            run()
        if failed[0]:
            failed[0] = 0
            if not again:
                again.append(otherwise())
            again[0]()

    return go
