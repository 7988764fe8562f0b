"""Rewrites gathers and scatters that take one index for a whole row: element by element they take many times as long.

    before  ScatterElements(zeros [N, F], Expand(index [E, 1], [E, F]), x [E, F], axis=0, reduction="add")
    after   GatherGrad(x, index, [N, F])                                    # adds each row of x to its row
    before  GatherElements(x [N, F], Expand(index [E, 1], [E, F]), axis=0)
    after   Gather(x, index, axis=0)
    before  GatherND(x [N, F], index [E, 1])
    after   Gather(x, Squeeze(index), axis=0)

PyTorch's ``scatter_add``, ``scatter_reduce`` and ``gather`` take an index per element, so layers on graphs, which pass a row
along each edge, expand theirs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of
from graphc.passes.gradients.indexing import scatter_rows

INDEXED = frozenset({"GatherElements", "GatherND", "ScatterElements", "ScatterND"})
"""The ops that :func:`by_rows` looks at."""

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def by_rows(op: Builder, node: ir.Node) -> ir.Value | None:
    """The result of a gather or scatter whose indices are the same for a whole row; None: they are not, or not seen to be."""
    data, indices = input_of(node, 0), input_of(node, 1)
    if node.op_type == "GatherElementsGrad":
        return _gradient(op, node, indices)
    if node.op_type in ("GatherND", "ScatterND"):
        return _of_tuples(op, node, data, indices)
    shape = dims(data)
    if not shape:
        return None
    axis, gathers = node.attributes.get_int("axis", 0) % len(shape), node.op_type == "GatherElements"
    reduction = node.attributes.get_string("reduction", "none")
    box = reduction == "none" and constant(_expanded(indices)) is not None  # the pass boxes writes it as a choice
    if not gathers and (box or data.dtype not in _FLOATS):
        return None
    index = _index_of_rows(op, indices, shape, axis)
    if index is None:
        return None
    if gathers:
        return op.Gather(data, index, axis=axis)  # type: ignore[no-any-return]
    updates = input_of(node, 2)
    order = [axis, *(k for k in range(len(shape)) if k != axis)]
    if axis:
        data, updates = op.Transpose(data, perm=order), op.Transpose(updates, perm=order)
    made = scatter_rows(op, data, index, updates, reduction)
    return op.Transpose(made, perm=[int(k) for k in np.argsort(order)]) if axis else made


def _gradient(op: Builder, node: ir.Node, indices: ir.Value) -> ir.Value | None:
    """The same of the gradient of a GatherElements along the first axis."""
    shape = dims(node.outputs[0])
    index = _index_of_rows(op, indices, shape, 0) if shape and not node.attributes.get_int("axis", 0) else None
    return op.graphc.GatherGrad(input_of(node), index, input_of(node, 2)) if index is not None else None


def _of_tuples(op: Builder, node: ir.Node, data: ir.Value, indices: ir.Value) -> ir.Value | None:
    """The same where index tuples have one element."""
    shape = dims(indices)
    if not shape or shape[-1] != 1 or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    if node.op_type == "GatherND":
        return op.Gather(data, op.Squeeze(indices, [-1]), axis=0)  # type: ignore[no-any-return]
    if node.attributes.get_string("reduction", "none") != "add" or data.dtype not in _FLOATS:
        return None
    return scatter_rows(op, data, op.Squeeze(indices, [-1]), input_of(node, 2), "add")


def _index_of_rows(op: Builder, indices: ir.Value, shape: tuple[int | str | None, ...], axis: int) -> ir.Value | None:
    """The index of each row, of one axis; None: the elements of a row may have different ones, or not all have one."""
    wide, source = dims(indices), _expanded(indices)
    narrow = dims(source)
    if wide is None or narrow is None or len(wide) != len(shape) or len(narrow) > len(wide):
        return None
    narrow = (*(1,) * (len(wide) - len(narrow)), *narrow)
    if any(narrow[k] != 1 or wide[k] is None or wide[k] != shape[k] for k in range(len(wide)) if k != axis):
        return None
    index = op.Reshape(source, [-1])
    same = narrow[axis] is not None and narrow[axis] == wide[axis]
    return index if same else op.Expand(index, op.lengths((indices, axis)))  # type: ignore[no-any-return]


def _expanded(value: ir.Value) -> ir.Value:
    """The value of which an Expand made this one."""
    while (producer := value.producer()) is not None and producer.domain == "" and producer.op_type in ("Expand", "Identity"):
        value = input_of(producer)
    return value
