"""permuted_products: let products of many matrices read their operands, and write their result, in another order of axes.

    before   s = MatMul(q, Transpose(k, perm=[0, 1, 3, 2]));  y = Transpose(MatMul(s, v), perm=[0, 2, 1, 3])
    after    s = PermutedMatMul(q, k);                        y = PermutedMatMul(s, v)

The gradient of a batched product has a transposed operand in each of its two; attention that is written out has more of them.
A Reshape between the two nodes is followed where it merges axes that count matrices. Every matrix keeps contiguous rows or
columns. A Transpose that other nodes read too stays, and the product reads its result.

Shapes are static: a backend whose kernels read memory with strides asks for this pass over its plans
(:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import input_of, required, static_dims
from graphc.passes.optimize.axis_order import only_user
from graphc.passes.optimize.identities import permutation
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@graph_pass("permuted_products", changes="form")
def permuted_products(model: ir.Model, ctx: Context, *, narrowest: int = 1) -> bool:
    """Take the Transposes around float32 and float64 products of many matrices into the products.

    Args:
        narrowest: smallest side of a product that is taken, of rows, columns and the length of its sums.
    """
    graph, count = model.graph, 0
    op = Builder(graph)
    for node in [node for node in graph if node.domain == "" and node.op_type == "MatMul"]:
        op.before, op.scope = node, node.name or node.op_type
        count += _permute(graph, op, node, narrowest)
    if not count:
        return False
    dead_code_elimination(graph)
    ctx.note(f"permuted_products: {counted(count, 'product')} of transposed operands")
    return True


@dataclass(frozen=True)
class _Side:
    """An operand or the result of a product: a value, the order in which the product sees its axes, and its sizes so."""

    value: ir.Value
    perm: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def moves(self) -> bool:
        return self.perm != tuple(range(len(self.perm)))


def _permute(graph: ir.Graph, op: Builder, node: ir.Node, narrowest: int) -> bool:
    a, b = (required(value) for value in node.inputs)
    shapes = [static_dims(value) for value in (a, b, node.outputs[0])]
    if node.outputs[0].dtype not in _TYPES or any(shape is None or 0 in shape for shape in shapes):
        return False
    of_a, of_b, of_y = (tuple(shape or ()) for shape in shapes)
    if len(of_y) < 3 or not of_a[:-2] == of_b[:-2] == of_y[:-2] or min(*of_a[-2:], of_y[-1]) < narrowest:
        return False
    sides = (_operand(a, of_a), _operand(b, of_b), _result(node.outputs[0], of_y))
    counts = max((side.sizes[:-2] for side in sides if side.moves), key=len, default=None)
    if counts is None:
        return False
    plain = (_alike(a, of_a), _alike(b, of_b), _alike(node.outputs[0], of_y))
    left, right, made = (_split(*pair, counts) for pair in zip(sides, plain, strict=True))
    order, last = made.perm, len(made.perm) - 1
    if order[-1] == last - 1:  # its rows lie along the columns of the product, which is that of the transposed operands
        swap = {last: last - 1, last - 1: last}
        left, right, order = _turned(right), _turned(left), tuple(swap.get(axis, axis) for axis in order)
    operands = [op.Reshape(x.value, _stored(x)) if static_dims(x.value) != _stored(x) else x.value for x in (left, right)]
    y = op.graphc.PermutedMatMul(*operands, permA=left.perm, permB=right.perm, permY=order)
    op.before = made.value.producer()
    shape = static_dims(made.value)
    return replace(graph, op, made.value, y if static_dims(y) == shape else op.Reshape(y, list(shape or ())))


def _alike(value: ir.Value, sizes: tuple[int, ...]) -> _Side:
    """The value in the order of its own axes, seen with these sizes."""
    return _Side(value, tuple(range(len(sizes))), sizes)


def _split(side: _Side, plain: _Side, counts: tuple[int, ...]) -> _Side:
    """The side with these axes in front of its matrices, or ``plain`` with them if its own are in another order."""
    if side.sizes[:-2] == counts:
        return side
    outer, inner = len(side.perm) - 2, len(counts)
    if side.perm[:-2] != tuple(range(outer)):
        side, outer = plain, len(plain.perm) - 2
    return _Side(side.value, (*range(inner), *(axis - outer + inner for axis in side.perm[-2:])), (*counts, *side.sizes[-2:]))


def _stored(side: _Side) -> tuple[int, ...]:
    """The shape of the value, of which the product sees a permutation."""
    return tuple(side.sizes[side.perm.index(axis)] for axis in range(len(side.perm)))


def _turned(side: _Side) -> _Side:
    """An operand with rows for columns."""
    *first, row, column = range(len(side.perm))
    order = (*first, column, row)
    return _Side(side.value, tuple(side.perm[k] for k in order), tuple(side.sizes[k] for k in order))


def _operand(value: ir.Value, shape: tuple[int, ...]) -> _Side:
    """An operand behind its Transpose, if products alone read that and it leaves rows or columns contiguous."""
    node, order = value.producer(), _order(value.producer())
    if node is None or not _read_by_products(value):
        return _alike(value, shape)
    if order is None and _merges(node, shape):
        value = input_of(node)
        node, order, shape = value.producer(), _order(value.producer()), required(static_dims(value))
        return _alike(value, shape) if node is None or order is None else _behind(node, order, shape)
    if order is None:
        return _alike(value, shape)
    if order == (*range(len(order) - 2), len(order) - 1, len(order) - 2):
        before = _operand(input_of(node), required(static_dims(input_of(node))))
        if before.moves:
            return _turned(before)
    return _behind(node, order, shape)


def _behind(node: ir.Node, order: tuple[int, ...], shape: tuple[int, ...]) -> _Side:
    if len(order) - 1 not in order[-2:]:
        return _alike(node.outputs[0], shape)
    return _Side(input_of(node), order, shape)


def _result(value: ir.Value, shape: tuple[int, ...]) -> _Side:
    """The result behind the Transpose that alone reads it, if the last axis of that is a side of the matrices."""
    user = only_user(value)
    sizes = shape
    if user is not None and user.op_type == "Reshape" and user.domain == "":
        split = static_dims(user.outputs[0])
        if split is not None and len(split) > len(shape) and split[-2:] == shape[-2:]:
            user, sizes = only_user(user.outputs[0]), split
    perm = _order(user)
    if user is None or perm is None or perm[-1] < len(perm) - 2:
        return _alike(value, shape)
    return _Side(user.outputs[0], perm, sizes)


def _order(node: ir.Node | None) -> tuple[int, ...] | None:
    """The order of axes that a Transpose makes; None for other nodes."""
    found = permutation(node) if node is not None and node.op_type == "Transpose" and not node.domain else None
    return tuple(found) if found is not None else None


def _merges(node: ir.Node, shape: tuple[int, ...]) -> bool:
    """Whether a Reshape makes this shape by merging axes in front of matrices."""
    before = static_dims(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    if node.domain or node.op_type != "Reshape" or before is None:
        return False
    return len(before) > len(shape) and before[-2:] == shape[-2:]


def _read_by_products(value: ir.Value) -> bool:
    """Whether only products read a value, or other Transposes and Reshapes of it."""
    if value.is_graph_output():
        return False
    for node in (use.node for use in value.uses()):
        moves = node.op_type in ("Transpose", "Reshape") and _read_by_products(node.outputs[0])
        if node.domain or not (moves or node.op_type == "MatMul"):
            return False
    return True
