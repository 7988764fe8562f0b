"""Normalisation over a batch, a layer or neighbouring channels; operands are in cache for the second sweep."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import exact, jit
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.device import Array, Run, in_order
from graphc.ir.facts import static_dims


def by_channel(array: Array) -> Array:
    """N × C × positions, one position for rank 2."""
    return array.reshape(array.shape[0], array.shape[1], -1)


FEW = 8
"""Positions of a channel from which one channel at a time is read well; below, neighbouring channels go side by side."""


def _columns(array: Array) -> Array:
    """N × (C · positions)."""
    return array.reshape(array.shape[0], -1)


def grain_of(x: Array) -> int:
    """Fewest channels of ``x`` that are worth handing to another thread."""
    size, channels = x.size, int(x.shape[1])
    return max(1, 16384 // max(1, size // max(1, channels)))


@kernel("onnxruntime", "graphc::BatchNormalizationTraining")
def batch_normalization_training(k: Binding) -> Run:
    """One channel at a time: mean, variance, then y, so that memory is read once; of few positions, many channels at a time."""
    (x, scale, bias), (y, mean, var, inv_std) = given(k.inputs, 3), given(k.outputs, 4)
    epsilon = np.float32(k.attributes["epsilon"])
    if by_channel(x).shape[2] < FEW:
        sums, lines = np.zeros(_columns(x).shape[1]), np.zeros((2, _columns(x).shape[1]), dtype=np.float32)
        operands = (_columns(x), scale, bias, epsilon, _columns(y), mean, var, inv_std, sums, lines)
        return k.pool.bind(_batch_normalization_columns, operands, x.shape[1], grain_of(x))
    arguments = (by_channel(x), scale, bias, epsilon, by_channel(y), mean, var, inv_std)
    pool, channels, grain = k.pool, x.shape[1], grain_of(x)
    return pool.bind(_batch_normalization, arguments, channels, grain)


@jit
def _batch_normalization(x, scale, bias, epsilon, y, mean, var, inv_std, start, stop):
    samples, positions = x.shape[0], x.shape[2]
    count = samples * positions
    for c in range(start, stop):
        total = 0.0
        for n in range(samples):
            part = np.float32(0.0)
            for i in range(positions):
                part += x[n, c, i]
            total += part
        centre = np.float32(total / count)
        total = 0.0
        for n in range(samples):
            part = np.float32(0.0)
            for i in range(positions):
                part += (x[n, c, i] - centre) * (x[n, c, i] - centre)
            total += part
        variance = np.float32(total / count)
        inverse = np.float32(1.0) / np.sqrt(variance + epsilon)
        factor = scale[c] * inverse
        shift = bias[c] - centre * factor
        mean[c], var[c], inv_std[c] = centre, variance, inverse
        for n in range(samples):
            for i in range(positions):
                y[n, c, i] = x[n, c, i] * factor + shift


@jit
def _batch_normalization_columns(x, scale, bias, epsilon, y, mean, var, inv_std, sums, lines, start, stop):
    samples, positions = x.shape[0], x.shape[1] // scale.size
    count = samples * positions
    first, last = start * positions, stop * positions
    total, centres, factors = sums[first:last], lines[0, first:last], lines[1, first:last]
    total[:] = 0.0
    for n in range(samples):
        row = x[n, first:last]
        for i in range(row.size):
            total[i] += row[i]
    for c in range(start, stop):
        at = (c - start) * positions
        whole = 0.0
        for i in range(positions):
            whole += total[at + i]
        mean[c] = np.float32(whole / count)
        centres[at : at + positions] = mean[c]
    total[:] = 0.0
    for n in range(samples):
        row = x[n, first:last]
        for i in range(row.size):
            distance = row[i] - centres[i]
            total[i] += distance * distance
    for c in range(start, stop):
        at = (c - start) * positions
        whole = 0.0
        for i in range(positions):
            whole += total[at + i]
        var[c] = np.float32(whole / count)
        inv_std[c] = np.float32(1.0) / np.sqrt(var[c] + epsilon)
        factors[at : at + positions] = scale[c] * inv_std[c]
        centres[at : at + positions] = bias[c] - mean[c] * (scale[c] * inv_std[c])  # from here on the shift
    for n in range(samples):
        row, out = x[n, first:last], y[n, first:last]
        for i in range(row.size):
            out[i] = row[i] * factors[i] + centres[i]


@kernel("onnxruntime", "graphc::BatchNormalizationTrainingGrad")
def batch_normalization_training_grad(k: Binding) -> Run:
    """One channel at a time: both sums, then dx; of few positions, many channels at a time."""
    (dy, x, scale, mean, inv_std), (dx, dscale, dbias) = given(k.inputs, 5), given(k.outputs, 3)
    if by_channel(x).shape[2] < FEW:
        sums, lines = np.zeros((2, _columns(x).shape[1])), np.zeros((3, _columns(x).shape[1]), dtype=np.float32)
        operands = (_columns(dy), _columns(x), scale, mean, inv_std, _columns(dx), dscale, dbias, sums, lines)
        return k.pool.bind(_batch_normalization_columns_grad, operands, x.shape[1], grain_of(x))
    arguments = (by_channel(dy), by_channel(x), scale, mean, inv_std, by_channel(dx), dscale, dbias)
    pool, channels, grain = k.pool, x.shape[1], grain_of(x)
    return pool.bind(_batch_normalization_grad, arguments, channels, grain)


@jit
def _batch_normalization_grad(dy, x, scale, mean, inv_std, dx, dscale, dbias, start, stop):
    samples, positions = x.shape[0], x.shape[2]
    count = samples * positions
    for c in range(start, stop):
        centre, inverse = mean[c], inv_std[c]
        slopes, products = 0.0, 0.0
        for n in range(samples):
            slope, product = np.float32(0.0), np.float32(0.0)
            for i in range(positions):
                slope += dy[n, c, i]
                product += dy[n, c, i] * (x[n, c, i] - centre)
            slopes += slope
            products += product
        dbias[c] = np.float32(slopes)
        dscale[c] = np.float32(products * inverse)
        factor = scale[c] * inverse
        bend = np.float32(-factor * inverse * inverse * (products / count))
        shift = np.float32(-factor * (slopes / count)) - bend * centre
        for n in range(samples):
            for i in range(positions):
                dx[n, c, i] = dy[n, c, i] * factor + x[n, c, i] * bend + shift


@jit
def _batch_normalization_columns_grad(dy, x, scale, mean, inv_std, dx, dscale, dbias, sums, lines, start, stop):
    samples, positions = x.shape[0], x.shape[1] // scale.size
    count = samples * positions
    first, last = start * positions, stop * positions
    of_bias, of_scale = sums[0, first:last], sums[1, first:last]
    factors, bends, shifts = lines[0, first:last], lines[1, first:last], lines[2, first:last]
    of_bias[:] = 0.0
    of_scale[:] = 0.0
    for c in range(start, stop):
        at = (c - start) * positions
        shifts[at : at + positions] = mean[c]
    for n in range(samples):
        slopes, row = dy[n, first:last], x[n, first:last]
        for i in range(row.size):
            of_bias[i] += slopes[i]
            of_scale[i] += slopes[i] * (row[i] - shifts[i])
    for c in range(start, stop):
        at = (c - start) * positions
        slopes_of_c, products = 0.0, 0.0
        for i in range(positions):
            slopes_of_c += of_bias[at + i]
            products += of_scale[at + i]
        inverse = inv_std[c]
        dbias[c] = np.float32(slopes_of_c)
        dscale[c] = np.float32(products * inverse)
        factor = scale[c] * inverse
        bend = np.float32(-factor * inverse * inverse * (products / count))
        factors[at : at + positions] = factor
        bends[at : at + positions] = bend
        shifts[at : at + positions] = np.float32(-factor * (slopes_of_c / count)) - bend * mean[c]
    for n in range(samples):
        slopes, row, out = dy[n, first:last], x[n, first:last], dx[n, first:last]
        for i in range(row.size):
            out[i] = slopes[i] * factors[i] + row[i] * bends[i] + shifts[i]


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
