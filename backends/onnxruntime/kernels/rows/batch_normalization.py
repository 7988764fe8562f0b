"""Norms over a batch, one channel at a time, and what follows them: a sum, an activation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import inlined, jit, specialized
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import between
from graphc.backends.onnxruntime.vectors.functions import Vector, row_function
from graphc.device import Array, Run
from graphc.ir.facts import required, static_dims


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


def _has_positions(node: ir.Node) -> bool:
    """Whether x is read one channel at a time."""
    shape = static_dims(required(node.inputs[1 if node.op_type.endswith("Grad") else 0]))
    return shape is not None and 0 not in shape and math.prod(shape[2:]) >= FEW


NONE, BETWEEN, LEAKY_RELU, HARD_SWISH, SILU = range(5)
"""Activations as compiled code knows them; the second leaves what lies between two bounds as it is."""
_CODES = {"": NONE, "leaky_relu": LEAKY_RELU, "hard_swish": HARD_SWISH, "silu": SILU}


def _activation(k: Binding) -> tuple[int, np.float32, np.float32]:
    """The code of the activation behind a norm, and its numbers: bounds, or the slope of a LeakyRelu."""
    name = k.attributes["activation"]
    low, high = (0.0, np.inf) if name == "relu" else (k.attributes["alpha"], k.attributes["beta"])
    return _CODES.get(name, BETWEEN), np.float32(low), np.float32(high)


def _silu_row(v: Vector) -> None:
    x = v.load(0)
    v.store(v.mul(x, v.sigmoid(x)), 0)


def _silu_slope_row(v: Vector) -> None:
    x, dy, dx = range(3)
    value = v.load(x)
    s = v.sigmoid(value)
    v.store(v.mul(v.load(dy), v.fma(v.mul(value, s), v.rest(s), s)), dx)


silu, silu_slope = row_function(1, _silu_row), row_function(3, _silu_slope_row)


@inlined
def hard_swish_slope(slope, value):
    """The gradient of a HardSwish; NaN has that of its operand."""
    three, zero = np.float32(3.0), np.float32(0.0)
    bent = slope * (value * np.float32(1 / 3) + np.float32(0.5))
    upper = bent if value <= three else slope
    return zero if value < -three else upper


@kernel("onnxruntime", "graphc::BatchNormalizationTraining")
def batch_normalization_training(k: Binding) -> Run:
    """One channel at a time: mean, variance, then y, so that memory is read once; of few positions, many channels at a time."""
    (x, scale, bias), (y, mean, var, inv_std) = given(k.inputs, 3), given(k.outputs, 4)
    epsilon = np.float32(k.attributes["epsilon"])
    if by_channel(x).shape[2] < FEW:
        sums, lines = np.zeros(_columns(x).shape[1]), np.zeros((2, _columns(x).shape[1]), dtype=np.float32)
        operands = (_columns(x), scale, bias, epsilon, _columns(y), mean, var, inv_std, sums, lines)
        return k.pool.bind(_batch_normalization_columns, operands, x.shape[1], grain_of(x))
    zero, none = np.float32(0.0), by_channel(x)[:0]
    arguments = (by_channel(x), scale, bias, epsilon, none, zero, zero, by_channel(y), mean, var, inv_std)
    return k.pool.bind(_batch_normalization(NONE, 0), arguments, x.shape[1], grain_of(x))


@kernel("onnxruntime", "graphc::FusedBatchNormalization", when=_has_positions)
def fused_batch_normalization(k: Binding) -> Run:
    """As :func:`batch_normalization_training`; y is added to and activated before it is written."""
    (x, scale, bias), (y, mean, var, inv_std) = given(k.inputs, 3), given(k.outputs, 4)
    residual, epsilon = optional(k.inputs, 3), np.float32(k.attributes["epsilon"])
    others = by_channel(x)[:0] if residual is None else by_channel(residual)
    code, *numbers = _activation(k)
    arguments = (by_channel(x), scale, bias, epsilon, others, *numbers, by_channel(y), mean, var, inv_std)
    return k.pool.bind(_batch_normalization(code, int(residual is not None)), arguments, x.shape[1], grain_of(x))


@specialized
def _batch_normalization(code: int, added: int) -> Callable[..., None]:
    """Make the loop with an activation, and with ``others`` that are added in front of it, or without."""

    @jit
    def batch_normalization(x, scale, bias, epsilon, others, low, high, y, mean, var, inv_std, start, stop):
        samples, positions = x.shape[0], x.shape[2]
        count, zero, one = samples * positions, np.float32(0.0), np.float32(1.0)
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
                    value = x[n, c, i] * factor + shift
                    if added:
                        value += others[n, c, i]
                    if code == BETWEEN:
                        value = between(value, low, high)
                    elif code == LEAKY_RELU:
                        value = low * value if value < zero else value
                    elif code == HARD_SWISH:
                        value *= between(value * np.float32(1 / 6) + np.float32(0.5), zero, one)
                    y[n, c, i] = value
                if code == SILU:
                    silu(positions, (y[n, c].ctypes.data,))

    return batch_normalization


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


@kernel("onnxruntime", "graphc::BatchNormalizationTrainingGrad", inplace={0: 0})
def batch_normalization_training_grad(k: Binding) -> Run:
    """One channel at a time: both sums, then dx; of few positions, many channels at a time."""
    (dy, x, scale, mean, inv_std), (dx, dscale, dbias) = given(k.inputs, 5), given(k.outputs, 3)
    same = int(0 in k.aliases)
    if by_channel(x).shape[2] < FEW:
        sums, lines = np.zeros((2, _columns(x).shape[1])), np.zeros((3, _columns(x).shape[1]), dtype=np.float32)
        operands = (_columns(dy), _columns(x), scale, mean, inv_std, same, _columns(dx), dscale, dbias, sums, lines)
        return k.pool.bind(_batch_normalization_columns_grad, operands, x.shape[1], grain_of(x))
    zero = np.float32(0.0)
    vectors = (scale, mean, mean, inv_std, zero, zero)  # without an activation nothing reads a bias
    arguments = (by_channel(dy), by_channel(x), *vectors, by_channel(x)[0], same, by_channel(dx), dscale, dbias)
    return k.pool.bind(_batch_normalization_grad(NONE, 0), arguments, x.shape[1], grain_of(x))


@kernel("onnxruntime", "graphc::FusedBatchNormalizationGrad", when=_has_positions, inplace={0: 0})
def fused_batch_normalization_grad(k: Binding) -> Run:
    """As :func:`batch_normalization_training_grad`; dy is that of the activation, whose operand x tells."""
    (dy, x, scale, bias, mean, inv_std), (dx, dscale, dbias) = given(k.inputs, 6), given(k.outputs, 3)
    code, *numbers = _activation(k)
    loop = _batch_normalization_grad(code, int(code == BETWEEN and bool(k.attributes["closed"])))
    operands = scratchpad_of(k.pool).floats(by_channel(x).shape[1:])[0] if code == SILU else by_channel(x)[0]
    vectors, same = (scale, bias, mean, inv_std, *numbers), int(0 in k.aliases)
    arguments = (by_channel(dy), by_channel(x), *vectors, operands, same, by_channel(dx), dscale, dbias)
    return k.pool.bind(loop, arguments, x.shape[1], grain_of(x))


@specialized
def _batch_normalization_grad(code: int, closed: int) -> Callable[..., None]:
    """Make the loop with the gradient of an activation, of bounds that have a slope themselves where they are ``closed``."""

    @inlined
    def bent(slope, value, least, most):
        """The slope in front of an activation that is no SiLU, from the one behind it and what it met."""
        nothing = np.float32(0.0)
        if code == BETWEEN:
            inside = (value >= least) & (value <= most) if closed else (value > least) & (value < most)
            return slope if inside else nothing
        if code == LEAKY_RELU:
            return slope if value > nothing else least * slope
        if code == HARD_SWISH:
            return hard_swish_slope(slope, value)
        return slope

    @jit
    def batch_normalization_grad(dy, x, scale, bias, mean, inv_std, low, high, operands, same, dx, dscale, dbias, start, stop):
        samples, positions = x.shape[0], x.shape[2]
        count = samples * positions
        for c in range(start, stop):
            centre, inverse = mean[c], inv_std[c]
            factor = scale[c] * inverse
            offset = bias[c] - centre * factor
            slopes, products = 0.0, 0.0
            for n in range(samples):
                if code == SILU:  # its gradient is kept in dx
                    for i in range(positions):
                        operands[c, i] = x[n, c, i] * factor + offset
                    silu_slope(positions, (operands[c].ctypes.data, dy[n, c].ctypes.data, dx[n, c].ctypes.data))
                slope, product = np.float32(0.0), np.float32(0.0)
                for i in range(positions):
                    part = dx[n, c, i] if code == SILU else dy[n, c, i]
                    part = bent(part, x[n, c, i] * factor + offset, low, high)
                    slope += part
                    product += part * (x[n, c, i] - centre)
                slopes += slope
                products += product
            dbias[c] = np.float32(slopes)
            dscale[c] = np.float32(products * inverse)
            bend = np.float32(-factor * inverse * inverse * (products / count))
            shift = np.float32(-factor * (slopes / count)) - bend * centre
            for n in range(samples):
                if same or code == SILU:  # one array to the compiler, which makes vectors only of what cannot overlap
                    given = dx[n, c]
                    for i in range(positions):
                        part = bent(given[i], x[n, c, i] * factor + offset, low, high)
                        given[i] = part * factor + x[n, c, i] * bend + shift
                    continue
                for i in range(positions):
                    part = bent(dy[n, c, i], x[n, c, i] * factor + offset, low, high)
                    dx[n, c, i] = part * factor + x[n, c, i] * bend + shift

    return batch_normalization_grad


@jit
def _batch_normalization_columns_grad(dy, x, scale, mean, inv_std, same, dx, dscale, dbias, sums, lines, start, stop):
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
        if same:
            for i in range(row.size):
                out[i] = out[i] * factors[i] + row[i] * bends[i] + shifts[i]
            continue
        for i in range(row.size):
            out[i] = slopes[i] * factors[i] + row[i] * bends[i] + shifts[i]
