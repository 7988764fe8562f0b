"""Decomposes Fourier transforms into products with constant sine and cosine matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion.rules.table import operand, optional, rule
from graphc.backends.fusion.views import integers
from graphc.ir.builder import Builder
from graphc.ir.facts import shape_of, static_dims

LONGEST = 8192
"""Length up to which a transform is a product, which costs length² operations."""


@rule("DFT")
def fourier_transform(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """The transform along one axis; the last axis of operand and result holds real and imaginary part."""
    x, shape, result = operand(node, 0), shape_of(node.inputs[0]), shape_of(node.outputs[0])
    given = integers(node, 2) if optional(node, 2) is not None else [-2]
    if given is None or (optional(node, 1) is not None and integers(node, 1) is None):
        return None
    axis = given[0] % len(shape)
    inverse, one_sided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    length = (integers(node, 1) or [0])[0] if optional(node, 1) is not None else 0
    if not length:
        length = result[axis] if inverse and one_sided else shape[axis]
    if length > LONGEST:
        return None
    kind = x.dtype.numpy()
    real, imaginary = _parts(op, x)
    taken = min(shape[axis], length)
    if taken < shape[axis]:
        real, imaginary = (op.Slice(v, [0], [taken], [axis]) if v is not None else None for v in (real, imaginary))
    matrix = _matrix(taken, result[axis], length, inverse=inverse, one_sided=one_sided)
    c, s = (op.const(np.ascontiguousarray(m).astype(kind)) for m in (matrix.real, matrix.imag))
    first, second = _along(op, real, c, axis), _along(op, real, s, axis)
    if imaginary is not None:
        first, second = op.Sub(first, _along(op, imaginary, s, axis)), op.Add(second, _along(op, imaginary, c, axis))
    if result[-1] == 1:
        return [op.Unsqueeze(first, [-1])]
    return [op.Concat(op.Unsqueeze(first, [-1]), op.Unsqueeze(second, [-1]), axis=-1)]


def length_of(node: ir.Node) -> int:
    """The length of a transform, or the longer one of operand and result; 0 where it is not known before a run."""
    if any(v is not None and static_dims(v) is None for v in (*node.inputs, *node.outputs)):
        return 0
    if node.op_type == "DFT":
        axis = integers(node, 2) if optional(node, 2) is not None else [-2]
        return 0 if axis is None else max(shape_of(v)[axis[0]] for v in (node.inputs[0], node.outputs[0]))
    length = integers(node, 3) if optional(node, 3) is not None else None
    window = optional(node, 2)
    return length[0] if length is not None else 0 if window is None else shape_of(window)[0]


@rule("STFT")
def short_time_transform(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """STFT: frames of the signal, multiplied by the window and transformed."""
    signal, window = operand(node, 0), optional(node, 2)
    step, length = integers(node, 1), integers(node, 3) if optional(node, 3) is not None else None
    if step is None or (optional(node, 3) is not None and length is None):
        return None
    size = length[0] if length is not None else shape_of(window)[0]
    frames = shape_of(node.outputs[0])[1]
    places = np.arange(frames)[:, None] * step[0] + np.arange(size)[None, :]
    x = op.Gather(signal, op.const(places.astype(np.int64)), axis=1)
    if len(shape_of(x)) == 3:
        x = op.Unsqueeze(x, [-1])
    if window is not None:
        x = op.Mul(x, op.Unsqueeze(window, [1]))
    return [op.DFT(x, None, np.int64(2), onesided=node.attributes.get_int("onesided", 1))]


def _parts(op: Builder, x: Any) -> tuple[Any, Any]:
    shape = list(shape_of(x)[:-1])
    if shape_of(x)[-1] == 1:
        return op.Reshape(x, op.const(np.array(shape, np.int64))), None
    return tuple(op.Reshape(op.Slice(x, [k], [k + 1], [-1]), op.const(np.array(shape, np.int64))) for k in range(2))


def _along(op: Builder, x: Any, matrix: Any, axis: int) -> Any:
    """``x`` with ``axis`` multiplied by ``matrix`` (before × after)."""
    rank = len(shape_of(x))
    if axis == rank - 1:
        return op.MatMul(x, matrix) if rank > 1 else op.Reshape(op.MatMul(op.Unsqueeze(x, [0]), matrix), [-1])
    moved = op.Transpose(x, perm=[*(k for k in range(rank) if k != axis), axis])
    return op.Transpose(op.MatMul(moved, matrix), perm=[*range(axis), rank - 1, *range(axis, rank - 1)])


def _matrix(before: int, after: int, length: int, *, inverse: bool, one_sided: bool) -> np.ndarray:
    """M (before × after, complex) with y = x·M.

    The inverse of a one-sided transform reads half of the frequencies; the other half are their conjugates, so each counts
    twice
    and the result is real.
    """
    k, n = np.arange(before)[:, None], np.arange(after)[None, :]
    matrix = np.exp((2j if inverse else -2j) * np.pi * ((k * n) % length) / length)
    if inverse:
        matrix /= length
        if one_sided:
            matrix = matrix * np.where((k == 0) | (2 * k == length), 1.0, 2.0)
    return np.asarray(matrix)
