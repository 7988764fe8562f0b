"""Convolutions over few pixels with many weights, as products of matrices with the weights where they lie.

    columns[(c, t), (n, p)] = x[n, c, p·stride + t·dilation - pad]
    y = w·columns      dw = dy·columnsᵀ      dx = wᵀ·dy, folded: each number added where it came from

oneDNN copies weights to another layout for each of the three, which takes half as long as the convolution where each weight
meets few pixels. The columns of these are small.
"""

from __future__ import annotations

import itertools
import math
import weakref

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import Scratchpad, on_lines
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import ConvEpilogue, finish
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.kernels.onednn.primitives import MatmulPrimitive
from graphc.device import Array, Run, in_order
from graphc.ir.ops.convolution import Window

FEWEST_WEIGHTS = {"forward": 1 << 17, "input": 1 << 18, "weight": 1 << 16}
MOST_PIXELS = 64
"""Of all samples. With more of them, or fewer weights, copies of weights take little of the time: measured over 27 shapes on
Zen 5 cores, with AVX-512 and AVX2. 512 channels to 512, 4 × 4 × 4: 0.89, 0.82 and 1.21 ms in oneDNN, 0.62, 0.79 and 0.65 here.
"""

GRAIN = 1 << 14
"""Numbers of columns that are worth handing to another thread."""

_COLUMNS: weakref.WeakKeyDictionary[Pool, Scratchpad] = weakref.WeakKeyDictionary()
"""Beside the scratchpad that products use: columns last through one."""


def is_faster(kind: str, x: Array, w: Array, y: Array, group: int, window: Window) -> bool:
    """Whether a convolution, or a gradient, is better computed here than by oneDNN.

    Args:
        kind: ``"forward"``, ``"input"`` or ``"weight"``.
    """
    if group > 1 or library() is None or window.begin is None or math.prod(window.kernel) == 1 or 0 in (x.size, y.size):
        return False
    return bool(w.size >= FEWEST_WEIGHTS[kind]) and len(y) * math.prod(y.shape[2:]) <= MOST_PIXELS


class _Columns:
    """Columns of a convolution, and its results beside them, in memory that all of a pool share.

    Attributes:
        columns: channels · taps × samples · pixels.
        results: channels of the result × samples · pixels.
        places: taps × samples · pixels: where each number of a column lies among those of a channel of all samples, and behind
            their last where it is padding.
    """

    def __init__(self, pool: Pool, x: Array, w: Array, y: Array, window: Window) -> None:
        self.pool, self.channels, self.outs = pool, x.shape[1], len(w)
        taps, pixels, samples = math.prod(window.kernel), math.prod(y.shape[2:]), len(x)
        held = _COLUMNS.setdefault(pool, Scratchpad())
        self.columns, self.results = held.floats((self.channels * taps, samples * pixels), (self.outs, samples * pixels))
        self.places = _places(x.shape, y.shape[2:], window)
        self.images, self.slopes = x.reshape(samples, self.channels, -1), y.reshape(samples, self.outs, -1)
        size = samples * self.images.shape[2] + 1
        self.parts = max(1, min(pool.threads, self.channels, self.columns.size // GRAIN))
        self.lines = on_lines((self.parts, size))

    def unfold(self) -> Run:
        """x to columns"""
        arguments = (self.images, self.places, self.columns, self.lines, self.parts)
        return self.pool.bind(_unfold, arguments, self.parts)

    def fold(self) -> Run:
        """x = sums of columns"""
        return self.pool.bind(_fold, (self.columns, self.places, self.images, self.lines, self.parts), self.parts)

    def gather(self) -> Run:
        """y, a gradient, to results"""
        return self.pool.bind(_gather, (self.slopes, self.results), self.outs, max(1, GRAIN // self.results.shape[1]))

    def scatter(self) -> Run:
        """results to y"""
        return self.pool.bind(_scatter, (self.results, self.slopes), self.outs, max(1, GRAIN // self.results.shape[1]))

    def multiply(self, a: Array, b: Array, c: Array) -> Run:
        """c = a·b"""
        lib = library()
        assert lib is not None
        return MatmulPrimitive(lib, a, b, c, None, pool=self.pool).runner()


def convolve(pool: Pool, x: Array, w: Array, epilogue: ConvEpilogue, y: Array, window: Window) -> Run:
    """y = Conv(x, w), and what follows."""
    held = _Columns(pool, x, w, y, window)
    product = held.multiply(w.reshape(len(w), -1), held.columns, held.results)
    return finish(pool, in_order([held.unfold(), product, held.scatter()]), y, epilogue)


def input_gradient(pool: Pool, dy: Array, w: Array, dx: Array, window: Window) -> Run:
    """dx of y = Conv(x, w)"""
    held = _Columns(pool, dx, w, dy, window)
    product = held.multiply(w.reshape(len(w), -1).T, held.results, held.columns)
    return in_order([held.gather(), product, held.fold()])


def weight_gradient(pool: Pool, x: Array, dy: Array, dw: Array, window: Window) -> Run:
    """dw of y = Conv(x, w)"""
    held = _Columns(pool, x, dw, dy, window)
    product = held.multiply(held.results, held.columns.T, dw.reshape(len(dw), -1))
    return in_order([held.unfold(), held.gather(), product])


def _places(x: tuple[int, ...], out: tuple[int, ...], window: Window) -> Array:
    """See :class:`_Columns`."""
    samples, size = x[0], x[2:]
    pixels = math.prod(size)
    found = np.empty((math.prod(window.kernel), samples, *out), dtype=np.int64)
    axes = [
        np.arange(o)[None] * stride + np.arange(taps)[:, None] * dilation - before
        for o, stride, taps, dilation, before in zip(
            out, window.strides, window.kernel, window.dilations, window.padding[0], strict=True
        )
    ]
    first = np.arange(samples).reshape(-1, *(1 for _ in out)) * pixels
    for tap, at in enumerate(itertools.product(*(range(n) for n in window.kernel))):
        grid = np.meshgrid(*(axis[t] for axis, t in zip(axes, at, strict=True)), indexing="ij")
        inside = np.logical_and.reduce([(g >= 0) & (g < n) for g, n in zip(grid, size, strict=True)])
        flat = np.ravel_multi_index([np.clip(g, 0, n - 1) for g, n in zip(grid, size, strict=True)], size)
        found[tap] = np.where(inside, first + flat, samples * pixels)
    return found.reshape(len(found), -1)


@jit
def _unfold(x, places, columns, lines, parts, start, stop):
    samples, channels, pixels = x.shape
    taps = places.shape[0]
    for part in range(start, stop):
        line = lines[part]
        for c in range(channels * part // parts, channels * (part + 1) // parts):
            for n in range(samples):
                for p in range(pixels):
                    line[n * pixels + p] = x[n, c, p]
            line[samples * pixels] = np.float32(0)
            for t in range(taps):
                row, at = columns[c * taps + t], places[t]
                for v in range(row.size):
                    row[v] = line[np.uint64(at[v])]


@jit
def _fold(columns, places, x, lines, parts, start, stop):
    samples, channels, pixels = x.shape
    taps = places.shape[0]
    for part in range(start, stop):
        line = lines[part]
        for c in range(channels * part // parts, channels * (part + 1) // parts):
            line[:] = np.float32(0)
            for t in range(taps):
                row, at = columns[c * taps + t], places[t]
                for v in range(row.size):
                    line[np.uint64(at[v])] += row[v]
            for n in range(samples):
                for p in range(pixels):
                    x[n, c, p] = line[n * pixels + p]


@jit
def _gather(y, results, start, stop):
    samples, pixels = y.shape[0], y.shape[2]
    for m in range(start, stop):
        for n in range(samples):
            for p in range(pixels):
                results[m, n * pixels + p] = y[n, m, p]


@jit
def _scatter(results, y, start, stop):
    samples, pixels = y.shape[0], y.shape[2]
    for m in range(start, stop):
        for n in range(samples):
            for p in range(pixels):
                y[n, m, p] = results[m, n * pixels + p]
