"""Rows that are added to or compared with others at indices: a scatter, the gradients of a Gather and of a GatherElements."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.host.calls import with_check
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.written_rows import WrittenRows
from graphc.device import Array, Run
from graphc.errors import ExecutionError
from graphc.ir.facts import static_dims

LEAST = 1 << 14
"""Smallest gradient, in elements, that is worth a step of its own."""


def _shapes(node: ir.Node) -> list[tuple[int, ...]] | None:
    """Of dy, the indices and dx; None: one is not known, or empty."""
    found = [static_dims(v) or (0,) for v in (*node.inputs[:2], *node.outputs) if v is not None]
    return found if all(0 not in shape for shape in found) else None


def _is_large(node: ir.Node) -> bool:
    shapes = _shapes(node)
    return shapes is not None and math.prod(shapes[-1]) >= LEAST


@kernel("onnxruntime", "graphc::GatherGrad", when=_is_large)
def gather_grad(k: Binding) -> Run:
    """dx = rows of dy added at their indices, in the order of the indices"""
    (dy, indices, _), (dx,) = given(k.inputs, 3), given(k.outputs, 1)
    rows = k.rows if isinstance(k.rows, WrittenRows) else WrittenRows.of(dx, k.pool.threads, alone=False)
    flat = dx.reshape(dx.shape[0], -1)
    failed = np.zeros(1, dtype=np.int64)
    arguments = (dy.reshape(-1, flat.shape[1]), indices.reshape(-1), flat, flat.view(np.int32), failed)
    run = k.pool.bind(_gather_grad, (*arguments, rows.touched, rows.alone, rows.nonfinite), rows.nonfinite.size)
    return _with_range_check(k, run, indices, dx.shape[0], failed)


def _with_range_check(k: Binding, run: Run, indices: Array, size: int, failed: Array) -> Run:
    """Bound work that writes the place of an index outside, and 1 more, to ``failed``."""

    def check() -> None:
        if failed[0]:
            index, failed[0] = indices.reshape(-1)[failed[0] - 1], 0
            what = f"index {index} is outside of the range from {-size} to {size - 1}"
            raise ExecutionError(f"{k.node.op_type} {k.node.name!r} failed: {what}", op=k.node.op_type, node=k.node.name or "")

    return with_check(run, failed, check)


@jit
def _gather_grad(dy, indices, dx, bits, failed, touched, alone, nonfinite, start, stop):
    rows, width = dx.shape
    parts, exponent = nonfinite.size, np.int32(0x7F800000)
    for part in range(start, stop):
        first, last = rows * part // parts, rows * (part + 1) // parts
        if alone[0] == 0:
            dx[first:last] = np.float32(0.0)
            touched[first:last] = 0
        for r in range(first, last):
            if touched[r] != 0:
                dx[r] = np.float32(0.0)
                touched[r] = 0
        for i in range(indices.size):
            r = indices[i] + rows if indices[i] < 0 else indices[i]
            if r < 0 or r >= rows:
                failed[0] = i + 1
            elif first <= r < last:
                touched[r] = 1
                row, slope = dx[r], dy[i]
                for c in range(width):
                    row[c] += slope[c]
        count = 0
        for r in range(first, last):
            if touched[r] != 0:
                row_bits = bits[r]
                for c in range(width):
                    count += (row_bits[c] & exponent) == exponent
        nonfinite[part] = count


def _takes_rows(node: ir.Node) -> bool:
    """Whether the index tuples of a ScatterND have one element, and what it reads is not small."""
    shapes = [static_dims(v) or (0,) for v in node.inputs if v is not None]
    return all(0 not in shape for shape in shapes) and shapes[1][-1] == 1 and math.prod(shapes[2]) >= LEAST


_REDUCTIONS = {"none": 0, "add": 1, "mul": 2, "max": 3, "min": 4}


@kernel("onnxruntime", "ScatterND", when=_takes_rows)
def scatter_rows(k: Binding) -> Run:
    """y = x with rows of updates at their indices, which replace, or are added, multiplied or compared, in that order"""
    (x, indices, updates), (y,) = given(k.inputs, 3), given(k.outputs, 1)
    flat, failed, parts = y.reshape(y.shape[0], -1), np.zeros(1, dtype=np.int64), min(k.pool.threads, y.shape[0])
    arguments = (x.reshape(flat.shape), indices.reshape(-1), updates.reshape(-1, flat.shape[1]), flat)
    code = _REDUCTIONS[str(k.attributes.get("reduction", "none"))]
    run = k.pool.bind(_scatter_rows, (*arguments, code, parts, failed), parts)
    return _with_range_check(k, run, indices, y.shape[0], failed)


@jit
def _scatter_rows(x, indices, updates, y, code, parts, failed, start, stop):
    rows, width = y.shape
    first, last = rows * start // parts, rows * stop // parts
    for r in range(first, last):
        for c in range(width):
            y[r, c] = x[r, c]
    for i in range(indices.size):
        r = indices[i] + rows if indices[i] < 0 else indices[i]
        if r < 0 or r >= rows:
            failed[0] = i + 1
        elif first <= r < last:
            row, update = y[r], updates[i]
            if code == 0:
                for c in range(width):
                    row[c] = update[c]
            elif code == 1:
                for c in range(width):
                    row[c] += update[c]
            elif code == 2:
                for c in range(width):
                    row[c] *= update[c]
            elif code == 3:
                for c in range(width):
                    row[c] = row[c] if row[c] >= update[c] or row[c] != row[c] else update[c]
            else:
                for c in range(width):
                    row[c] = row[c] if row[c] <= update[c] or row[c] != row[c] else update[c]


def _have_the_same_lines(node: ir.Node) -> bool:
    """Whether dy and dx have the same sizes but for the axis: with fewer indices, the lines of dx are not those of dy."""
    shapes = _shapes(node)
    if shapes is None or math.prod(shapes[0]) < LEAST:
        return False
    axis = node.attributes.get_int("axis", 0) % len(shapes[0])
    return len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) == 1


@kernel("onnxruntime", "graphc::GatherElementsGrad", when=_have_the_same_lines)
def gather_elements_grad(k: Binding) -> Run:
    """dx = elements of dy added at their indices along an axis, in the order of the indices"""
    (dy, indices, _), (dx,) = given(k.inputs, 3), given(k.outputs, 1)
    axis = int(k.attributes["axis"]) % dx.ndim
    lines, inner = math.prod(dx.shape[:axis]), math.prod(dx.shape[axis + 1 :])
    arguments = tuple(array.reshape(lines, -1, inner) for array in (dy, indices, dx))
    return k.pool.bind(_gather_elements_grad, arguments, lines, max(1, LEAST // 4 * lines // dy.size))


@jit
def _gather_elements_grad(dy, indices, dx, start, stop):
    count = dx.shape[1]
    for line in range(start, stop):
        target = dx[line]
        target[:] = np.float32(0.0)
        if dy.shape[2] == 1:  # along the last axis, without a loop of one element
            for j in range(dy.shape[1]):
                place = indices[line, j, 0]
                place += count if place < 0 else 0
                if 0 <= place < count:
                    target[place, 0] += dy[line, j, 0]
            continue
        for j in range(dy.shape[1]):
            slopes, places = dy[line, j], indices[line, j]
            for i in range(slopes.size):
                place = places[i] + count if places[i] < 0 else places[i]
                if 0 <= place < count:  # the GatherElements refused an index outside before
                    target[place, i] += slopes[i]
