"""Repairs Gather and Scatter whose indices count the samples of one batch (:mod:`graphc.passes.rebatch.rebatch`).

    before  y = GatherND(x, [[0, n0], [1, n1], [2, n2], [3, n3]])         after  y = GatherND(x, [[k, nk] for k < batch])

A sample reads and writes only its own entries, so an index into an axis with the batch grows from sample to sample by the
number of entries of a sample. A file with one sample does not show that, the position of the index in the node does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import constant, describe_value, dims
from graphc.passes.rebatch.change import Change


def gather(change: Change, node: ir.Node) -> None:
    """Let constant indices into the batch follow it."""
    data, indices = node.inputs
    if data is None or indices is None or not change.axes(data):
        return
    axis = node.attributes.get_int("axis", 0) % change.op.rank(data)
    if not change.is_batch((dims(data) or ())[axis]) or change.axes(indices):
        return
    array = change.number(indices)
    inner = change.inner(data, axis)
    if array is not None and _walks_the_batch(change, array, inner):
        node.replace_input_with(1, change.rows(indices, 0, exact=True, step=inner))


def _walks_the_batch(change: Change, array: np.ndarray, inner: int) -> bool:
    """Whether indices move by one sample from sample to sample; else they pick samples by number, in any batch the same."""
    if array.ndim == 0 or array.shape[0] % change.declared:
        return False
    parts = array.reshape(change.declared, -1)
    return bool(np.all(np.diff(parts, axis=0) == inner))


def gather_nd(change: Change, node: ir.Node) -> None:
    """Let the constant part of the indices that counts the samples follow the batch."""
    data, indices = node.inputs
    if data is None or indices is None:
        return
    if node.attributes.get_int("batch_dims", 0):
        if change.axes(data) and not change.axes(indices):
            node.replace_input_with(1, change.rows(indices, change.axes(data)[0], exact=True))
        elif change.axes(indices) and not change.axes(data):
            node.replace_input_with(0, change.rows(data, change.axes(indices)[0], exact=True))
        return
    _count_samples(change, node, data)


def scatter_nd(change: Change, node: ir.Node) -> None:
    """Let the data, and the constant part of the indices, follow the batch of the updates."""
    data, indices, updates = node.inputs
    if data is None or indices is None or updates is None:
        return
    reached = [v for v in (data, indices, updates) if change.axes(v)]
    if not reached:
        return
    if not change.axes(data):
        node.replace_input_with(0, change.rows(data, _batch_axis(change, data, reached), exact=True))
    wide = node.inputs[0]
    if wide is not None:
        _count_samples(change, node, wide)
    made = node.inputs[1]
    if not change.axes(updates) and change.axes(made):
        node.replace_input_with(2, change.rows(updates, change.axes(made)[0], exact=True))


def add_rows(change: Change, node: ir.Node) -> None:
    """Let the number of rows that others are added to, and constant indices of these, follow the batch of the others."""
    rows, indices, shape = node.inputs
    sizes = constant(shape)
    if rows is None or indices is None or sizes is None or not (change.axes(rows) or change.axes(indices)):
        return
    inner, left = divmod(int(sizes[0]), change.declared)
    if left or not inner:
        return  # a number of rows of its own
    if not change.axes(indices):
        array = change.number(indices)
        if array is None or not _walks_the_batch(change, array, inner):
            return
        node.replace_input_with(1, change.rows(indices, 0, exact=True, step=inner))
    count = change.op.Mul(change.batch(), np.array([inner]))
    node.replace_input_with(2, change.op.Concat(count, sizes[1:], axis=0))


def _batch_axis(change: Change, data: ir.Value, reached: Sequence[ir.Value]) -> int:
    """The axis of the scattered-into ``data`` that must be the batch's: the first that it divides."""
    shape = dims(data) or ()
    for axis, size in enumerate(shape):
        if isinstance(size, int) and size % change.declared == 0 and (size > 1 or change.declared == 1):
            return axis
    raise ModelError(f"{describe_value(data)} has no axis for the batch of {describe_value(reached[0])}")


def _count_samples(change: Change, node: ir.Node, data: ir.Value) -> None:
    """Repair operand 1, index tuples over the first axes of ``data``."""
    indices = node.inputs[1]
    if indices is None:
        return
    width = (dims(indices) or ())[-1]
    columns = [a for a in change.axes(data) if isinstance(width, int) and a < width]
    if not columns:
        return
    column = columns[0]
    inner = change.inner(data, column)
    if not change.axes(indices):
        array = change.number(indices)
        if array is None or array.ndim < 2 or not _walks_the_batch(change, array[..., column], inner):
            return
        step = np.zeros(array.shape[-1], array.dtype)
        step[column] = inner
        node.replace_input_with(1, change.rows(indices, 0, exact=True, step=step))
        return
    producer = indices.producer()
    if change.declared > 1 or producer is None or producer.op_type != "Concat":
        return
    start = 0
    for k, part in enumerate(producer.inputs):  # a file with one sample: the column that counts samples holds zeros
        size = (dims(part) or (None,))[-1] if part is not None else None
        if part is not None and start == column and size == 1:
            origin = _unexpanded(part)
            if change.number(origin) is not None:
                operands = list(producer.inputs)
                axis = change.axes(indices)[0]
                operands[k] = change.op.Add(part, _counter(change, part, axis, inner))
                node.replace_input_with(1, change.op.Concat(*operands, axis=-1))
            return
        if not isinstance(size, int):
            return
        start += size


def _unexpanded(value: ir.Value) -> ir.Value:
    """The value behind Expand, Unsqueeze and Reshape nodes."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Expand", "Unsqueeze", "Reshape") and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def _counter(change: Change, like: ir.Value, axis: int, inner: int) -> ir.Value:
    """The first entry of each sample: 0, inner, 2·inner, … along ``axis`` of ``like``."""
    each = change.inner(like, axis)
    zeros = np.zeros(
        [each if k == axis else 1 for k in range(change.op.rank(like))], like.dtype.numpy() if like.dtype else None
    )
    return change.rows(change.op.const(zeros), axis, exact=True, step=inner)


def gather_elements(change: Change, node: ir.Node) -> None:
    """Let data or indices follow the batch of the other operand."""
    _same_length(change, node, (0, 1))


def scatter_elements(change: Change, node: ir.Node) -> None:
    """Let data, indices and updates follow the batch of the others."""
    _same_length(change, node, (1, 2, 0))


def _same_length(change: Change, node: ir.Node, operands: Sequence[int]) -> None:
    """Give ``operands``, of equal rank, the batch in the axes in which one of them has it."""
    values = [node.inputs[k] for k in operands]
    axes = sorted({axis for value in values for axis in change.axes(value)})
    indexed = node.attributes.get_int("axis", 0)
    for axis in axes:
        leader = next(v for v in values if axis in change.axes(v) and v is not None)
        outer = change.outer.get(leader, 1)
        for k in operands:
            value = node.inputs[k]
            if value is None or change.is_batch((dims(value) or ())[axis]):
                continue
            step = None
            if k == 1 and axis == indexed % change.op.rank(value):
                data = node.inputs[0]
                step = _entries(change, data, axis)
            node.replace_input_with(k, change.rows(value, axis, outer=outer, exact=True, step=step))


def _entries(change: Change, data: ir.Value | None, axis: int) -> int:
    size = (dims(data) or ())[axis] if data is not None else None
    return max(1, (change.old_size(size) or 0) // change.declared)
