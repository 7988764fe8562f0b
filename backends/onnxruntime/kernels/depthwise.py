"""Depthwise convolutions: their weight gradient, and along one axis all three.

The weight gradient takes one channel at a time, all taps of a row of the window in registers:

    dw[c, i, j] = Σ over samples and positions (r, q) of x[n, c, r·stride + i·dilation - pad, …] · dy[n, c, r, q]

oneDNN 3.2 and PyTorch 2.13 compute most windows beyond 3 × 3 as a small product a channel: for 7 × 7, 16 × 96 × 16 × 16, 37 ms
of one thread (AVX2), where this takes 2.5; for 5 × 5, 6 and 1.3 ms. For 3 × 3 oneDNN is as fast or faster. Along one axis it
computes element by element: 31 taps over 16 × 64 × 256 take 6.5 ms of two threads, and PyTorch 2.5, where this takes 0.4.
"""

from __future__ import annotations

import numpy as np

from graphc.backend import Pool
from graphc.backends.onnxruntime.kernels.jit import jit
from graphc.backends.onnxruntime.vectors.functions import LANES, taps_function
from graphc.device import Array, Run
from graphc.ir.ops.convolution import Window

taps1, taps3, taps5, taps7 = (taps_function(taps) for taps in (1, 3, 5, 7))


def is_faster(dw: Array, group: int, onednn: bool) -> bool:
    """Whether this kernel is the fastest one for weights ``dw``: M × C/group × window, beside oneDNN or without it."""
    window = dw.shape[2:]
    return group > 1 and dw.shape[1] == 1 and len(window) < 3 and (max(window) > 3 or not onednn)


def weight_gradient(pool: Pool, x: Array, dw: Array, dy: Array, window: Window) -> Run:
    """dw from x and dy, for one or two spatial axes and weights of one channel a group."""
    assert window.begin is not None
    lift = [1] * (4 - x.ndim)  # one spatial axis is treated as two with a height of one
    none = [0] * len(lift)
    geometry = np.array([*lift, *window.strides, *lift, *window.dilations, *none, *window.begin], dtype=np.int64)
    images, slopes = x.reshape(*x.shape[:2], *lift, *x.shape[2:]), dy.reshape(*dy.shape[:2], *lift, *dy.shape[2:])
    weights = dw.reshape(dw.shape[0], *lift, *dw.shape[2:])
    channels, grain = dw.shape[0], max(1, 65536 // max(1, dy.size // dw.shape[0] * int(np.prod(window.kernel))))
    parts = max(1, min(pool.threads, channels // grain))
    stride_h, stride_w, dilation_h, dilation_w = (int(n) for n in geometry[:4])
    (rows, columns), (taps_h, taps_w) = slopes.shape[2:], weights.shape[1:]
    blocks = -(-columns // LANES)
    # Padded copies of one image; the padding stays zero. Columns lie by their remainder modulo the stride, so that a tap reads
    # consecutive ones.
    each = blocks * LANES + (taps_w - 1) * dilation_w // stride_w
    image = np.zeros((parts, (rows - 1) * stride_h + (taps_h - 1) * dilation_h + 1, stride_w, each), dtype=np.float32)
    slope = np.zeros((parts, rows, blocks * LANES), dtype=np.float32)
    sums = np.zeros((parts, taps_h, taps_w, LANES), dtype=np.float32)
    columns_of_taps = np.arange(taps_w) * dilation_w
    offsets = 4 * (columns_of_taps % stride_w * each + columns_of_taps // stride_w)
    return pool.bind(_weight_gradient, (images, slopes, weights, geometry, image, slope, sums, offsets), parts)


@jit
def _weight_gradient(x, dy, dw, geometry, images, slopes, all_sums, offsets, start, stop):
    stride_h, stride_w, dilation_h, _, begin_h, begin_w = geometry
    samples, height, width = x.shape[0], x.shape[2], x.shape[3]
    rows, columns = dy.shape[2], dy.shape[3]
    taps_h, taps_w = dw.shape[1], dw.shape[2]
    channels, parts, outs = dw.shape[0], images.shape[0], dw.shape[0] // x.shape[1]  # outs: of an input channel
    tall, each, blocks = images.shape[1], images.shape[3], slopes.shape[2] // LANES
    line, of_offsets = 4 * stride_w * each, offsets.ctypes.data
    for part in range(start, stop):
        image, slope, sums = images[part], slopes[part], all_sums[part]
        of_image, of_slope, of_sums = image.ctypes.data, slope.ctypes.data, sums.ctypes.data
        for c in range(channels * part // parts, channels * (part + 1) // parts):
            sums[:] = 0.0
            for n in range(samples):
                for r in range(rows):
                    for q in range(columns):
                        slope[r, q] = dy[n, c, r, q]
                for h in range(max(0, begin_h), min(tall, height + begin_h)):
                    source = x[n, c // outs, h - begin_h]
                    for phase in range(stride_w):
                        first = max(0, -((phase - begin_w) // stride_w))
                        last = min(each, (width - 1 + begin_w - phase) // stride_w + 1)
                        target, shift = image[h, phase], phase - begin_w
                        if stride_w == 1:
                            for e in range(first, last):
                                target[e] = source[e + shift]
                        else:
                            for e in range(first, last):
                                target[e] = source[e * stride_w + shift]
                for i in range(taps_h):
                    at, row, j = of_image + i * dilation_h * line, of_sums + i * taps_w * LANES * 4, 0
                    step = stride_h * line
                    while j < taps_w:
                        o, s = of_offsets + 8 * j, row + j * LANES * 4
                        if taps_w - j >= 7:
                            taps7(at, step, o, of_slope, blocks * LANES * 4, rows, blocks, s)
                            j += 7
                        elif taps_w - j >= 5:
                            taps5(at, step, o, of_slope, blocks * LANES * 4, rows, blocks, s)
                            j += 5
                        elif taps_w - j >= 3:
                            taps3(at, step, o, of_slope, blocks * LANES * 4, rows, blocks, s)
                            j += 3
                        else:
                            taps1(at, step, o, of_slope, blocks * LANES * 4, rows, blocks, s)
                            j += 1
            for i in range(taps_h):
                for j in range(taps_w):
                    total = np.float32(0.0)
                    for v in range(LANES):
                        total += sums[i, j, v]
                    dw[c, i, j] = total


BLOCK = 2048
"""Elements of a line whose sums stay in the cache nearest to a core while all taps are added."""


def is_along_a_line(w: Array, x: Array, group: int) -> bool:
    """Whether each channel of x is convolved alone along its one axis."""
    return x.ndim == 3 and w.shape[1] == 1 and group == w.shape[0] == x.shape[1] > 1


def along_lines(pool: Pool, x: Array, w: Array, bias: Array | None, y: Array, window: Window) -> Run:
    """y = Conv(x, w, bias)"""
    return _bind_lines(pool, x, w, bias, y, window, window.padding[0][0], turned=False)


def gradient_along_lines(pool: Pool, dy: Array, w: Array, dx: Array, window: Window) -> Run:
    """dx of y = Conv(x, w): a convolution of dy, spread by the stride, with the taps in reverse order."""
    return _bind_lines(pool, dy, w, None, dx, window, window.span[0] - 1 - window.padding[0][0], turned=True)


def _bind_lines(
    pool: Pool, x: Array, w: Array, bias: Array | None, y: Array, window: Window, begin: int, *, turned: bool
) -> Run:
    """Bind y = Conv(x, w, bias), with ``begin`` zeros before x.

    Args:
        turned: the taps are in reverse order, and the stride lies between the elements of x, not between those of y.
    """
    (dilation,), (stride,), lines = window.dilations, window.strides, x.shape[0] * x.shape[1]
    spread, kept = (stride, 1) if turned else (1, stride)
    size = (y.shape[2] - 1) * kept + 1
    parts = max(1, min(pool.threads, lines, lines * size * w.shape[2] // 65536))
    copies: Array = np.zeros((parts, size + window.span[0] - 1), dtype=np.float32)
    wide: Array = np.zeros((parts, size if kept > 1 else 1), dtype=np.float32)
    first = np.zeros(len(w), dtype=np.float32) if bias is None else bias
    numbers = np.array([dilation, begin, spread, kept, size, int(turned)], dtype=np.int64)
    arguments = (x.reshape(lines, -1), w.reshape(len(w), -1), first, numbers, y.reshape(lines, -1), copies, wide)
    return pool.bind(_convolve_lines, arguments, parts)


@jit
def _convolve_lines(x, w, bias, numbers, y, copies, wide, start, stop):
    dilation, begin, spread, kept, size, turned = numbers
    parts, lines, taps = copies.shape[0], x.shape[0], w.shape[1]
    direction, last = -1 if turned else 1, taps - 1 if turned else 0
    for part in range(start, stop):
        padded = copies[part]
        low = max(0, -(begin // spread))
        high = min(x.shape[1], (padded.size - 1 - begin) // spread + 1)
        for line in range(lines * part // parts, lines * (part + 1) // parts):
            source, c = x[line], line % w.shape[0]
            if spread == 1:
                for i in range(low, high):
                    padded[i + begin] = source[i]
            else:
                for i in range(low, high):
                    padded[i * spread + begin] = source[i]
            weights, result = w[c], wide[part] if kept > 1 else y[line]
            for at in range(0, size, BLOCK):
                sums = result[at : min(size, at + BLOCK)]
                sums[:] = bias[c]
                j = 0
                while j + 4 <= taps:
                    k = last + j * direction
                    a, b, d, e = weights[k], weights[k + direction], weights[k + 2 * direction], weights[k + 3 * direction]
                    of_a, of_b = padded[at + j * dilation :], padded[at + (j + 1) * dilation :]
                    of_d, of_e = padded[at + (j + 2) * dilation :], padded[at + (j + 3) * dilation :]
                    for q in range(sums.size):
                        sums[q] += a * of_a[q] + b * of_b[q] + d * of_d[q] + e * of_e[q]
                    j += 4
                while j < taps:
                    a, of_a = weights[last + j * direction], padded[at + j * dilation :]
                    for q in range(sums.size):
                        sums[q] += a * of_a[q]
                    j += 1
            if kept > 1:
                target = y[line]
                for q in range(target.size):
                    target[q] = result[q * kept]
