"""grouped_products: write products of rows that choose among several matrices as products by groups.

    before   y = MatMul(Reshape(Where(Equal(owner[S, 1], [[0 … E − 1]])[…, None], x[S, 1, D], 0), [S, E·D]),
                        Reshape(w[E, D, O], [E·D, O]))
    or       y = MatMul(x[S, 1, D], Gather(w, owner[S]))
    after    y = GroupedMatMul(x, w, owner)                      # y[s] = x[s]·w[owner[s]]

The first form has fixed shapes in ONNX and multiplies every row by every matrix; PyTorch's mixtures of experts come so
(:mod:`graphc.frontends.torch_export.experts`). The second copies a matrix for every row. A backend with a kernel does neither;
others compute the form that was found. An infinity or NaN in one matrix then stays in the rows that have that matrix. Products
in 16 bits stay as they are, and Gathers from more matrices than a mixture of experts has.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of, is_zero, required, static_dims
from graphc.passes.optimize.simplify import replace_each
from graphc.pipeline import Context, graph_pass

MOST = 256
"""Matrices at most that a Gather chooses from. Of more, a step uses few, and the gradient of a Gather knows which."""


@graph_pass("grouped_products", requires=("legalize",), changes="form")
def grouped_products(model: ir.Model, ctx: Context) -> bool:
    """Replace every float32 product in which rows choose matrices."""
    count = replace_each(model.graph, ("MatMul",), _grouped)
    if count:
        ctx.note(f"grouped_products: {counted(count, 'product')} by groups of rows")
    return count > 0


def _grouped(op: Builder, node: ir.Node) -> ir.Value | None:
    return (_masked(op, node) or _gathered(op, node)) if node.outputs[0].dtype == ir.DataType.FLOAT else None


def _masked(op: Builder, node: ir.Node) -> ir.Value | None:
    """The product of rows that a mask puts beside zeros, at the place of their matrix."""
    spread, stacked = (_producer(value, "Reshape") for value in node.inputs)
    masked = None if spread is None else _producer(spread.inputs[0], "Where")
    if spread is None or stacked is None or masked is None:
        return None
    w, (condition, x, other) = input_of(stacked), masked.inputs
    sizes = _matrices(w)
    if sizes is None or dims(stacked.outputs[0]) != (sizes[0] * sizes[1], sizes[2]):
        return None
    experts, depth, _ = sizes
    owner = _owner(condition, experts)
    if owner is None or x is None or _of(x) != (1, depth) or _of(masked.outputs[0]) != (experts, depth):
        return None
    rows = {required(dims(value))[0] for value in (x, owner)}
    if len(rows) > 1 and 1 in rows:
        return None  # one row for several owners, or one owner for several rows
    fill = _producer(other, "CastLike")
    zero = other if fill is None else fill.inputs[0]
    if zero is None or not is_zero(zero) or required(dims(spread.outputs[0]))[1:] != (experts * depth,):
        return None
    numbers = op.Cast(op.Reshape(owner, [-1]), to=int(ir.DataType.INT64))
    w, transposed = _as_it_lies(w, False)
    return op.graphc.GroupedMatMul(op.Reshape(x, [-1, depth]), w, numbers, transB=transposed or None)  # type: ignore[no-any-return]


def _gathered(op: Builder, node: ir.Node) -> ir.Value | None:
    """The product of rows, or columns, with a matrix each that a Gather took."""
    for x, chosen, axis in ((node.inputs[0], node.inputs[1], 1), (node.inputs[1], node.inputs[0], 2)):
        if x is None or chosen is None or len(dims(x) or ()) != 3 or required(dims(x))[axis] != 1:
            continue
        matrices, transposed = _as_it_lies(chosen, axis == 2)
        gather = _producer(matrices, "Gather")
        if gather is None or gather.attributes.get_int("axis", 0) != 0:
            continue
        w, indices = input_of(gather), input_of(gather, 1)
        sizes, rows = _matrices(w), dims(indices)
        if sizes is None or sizes[0] > MOST or rows is None or rows != required(dims(x))[:1]:
            continue
        # refuses an index outside as the Gather of matrices did, and counts a negative one from the end
        numbers = op.Gather(op.const(np.arange(sizes[0], dtype=np.int64)), indices, axis=0)
        flat = op.Reshape(x, [-1, sizes[2 if transposed else 1]])
        product = op.graphc.GroupedMatMul(flat, w, numbers, transB=transposed or None, gathers=1)
        return op.Unsqueeze(product, [axis])  # type: ignore[no-any-return]
    return None


def _matrices(w: ir.Value) -> tuple[int, int, int] | None:
    """Number, rows and columns of matrices, if they are known."""
    sizes = static_dims(w)
    return (sizes[0], sizes[1], sizes[2]) if sizes is not None and len(sizes) == 3 else None


def _as_it_lies(w: ir.Value, transposed: bool) -> tuple[ir.Value, bool]:
    """Matrices without a Transpose of each, and whether a product reads them transposed."""
    while (moved := _producer(w, "Transpose")) is not None:
        order = list(moved.attributes.get_ints("perm", ()))
        if order not in ([0, 1, 2], [0, 2, 1]):
            break
        w, transposed = input_of(moved), transposed != (order == [0, 2, 1])
    return w, transposed


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def _of(value: ir.Value) -> tuple[object, ...] | None:
    """The sizes behind the first of three axes."""
    sizes = dims(value)
    return sizes[1:] if sizes is not None and len(sizes) == 3 else None


def _owner(condition: ir.Value | None, experts: int) -> ir.Value | None:
    """The numbers, S × 1, that a mask of S × ``experts`` × 1 compares with 0 to ``experts`` - 1."""
    if condition is None or _of(condition) != (experts, 1):
        return None
    moved = _producer(condition, "Unsqueeze") or _producer(condition, "Reshape")
    compared = _producer(condition if moved is None else moved.inputs[0], "Equal")
    for value, numbers in () if compared is None else (compared.inputs, reversed(compared.inputs)):
        known = constant(numbers)
        if known is None and (made := _producer(numbers, "Unsqueeze")) is not None:
            known = constant(made.inputs[0])
        if known is None or value is None or not np.array_equal(known.reshape(-1), np.arange(experts)):
            continue
        sizes = dims(value)
        if sizes is not None and sizes[1:] in ((1,), (1, 1)) and value.dtype in (ir.DataType.INT32, ir.DataType.INT64):
            return value
    return None
