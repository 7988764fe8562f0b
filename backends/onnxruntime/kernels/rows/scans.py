"""Running sums and products."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import exact
from graphc.device import Array, Run
from graphc.ir.facts import constant, required, static_dims

TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

_COLUMNS = 64
"""Neighbours that run side by side."""


def _is_known(node: ir.Node) -> bool:
    return 0 not in (static_dims(node.outputs[0]) or (0,))


def _axis_is_known(node: ir.Node) -> bool:
    shape = static_dims(required(node.inputs[0]))
    return constant(node.inputs[1]) is not None and shape is not None and 0 not in shape


@kernel("onnxruntime", "CumSum", when=_axis_is_known)
def cumulative_sum(k: Binding) -> Run:
    """Sums of the elements up to each one along an axis; the sum so far is float64, as in PyTorch."""
    (x, _), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    views, parts = _lines(k, x, y)
    room: Array = np.zeros((parts, _COLUMNS), dtype=np.float64)
    exclusive, reverse = (np.bool_(bool(k.attributes.get(name, 0))) for name in ("exclusive", "reverse"))
    return k.pool.bind(_cumulative_sum, (*views, exclusive, reverse, room), parts)


def _lines(k: Binding, *arrays: Array) -> tuple[list[Array], int]:
    """Arrays as lines along the axis, an attribute or the last operand: before × length × behind; how many parts share them."""
    place = k.attributes.get("axis")
    axis = int(np.asarray(constant(k.node.inputs[-1]) if place is None else place).reshape(-1)[0]) % arrays[0].ndim
    views = [array.reshape(-1, array.shape[axis], math.prod(array.shape[axis + 1 :])) for array in arrays]
    before, _, behind = views[0].shape
    return views, max(1, min(k.pool.threads, before * -(-behind // _COLUMNS), arrays[0].size // 8192))


@kernel("onnxruntime", "graphc::RunningProduct", dtypes=TYPES, when=_is_known)
@kernel("onnxruntime", "CumProd", dtypes=TYPES, when=_axis_is_known)
def running_product(k: Binding) -> Run:
    """Products of the elements up to each one along an axis; the product so far is float64, as in PyTorch."""
    (x,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    views, parts = _lines(k, x, y)
    room: Array = np.zeros((parts, _COLUMNS), dtype=np.float64)
    exclusive, reverse = (np.bool_(bool(k.attributes.get(name, 0))) for name in ("exclusive", "reverse"))
    return k.pool.bind(_running_product, (*views, exclusive, reverse, room), parts)


def _is_plain(node: ir.Node) -> bool:
    shape = static_dims(required(node.inputs[1]))
    flags = [node.attributes.get_int(name, 0) for name in ("exclusive", "reverse")]
    return constant(node.inputs[3]) is not None and shape is not None and 0 not in shape and not any(flags)


@kernel("onnxruntime", "graphc::RunningProductGrad", dtypes=TYPES, when=_is_plain)
def running_product_gradient(k: Binding) -> Run:
    """dxᵢ = Σ_{j≥i} dyⱼ·yⱼ/xᵢ before the first zero of a line, 0 behind it; at it, products without it."""
    (dy, x, y, _), (dx,) = given(k.inputs, 4), given(k.outputs, 1)
    views, parts = _lines(k, dy, x, y, dx)
    room: Array = np.zeros((parts, _COLUMNS), dtype=np.float64)
    zeros: Array = np.zeros((parts, _COLUMNS), dtype=np.int64)
    return k.pool.bind(_running_product_gradient, (*views, room, zeros), parts)


@exact
def _running_product(x, y, exclusive, reverse, room, start, stop):
    before, count, behind = x.shape
    tiles, parts = (behind + _COLUMNS - 1) // _COLUMNS, room.shape[0]
    for part in range(start, stop):
        total = room[part]
        for tile in range(before * tiles * part // parts, before * tiles * (part + 1) // parts):
            n, first = tile // tiles, tile % tiles * _COLUMNS
            width = min(_COLUMNS, behind - first)
            if behind == 1:
                source, target, run = x[n, :, 0], y[n, :, 0], 1.0
                for i in range(count):
                    at = count - 1 - i if reverse else i
                    further = run * np.float64(source[at])
                    target[at] = run if exclusive else further
                    run = further
                continue
            total[:] = 1.0
            for i in range(count):
                at = count - 1 - i if reverse else i
                source, target = x[n, at, first : first + width], y[n, at, first : first + width]
                for c in range(width):
                    further = total[c] * np.float64(source[c])
                    target[c] = total[c] if exclusive else further
                    total[c] = further


@exact
def _running_product_gradient(dy, x, y, dx, room, zeros, start, stop):
    before, count, behind = x.shape
    tiles, parts = (behind + _COLUMNS - 1) // _COLUMNS, room.shape[0]
    for part in range(start, stop):
        total, zero = room[part], zeros[part]
        for tile in range(before * tiles * part // parts, before * tiles * (part + 1) // parts):
            n, first = tile // tiles, tile % tiles * _COLUMNS
            width = min(_COLUMNS, behind - first)
            for c in range(width):
                total[c], zero[c] = 0.0, count
            if behind == 1:
                values, slopes, made, target, run = x[n, :, 0], dy[n, :, 0], y[n, :, 0], dx[n, :, 0], 0.0
                for i in range(count - 1, -1, -1):
                    run += np.float64(slopes[i]) * np.float64(made[i])
                    target[i] = run / np.float64(values[i])
                    if values[i] == 0:
                        zero[0] = i
            else:
                for i in range(count - 1, -1, -1):
                    values, slopes = x[n, i, first : first + width], dy[n, i, first : first + width]
                    made, target = y[n, i, first : first + width], dx[n, i, first : first + width]
                    for c in range(width):
                        total[c] += np.float64(slopes[c]) * np.float64(made[c])
                        target[c] = total[c] / np.float64(values[c])
                        zero[c] = i if values[c] == 0 else zero[c]
            for c in range(width):
                at = zero[c]
                if at == count:
                    continue
                product = np.float64(y[n, at - 1, first + c]) if at > 0 else 1.0
                slope = product * np.float64(dy[n, at, first + c])
                for i in range(at + 1, count):
                    product *= np.float64(x[n, i, first + c])
                    slope += product * np.float64(dy[n, i, first + c])
                    dx[n, i, first + c] = 0.0
                dx[n, at, first + c] = slope


@exact
def _cumulative_sum(x, y, exclusive, reverse, room, start, stop):
    before, count, behind = x.shape
    tiles, parts = (behind + _COLUMNS - 1) // _COLUMNS, room.shape[0]
    for part in range(start, stop):
        total = room[part]
        for tile in range(before * tiles * part // parts, before * tiles * (part + 1) // parts):
            n, first = tile // tiles, tile % tiles * _COLUMNS
            width = min(_COLUMNS, behind - first)
            if behind == 1:
                source, target, run = x[n, :, 0], y[n, :, 0], 0.0
                for i in range(count):
                    at = count - 1 - i if reverse else i
                    above = run + np.float64(source[at])
                    target[at] = np.float32(run if exclusive else above)
                    run = above
                continue
            total[:] = 0.0
            for i in range(count):
                at = count - 1 - i if reverse else i
                source, target = x[n, at, first : first + width], y[n, at, first : first + width]
                for c in range(width):
                    if exclusive:
                        target[c] = np.float32(total[c])
                    total[c] += np.float64(source[c])
                    if not exclusive:
                        target[c] = np.float32(total[c])
