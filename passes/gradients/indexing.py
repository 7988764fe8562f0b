"""Gradients of gathers and scatters; contributions of repeated indices are summed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of, is_zero, rank
from graphc.passes.gradients.shape import pad_to, scatter_back

zero_gradient("NonZero", "NonMaxSuppression", origin=__name__)


@gradient("Gather")
def gather(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[…, indices, …] on one axis;  ∂x = dy added at the indices"""
    x, indices = operands(node, 2)
    axis = node.attributes.get_int("axis", 0) % rank(x)
    known = constant(indices)
    if known is not None and known.size == 1:
        return _one_slice(op, x, axis, int(known.reshape(-1)[0]), dy)
    if axis == 0:
        return op.graphc.GatherGrad(dy, indices, op.shape(x))
    width = rank(indices)
    order = [axis, *(k for k in range(rank(x)) if k != axis)]
    front = op.Transpose(dy, perm=[*range(axis, axis + width), *range(axis), *range(axis + width, rank(dy))])
    moved = op.graphc.GatherGrad(front, indices, op.lengths(*((x, k) for k in order)))
    return op.Transpose(moved, perm=[int(k) for k in np.argsort(order)])


@gradient("graphc::GatherGrad")
def gather_grad(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """dx = rows of dy added at the indices;  ∂dy = dz at the indices"""
    return op.Gather(dz, node.inputs[1], axis=0)


def _one_slice(op: Builder, x: ir.Value, axis: int, index: int, dy: ir.Value) -> Any:
    """Zeros of the shape of x, with dy at one constant index of an axis."""
    piece = op.Reshape(dy, op.lengths(*((x, k) if k != axis else 1 for k in range(rank(x)))))
    size = op.lengths((x, axis))
    whole = constant(size)
    if whole is not None:
        before = index % int(whole[0])
        pads = op.const([before, int(whole[0]) - 1 - before])
    elif index >= 0:
        pads = op.Concat(op.const([index]), op.Sub(size, op.const([index + 1])), axis=0)
    else:
        pads = op.Concat(op.Add(size, op.const([index])), op.const([-1 - index]), axis=0)
    return pad_to(op, x, piece, pads, [axis])


@gradient("GatherElements")
def gather_elements(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[indices] element by element on one axis;  ∂x = dy added at the indices"""
    x, indices = operands(node, 2)
    return op.graphc.GatherElementsGrad(dy, indices, op.shape(x), axis=node.attributes.get_int("axis", 0))


@gradient("graphc::GatherElementsGrad")
def gather_elements_grad(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """dx = elements of dy added at the indices;  ∂dy = dz at the indices"""
    return op.GatherElements(dz, node.inputs[1], axis=node.attributes.get_int("axis", 0))


@gradient("GatherND")
def gather_nd(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[index tuples];  ∂x = dy added at the index tuples"""
    x, indices = operands(node, 2)
    batch = node.attributes.get_int("batch_dims", 0)
    if batch:
        return scatter_back(op, x, dy, lambda positions: op.GatherND(positions, indices, batch_dims=batch))
    return op.ScatterND(op.zeros_like(x), indices, dy, reduction="add")


@gradient("ScatterElements")
def scatter_elements(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with updates at the indices, which replace, or are added, multiplied or compared; see :func:`_scattered`"""
    axis = node.attributes.get_int("axis", 0)

    def scatter(x: Any, indices: Any, updates: Any, reduction: str) -> Any:
        return op.ScatterElements(x, indices, updates, axis=axis, reduction=reduction)

    return _scattered(op, node, dy, scatter, lambda x, indices: op.GatherElements(x, indices, axis=axis))


@gradient("ScatterND")
def scatter_nd(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x with updates at the index tuples, which replace, or are added, multiplied or compared; see :func:`_scattered`"""

    rows = (dims(input_of(node, 1)) or (0,))[-1] == 1

    def scatter(x: Any, indices: Any, updates: Any, reduction: str) -> Any:
        if rows:
            return scatter_rows(op, x, op.Squeeze(indices, [-1]), updates, reduction)
        return op.ScatterND(x, indices, updates, reduction=reduction)

    def gather(x: Any, indices: Any) -> Any:
        return op.Gather(x, op.Squeeze(indices, [-1]), axis=0) if rows else op.GatherND(x, indices)

    return _scattered(op, node, dy, scatter, gather)


def scatter_rows(op: Builder, x: ir.Value, index: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
    """``x`` with rows of ``updates`` at their indices on the first axis, which replace, are added, multiplied or compared."""
    if reduction != "add":
        return op.ScatterND(x, op.Unsqueeze(index, [rank(index)]), updates, reduction=reduction)  # type: ignore[no-any-return]
    total = op.graphc.GatherGrad(updates, index, op.shape(x))
    return total if is_zero(x) else op.Add(x, total)  # type: ignore[no-any-return]


def _scattered(op: Builder, node: ir.Node, dy: ir.Value, scatter: Callable[..., Any], gather: Callable[..., Any]) -> Any:
    """The gradients of x and of the updates u of a scatter.

    none: ∂x = dy, zero where replaced;  ∂u = dy at the indices.  add: ∂x = dy,  ∂u = dy at the indices.
    mul: ∂x = dy·Πu,  ∂u = dy·x·Π of the other updates of that place, by division but for zeros.
    max, min: dy goes to x and to the updates that equal y, in equal shares.
    """
    x, indices, updates = operands(node, 3)
    reduction = node.attributes.get_string("reduction", "none")
    at_places = functools.partial(gather, dy, indices)
    if reduction == "none":
        return lambda: scatter(dy, indices, op.zeros_like(updates), "none"), None, at_places
    if reduction == "add":
        return dy, None, at_places
    if reduction == "mul":
        return (
            lambda: op.Mul(dy, scatter(op.ones_like(x), indices, updates, "mul")),
            None,
            lambda: _factors(op, dy, x, indices, updates, scatter, gather),
        )

    @functools.cache
    def shares() -> tuple[Any, Any, Any]:
        (y,) = node.outputs
        kept = op.cast_like(op.Equal(x, y), dy)
        taken = op.cast_like(op.Equal(updates, gather(y, indices)), dy)
        return kept, taken, op.Div(dy, scatter(kept, indices, taken, "add"))

    return (
        lambda: op.Mul(shares()[0], shares()[2]),
        None,
        lambda: op.Mul(shares()[1], gather(shares()[2], indices)),
    )


def _factors(op: Builder, dy: Any, x: Any, indices: Any, updates: Any, scatter: Any, gather: Any) -> Any:
    """∂u of a product: a single zero update of a place gets the product of the rest, two make all of them zero."""
    zero = op.Equal(updates, 0.0)
    others = op.Where(zero, op.scalar(1, updates), updates)
    product = gather(op.Mul(dy, scatter(x, indices, others, "mul")), indices)
    zeros = gather(scatter(op.zeros_like(x), indices, op.cast_like(zero, x), "add"), indices)
    alone = op.Equal(zeros, op.cast_like(zero, x))  # no zero among the other updates of the place
    return op.Where(alone, op.Div(product, others), op.scalar(0, dy))


@gradient("TensorScatter")
def tensor_scatter(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = a cache with an update written from some index on;  ∂cache = dy, zero where written;  ∂update = dy from there"""
    cache, update = operands(node, 2)
    starts = node.inputs[2] if len(node.inputs) > 2 else None
    axis = node.attributes.get_int("axis", -2) % rank(cache)

    def dcache() -> Any:
        return op.TensorScatter(dy, op.zeros_like(update), starts, **node.attributes)

    def dupdate() -> Any:
        size = op.lengths((update, axis))
        places = op.Range(np.int64(0), op.Squeeze(size, [0]), np.int64(1))
        if starts is not None:
            places = op.Add(op.Unsqueeze(starts, [1]), places)
            places = op.Mod(places, op.lengths((cache, axis)))
            places = op.Unsqueeze(places, [k for k in range(rank(cache)) if k not in (0, axis)])
        else:
            places = op.Unsqueeze(places, [k for k in range(rank(cache)) if k != axis])
        return op.GatherElements(dy, op.Expand(places, op.shape(update)), axis=axis)

    return dcache, dupdate


@gradient("Unique")
def unique(op: Builder, node: ir.Node, dy: ir.Value | None, *others: ir.Value | None) -> Any:
    """y = the distinct slices of x;  ∂x = dy at their first occurrences, which output 1 lists"""
    (x,) = operands(node, 1)
    if dy is None:
        return None
    first = op.Unique(x, _outputs=2, **node.attributes)[1]
    if "axis" not in node.attributes:
        return scatter_back(op, x, dy, lambda positions: op.Gather(op.Reshape(positions, [-1]), first))
    axis = node.attributes["axis"].as_int() % rank(x)
    return scatter_back(op, x, dy, lambda positions: op.Gather(positions, first, axis=axis))


@gradient("OneHot")
def one_hot(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = off + (on - off)·hot;  ∂(off, on) = (Σdy·(1 - hot), Σdy·hot)"""
    indices, depth, values = operands(node, 3)

    def dvalues() -> Any:
        hot = op.OneHot(indices, depth, op.cast_like(op.const([0, 1]), values), axis=node.attributes.get_int("axis", -1))
        on, total = op.ReduceSum(op.Mul(dy, hot), keepdims=0), op.ReduceSum(dy, keepdims=0)
        return op.Concat(op.Unsqueeze(op.Sub(total, on), [0]), op.Unsqueeze(on, [0]), axis=0)

    return None, None, dvalues
