"""Writes sums of elements that a GatherND picks by constant indices as matrix products; part of the pass ``gathers``.

PyTorch's newer exporter writes adaptive average pooling of 32 × 32 to 7 × 7 pixels so:

    before   w = GatherND(x[32, 32, …], indices[7, 6, 7, 6, 2]);  w = Where(beyond the window, 0, w)
             y = Σ of 36 single picks of w, as Gathers and Adds
    after    y = A · x · Bᵀ        A[7, 32], B[7, 32]: how often each line is in a sum

The nodes between the GatherND and the last sum are linear in x, with coefficients that depend on the picked axes alone. They
are followed as one matrix over those axes, and stay one where it is small. Divisions by the counts stay behind the product,
whose coefficients are small whole numbers, exact in 16 bits. Gradients are products as well, where that of a GatherND scatters
on one thread. Where x has an infinity or NaN, more sums are NaN than those that pick it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.evaluate import evaluate
from graphc.ir.facts import constant, dims, input_of, required
from graphc.passes.optimize.simplify import replace

LARGEST = 1 << 24
"""Elements of the matrix that is followed through the nodes."""

CONSTANTS, DEPTH = 1 << 16, 32
"""Elements of indices and masks that are computed from constants, and most nodes between."""

DENSE = 1 << 20
"""Elements of a matrix that does not divide into one for each axis."""

LEAST = 1 << 14
"""Elements of a matrix above which dividing it pays: below, the work of two products of many small matrices takes longer."""

Matrix = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Picked:
    """A value that is linear in what one GatherND reads.

    Attributes:
        axes: for each axis of the value, None if it was picked, or the number of an axis that the GatherND left as it is.
        matrix: the picked axes, and the elements that the indices choose from: how often each is in the value.
        sums: whether elements have been added up.
    """

    axes: tuple[int | None, ...]
    matrix: Matrix
    sums: bool = False

    def beside(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """An operand that broadcasts to the value, over the picked axes alone; None: it differs along other axes."""
        if array.ndim > len(self.axes):
            return None
        shape = (1,) * (len(self.axes) - array.ndim) + array.shape
        if any(size != 1 for size, axis in zip(shape, self.axes, strict=True) if axis is not None):
            return None
        picked = [size for size, axis in zip(shape, self.axes, strict=True) if axis is None]
        if any(size not in (1, own) for size, own in zip(picked, self.matrix.shape, strict=False)):
            return None
        return array.reshape(*picked, 1)


def sums_as_products(graph: ir.Graph, op: Builder) -> int:
    """Replace every sum that can be one; returns their number."""
    count, constants = 0, _Constants()
    for node in [node for node in graph if node.domain == "" and node.op_type == "GatherND"]:
        last = _last_sum(node, constants)
        if last is None:
            continue
        value, found = last
        op.before, op.scope = required(value.producer()), node.name or node.op_type
        product = _product(op, input_of(node), found)
        count += product is not None and replace(graph, op, value, product)
    return count


def _last_sum(node: ir.Node, constants: _Constants) -> tuple[ir.Value, Picked] | None:
    """The only value that others read of all that is linear in ``node``, if it is a sum."""
    start = _start(node, constants)
    if start is None:
        return None
    known = {node.outputs[0]: start}
    pending = [node.outputs[0]]
    while pending:
        for reader in sorted(pending.pop().consumers(), key=lambda n: n.name or ""):
            if reader.domain or len(reader.outputs) != 1 or reader.outputs[0] in known:
                continue
            found = _follow(reader, known, constants)
            if found is not None and found.matrix.size <= LARGEST:
                known[reader.outputs[0]] = found
                pending.append(reader.outputs[0])
    ends = [v for v in known if v.is_graph_output() or not all(_stays(v, reader, known) for reader in v.consumers())]
    return (ends[0], known[ends[0]]) if len(ends) == 1 and known[ends[0]].sums else None


def _stays(value: ir.Value, reader: ir.Node, known: Mapping[ir.Value, Picked]) -> bool:
    """Whether a reader of ``value`` is among the nodes that are followed, or reads its type alone."""
    if reader.op_type == "CastLike":
        return reader.inputs[0] is not value
    return len(reader.outputs) == 1 and reader.outputs[0] in known


def _start(node: ir.Node, constants: _Constants) -> Picked | None:
    data, indices = input_of(node), constants.of(node.inputs[1])
    sizes = dims(data)
    if indices is None or sizes is None or data.is_initializer() or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    if data.dtype is None or not data.dtype.is_floating_point() or not indices.size or indices.shape[-1] > len(sizes):
        return None
    picked = [size for size in sizes[: indices.shape[-1]] if isinstance(size, int)]
    if len(picked) != indices.shape[-1] or indices.size // len(picked) * math.prod(picked) > LARGEST:
        return None
    places = np.where(indices < 0, indices + np.array(picked), indices)
    if (places < 0).any() or (places >= np.array(picked)).any():
        return None  # an error, which the GatherND reports
    flat = np.ravel_multi_index(tuple(np.moveaxis(places, -1, 0)), picked)
    matrix = np.zeros((*flat.shape, math.prod(picked)), np.float32)
    np.put_along_axis(matrix, flat[..., None], np.float32(1), -1)
    kept: Sequence[int] = range(len(sizes) - len(picked))
    return Picked((*(None for _ in flat.shape), *kept), matrix)


class _Constants:
    """Constants, and what small constants make: exporters leave folding to others. No value is tried twice."""

    def __init__(self) -> None:
        self._tried: set[ir.Value] = set()

    def of(self, value: ir.Value | None, depth: int = DEPTH) -> np.ndarray[Any, Any] | None:
        """The value as an array, or None."""
        found = constant(value)
        node = None if value is None else value.producer()
        if found is not None or value is None or node is None or value in self._tried or not depth:
            return found
        self._tried.add(value)
        like = node.op_type == "CastLike"  # a mask's zero, in the type of what it masks
        operands = [v for v in (node.inputs[:1] if like else node.inputs) if v is not None]
        if any(self.of(operand, depth - 1) is None for operand in operands):
            return None
        if like:
            found = required(constant(operands[0])).astype(value.dtype.numpy()) if value.dtype is not None else None
        else:
            found = evaluate(node, limit=CONSTANTS)
        if found is not None:
            value.const_value = ir.Tensor(found, name=value.name)
        return found


def _follow(node: ir.Node, known: Mapping[ir.Value, Picked], constants: _Constants) -> Picked | None:
    """The result of ``node``, if it is linear in the same GatherND."""
    operands = [known.get(v) if v is not None else None for v in node.inputs]
    match node.op_type, operands:
        case "Transpose", [Picked() as x]:
            perm = list(node.attributes.get_ints("perm", tuple(reversed(range(len(x.axes))))))
            number = {axis: k for k, axis in enumerate(k for k, a in enumerate(x.axes) if a is None)}
            order = [number[axis] for axis in perm if x.axes[axis] is None]
            return Picked(tuple(x.axes[axis] for axis in perm), x.matrix.transpose(*order, len(order)), x.sums)
        case "Gather", [Picked() as x, None]:
            index, axis = constants.of(node.inputs[1]), node.attributes.get_int("axis", 0) % len(x.axes)
            if index is None or index.ndim or x.axes[axis] is not None:
                return None
            place = sum(a is None for a in x.axes[:axis])
            if not -x.matrix.shape[place] <= int(index) < x.matrix.shape[place]:
                return None
            matrix = np.take(x.matrix, [int(index)], axis=place).squeeze(place)
            return Picked((*x.axes[:axis], *x.axes[axis + 1 :]), matrix, x.sums)
        case "Where", [None, *_]:
            return _masked(node, operands, constants)
        case "Add", [Picked() as x, Picked() as y] if x.axes == y.axes and x.matrix.shape == y.matrix.shape:
            return Picked(x.axes, x.matrix + y.matrix, True)
    return None


def _masked(node: ir.Node, operands: Sequence[Picked | None], constants: _Constants) -> Picked | None:
    """Where(condition, 0, x) or Where(condition, x, 0)."""
    condition = constants.of(node.inputs[0])
    side = next((k for k in (1, 2) if operands[k] is not None), None)
    if condition is None or side is None:
        return None
    other, x = constants.of(node.inputs[3 - side]), required(operands[side])
    shown = x.beside(condition)
    if other is None or other.size != 1 or other.reshape(-1)[0] != 0 or other.ndim > len(x.axes) or shown is None:
        return None
    shown = np.broadcast_to(shown, (*x.matrix.shape[:-1], 1))
    return Picked(x.axes, np.where(shown == (side == 1), x.matrix, np.float32(0)), x.sums)


def _product(op: Builder, data: ir.Value, found: Picked) -> ir.Value | None:
    """The sums as products of ``data``, whose first axes the indices choose from."""
    sizes = dims(data) or ()
    kept = sum(axis is not None for axis in found.axes)
    picked = sizes[: len(sizes) - kept]
    rows = found.matrix.shape[:-1]
    dtype = required(data.dtype).numpy()
    first = op.Transpose(data, perm=[*range(len(picked), len(sizes)), *range(len(picked))])
    divides = len(rows) == len(picked) == 2 and found.matrix.size > LEAST
    divided = _divided(found.matrix, picked) if divides else None
    if divided is not None:
        a, b = divided
        result = op.MatMul(op.const(a.astype(dtype)), op.MatMul(first, op.const(np.ascontiguousarray(b.T).astype(dtype))))
    elif found.matrix.size <= DENSE:
        matrix = found.matrix.reshape(-1, found.matrix.shape[-1])
        flat = op.Reshape(first, [*[0] * kept, -1])
        product = op.MatMul(flat, op.const(np.ascontiguousarray(matrix.T).astype(dtype)))
        result = op.Reshape(product, [*[0] * kept, *rows])
    else:
        return None
    # now the kept axes in order, then the picked ones
    numbers = iter(range(kept, kept + len(rows)))
    return op.Transpose(result, perm=[next(numbers) if axis is None else axis for axis in found.axes])  # type: ignore[no-any-return]


def _divided(matrix: Matrix, sizes: Sequence[Any]) -> tuple[Matrix, Matrix] | None:
    """A and B with matrix[i, j, p, q] = A[i, p] · B[j, q]; None if there are none."""
    whole = matrix.reshape(*matrix.shape[:2], *sizes)
    at = np.unravel_index(int(np.argmax(whole)), whole.shape)
    largest = whole[at]
    if not largest:
        return None
    a, b = whole[:, at[1], :, at[3]], whole[at[0], :, at[2], :] / largest
    return (a, b) if np.array_equal(np.einsum("ip,jq->ijpq", a, b), whole) else None
