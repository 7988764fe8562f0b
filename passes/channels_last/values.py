"""Tracks the tensor that holds each value, and its order of axes, for ``channels_last``.

An order gives, for each axis of a value, its place in the tensor that holds it: a value of N × C × H × W held by a tensor of
N × H × W × C has the order (0, 3, 1, 2), and is ``Transpose(tensor, perm=(0, 3, 1, 2))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import constant, input_of, producer_of, static_dims
from graphc.passes.optimize.simplify import FOLD_LIMIT, replace

Order: TypeAlias = "tuple[int, ...]"

ELEMENTWISE = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot",
    "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub",
    "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
})  # fmt: skip
"""Standard ops whose operands broadcast to their result."""


def inverse(order: Sequence[int]) -> list[int]:
    return [int(k) for k in np.argsort(order)]


def in_order(sizes: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether ``axes`` lists the axes of ``sizes`` in memory order; axes of size 1 may stand anywhere."""
    real = [axis for axis in axes if sizes[axis] != 1]
    return real == sorted(real)


def size(value: ir.Value) -> int:
    return int(np.prod(static_dims(value) or (), dtype=np.int64))


class Arrangement:
    """The state of the walk, and the builder that inserts before the current node."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.op = graph, Builder(graph)
        self._held: dict[ir.Value, tuple[ir.Value, Order]] = {}
        self._made: dict[tuple[ir.Value, Order], ir.Value] = {}

    def held(self, value: ir.Value | None) -> tuple[ir.Value, Order] | None:
        """The tensor that holds ``value`` in an order other than its own, and that order."""
        return self._held.get(value) if value is not None else None

    def know(self, value: ir.Value, tensor: ir.Value, order: Order) -> None:
        self._held[value] = (tensor, order)

    def settle(self, node: ir.Node, results: Sequence[tuple[ir.Value, Order] | None]) -> None:
        """Replace ``node``: its outputs are held by these tensors in these orders; None: an unused output."""
        kept = False
        for old, result in zip(node.outputs, results, strict=True):
            if result is None:
                continue
            tensor, order = result
            value, name = self._own_order(tensor, order), old.name
            fresh = not (value.uses() or value.is_graph_output() or old.is_graph_output()) and value.producer() is not None
            if replace(self.graph, self.op, old, value):
                if fresh:
                    old.name, value.name = value.name, name  # so that messages still name the user's node
                old = value
            else:
                kept = True
            if old is not tensor:
                self._held[old] = (tensor, order)
        if not kept:
            self.graph.remove(node, safe=True)

    def _own_order(self, tensor: ir.Value, order: Order) -> ir.Value:
        """The value that ``tensor`` holds, in its own order."""
        if list(order) == sorted(order):
            return tensor
        sizes = static_dims(tensor) or ()
        if in_order(sizes, order):
            return self.op.Reshape(tensor, [sizes[axis] for axis in order])  # type: ignore[no-any-return]
        return self.op.Transpose(tensor, perm=list(order))  # type: ignore[no-any-return]

    def arranged(self, value: ir.Value, order: Order) -> ir.Value:
        """A tensor that holds ``value`` in ``order``."""
        if list(order) == sorted(order):
            return value
        held = self._held.get(value)
        if held is not None and held[1] == order:
            return held[0]
        found = self._made.get((value, order))
        if found is None:
            found = self._made[value, order] = self._arrange(value, order)
        return found

    def fitted(self, value: ir.Value | None, order: Order) -> ir.Value | None:
        """A tensor in ``order`` that broadcasts as ``value`` does in its own order."""
        if value is None or size(value) == 1:
            return value
        shape = static_dims(value) or ()
        missing = len(order) - len(shape)
        if not missing:
            return self.arranged(value, order)
        full = (*[1] * missing, *shape)
        axes = inverse(order)
        target = [full[axis] for axis in axes]
        if in_order(full, axes):
            while len(target) > 1 and target[0] == 1:
                target = target[1:]
            return value if tuple(target) == shape else self.op.Reshape(value, target)
        return self.arranged(self.op.Reshape(value, full), order)

    def _arrange(self, value: ir.Value, order: Order) -> ir.Value:
        op, axes, sizes = self.op, inverse(order), static_dims(value) or ()
        target = [sizes[axis] for axis in axes]
        known = constant(value)
        if known is not None and known.size <= FOLD_LIMIT:
            return op.const(np.ascontiguousarray(known.transpose(axes)))
        held = self._held.get(value)
        if held is None and in_order(sizes, axes):
            return op.Reshape(value, target)  # type: ignore[no-any-return]
        if self.flexible(value):
            producer = producer_of(value)
            if producer.op_type == "Expand":
                return op.Expand(self.fitted(producer.inputs[0], order), target)  # type: ignore[no-any-return]
            if producer.op_type == "Split":
                return self._split(producer, value, order)
            return op.repeat(producer, [self.fitted(v, order) for v in producer.inputs], producer.attributes)[0]
        if held is None:
            return op.Transpose(value, perm=axes)  # type: ignore[no-any-return]
        tensor, has = held
        return op.Transpose(tensor, perm=[has[axis] for axis in axes])  # type: ignore[no-any-return]

    def _split(self, node: ir.Node, value: ir.Value, order: Order) -> ir.Value:
        whole, axis = input_of(node), node.attributes.get_int("axis", 0) % len(order)
        attributes = {**{name: attr.value for name, attr in node.attributes.items()}, "axis": order[axis]}
        operands = [self.arranged(whole, order), *node.inputs[1:]]
        parts = self.op.emit("Split", operands, attributes, outputs=len(node.outputs))
        self._made.update(((out, order), part) for out, part in zip(node.outputs, parts, strict=True))
        return self._made[value, order]

    def flexible(self, value: ir.Value, depth: int = 4) -> bool:
        """Whether the value only repeats smaller ones, so that recomputing it is cheaper than a transpose."""
        producer = value.producer()
        if producer is None or producer.domain or not depth:
            return False
        if producer.op_type == "Expand":
            return producer.inputs[0] is not None and size(producer.inputs[0]) < size(value)
        if producer.op_type == "Split":
            return producer.inputs[0] is not None and self.flexible(producer.inputs[0], depth - 1)
        if producer.op_type not in ELEMENTWISE:
            return False
        whole = [v for v in producer.inputs if v is not None and size(v) == size(value)]
        return bool(whole) and all(self.flexible(v, depth - 1) for v in whole)

    def vote(self, values: Sequence[ir.Value | None]) -> Order | None:
        """The order that holds most elements of the largest of ``values``; None: their own."""
        present = [v for v in dict.fromkeys(values) if v is not None]
        most = max((size(v) for v in present), default=0)
        votes: dict[Order, int] = {}
        against = 0
        for value in present:
            if 4 * size(value) <= most:
                continue
            held = self._held.get(value)
            if held is not None:
                votes[held[1]] = votes.get(held[1], 0) + size(value)
            elif constant(value) is None and not self.flexible(value):
                against += size(value)
        best = max(votes, key=lambda order: votes[order], default=None)
        return best if best is not None and votes[best] >= against else None
