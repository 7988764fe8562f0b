"""Gelu, softmax and gradients of activations in one sweep over memory."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import exact, jit
from graphc.backends.onnxruntime.kernels.common.mathematics import exp, highest_of
from graphc.device import Run

GRAIN = 16384
"""Smallest range, in elements, that is worth handing to another thread."""

_HALF_ROOT = np.float32(math.sqrt(0.5))
_DENSITY = np.float32(1.0 / math.sqrt(2.0 * math.pi))
_TANH_SCALE = np.float32(math.sqrt(2.0 / math.pi))
_TANH_CUBIC = np.float32(0.044715)


@kernel("onnxruntime", "graphc::ReluGrad")
def relu_grad(k: Binding) -> Run:
    """dx = dy where y > 0, else 0"""
    (dy, y), (dx,) = given(k.inputs, 2), given(k.outputs, 1)
    arguments, pool, size = (dy.reshape(-1), y.reshape(-1), dx.reshape(-1)), k.pool, dy.size
    return pool.bind(_relu_grad, arguments, size, GRAIN)


@exact
def _relu_grad(dy, y, dx, start, stop):
    dy, y, dx = dy[start:stop], y[start:stop], dx[start:stop]
    for i in range(y.size):
        slope = dy[i]  # always read, so that there is no branch
        dx[i] = slope if y[i] > np.float32(0.0) else np.float32(0.0)


@kernel("onnxruntime", "Gelu")
def gelu(k: Binding) -> Run:
    """y = x·Φ(x), or its approximation by tanh"""
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    arguments, pool, size = (x.reshape(-1), y.reshape(-1)), k.pool, x.size
    approximate = k.attributes.get("approximate", "none")
    loop = _gelu_tanh if approximate in ("tanh", b"tanh") else _gelu
    return pool.bind(loop, arguments, size, GRAIN // 4)


@jit
def _gelu(x, y, start, stop):
    """Φ as in :func:`_gelu_grad`."""
    x, y = x[start:stop], y[start:stop]
    one, half = np.float32(1.0), np.float32(0.5)
    for i in range(x.size):
        v = x[i]
        e = exp(-half * v * v)
        t = one / (one + np.float32(0.3275911) * _HALF_ROOT * abs(v))
        series = np.float32(1.421413741) + t * (np.float32(-1.453152027) + t * np.float32(1.061405429))
        series = t * (np.float32(0.254829592) + t * (np.float32(-0.284496736) + t * series))
        tail = half * series * e
        y[i] = v * (one - tail if v >= np.float32(0.0) else tail)


@jit
def _gelu_tanh(x, y, start, stop):
    """½x(1 + tanh u) = x/(1 + exp(-2u))"""
    x, y = x[start:stop], y[start:stop]
    one, two = np.float32(1.0), np.float32(2.0)
    for i in range(x.size):
        v = x[i]
        u = _TANH_SCALE * v * (one + _TANH_CUBIC * v * v)
        e = exp(-two * abs(u))
        y[i] = v * (one if u >= np.float32(0.0) else e) / (one + e)


@kernel("onnxruntime", "graphc::GeluGrad")
def gelu_grad(k: Binding) -> Run:
    """dx = dy · Gelu'(x)"""
    (dy, x), (dx,) = given(k.inputs, 2), given(k.outputs, 1)
    arguments, pool, size = (dy.reshape(-1), x.reshape(-1), dx.reshape(-1)), k.pool, dy.size
    loop = _gelu_grad_tanh if k.attributes["approximate"] == "tanh" else _gelu_grad
    return pool.bind(loop, arguments, size, GRAIN // 4)


@jit
def _gelu_grad(dy, x, dx, start, stop):
    """Φ(x) + x·φ(x); both share exp(-x²/2).

    Φ comes from erf by formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions (error below 1.5e-7).
    """
    dy, x, dx = dy[start:stop], x[start:stop], dx[start:stop]
    one, half = np.float32(1.0), np.float32(0.5)
    for i in range(x.size):
        v = x[i]
        e = exp(-half * v * v)
        t = one / (one + np.float32(0.3275911) * _HALF_ROOT * abs(v))
        series = np.float32(1.421413741) + t * (np.float32(-1.453152027) + t * np.float32(1.061405429))
        series = t * (np.float32(0.254829592) + t * (np.float32(-0.284496736) + t * series))
        tail = half * series * e
        cumulative = one - tail if v >= np.float32(0.0) else tail
        dx[i] = dy[i] * (cumulative + v * e * _DENSITY)


@jit
def _gelu_grad_tanh(dy, x, dx, start, stop):
    """½(1 + t) + ½x(1 - t²)u' with t = tanh(u) from e = exp(-2|u|)."""
    dy, x, dx = dy[start:stop], x[start:stop], dx[start:stop]
    one, half, two, three = np.float32(1.0), np.float32(0.5), np.float32(2.0), np.float32(3.0)
    for i in range(x.size):
        v = x[i]
        square = v * v
        u = _TANH_SCALE * v * (one + _TANH_CUBIC * square)
        e = exp(-two * abs(u))
        inverse = one / (one + e)
        t = (one - e) * inverse
        t = t if u >= np.float32(0.0) else -t
        bend = np.float32(4.0) * e * inverse * inverse  # 1 - t², without the cancellation
        inner = _TANH_SCALE * (one + three * _TANH_CUBIC * square)
        dx[i] = dy[i] * (half * (one + t) + half * v * bend * inner)


def _last_axis(node: ir.Node) -> bool:
    axis, rank = node.attributes.get_int("axis", -1), len(node.outputs[0].shape or ())
    return axis in (-1, rank - 1)


@kernel("onnxruntime", "Softmax", when=_last_axis)
def softmax(k: Binding) -> Run:
    """y = eˣ⁻ᵐ / Σ eˣ⁻ᵐ over the last axis, m its maximum"""
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    width = x.shape[-1]
    arguments = (x.reshape(-1, width), y.reshape(-1, width))
    pool, rows, grain = k.pool, x.size // max(width, 1), max(1, GRAIN // 4 // max(width, 1))
    return pool.bind(_softmax, arguments, rows, grain)


@jit
def _softmax(x, y, start, stop):
    for r in range(start, stop):
        row, out = x[r], y[r]
        top = highest_of(row)
        total = np.float32(0.0)
        for i in range(row.size):
            share = exp(row[i] - top)
            out[i] = share
            total += share
        inverse = np.float32(1.0) / total
        for i in range(row.size):
            out[i] *= inverse


@kernel("onnxruntime", "graphc::SoftmaxGrad", when=_last_axis)
def softmax_grad(k: Binding) -> Run:
    """dx = y·(dy − Σ dy·y) over the last axis"""
    (dy, y), (dx,) = given(k.inputs, 2), given(k.outputs, 1)
    width = dy.shape[-1]
    arguments = tuple(a.reshape(-1, width) for a in (dy, y, dx))
    pool, rows, grain = k.pool, dy.size // max(width, 1), max(1, GRAIN // max(width, 1))
    return pool.bind(_softmax_grad, arguments, rows, grain)


@jit
def _softmax_grad(dy, y, dx, start, stop):
    for row in range(start, stop):
        slope, share, out = dy[row], y[row], dx[row]
        total = np.float32(0.0)
        for i in range(share.size):
            total += slope[i] * share[i]
        for i in range(share.size):
            out[i] = share[i] * (slope[i] - total)
