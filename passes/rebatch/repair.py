"""Repairs single nodes whose operands are fixed to one batch size (:mod:`graphc.passes.rebatch.rebatch`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import constant, dims, input_of
from graphc.ir.subgraphs import CONTROL
from graphc.ir.symbolic_dims import held
from graphc.passes.rebatch import indices
from graphc.passes.rebatch.change import Change

Repair = Callable[[Change, ir.Node], None]


# Shapes as operands -----------------------------------------------------------------------------------------------------


def _reshape(change: Change, node: ir.Node) -> None:
    """Make the Reshape's target follow the batch: ``[1, 1024]`` becomes ``[0, 1024]``."""
    x, target = node.inputs[0], constant(node.inputs[1])
    axis = change.axis(x)
    if x is None or axis is None or target is None:
        return
    if not node.attributes.get_int("allowzero", 0) and len(target) > axis and not target[: axis + 1].any():
        return  # a target of 0 copies the size
    source, result = change.old(x), change.old(node.outputs[0])
    if source is None or result is None:
        raise ModelError(f"the target shape {target.tolist()} is fixed while other dimensions are symbolic")
    position = math.prod(source[:axis]) * change.outer.get(x, 1)
    place = batch_place(position, result, change.declared)
    if place is None:
        raise ModelError(f"it is not clear where the batch (dimension {axis} of {source}) goes in {result}")
    outer = position // math.prod(result[:place])
    if outer > 1:
        change.outer[node.outputs[0]] = outer
    same = place == axis and result[place] == source[axis] and math.prod(result[:place]) == math.prod(source[:axis])
    new = [(0 if same else -1) if k == place else d for k, d in enumerate(result)]
    node.attributes.pop("allowzero", None)
    node.replace_input_with(1, change.op.const(np.array(new, dtype=np.int64)))


def batch_place(position: int, result: Sequence[int], batch: int) -> int | None:
    """Return the axis of ``result`` that takes the batch; ``position`` is the product of the sizes before it.

    Reshape keeps the order of elements, so that product is the same before and after. A batch of 1 leaves a choice: first an
    axis that holds only the batch, then the axis after that product; never the last axis (the features) if the axis before it
    fits.
    """
    candidates = []
    for k, size in enumerate(result):
        start = math.prod(result[:k])
        if start <= position and position * batch <= start * size and position % start == 0 and size % batch == 0:
            candidates.append(k)
    exact = [k for k in candidates if result[k] == batch and math.prod(result[:k]) == position]
    if exact:
        return exact[0]
    if len(candidates) > 1 and candidates[-1] == len(result) - 1:
        return candidates[-2]
    return candidates[-1] if candidates else None


def _expand(change: Change, node: ir.Node) -> None:
    """Make the target of an Expand 1 along the batch: an Expand to the old size does nothing there."""
    x, target, sizes = node.inputs[0], constant(node.inputs[1]), held(node.inputs[1])
    if x is None:
        return
    for back, size in enumerate(reversed(sizes or ()), start=1):  # entries for each sample, and a target that follows the batch
        have = (dims(x) or ())[-back] if back <= change.op.rank(x) else 1
        if change.is_batch(size) and not change.is_batch(have) and have != 1 and have == change.old_size(size):
            x = change.rows(x, -back)
            node.replace_input_with(0, x)
    if target is None:
        return
    new = target.copy()
    for axis in change.axes(x):
        place = len(new) - change.op.rank(x) + axis
        if place >= 0:
            new[place] = 1
    if not np.array_equal(new, target):
        node.replace_input_with(1, change.op.const(new))


def _slice(change: Change, node: ir.Node) -> None:
    """Extend a Slice that took the whole old batch to the whole new one."""
    ends = constant(node.inputs[2])
    if ends is None or not (whole := [k for k, takes_all in _ranges(change, node) if takes_all]):
        return
    new = ends.copy()
    new[whole] = np.iinfo(ends.dtype).max
    if not np.array_equal(new, ends):
        node.replace_input_with(2, change.op.const(new))


def _ranges(change: Change, node: ir.Node) -> list[tuple[int, bool]]:
    """Of a Slice with constant operands: the place of each range in an axis with the batch, and whether it takes all of it."""
    x, starts, ends = input_of(node), constant(node.inputs[1]), constant(node.inputs[2])
    if starts is None or ends is None:
        return []
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else np.arange(len(starts))
    steps = constant(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else np.ones_like(starts)
    if axes is None or steps is None:
        return []
    found = []
    for k, a in enumerate(axes):
        axis = int(a) % change.op.rank(x)
        size = change.old_size((dims(x) or ())[axis])
        if axis in change.axes(x) and size is not None:
            found.append((k, bool(starts[k] in (0, -size) and steps[k] == 1 and size <= ends[k])))
    return found


def _resize(change: Change, node: ir.Node) -> None:
    """Replace sizes that include the batch by sizes of the other axes."""
    sizes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    x, axis = node.inputs[0], change.axis(node.inputs[0])
    if x is None or sizes is None or axis is None or "axes" in node.attributes:
        return
    others = [k for k in range(change.op.rank(x)) if k != axis]
    node.attributes["axes"] = ir.AttrInt64s("axes", others)
    node.replace_input_with(3, change.op.const(sizes[others]))


def _squeeze(change: Change, node: ir.Node) -> None:
    """Name the axes of a Squeeze without axes: those of size 1, but not the batch."""
    x = node.inputs[0]
    if x is None or (len(node.inputs) > 1 and node.inputs[1] is not None) or not change.axes(x):
        return
    axes = [k for k, d in enumerate(dims(x) or ()) if d == 1]
    node.resize_inputs(2)
    node.replace_input_with(1, change.op.const(np.array(axes, np.int64)))


# Operands that lie beside the batch -------------------------------------------------------------------------------------


def _broadcast(change: Change, node: ir.Node, trailing: int = 0) -> None:
    """Make operands with entries for each sample of the old batch follow the new one.

    Args:
        trailing: last axes that do not broadcast.
    """
    for k in range(len(node.inputs)):
        _follow(change, node, k, trailing)


def _matmul(change: Change, node: ir.Node) -> None:
    _broadcast(change, node, trailing=2)


def _follow(change: Change, node: ir.Node, index: int, trailing: int) -> None:
    """Make operand ``index`` follow the batch in the axes, counted from the last, in which another operand has it."""
    value = node.inputs[index]
    for back in range(trailing + 1, len(dims(value) or ()) + 1 if value is not None else 0):
        have = (dims(value) or ())[-back] if value is not None else None
        for leader in node.inputs:
            found = dims(leader) if leader is not None and leader is not value else None
            if value is None or leader is None or found is None or len(found) < back or not change.is_batch(found[-back]):
                continue
            if not change.is_batch(have) and have == change.old_size(found[-back]) and have != 1:
                made = change.rows(value, -back, outer=change.outer.get(leader, 1))
                node.replace_input_with(index, made)
                value, have = made, (dims(made) or ())[-back]


def _gemm(change: Change, node: ir.Node) -> None:
    """Make the addend follow the rows of the product."""
    a, c = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    axis = 1 if node.attributes.get_int("transA", 0) else 0
    if a is None or c is None or len(dims(c) or ()) < 2 or not change.is_batch((dims(a) or ())[axis]):
        return
    rows = (dims(c) or ())[-2]
    if rows != 1 and rows == change.old_size((dims(a) or ())[axis]):
        node.replace_input_with(2, change.rows(c, -2, outer=change.outer.get(a, 1)))


def _concat(change: Change, node: ir.Node) -> None:
    """Repeat operands of the old batch size (a class token) for the new batch size."""
    rank = change.op.rank(node.outputs[0])
    joined = node.attributes["axis"].as_int() % rank
    every = [v for v in node.inputs if v is not None]
    leader = next((v for v in every if any(a != joined for a in change.axes(v))), None)
    if leader is None:
        return
    for k, value in enumerate(node.inputs):
        for axis in change.axes(leader):
            if axis != joined and value is not None and not change.is_batch((dims(value) or ())[axis]):
                value = change.rows(value, axis, outer=change.outer.get(leader, 1), exact=True)
                node.replace_input_with(k, value)


def _recurrent(change: Change, node: ir.Node) -> None:
    """Drop initial states of zeros, and repeat others of the old batch size for the new batch size."""
    axis = 0 if "layout" in node.attributes and node.attributes["layout"].as_int() else 1
    x = node.inputs[0]
    if not change.is_batch((dims(x) or (None, None))[axis] if x is not None else None):
        return
    for k, place in ((4, 0), (5, axis), (6, axis)):
        value = node.inputs[k] if k < len(node.inputs) else None
        if value is not None and not change.axes(value):
            array = change.number(value)
            zeros = k > 4 and array is not None and not array.any() and not value.is_initializer()
            node.replace_input_with(k, None if zeros else change.rows(value, place, exact=True))


def _attention(change: Change, node: ir.Node) -> None:
    """Make the mask, and keys and values of earlier steps, follow the batch of the queries."""
    query = input_of(node)
    for k in range(len(node.inputs)):
        value, mask = node.inputs[k], k == 3
        shape = (dims(value) or ()) if value is not None else ()
        if value is None or not shape or change.axes(value) or shape[0] != change.declared or (mask and len(shape) < 4):
            continue
        if k and change.is_batch((dims(query) or (None,))[0]) and not (mask and change.declared == 1):
            node.replace_input_with(k, change.rows(value, 0, exact=not mask))


def _channels(change: Change, node: ir.Node) -> None:
    """Repeat per-channel operands where the batch lies in the channels (one group a sample)."""
    x = node.inputs[0]
    if x is None or not change.is_batch((dims(x) or (None, None))[1]):
        return
    for k, value in enumerate(node.inputs):
        if k and value is not None and not change.axes(value):
            node.replace_input_with(k, change.rows(value, 0, outer=change.outer.get(x, 1), exact=True))


BROADCAST = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
)  # fmt: skip
"""Ops whose operands broadcast in every axis."""


REPAIRS: dict[str, Repair] = {
    **dict.fromkeys(BROADCAST, _broadcast),
    "Attention": _attention,
    "BatchNormalization": _channels,
    "Concat": _concat,
    "Expand": _expand,
    "GRU": _recurrent,
    "Gather": indices.gather,
    "GatherElements": indices.gather_elements,
    "GatherGrad": indices.add_rows,
    "GatherND": indices.gather_nd,
    "Gemm": _gemm,
    "InstanceNormalization": _channels,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": indices.scatter_elements,
    "ScatterND": indices.scatter_nd,
    "Slice": _slice,
    "Squeeze": _squeeze,
}
"""Op type → repair of a node, applied before its outputs are inferred again."""


def is_doubtful(change: Change, node: ir.Node) -> bool:
    """Whether the graph alone does not tell that ``node``, which the batch reaches, keeps the samples apart."""
    if node.op_type in CONTROL or node.op_type in ("GatherND", "ScatterND", "GatherGrad", "NonZero", "Compress"):
        return True
    if node.op_type in ("Gather", "GatherElements", "ScatterElements"):
        data = input_of(node)
        axis = node.attributes.get_int("axis", 0) % change.op.rank(data)
        return axis in change.axes(data) or (node.op_type != "Gather" and axis in change.axes(node.inputs[1]))
    if node.op_type == "Slice":
        return not all(takes_all for _, takes_all in _ranges(change, node))
    if node.op_type == "Split":
        data = input_of(node)
        return node.attributes.get_int("axis", 0) % change.op.rank(data) in change.axes(data)
    return (
        node.op_type == "Reshape" and change.declared == 1 and len(change.axes(input_of(node))) == 1 and _is_open(change, node)
    )


def _is_open(change: Change, node: ir.Node) -> bool:
    """Whether a Reshape of one sample may put the batch in several axes."""
    source, result = change.old(input_of(node)), change.old(node.outputs[0])
    axis = next(iter(change.axes(input_of(node))), 0)
    return source is not None and result is not None and math.prod(source[:axis]) > 1 and result.count(1) != 1
