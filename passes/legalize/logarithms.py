"""Forms of logarithms that are finite, and have their digits, wherever the logarithm does.

    Log(Sigmoid(x))          → -Softplus(-x)                          was minus infinity below -88
    Log(1 - Sigmoid(x))      → -Softplus(x)                           was minus infinity above 17
    Log(Softmax(x))          → LogSoftmax(x)                          was minus infinity where a class is unlikely
    Log(1 + Exp(x))          → Softplus(x)                            was infinity above 88
    Log(Exp(a) + Exp(b))     → Max(a, b) + Softplus(-|a - b|)         was infinity above 88

PyTorch's exporters write ``binary_cross_entropy_with_logits``, ``logsigmoid`` and ``logaddexp`` like that.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims


def stable_logarithm(op: Builder, node: ir.Node) -> Any:
    """The value that replaces a Log, or None."""
    inner = _producer(node.inputs[0], "Sigmoid", "Softmax", "Sub", "Add")
    if inner is None:
        return None
    x = inner.inputs[0]
    if inner.op_type == "Sigmoid":
        return op.Neg(op.Softplus(op.Neg(x)))
    if inner.op_type == "Softmax":
        return op.LogSoftmax(x, axis=inner.attributes.get_int("axis", -1))
    if inner.op_type == "Sub":
        chance = _producer(inner.inputs[1], "Sigmoid")
        return op.Neg(op.Softplus(chance.inputs[0])) if chance is not None and _is_one(x, inner) else None
    powers = [_producer(value, "Exp") for value in inner.inputs]
    for power, other in zip(powers, reversed(inner.inputs), strict=True):
        if power is not None and _is_one(other, inner):
            return op.Softplus(power.inputs[0])
    a, b = (power.inputs[0] if power is not None else None for power in powers)
    if a is None or b is None or a.dtype is None:
        return None
    apart = op.Where(op.Equal(a, b), op.scalar(0, a), op.Sub(a, b))  # two that are minus infinity have no difference
    return op.Add(op.Max(a, b), op.Softplus(op.Neg(op.Abs(apart))))


def _producer(value: ir.Value | None, *ops: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.domain == "" and node.op_type in ops else None


def _is_one(value: ir.Value | None, node: ir.Node) -> bool:
    """Whether an operand is the number one, perhaps converted to another type, and leaves the shape of the other operand."""
    cast = _producer(value, "Cast", "CastLike")
    known = constant(cast.inputs[0] if cast is not None else value)
    if known is None or known.size != 1 or not (known == 1).all():
        return False
    shapes = [dims(operand) for operand in node.inputs if operand is not None and operand is not value]
    return known.ndim == 0 or all(shape is not None and len(shape) >= known.ndim for shape in shapes)
