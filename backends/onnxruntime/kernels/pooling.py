"""Gradients of pooling, a channel of a sample at a time: its dx stays in cache while windows add to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.backend import Array, Binding, Run, kernel
from graphc.backends.onnxruntime.kernels.arrays import given, have_spatial_axes
from graphc.backends.onnxruntime.kernels.jit import exact, jit
from graphc.ir.facts import shape_of_result
from graphc.ir.ops.convolution import Window


def _axis(window: Window, axis: int, size: int, out: int, include_pad: bool) -> tuple[Array, Array]:
    """Where the windows of one spatial axis lie.

    Returns:
        int64 (out, 3): position of the first tap inside x, how many taps are inside, distance between taps;
        float32 (out,): one over the number of taps that an average counts.
    """
    assert window.begin is not None
    assert window.end is not None
    step = window.dilations[axis]
    starts = np.arange(out) * window.strides[axis] - window.begin[axis]
    covered = starts[:, None] + np.arange(window.kernel[axis])[None, :] * step
    inside = (covered >= 0) & (covered < size)
    counted = covered < size + window.end[axis] if include_pad else inside
    first = np.where(inside.any(axis=1), starts + inside.argmax(axis=1) * step, 0)
    places = np.stack([first, inside.sum(axis=1), np.full(out, step)], axis=1)
    return places.astype(np.int64), (1.0 / np.maximum(counted.sum(axis=1), 1)).astype(np.float32)


def _planes(array: Array) -> Array:
    """N × C × spatial as planes × height × width; one spatial axis is two with a height of one."""
    height = 1 if array.ndim == 3 else array.shape[2]
    return array.reshape(-1, height, array.shape[-1])


def _windows(k: Binding, size: Sequence[int], out: Sequence[int]) -> tuple[Array, Array, Array, Array]:
    """Places of rows and columns, shares of rows and columns."""
    window = Window.of(k.attributes, tuple(size))
    include_pad = bool(k.attributes.get("count_include_pad", 0))
    made = [_axis(window, a, size[a], out[a], include_pad) for a in range(len(size))]
    if len(made) == 1:
        made.insert(0, (np.array([[0, 1, 1]], dtype=np.int64), np.ones(1, dtype=np.float32)))
    (rows, row_share), (columns, column_share) = made
    return rows, columns, row_share, column_share


@kernel("onnxruntime", "graphc::MaxPoolGrad", when=lambda node: have_spatial_axes(node, (0, 1, 2), 2))
def max_pool_grad(k: Binding) -> Run:
    """Each dy goes to the first element of its window that equals the maximum y."""
    (dy, x, y), (dx,) = given(k.inputs, 3), given(k.outputs, 1)
    rows, columns, _, _ = _windows(k, x.shape[2:], y.shape[2:])
    arguments = (_planes(dy), _planes(x), _planes(y), rows, columns, _planes(dx))
    pool, planes = k.pool, x.shape[0] * x.shape[1]
    grain = max(1, 4096 // max(1, int(np.prod(y.shape[2:]))))
    return lambda: pool.run(_max_pool_grad, arguments, planes, grain)


@exact
def _max_pool_grad(dy, x, y, rows, columns, dx, start, stop):  # type: ignore[no-untyped-def]
    for plane in range(start, stop):
        source, target = x[plane], dx[plane]
        target[:] = 0.0
        for r in range(rows.shape[0]):
            row, height, row_step = rows[r]
            for q in range(columns.shape[0]):
                column, width, column_step = columns[q]
                wanted = y[plane, r, q]
                at, found = column, row
                # From the last tap to the first, so that the first maximum is what remains; no branch to guess wrong.
                for i in range(height - 1, -1, -1):
                    for j in range(width - 1, -1, -1):
                        hit = source[row + i * row_step, column + j * column_step] == wanted
                        found = row + i * row_step if hit else found
                        at = column + j * column_step if hit else at
                target[found, at] += dy[plane, r, q]


def _average_is_native(node: ir.Node) -> bool:
    shape = shape_of_result(node.inputs[1])
    known = shape is not None and all(isinstance(d, int) for d in shape.dims)
    return known and have_spatial_axes(node, (0,), 2)


@kernel("onnxruntime", "graphc::AveragePoolGrad", when=_average_is_native)
def average_pool_grad(k: Binding) -> Run:
    """Each dy is shared out equally over its window."""
    (dy,), (dx,) = given(k.inputs, 1), given(k.outputs, 1)
    arguments = (_planes(dy), *_windows(k, dx.shape[2:], dy.shape[2:]), _planes(dx))
    pool, planes = k.pool, dx.shape[0] * dx.shape[1]
    grain = max(1, 16384 // max(1, int(np.prod(dx.shape[2:]))))
    return lambda: pool.run(_average_pool_grad, arguments, planes, grain)


@jit
def _average_pool_grad(dy, rows, columns, row_share, column_share, dx, start, stop):  # type: ignore[no-untyped-def]
    for plane in range(start, stop):
        target = dx[plane]
        target[:] = 0.0
        for r in range(rows.shape[0]):
            row, height, row_step = rows[r]
            for q in range(columns.shape[0]):
                column, width, column_step = columns[q]
                share = dy[plane, r, q] * (row_share[r] * column_share[q])
                for i in range(height):
                    for j in range(width):
                        target[row + i * row_step, column + j * column_step] += share
