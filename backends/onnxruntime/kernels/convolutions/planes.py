"""Depthwise convolutions over images: a plane of one channel at a time, read where it lies.

    y[q] = Σ over taps t of w[t] · x[q·stride + t - pad]

oneDNN keeps channels in the lanes of vectors, for which images are copied to another layout and back. Here neighbouring windows
fill the lanes, and a line of pixels is read once for several rows of windows. Milliseconds of two threads with AVX-512, there
and here, of results, input gradients and weight gradients:

    3 × 3, 16 × 96 × 48 × 48, steps of two    0.56, 0.23    0.68, 0.15    0.53, 0.28
    3 × 3, 8 × 144 × 56 × 56                  1.90, 0.55    2.43, 0.50    2.28, 1.50
    3 × 3, 8 × 192 × 28 × 28                  0.20, 0.15    0.22, 0.15    0.19, 0.21
    5 × 5, 8 × 144 × 56 × 56                  2.05, 0.91    2.53, 0.87    22.7, 1.94

Sums begin anew for each sample: errors of weight gradients are a ninth to a 25th of oneDNN's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.common.jit import jit, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import BETWEEN, PLAIN, ConvEpilogue, activate_line
from graphc.backends.onnxruntime.vectors.functions import LANES, array_of, floats_at
from graphc.backends.onnxruntime.vectors.planes import plane_products, plane_slopes, plane_windows
from graphc.device import Array, Run
from graphc.ir.ops.convolution import Window

ROWS, PAIRS = 4, 2
"""Rows of windows that are computed at once, and pairs of rows of a gradient."""

GRAIN = 1 << 16
"""Multiplications that are worth handing to another thread."""


FAR = 9 << 20
"""Bytes of an image that leave the cache."""


def is_fastest(kind: str, x: Array, w: Array, y: Array, group: int, window: Window) -> bool:
    """Whether these kernels take less time than others, by shapes: measured over 46 on Zen 5 cores, with AVX-512 and AVX2.

    Args:
        kind: ``"forward"``, ``"input"`` or ``"weight"``.
        x, w, y: of the convolution, or their gradients.
    """
    taps, step = window.kernel[0], window.strides[0]
    square = len({*window.kernel}) == len({*window.strides}) == len({*window.dilations}) == 1 and window.begin is not None
    if not (x.ndim == 4 and square and group == len(w) == x.shape[1] and taps in (3, 5) and step in (1, 2)):
        return False
    if window.dilations[0] > 1 or 0 in (x.size, y.size):
        return False
    columns = int((x if kind == "input" else y).shape[3])
    if kind == "weight":
        return taps == 5 or columns >= (32 if step == 1 else 24)
    if taps == 3:
        return columns >= 14
    if kind == "input":
        return columns >= (28 if step == 1 else 16)
    return step == 1 and columns >= 32 and int(x.nbytes) >= FAR


def convolve(pool: Pool, x: Array, w: Array, epilogue: ConvEpilogue, y: Array, window: Window) -> Run:
    """y = Conv(x, w), and what follows, for images and as many filters as channels."""
    begin, step = window.padding[0], window.strides[0]
    return _windows(pool, x, w.reshape(len(w), -1), epilogue, y, begin, window.kernel[0], step, turned=False)


def input_gradient(pool: Pool, dy: Array, w: Array, dx: Array, window: Window) -> Run:
    """dx of y = Conv(x, w)"""
    begin = window.padding[0]
    if window.strides[0] == 2:
        planes, odd = len(dx) * dx.shape[1], [pad % 2 for pad in begin]
        numbers, zeros = np.array([pad // 2 for pad in begin], dtype=np.int64), np.zeros(dy.shape[3], dtype=np.float32)
        grain = max(1, GRAIN // (math.prod(dy.shape[2:]) * math.prod(window.kernel)))
        return pool.bind(_slopes_of(window.kernel[0], *odd), (dy, w.reshape(len(w), -1), dx, numbers, zeros), planes, grain)
    begin = tuple(window.kernel[0] - 1 - pad for pad in begin)
    return _windows(pool, dy, w.reshape(len(w), -1), PLAIN, dx, begin, window.kernel[0], 1, turned=True)


def _windows(
    pool: Pool,
    x: Array,
    w: Array,
    epilogue: ConvEpilogue,
    y: Array,
    begin: tuple[int, ...],
    taps: int,
    step: int,
    *,
    turned: bool,
) -> Run:
    planes = len(y) * y.shape[1]
    numbers = np.array([*begin, int(turned)], dtype=np.int64)
    zeros = np.zeros(x.shape[3], dtype=np.float32)
    others = epilogue.others(y)
    arguments = (x, w, *epilogue.vectors(len(w)), others, *epilogue.numbers(), y, numbers, zeros)
    grain = max(1, GRAIN // (math.prod(y.shape[2:]) * taps * taps))
    return pool.bind(_windows_of(taps, step), arguments, planes, grain)


@specialized
def _windows_of(taps: int, step: int) -> Callable[..., None]:
    windows, rows_of = plane_windows(taps, step, ROWS), ROWS

    @jit
    def kernel(x, w, scale, shift, others, code, alpha, beta, y, numbers, zeros, start, stop):
        begin_h, begin_w, turned = numbers
        channels, height, width = x.shape[1], x.shape[2], x.shape[3]
        rows, columns = y.shape[2], y.shape[3]
        infinity = np.float32(np.inf)
        low, high = (alpha, beta) if code == BETWEEN else (-infinity, infinity)
        for plane in range(start, stop):
            n, c = plane // channels, plane % channels
            of_x, of_y, of_w, w_step = x[n, c].ctypes.data, y[n, c].ctypes.data, w[c].ctypes.data, 4
            if turned == 1:
                of_w, w_step = of_w + 4 * (w.shape[1] - 1), -4
            other = others[n, c].ctypes.data if others.size > 0 else 0
            follows = (scale[c], shift[c], low, high)
            for r in range(0, rows, rows_of):
                at = 4 * r * columns
                windows(
                    of_x,
                    4 * width,
                    zeros.ctypes.data,
                    (height, width),
                    r * step - begin_h,
                    begin_w,
                    of_w,
                    w_step,
                    of_y + at,
                    4 * columns,
                    min(rows_of, rows - r),
                    columns,
                    follows,
                    other + at if other != 0 else 0,
                )
            if code != BETWEEN:
                activate_line(array_of(floats_at(of_y), (rows * columns,)), code, alpha, beta)

    return kernel


@specialized
def _slopes_of(taps: int, odd_h: int, odd_w: int) -> Callable[..., None]:
    slopes, rows_of = plane_slopes(taps, odd_h, odd_w, PAIRS), 2 * PAIRS

    @jit
    def kernel(dy, w, dx, numbers, zeros, start, stop):
        half_h, half_w = numbers
        channels, height, width = dy.shape[1], dy.shape[2], dy.shape[3]
        rows, columns = dx.shape[2], dx.shape[3]
        for plane in range(start, stop):
            n, c = plane // channels, plane % channels
            of_dy, of_dx, of_w = dy[n, c].ctypes.data, dx[n, c].ctypes.data, w[c].ctypes.data
            for r in range(0, rows, rows_of):
                slopes(
                    of_dy,
                    4 * width,
                    zeros.ctypes.data,
                    (height, width),
                    r // 2 + half_h,
                    half_w,
                    of_w,
                    of_dx + 4 * r * columns,
                    4 * columns,
                    min(rows_of, rows - r),
                    columns,
                )

    return kernel


def weight_gradient(pool: Pool, x: Array, dw: Array, dy: Array, window: Window) -> Run:
    """dw of y = Conv(x, w), for images and as many filters as channels."""
    taps, step = window.kernel[0], window.strides[0]
    channels = len(dw)
    parts = max(1, min(pool.threads, channels, dy.size * taps * taps // GRAIN))
    numbers = np.array([*window.padding[0], parts], dtype=np.int64)
    zeros = np.zeros(x.shape[3], dtype=np.float32)
    arguments = (x, dw.reshape(channels, -1), dy, numbers, zeros, on_lines((parts, 2, taps * taps * LANES)))
    return pool.bind(_products_of(taps, step), arguments, parts)


@specialized
def _products_of(taps: int, step: int) -> Callable[..., None]:
    two, one, lanes = plane_products(taps, step, 2), plane_products(taps, step, 1), LANES

    @jit
    def kernel(x, dw, dy, numbers, zeros, all_sums, start, stop):
        begin_h, begin_w, parts = numbers
        samples, channels, height, width = x.shape
        rows, columns = dy.shape[2], dy.shape[3]
        of_zeros, sizes, line = zeros.ctypes.data, (height, width), 4 * columns
        for part in range(start, stop):
            sums, totals = all_sums[part, 0], all_sums[part, 1]
            of_sums = sums.ctypes.data
            for c in range(channels * part // parts, channels * (part + 1) // parts):
                totals[:] = 0.0
                for n in range(samples):
                    sums[:] = 0.0
                    of_x, of_dy = x[n, c].ctypes.data, dy[n, c].ctypes.data
                    for r in range(0, rows - 1, 2):
                        top = r * step - begin_h
                        two(of_x, 4 * width, of_zeros, sizes, top, begin_w, of_dy + r * line, line, columns, of_sums)
                    if rows % 2 == 1:
                        r, top = rows - 1, (rows - 1) * step - begin_h
                        one(of_x, 4 * width, of_zeros, sizes, top, begin_w, of_dy + r * line, line, columns, of_sums)
                    for v in range(totals.size):
                        totals[v] += sums[v]
                for t in range(dw.shape[1]):
                    total = np.float32(0.0)
                    for v in range(lanes):
                        total += totals[t * lanes + v]
                    dw[c, t] = total

    return kernel
