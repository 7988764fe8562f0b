"""The real numbers that quantised tensors stand for, as float values of the graph.

    before   q ─► MaxPool ─► Reshape ─► DequantizeLinear ─► y          q: uint8, quantised from x
    after    q ─► DequantizeLinear ─► MaxPool ─► Reshape ─► y

Ops that only move or compare numbers commute with a scale: they run on the real numbers, where gradients pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of, input_of, rank
from graphc.passes.gradients.quantization import quantised_range
from graphc.passes.quantization.weights import Align, Weights, factors, tensor_of

_MOVES: dict[str, tuple[int, ...]] = {
    "DepthToSpace": (0,),
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "MaxPool": (0,),
    "Pad": (0, 2),
    "ReduceMax": (0,),
    "ReduceMin": (0,),
    "Reshape": (0,),
    "Resize": (0,),
    "Slice": (0,),
    "SpaceToDepth": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""Op → the inputs whose numbers it moves, or chooses from in an order that a scale keeps."""

_VARIADIC = frozenset({"Concat", "Max", "Min"})

QUANTISERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})


def moved(node: ir.Node) -> tuple[int, ...]:
    """The inputs whose numbers ``node`` passes on; none for any other op."""
    if node.domain:
        return ()
    return tuple(range(len(node.inputs))) if node.op_type in _VARIADIC else _MOVES.get(node.op_type, ())


def source_of(value: ir.Value) -> ir.Value:
    """The value that ``value`` was moved from, through ops that move one input."""
    node = value.producer()
    while node is not None and moved(node) == (0,) and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def same_constant(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two scales or zero points are one value, or equal constants; an absent zero point is 0."""
    if a is b:
        return True
    first, second = (None if v is None else tensor_of(v) for v in (a, b))
    if (a is not None and first is None) or (b is not None and second is None):
        return False
    left, right = (np.zeros((), np.int64) if t is None else np.asarray(t.numpy()) for t in (first, second))
    return left.size == right.size and bool((left.reshape(-1) == right.reshape(-1)).all())


class RealValues:
    """Emits the real numbers of quantised tensors; ``op.before`` is the node that asks.

    Args:
        rounds: whether values that a ``QuantizeLinear`` rounds stay rounded, with straight-through gradients; else they are
            only limited to the range of the integers.
    """

    def __init__(self, op: Builder, weights: Weights, *, rounds: bool) -> None:
        self.weights = weights
        self._op, self.rounds = op, rounds
        self._made: dict[Any, ir.Value] = {}

    def real(
        self,
        q: ir.Value,
        scale: ir.Value,
        zero: ir.Value | None,
        *,
        attributes: dict[str, Any] | None = None,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """(q - zero) · scale, computed in front of the ops that moved q where that is possible.

        Args:
            attributes: ``axis`` and ``block_size``, as of DequantizeLinear.
            dtype: element type; default: that of the scale.
        """
        attributes = attributes or {}
        dtype = dtype or dtype_of(scale)
        key = (q, scale, zero, tuple(sorted(attributes.items())), dtype)
        if key not in self._made:
            self._made[key] = self._real(q, scale, zero, attributes, dtype)
        return self._made[key]

    def _real(
        self, q: ir.Value, scale: ir.Value, zero: ir.Value | None, attributes: dict[str, Any], dtype: ir.DataType
    ) -> ir.Value:
        node = q.producer()
        single = scale.shape is not None and all(d == 1 for d in scale.shape)
        if tensor_of(q) is not None:
            found = self._weight(q, scale, zero, attributes, dtype)
            if found is not None:
                return found
        elif node is not None and moved(node) and single:
            return self._moved(q, node, scale, zero, attributes, dtype)
        elif node is not None and node.op_type in QUANTISERS and not node.domain:
            found = self._unrounded(node, scale, zero, attributes)
            if found is not None:
                return found
        wide = {"output_dtype": int(dtype)} if dtype != scale.dtype else {}
        (y,) = self._op.emit("DequantizeLinear", [q, scale, zero], attributes | wide)
        return y

    def _unrounded(self, node: ir.Node, scale: ir.Value, zero: ir.Value | None, attributes: dict[str, Any]) -> ir.Value | None:
        """What a quantiser rounds, if it need not be rounded."""
        x = input_of(node)
        if node.op_type == "DynamicQuantizeLinear":
            return x if node.outputs[1] is scale else None  # its range follows the data: the integers limit nothing
        same = same_constant(scale, first_of(node.inputs, 1)) and same_constant(zero, first_of(node.inputs, 2))
        mine = {name: node.attributes[name].as_int() for name in attributes if name in node.attributes}
        if self.rounds or not same or (rank(scale) > 0 and mine != attributes) or attributes.get("block_size"):
            return None
        return self._limited(node, x, scale, zero, attributes)

    def _weight(
        self, q: ir.Value, scale: ir.Value, zero: ir.Value | None, attributes: dict[str, Any], dtype: ir.DataType
    ) -> ir.Value | None:
        found = factors(scale)
        if scale.shape is None or not scale.shape.is_static() or dtype != scale.dtype:
            return None
        count, size = rank(q), int(attributes.get("block_size", 0))
        axis = int(attributes.get("axis", 1)) % max(count, 1)
        align = by_block(count) if size else along(axis, count)
        return self.weights.parameter(q, found, zero, dtype=dtype, align=align, block=(axis, size) if size else None)

    def _moved(
        self,
        q: ir.Value,
        node: ir.Node,
        scale: ir.Value,
        zero: ir.Value | None,
        attributes: dict[str, Any],
        dtype: ir.DataType,
    ) -> ir.Value:
        inputs: list[ir.Value | None] = list(node.inputs)
        for index in moved(node):
            value = inputs[index] if index < len(inputs) else None
            if value is not None:
                inputs[index] = self.real(value, scale, zero, attributes=attributes, dtype=dtype)
        outputs = self._op.emit(node.op_type, inputs, dict(node.attributes), outputs=len(node.outputs))
        extra = (tuple(sorted(attributes.items())), dtype)
        for old, new in zip(node.outputs, outputs, strict=True):
            self._made[(old, scale, zero, *extra)] = new
        return outputs[list(node.outputs).index(q)]

    def _limited(
        self, node: ir.Node, x: ir.Value, scale: ir.Value, zero: ir.Value | None, attributes: dict[str, Any]
    ) -> ir.Value:
        """Limit ``x`` to what the integers can hold: exporters leave out a Relu where the range already cuts it."""
        op, (low, high) = self._op, quantised_range(node)
        shift = op.scalar(0, scale) if zero is None else op.cast_like(zero, scale)
        bounds: list[Any] = [op.Mul(op.Sub(float(bound), shift), scale) for bound in (low, high)]
        if rank(scale) == 1 and rank(x) > 1 and scale.shape != (1,):
            axis = int(attributes.get("axis", 1)) % rank(x)
            bounds = [op.Unsqueeze(bound, [k for k in range(rank(x)) if k != axis]) for bound in bounds]
        return op.Min(op.Max(x, bounds[0]), bounds[1])  # type: ignore[no-any-return]


def along(axis: int, count: int) -> Align:
    """Factors of one element, or of one for each slice along ``axis`` of ``count`` axes."""

    def align(shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if all(d == 1 for d in shape):
            return ()
        size = max(shape)
        if np.prod(shape) != size:
            return None
        return tuple(size if k == axis else 1 for k in range(count))

    return align


def by_block(count: int) -> Align:
    """Factors with an element for each block."""
    return lambda shape: shape if len(shape) == count else None


def first_of(values: Sequence[ir.Value | None], index: int) -> ir.Value | None:
    """Input ``index``, or None if it is left out."""
    return values[index] if index < len(values) else None
