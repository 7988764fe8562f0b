"""BatchNormalization over the batch of all workers, one channel at a time.

Sums are made in float64 element by element: a float32 partial sum would depend on where a worker's share begins.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.rows.batch_normalization import by_channel, grain_of
from graphc.device import Run


@kernel("onnxruntime", "graphc::BatchMoments")
def batch_moments(k: Binding) -> Run:
    (x, live), (count, total, squares) = given(k.inputs, 2), given(k.outputs, 3)
    elements = x.size / max(1, x.shape[1])
    arguments = (by_channel(x), live.reshape(1), total, squares)
    sweep = k.pool.bind(_moments, arguments, x.shape[1], grain_of(x))

    def run() -> None:
        count[...] = elements if live > 0 else 0.0
        sweep()

    return run


@jit
def _moments(x, live, total, squares, start, stop):
    samples, positions = x.shape[0], x.shape[2]
    for c in range(start, stop):
        first, second = 0.0, 0.0
        if live[0] > 0.0:
            for n in range(samples):
                for i in range(positions):
                    value = np.float64(x[n, c, i])
                    first += value
                    second += value * value
        total[c], squares[c] = first, second


def _is_single(node: ir.Node) -> bool:
    return node.outputs[0].dtype == ir.DataType.FLOAT


@kernel("onnxruntime", "graphc::BatchStatistics", dtypes=(ir.DataType.DOUBLE,), when=_is_single)
def batch_statistics(k: Binding) -> Run:
    (count, total, squares), (mean, var, inv_std) = given(k.inputs, 3), given(k.outputs, 3)
    arguments = (count.reshape(1), total, squares, float(k.attributes["epsilon"]), mean, var, inv_std)
    return k.pool.bind(_statistics, arguments, 1)


@jit
def _statistics(count, total, squares, epsilon, mean, var, inv_std, start, stop):
    elements = max(count[0], 1.0)
    for c in range(total.size):
        centre = total[c] / elements
        spread = max(squares[c] / elements - centre * centre, 0.0)
        mean[c], var[c], inv_std[c] = centre, spread, 1.0 / np.sqrt(spread + epsilon)


@kernel("onnxruntime", "graphc::SharedNormalization")
def shared_normalization(k: Binding) -> Run:
    (x, scale, bias, mean, inv_std), (y,) = given(k.inputs, 5), given(k.outputs, 1)
    arguments = (by_channel(x), scale, bias, mean, inv_std, by_channel(y))
    pool, channels, grain = k.pool, x.shape[1], grain_of(x)
    return pool.bind(_normalize, arguments, channels, grain)


@jit
def _normalize(x, scale, bias, mean, inv_std, y, start, stop):
    samples, positions = x.shape[0], x.shape[2]
    for c in range(start, stop):
        centre, factor, shift = mean[c], scale[c] * inv_std[c], bias[c]
        for n in range(samples):
            for i in range(positions):
                y[n, c, i] = (x[n, c, i] - centre) * factor + shift


@kernel("onnxruntime", "graphc::SharedNormalizationSums")
def shared_normalization_sums(k: Binding) -> Run:
    (dy, x, mean, inv_std), outputs = given(k.inputs, 4), given(k.outputs, 4)
    arguments = (by_channel(dy), by_channel(x), mean, inv_std, *outputs)
    pool, channels, grain = k.pool, x.shape[1], grain_of(x)
    return pool.bind(_normalize_sums, arguments, channels, grain)


@jit
def _normalize_sums(dy, x, mean, inv_std, dscale, dbias, product, slope, start, stop):
    samples, positions = x.shape[0], x.shape[2]
    for c in range(start, stop):
        centre = mean[c]
        first, second = 0.0, 0.0
        for n in range(samples):
            for i in range(positions):
                value = np.float64(dy[n, c, i])
                first += value
                second += value * np.float64(x[n, c, i] - centre)
        second *= np.float64(inv_std[c])
        slope[c], product[c] = first, second
        dbias[c], dscale[c] = first, second


@kernel("onnxruntime", "graphc::SharedNormalizationGrad")
def shared_normalization_grad(k: Binding) -> Run:
    (dy, x, scale, mean, inv_std, count, product, slope, live), (dx,) = given(k.inputs, 9), given(k.outputs, 1)
    arguments = (by_channel(dy), by_channel(x), scale, mean, inv_std, count.reshape(1), product, slope, by_channel(dx))
    sweep = k.pool.bind(_normalize_grad, arguments, x.shape[1], grain_of(x))

    def run() -> None:
        if live > 0:
            sweep()
        else:
            dx.fill(0)

    return run


@jit
def _normalize_grad(dy, x, scale, mean, inv_std, count, product, slope, dx, start, stop):
    samples, positions = x.shape[0], x.shape[2]
    elements = max(count[0], 1.0)
    for c in range(start, stop):
        centre, factor = mean[c], scale[c] * inv_std[c]
        level = np.float32(slope[c] / elements)
        tilt = np.float32(inv_std[c] * product[c] / elements)
        for n in range(samples):
            for i in range(positions):
                dx[n, c, i] = ((dy[n, c, i] - level) - (x[n, c, i] - centre) * tilt) * factor
