"""Products in which every row has one of several matrices: rows of one matrix are gathered and multiplied in panels.

A unit of work is a matrix and a block of columns. All units of a block belong to one thread where there are blocks enough, so
the threads' shares are alike however many rows a matrix has. Nothing is added by two threads: bits depend on the rows alone.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.products.panels import (
    DEPTH,
    GAP,
    TALL,
    add_rows,
    copy_edge,
    copy_to_panels,
    multiply_rows,
    panels_bytes,
)
from graphc.backends.onnxruntime.vectors.functions import PANEL, array_of, floats_at
from graphc.device import Array, Run
from graphc.ir.facts import static_dims

BLOCK = 512
"""Most columns of a block: as many panels stay in the cache while the rows of a matrix pass by."""
ROW = BLOCK + GAP
"""Floats from one row to the next of gathered rows that lie beside each other in scratch."""


def _has_an_owner_for_each_row(node: ir.Node) -> bool:
    shapes = [static_dims(value) for value in (*node.inputs, *node.outputs) if value is not None]
    if any(shape is None or 0 in shape for shape in shapes):
        return False
    x, owner = shapes[0] or (), shapes[2]
    return owner == x[:1]


@kernel("onnxruntime", "graphc::GroupedMatMul", when=_has_an_owner_for_each_row)
def grouped_matmul(k: Binding) -> Run:
    """y[s] = x[s]·w[owner[s]]"""
    (x, w, owner), (y,) = given(k.inputs, 3), given(k.outputs, 1)
    matrix, row, column = w.strides
    if k.attributes["transB"]:
        row, column = column, row
    sizes = [x.shape[1], y.shape[1], w.shape[0]]
    places = [x.ctypes.data, w.ctypes.data, y.ctypes.data, matrix, row, column]
    return _bound(k.pool, _grouped_matmul, owner, (x, w, y), [*places, *sizes])


@kernel("onnxruntime", "graphc::GroupedMatMulGradWeight", when=_has_an_owner_for_each_row)
def grouped_matmul_grad_weight(k: Binding) -> Run:
    """dw[e] = Σ x[s]ᵀ·dy[s] over the rows of e"""
    (x, dy, owner, _), (dw,) = given(k.inputs, 4), given(k.outputs, 1)
    sizes = [x.shape[1], dy.shape[1], dw.shape[0]]
    return _bound(k.pool, _grouped_grad_weight, owner, (x, dy, dw), [x.ctypes.data, dy.ctypes.data, dw.ctypes.data, *sizes])


def _bound(pool: Pool, function: object, owner: Array, held: tuple[Array, ...], numbers: list[int]) -> Run:
    """Bind a function of this module; its ``table`` is ``numbers``, the columns of a block and the bytes of a thread."""
    width, parts = numbers[-2], pool.threads
    blocks = -(-width // BLOCK)
    blocks += -blocks % parts  # each thread has as many
    block = -(-width // (blocks * PANEL)) * PANEL
    each = panels_bytes(DEPTH, BLOCK) + 4 * (2 * DEPTH * ROW + TALL * PANEL)
    scratch = scratchpad_of(pool)
    scratch.reserve(each * parts)
    table = np.array([*numbers, block, each], dtype=np.int64)
    rows, ends = np.empty((parts, owner.size), dtype=np.int64), np.empty((parts, numbers[-1] + 1), dtype=np.int64)
    run = pool.bind(function, (owner, rows, ends, table, scratch.cell), parts)  # type: ignore[arg-type]
    return lambda held=held: run()  # type: ignore[misc]


@jit
def _sort(owner, rows, ends):
    """Write to ``rows`` the numbers of all rows, those of one matrix side by side in order, and to ``ends`` where they end."""
    experts = ends.size - 1
    ends[:] = 0
    for s in range(owner.size):
        if 0 <= owner[s] < experts:
            ends[owner[s] + 1] += 1
    for e in range(experts):
        ends[e + 1] += ends[e]
    for s in range(owner.size):
        if 0 <= owner[s] < experts:
            rows[ends[owner[s]]] = s
            ends[owner[s]] += 1


@jit
def _gather(x, x_row, rows, first, count, width, y, y_row):
    """y[r] = x[rows[first + r]] for ``count`` rows of ``width`` floats at addresses, rows so many bytes apart."""
    for r in range(count):
        source = array_of(floats_at(x + rows[first + r] * x_row), (width,))
        target = array_of(floats_at(y + r * y_row), (width,))
        for v in range(width):
            target[v] = source[v]


@jit
def _scatter(x, x_row, rows, first, count, width, y, y_row, adds):
    """y[rows[first + r]] = x[r], or += x[r]; numbers as in ``_gather``."""
    for r in range(count):
        source = array_of(floats_at(x + r * x_row), (width,))
        target = array_of(floats_at(y + rows[first + r] * y_row), (width,))
        if adds:
            for v in range(width):
                target[v] += source[v]
        else:
            for v in range(width):
                target[v] = source[v]


@jit
def _clear(y, y_row, count, width):
    for r in range(count):
        target = array_of(floats_at(y + r * y_row), (width,))
        for v in range(width):
            target[v] = np.float32(0)


@jit
def _grouped_matmul(owner, rows, ends, table, cell, start, stop):
    x, w, y, w_matrix, w_row, w_column, depth, width, experts, block, each = table
    parts, units = rows.shape[0], (width + block - 1) // block * experts
    for part in range(start, stop):
        of_b, mine, last = cell[0] + part * each, rows[part], ends[part]
        _sort(owner, mine, last)
        of_a = of_b + (block // PANEL) * (DEPTH * PANEL + GAP) * 4
        of_c = of_a + DEPTH * ROW * 4
        for unit in range(units * part // parts, units * (part + 1) // parts):
            expert, left = unit % experts, unit // experts * block
            across = min(block, width - left)
            if expert == 0:
                for s in range(owner.size):
                    if owner[s] < 0 or owner[s] >= experts:
                        _clear(y + (s * width + left) * 4, width * 4, 1, across)
            first = last[expert - 1] if expert > 0 else 0
            count = last[expert] - first
            for k in range(0, depth if count > 0 else 0, DEPTH):
                piece = min(DEPTH, depth - k)
                copy_to_panels(w + expert * w_matrix + k * w_row + left * w_column, w_row, w_column, piece, across, of_b)
                for m in range(0, count, TALL):
                    height = min(TALL, count - m)
                    _gather(x + k * 4, depth * 4, mine, first + m, height, piece, of_a, (DEPTH + GAP) * 4)
                    for p in range(0, across, PANEL):
                        panel = of_b + p // PANEL * (piece * PANEL + GAP) * 4
                        multiply_rows(of_a, (DEPTH + GAP) * 4, 4, panel, PANEL * 4, piece, of_c + p * 4, ROW * 4, height)
                    _scatter(of_c, ROW * 4, mine, first + m, height, across, y + left * 4, width * 4, k > 0)


@jit
def _grouped_grad_weight(owner, rows, ends, table, cell, start, stop):
    x, dy, dw, depth, width, experts, block, each = table
    parts, units = rows.shape[0], (width + block - 1) // block * experts
    for part in range(start, stop):
        of_b, mine, last = cell[0] + part * each, rows[part], ends[part]
        _sort(owner, mine, last)
        of_a = of_b + (block // PANEL) * (DEPTH * PANEL + GAP) * 4
        of_dy = of_a + DEPTH * ROW * 4
        edge = of_dy + DEPTH * ROW * 4
        for unit in range(units * part // parts, units * (part + 1) // parts):
            expert, left = unit % experts, unit // experts * block
            across = min(block, width - left)
            to = dw + (expert * depth * width + left) * 4
            first = last[expert - 1] if expert > 0 else 0
            count = last[expert] - first
            if count == 0:
                _clear(to, width * 4, depth, across)
            for k in range(0, count, DEPTH):
                piece = min(DEPTH, count - k)
                _gather(dy + left * 4, width * 4, mine, first + k, piece, across, of_dy, ROW * 4)
                copy_to_panels(of_dy, ROW * 4, 4, piece, across, of_b)
                for m in range(0, depth, TALL):
                    height = min(TALL, depth - m)
                    _gather(x + m * 4, depth * 4, mine, first + k, piece, height, of_a, (TALL + GAP) * 4)
                    for p in range(0, across, PANEL):
                        panel, z = of_b + p // PANEL * (piece * PANEL + GAP) * 4, to + (m * width + p) * 4
                        if across - p < PANEL:
                            multiply_rows(of_a, 4, (TALL + GAP) * 4, panel, PANEL * 4, piece, edge, PANEL * 4, height)
                            copy_edge(edge, z, width * 4, height, across - p, k > 0)
                        elif k > 0:
                            add_rows(of_a, 4, (TALL + GAP) * 4, panel, PANEL * 4, piece, z, width * 4, height)
                        else:
                            multiply_rows(of_a, 4, (TALL + GAP) * 4, panel, PANEL * 4, piece, z, width * 4, height)
