"""Norms over a layer or neighbouring channels; operands are in cache for the second sweep."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import exact, jit
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.kernels.rows.batch_normalization import by_channel
from graphc.device import Run, in_order
from graphc.ir.facts import static_dims


def _scale_is_a_row(of: int) -> Callable[[ir.Node], bool]:
    """Whether scale (the input after input ``of``) has the shape of the normalised axes, so that those form one
    contiguous row.
    """

    def check(node: ir.Node) -> bool:
        x, scale = node.inputs[of], node.inputs[of + 1]
        shape = static_dims(x) if x is not None else None
        own = static_dims(scale) if scale is not None else None
        if shape is None or own is None:
            return False
        axis = node.attributes.get_int("axis", -1) % len(shape)
        return own == shape[axis:] and 0 not in shape

    return check


@kernel("onnxruntime", "LayerNormalization", when=_scale_is_a_row(0))
def layer_normalization(k: Binding) -> Run:
    """y = (x - mean) / √(variance + ε) · scale + bias, one row at a time: mean, variance, then the result"""
    (x, scale), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    size = scale.size
    rows = x.size // size
    bias = optional(k.inputs, 2)
    # mean and inverse deviation are outputs only where the backward pass reads them
    sides = [a if (a := optional(k.outputs, i)) is not None else np.empty(rows, dtype=np.float32) for i in (1, 2)]
    arguments = (
        x.reshape(rows, size),
        scale.reshape(-1),
        np.zeros(size, dtype=np.float32) if bias is None else bias.reshape(-1),
        y.reshape(rows, size),
        sides[0].reshape(-1),
        sides[1].reshape(-1),
        np.float32(k.attributes.get("epsilon", 1e-5)),
    )
    pool, grain = k.pool, max(1, 8192 // size)
    return pool.bind(_layer_normalization, arguments, rows, grain)


@jit
def _layer_normalization(x, scale, bias, y, mean, inv_std, epsilon, start, stop):
    size = scale.size
    for r in range(start, stop):
        row, out = x[r], y[r]
        total = np.float32(0.0)
        for i in range(size):
            total += row[i]
        centre = total / np.float32(size)
        spread = np.float32(0.0)
        for i in range(size):
            distance = row[i] - centre
            spread += distance * distance
        inverse = np.float32(1.0) / np.sqrt(spread / np.float32(size) + epsilon)
        for i in range(size):
            out[i] = (row[i] - centre) * inverse * scale[i] + bias[i]
        mean[r] = centre
        inv_std[r] = inverse


@kernel("onnxruntime", "graphc::LayerNormalizationGrad", when=_scale_is_a_row(1))
def layer_normalization_grad(k: Binding) -> Run:
    """One row at a time; sums for scale and bias go to one accumulator per thread and are added at the end."""
    (dy, x, scale, mean, inv_std), (dx, dscale, dbias) = given(k.inputs, 5), given(k.outputs, 3)
    size = scale.size
    rows = x.size // size
    parts = max(1, min(k.pool.threads, x.size // 16384, rows))
    sums = on_lines((parts, 2, size))
    arguments = (
        dy.reshape(rows, size),
        x.reshape(rows, size),
        scale.reshape(-1),
        mean.reshape(-1),
        inv_std.reshape(-1),
        dx.reshape(rows, size),
        sums,
    )
    flat_scale, flat_bias = dscale.reshape(-1), dbias.reshape(-1)
    sweep = k.pool.bind(_layer_normalization_grad, arguments, parts)
    return in_order([sweep, k.pool.bind(_add_accumulators, (sums, flat_scale, flat_bias), 1)])


@exact
def _add_accumulators(sums, dscale, dbias, start, stop):
    dscale[:], dbias[:] = 0.0, 0.0
    for part in range(sums.shape[0]):
        for c in range(dscale.size):
            dscale[c] += sums[part, 0, c]
            dbias[c] += sums[part, 1, c]


@jit
def _layer_normalization_grad(dy, x, scale, mean, inv_std, dx, sums, start, stop):
    rows, size = x.shape
    parts = sums.shape[0]
    for part in range(start, stop):
        of_scale, of_bias = sums[part, 0], sums[part, 1]
        of_scale[:] = 0.0
        of_bias[:] = 0.0
        for r in range(rows * part // parts, rows * (part + 1) // parts):
            centre, inverse = mean[r], inv_std[r]
            level, tilt = np.float32(0.0), np.float32(0.0)
            for i in range(size):
                slope = dy[r, i] * scale[i]
                level += slope
                tilt += slope * ((x[r, i] - centre) * inverse)
            level /= np.float32(size)
            tilt /= np.float32(size)
            for i in range(size):
                normal = (x[r, i] - centre) * inverse
                dx[r, i] = (dy[r, i] * scale[i] - level - normal * tilt) * inverse
                of_scale[i] += dy[r, i] * normal
                of_bias[i] += dy[r, i]


@kernel("onnxruntime", "graphc::LRNGrad")
def lrn_grad(k: Binding) -> Run:
    """One sample at a time: s for all channels, the sums across channels, then dx."""
    (dy, x, y), (dx,) = given(k.inputs, 3), given(k.outputs, 1)
    a = k.attributes
    samples, channels = x.shape[:2]
    block = 256  # number of positions whose channels fit in cache
    positions = x.size // max(1, samples * channels)
    blocks = -(-positions // block)
    parts = max(1, min(k.pool.threads, samples * blocks))
    scratch = np.zeros((parts, 2, channels, block), dtype=np.float32)
    coefficients = np.array([a["alpha"] / a["size"], a["beta"], a["bias"]], dtype=np.float32)
    arguments = (by_channel(dy), by_channel(x), by_channel(y), coefficients, int(a["size"]), scratch, by_channel(dx))
    pool = k.pool
    return pool.bind(_lrn_grad, arguments, parts)


@jit
def _lrn_grad(dy, x, y, coefficients, size, scratch, dx, start, stop):
    alpha, beta, bias = coefficients[0], coefficients[1], coefficients[2]
    before, after = (size - 1) // 2, size // 2
    samples, channels, positions = x.shape
    parts, block = scratch.shape[0], scratch.shape[3]
    blocks = (positions + block - 1) // block
    for part in range(start, stop):
        norms, crossed = scratch[part, 0], scratch[part, 1]
        for item in range(samples * blocks * part // parts, samples * blocks * (part + 1) // parts):
            n, first = item // blocks, item % blocks * block
            width = min(block, positions - first)
            for c in range(channels):
                for i in range(width):
                    norms[c, i] = 0.0
                for other in range(max(0, c - before), min(channels, c + after + 1)):
                    for i in range(width):
                        norms[c, i] += x[n, other, first + i] * x[n, other, first + i]
                for i in range(width):
                    norms[c, i] = bias + alpha * norms[c, i]
                    crossed[c, i] = dy[n, c, first + i] * y[n, c, first + i] / norms[c, i]
            for c in range(channels):
                for i in range(width):
                    dx[n, c, first + i] = 0.0
                for other in range(max(0, c - after), min(channels, c + before + 1)):
                    for i in range(width):
                        dx[n, c, first + i] += crossed[other, i]
                for i in range(width):
                    across = np.float32(2.0) * alpha * beta * x[n, c, first + i] * dx[n, c, first + i]
                    dx[n, c, first + i] = dy[n, c, first + i] * _negative_power(norms[c, i], beta) - across


@jit
def _negative_power(base, exponent):
    """base^-exponent; by square roots for the exponent that all published networks use, else by libm."""
    if exponent == np.float32(0.75):
        root = np.sqrt(base)
        return np.float32(1.0) / (root * np.sqrt(root))
    return base**-exponent
