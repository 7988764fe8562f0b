"""gathers: write a Gather by constant indices in arithmetic progression as slices, and sums of picks as products.

    before   y = Gather(x, [[0, 1, 2], [1, 2, 3]], axis=1)                              # windows of three
    after    y = Concat(Unsqueeze(x[:, 0:3], 1), Unsqueeze(x[:, 1:4], 1), axis=1)

Slices cost no pass over memory inside a generated kernel, need no check of indices, and their gradients add what lies side by
side, where that of a Gather scatters. Windows, patches, channel orders and halves that change places look like this in exported
files. Windows that start several elements apart, as patches of a series, are slices of blocks of so many elements as divide
both this distance and the windows: windows of 16 every 8 elements are blocks of 8 beside the blocks behind them.

A GatherND of single indices, as exporters write ``x[:, indices]``, becomes a Gather first, which has a faster gradient.
A Gather stays as it is if it reads a parameter (an embedding has a gradient of rows), if its indices or the length of the axis
are known only at run time, or if they make more than 16 slices or slices of less than 4 elements.

Sums of what a GatherND picks, as in adaptive pooling, become products first (:mod:`~graphc.passes.optimize.gathered_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of, rank, required
from graphc.passes.optimize.gathered_sums import sums_as_products
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass

MOST, LEAST = 16, 4
"""Slices at most, and elements of a slice at least, for which slices are better."""

Run: TypeAlias = tuple[int, int, int]
"""First index, step and number of indices."""

_END = np.iinfo(np.int64).max


@graph_pass("gathers", requires=("legalize",), changes="form")
def gathers(model: ir.Model, ctx: Context) -> bool:
    """Replace every Gather that a few slices can do."""
    graph = model.graph
    gathered = [node for node in graph if node.domain == "" and node.op_type in ("Gather", "GatherND")]
    if not gathered:
        return False
    op, count = Builder(graph), 0
    products = sums_as_products(graph, op)
    for node in gathered if not products else [n for n in gathered if n.graph is graph and any(v.uses() for v in n.outputs)]:
        op.before, op.scope = node, node.name or node.op_type
        found = _as_slices(op, node) if node.op_type == "Gather" else _as_gather(op, node)
        count += found is not None and replace(graph, op, node.outputs[0], found)
    dead_code_elimination(graph)  # also of what replace() refused
    if count:
        ctx.note(f"gathers: {count} are slices or simpler gathers")
    if products:
        ctx.note(f"gathers: {counted(products, 'sum')} of gathered elements as products")
    return count + products > 0


def _as_gather(op: Builder, node: ir.Node) -> ir.Value | None:
    """A GatherND whose tuples have one index each, as slices or as a Gather on the first axis."""
    shape = dims(required(node.inputs[1]))
    if not shape or shape[-1] != 1 or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    known = constant(node.inputs[1])
    indices = op.Squeeze(node.inputs[1], [-1]) if known is None else op.const(known[..., 0])
    gather = op.Gather(input_of(node), indices, axis=0)
    sliced = _as_slices(op, gather.producer())
    return gather if sliced is None else sliced


def _as_slices(op: Builder, node: ir.Node) -> ir.Value | None:
    windows = _in_blocks(op, node)
    if windows is not None:
        return windows
    pieces = _pieces(node)
    if pieces is None:
        return None
    axis, runs, place = pieces
    slices = [_slice(op, input_of(node), axis, run) for run in runs]
    if place is not None:
        slices, axis = [op.Unsqueeze(piece, [place]) for piece in slices], place
    return slices[0] if len(slices) == 1 else op.Concat(*slices, axis=axis)  # type: ignore[no-any-return]


def _indices(node: ir.Node) -> tuple[ir.Value, int, np.ndarray[Any, np.dtype[np.int64]]] | None:
    """The data, the axis and the indices of a Gather, if they are known, valid and more than a few."""
    data, indices = input_of(node), constant(node.inputs[1])
    sizes = dims(data)
    if indices is None or sizes is None or data.is_initializer() or not 1 <= indices.ndim <= 2 or indices.size < LEAST:
        return None
    axis = node.attributes.get_int("axis", 0) % len(sizes)
    size, indices = sizes[axis], indices.astype(np.int64)
    if not isinstance(size, int):
        return None
    indices = np.where(indices < 0, indices + size, indices)
    return (data, axis, indices) if indices.min() >= 0 and indices.max() < size else None  # an error, which Gather reports


def _in_blocks(op: Builder, node: ir.Node) -> ir.Value | None:
    """Windows of neighbours, as slices of blocks."""
    found = _indices(node)
    if found is None or found[2].ndim != 2 or min(found[2].shape) < 2:
        return None
    data, axis, indices = found
    turned = indices[1, 0] - indices[0, 0] == 1
    if turned:
        indices = indices.T
    first, (count, width) = int(indices[0, 0]), indices.shape
    hop = int(indices[1, 0]) - first
    following = [d for d in (dims(data) or ())[axis + 1 :] if isinstance(d, int)]
    if hop < 2 or axis + 1 + len(following) != rank(data):
        return None
    if not np.array_equal(indices, first + hop * np.arange(count)[:, None] + np.arange(width)):
        return None
    block = math.gcd(hop, width)
    if block < min(LEAST, width):
        block = hop  # the last block of a window is not taken whole
    step, pieces = hop // block, -(-width // block)
    if pieces > MOST or (pieces > 1 and block < LEAST):
        return None
    last, length = width - block * (pieces - 1), hop * (count - 1) + block * pieces
    size = required(dims(data))[axis]
    assert isinstance(size, int)
    if first + length > size:
        data = op.Pad(data, [0, first + length - size], None, [axis])
    blocks = op.Reshape(op.Slice(data, [first], [first + length], [axis]), [*[0] * axis, length // block, block, *following])
    parts = [op.Slice(blocks, [k], [k + step * (count - 1) + 1], [axis], [step]) for k in range(pieces)]
    if last < block:
        parts[-1] = op.Slice(parts[-1], [0], [last], [axis + 1])
    result = parts[0] if pieces == 1 else op.Concat(*parts, axis=axis + 1)
    if turned:
        order = list(range(rank(data) + 1))
        order[axis], order[axis + 1] = axis + 1, axis
        result = op.Transpose(result, perm=order)
    return result  # type: ignore[no-any-return]


def _pieces(node: ir.Node) -> tuple[int, Sequence[Run], int | None] | None:
    """The axis, the slices of a Gather, and the new axis that counts them (None: they follow each other); None: it stays."""
    known = _indices(node)
    if known is None:
        return None
    _, axis, indices = known
    if indices.ndim == 1:
        runs = _runs(indices)
        return (axis, runs, None) if len(runs) <= MOST and len(indices) >= LEAST * len(runs) else None
    rows, place = min((indices, axis), (indices.T, axis + 1), key=lambda way: len(way[0]))
    found = [_runs(row) for row in rows]
    if len(found) > MOST or rows.shape[1] < LEAST or any(len(runs) != 1 for runs in found):
        return None
    return axis, [runs[0] for runs in found], place


def _runs(indices: np.ndarray[Any, np.dtype[np.int64]]) -> list[Run]:
    """Cut indices into the longest arithmetic progressions, from the left; equal ones make runs of one."""
    runs, at = [], 0
    while at < len(indices):
        steps = np.diff(indices[at:])
        step = int(steps[0]) if len(steps) else 1
        other = np.flatnonzero(steps != step)
        count = 1 if step == 0 else (int(other[0]) if len(other) else len(steps)) + 1
        runs.append((int(indices[at]), step if count > 1 else 1, count))
        at += count
    return runs


def _slice(op: Builder, data: ir.Value, axis: int, run: Run) -> Any:
    first, step, count = run
    end = first + (count - 1) * step + (1 if step > 0 else -1)
    return op.Slice(data, [first], [end if end >= 0 else -_END], [axis], [step])
