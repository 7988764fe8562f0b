"""Rules that carry an order of axes through the ops between convolutions.

A rule gets the walk and a node. It returns the tensor that holds each output and its order. None keeps the node
unchanged, with its operands in their own order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.gradient import key_of
from graphc.ir.facts import constant, input_of, rank, static_dims
from graphc.ir.ops.channels_last import PREFIX, last_order
from graphc.ir.ops.convolution import Window
from graphc.ir.ops.normalization import EPSILON, batch_normalized
from graphc.passes.channels_last.values import ELEMENTWISE, Arrangement, Order, in_order, inverse, size

Results: TypeAlias = "Sequence[tuple[ir.Value, Order] | None] | None"
Rule: TypeAlias = Callable[[Arrangement, ir.Node], Results]
MovedRule: TypeAlias = Callable[[Arrangement, ir.Node, ir.Value, Order], Results]

RULES: dict[str, Rule] = {}

TAPS, MOST_TAPS = "MaxPoolTaps", 16
"""Largest window, in elements, for which a pool records the position of its maximum."""


def follow(walk: Arrangement, node: ir.Node) -> None:
    """Compute ``node`` in the order of its operands, if that order is known to be better."""
    found = RULES.get(key_of(node.domain, node.op_type))
    if found is None or any(v is not None and static_dims(v) is None for v in (*node.inputs, *node.outputs)):
        return
    if node.op_type != "Transpose" and not any(walk.held(v) for v in node.inputs):
        return
    results = found(walk, node)
    if results is not None:
        walk.settle(node, results)


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update((op, function) for op in ops)
        return function

    return register


def moved(*ops: str) -> Callable[[MovedRule], MovedRule]:
    """Register a rule ``(walk, node, tensor, order)`` for ops whose first operand another tensor holds."""

    def register(function: MovedRule) -> MovedRule:
        def first_held(walk: Arrangement, node: ir.Node) -> Results:
            held = walk.held(node.inputs[0])
            return None if held is None else function(walk, node, *held)

        rule(*ops)(first_held)
        return function

    return register


def _values(node: ir.Node) -> dict[str, Any]:
    return {name: attr.value for name, attr in node.attributes.items()}


def _integers(value: ir.Value | None) -> list[int] | None:
    known = constant(value)
    return None if known is None else [int(k) for k in known.reshape(-1)]


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


# Element by element ---------------------------------------------------------------------------------------------------


@rule(*ELEMENTWISE, "graphc::ReluGrad", "graphc::GeluGrad")
def _elementwise(walk: Arrangement, node: ir.Node) -> Results:
    order = walk.vote(node.inputs)
    if order is None or len(order) != rank(node.outputs[0]):
        return None
    operands = [walk.fitted(v, order) for v in node.inputs]
    return [(walk.op.repeat(node, operands, node.attributes)[0], order)]


@rule("graphc::Recompute")
def _region(walk: Arrangement, node: ir.Node) -> Results:
    """Handle an op whose saved tensors hold the values themselves."""
    held = [walk.held(v) for v in node.inputs]
    again = walk.op.repeat(node, [v if h is None else h[0] for v, h in zip(node.inputs, held, strict=True)], node.attributes)
    orders = (tuple(range(rank(out))) if h is None else h[1] for out, h in zip(node.outputs, held, strict=True))
    return list(zip(again, orders, strict=True))


@moved("BatchNormalization")
def _batch_normalization(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    """Decompose the op, because it needs its channels on axis 1."""
    _, scale, bias, mean, variance = (v for v in node.inputs if v is not None)
    op = walk.op
    wide = op.cast_like(tensor, mean)
    axes = [k for k in range(len(order)) if k != order[1]]
    behind = [1] * (len(order) - 1 - order[1])
    results: list[tuple[ir.Value, Order] | None] = []

    def along(value: ir.Value) -> ir.Value:
        shaped = op.Reshape(value, [-1, *behind]) if behind else value
        return op.cast_like(shaped, wide)

    centre, spread = along(mean), along(variance)
    if node.attributes.get_int("training_mode", 0):
        momentum = node.attributes.get_float("momentum", 0.9)
        centre = op.ReduceMean(wide, axes, keepdims=0)
        shifted = op.Sub(wide, op.Reshape(centre, [-1, *behind]) if behind else centre)
        spread = op.ReduceMean(op.Mul(shifted, shifted), axes, keepdims=0)
        for running, batch in ((mean, centre), (variance, spread)):
            now = op.cast_like(batch, running)
            kept = now if momentum == 0 else op.Add(op.Mul(running, momentum), op.Mul(now, 1.0 - momentum))
            results.append((kept, (0,)))
        centre, spread = along(centre), along(spread)
    factor = op.Mul(op.Reciprocal(op.Sqrt(op.Add(spread, node.attributes.get_float("epsilon", 1e-5)))), along(scale))
    y = op.Add(op.Mul(op.Sub(wide, centre), factor), along(bias))
    return [(op.cast_like(y, tensor), order), *results][: len(node.outputs)]


@moved("graphc::BatchNormalizationTraining")
def _batch_normalization_training(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    _, scale, bias = (v for v in node.inputs if v is not None)
    epsilon = node.attributes.get_float("epsilon", EPSILON)
    y, *statistics = batch_normalized(walk.op, tensor, scale, bias, order[1], epsilon)
    return [(y, order), *((value, (0,)) for value in statistics)]


# Along axes -----------------------------------------------------------------------------------------------------------

_REDUCTIONS = tuple(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)


@moved(*_REDUCTIONS)
def _reduction(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    axes = _integers(_input(node, 1))
    if axes is None and _input(node, 1) is not None:
        return None
    if not axes and node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        return None
    gone = sorted(order[axis] for axis in axes or range(len(order)))
    keep = node.attributes.get_int("keepdims", 1)
    y = walk.op.emit(node.op_type, [tensor, np.array(gone, dtype=np.int64)], {"keepdims": keep})[0]
    if keep:
        return [(y, order)]
    left = [k for k in range(len(order)) if k not in gone]
    return [(y, tuple(left.index(place) for place in order if place in left))]


@moved("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    reduce = walk.op.ReduceMean if node.op_type == "GlobalAveragePool" else walk.op.ReduceMax
    return [(reduce(tensor, sorted(order[2:]), keepdims=1), order)]


@moved("Softmax", "LogSoftmax", "Hardmax")
def _along_one_axis(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    axis = node.attributes.get_int("axis", -1) % len(order)
    return [(walk.op.emit(node.op_type, [tensor], {"axis": order[axis]})[0], order)]


@rule("Concat")
def _concat(walk: Arrangement, node: ir.Node) -> Results:
    order = walk.vote(node.inputs)
    if order is None:
        return None
    axis = node.attributes["axis"].as_int() % len(order)
    parts = [walk.arranged(v, order) for v in node.inputs if v is not None]
    return [(walk.op.Concat(*parts, axis=order[axis]), order)]


@moved("Split")
def _split(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    axis = node.attributes.get_int("axis", 0) % len(order)
    attributes = {**_values(node), "axis": order[axis]}
    parts = walk.op.emit("Split", [tensor, *node.inputs[1:]], attributes, outputs=len(node.outputs))
    return [(part, order) for part in parts]


@moved("Slice")
def _slice(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    starts, axes = _integers(_input(node, 1)), _integers(_input(node, 3))
    if starts is None or (axes is None and _input(node, 3) is not None):
        return None
    places = [order[axis] for axis in (range(len(starts)) if axes is None else axes)]
    return [(walk.op.Slice(tensor, node.inputs[1], node.inputs[2], places, _input(node, 4)), order)]


@moved("Pad")
def _pad(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    pads, axes, count = _integers(_input(node, 1)), _integers(_input(node, 3)), len(order)
    if pads is None or (axes is None and _input(node, 3) is not None):
        return None
    whole = [0] * (2 * count)  # of all axes: onnxruntime moves transposes across a Pad and ignores its ``axes``
    for k, axis in enumerate(range(count) if axes is None else axes):
        whole[order[axis]], whole[count + order[axis]] = pads[k], pads[k + len(pads) // 2]
    return [(walk.op.Pad(tensor, whole, _input(node, 2), **_values(node)), order)]


@moved("Expand")
def _expand(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    out = static_dims(node.outputs[0]) or ()
    if len(out) != len(order):
        return None
    return [(walk.op.Expand(tensor, [out[axis] for axis in inverse(order)]), order)]


# Other shapes of the same elements ------------------------------------------------------------------------------------


@rule("Transpose")
def _transpose(walk: Arrangement, node: ir.Node) -> Results:
    x, out = input_of(node), node.outputs[0]
    axes = node.attributes["perm"].as_ints() if "perm" in node.attributes else list(reversed(range(rank(out))))
    held = walk.held(x)
    if held is None:
        walk.know(out, x, tuple(axes))
        return None
    tensor, order = held
    return [(tensor, tuple(order[axis] for axis in axes))]


@moved("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(walk: Arrangement, node: ir.Node, tensor: ir.Value, order: Order) -> Results:
    """Reshape in place: splits and merges adjacent axes; axes to merge that lie apart are first brought together."""
    before, after = static_dims(input_of(node)) or (), static_dims(node.outputs[0]) or ()
    groups = _groups(before, after)
    if groups is None:
        return None
    groups.sort(key=lambda group: order[group[0][-1]])
    wanted = [order[axis] for old, _ in groups for axis in old]
    if not in_order(static_dims(tensor) or (), wanted):
        if [axis for old, _ in groups for axis in old] == [k for k, n in enumerate(before) if n != 1]:
            return None
        ones = [place for place in range(len(order)) if place not in wanted]
        tensor = walk.op.Transpose(tensor, perm=[*wanted, *ones])
    places = [axis for _, new in groups for axis in new]
    if places == sorted(places):
        return [(walk.op.Reshape(tensor, list(after)), tuple(range(len(after))))]
    places += [k for k, n in enumerate(after) if n == 1]
    return [(walk.op.Reshape(tensor, [after[k] for k in places]), tuple(inverse(places)))]


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The smallest groups of axes that a reshape turns into each other, in order; axes of size 1 belong to none."""
    if 0 in (*before, *after):
        return None
    old, new = ([k for k, n in enumerate(sizes) if n != 1] for sizes in (before, after))
    groups = []
    while old and new:
        group = [old.pop(0)], [new.pop(0)]
        sizes = before[group[0][0]], after[group[1][0]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                group[0].append(old.pop(0))
                sizes = sizes[0] * before[group[0][-1]], sizes[1]
            else:
                group[1].append(new.pop(0))
                sizes = sizes[0], sizes[1] * after[group[1][-1]]
        groups.append(group)
    return groups


# Pooling --------------------------------------------------------------------------------------------------------------


def _pool(walk: Arrangement, node: ir.Node, tensors: Sequence[ir.Value | None], *others: Any, name: str = "") -> Results:
    """Emit the op, or the op called ``name``, in its channels-last form."""
    name = name or node.op_type
    largest = max((v for v in tensors if v is not None), key=size)
    order = tuple(last_order(rank(largest)))
    if walk.vote(tensors) != order:
        return None
    attributes = {key: value for key, value in _values(node).items() if key != "storage_order"}
    operands = [walk.arranged(v, order) for v in tensors if v is not None]
    return [(walk.op.emit(PREFIX + name, [*operands, *others], attributes, domain="graphc")[0], order)]


@rule("MaxPool", "AveragePool")
def _plain_pool(walk: Arrangement, node: ir.Node) -> Results:
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        return None
    results = _pool(walk, node, node.inputs, name=TAPS if _notes_taps(node) else "")
    return None if results is None else [*results, *[None] * (len(node.outputs) - 1)]


def _notes_taps(node: ir.Node) -> bool:
    """Whether to save the positions of the maxima for the gradient, which takes fewer bytes than x and y."""
    window = Window.of(_values(node), (static_dims(node.outputs[0]) or ())[2:])
    if not 1 < math.prod(window.kernel) <= MOST_TAPS or set(window.dilations) != {1} or node.outputs[0].dtype is None:
        return False
    return any(user.op_type == "MaxPoolGrad" and index == 2 for user, index in node.outputs[0].uses())


@rule("graphc::MaxPoolGrad")
def _max_pool_gradient(walk: Arrangement, node: ir.Node) -> Results:
    held = walk.held(node.inputs[2])
    made = held[0].producer() if held is not None else None
    if made is None or made.op_type != PREFIX + TAPS:
        return _pool(walk, node, node.inputs)
    shape = static_dims(node.outputs[0]) or ()
    others = made.outputs[1], [shape[axis] for axis in inverse(last_order(len(shape)))]
    return _pool(walk, node, node.inputs[:1], *others, name=f"{TAPS}Grad")


@rule("graphc::AveragePoolGrad")
def _average_pool_gradient(walk: Arrangement, node: ir.Node) -> Results:
    shape = static_dims(node.outputs[0]) or ()
    return _pool(walk, node, node.inputs[:1], [shape[axis] for axis in inverse(last_order(len(shape)))])
