"""Running sums."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.arrays import given
from graphc.backends.onnxruntime.kernels.jit import exact
from graphc.device import Array, Run
from graphc.ir.facts import constant, required, static_dims

_COLUMNS = 64
"""Neighbours that run side by side."""


def _axis_is_known(node: ir.Node) -> bool:
    shape = static_dims(required(node.inputs[0]))
    return constant(node.inputs[1]) is not None and shape is not None and 0 not in shape


@kernel("onnxruntime", "CumSum", when=_axis_is_known)
def cumulative_sum(k: Binding) -> Run:
    """Sums of the elements up to each one along an axis; the sum so far is float64, as in PyTorch."""
    (x, _), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    axis = int(np.asarray(constant(k.node.inputs[1])).reshape(-1)[0]) % x.ndim
    behind = math.prod(x.shape[axis + 1 :])
    views = [array.reshape(-1, array.shape[axis], behind) for array in (x, y)]
    tiles = len(views[0]) * -(-behind // _COLUMNS)
    parts = max(1, min(k.pool.threads, tiles, x.size // 8192))
    room: Array = np.zeros((parts, _COLUMNS), dtype=np.float64)
    exclusive, reverse = (np.bool_(bool(k.attributes.get(name, 0))) for name in ("exclusive", "reverse"))
    return k.pool.bind(_cumulative_sum, (*views, exclusive, reverse, room), parts)


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
