"""Finds the class axis of scores: by the labels' shape, then by the layer that computes the scores.

scores float[n,t,1000], label int64[n,t]               axis 2: the only one that fits
scores float[n,t,1000] with t unknown, a new label     axis 2: the only one of a known size
scores float[4,12,100] = MatMul(h, W), a new label     axis 2: where that layer's features are
scores float[4,10,8,8] = Conv(h, W), a new label       axis 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.facts import Dim, describe_value, dims, rank

DEFAULT = 1
"""PyTorch's class axis, for scores whose axis nothing tells."""


def class_axis(scores: ir.Value, label: Sequence[Dim] | None) -> int:
    """Find the class axis of ``scores`` for labels of the shape ``label``; None: the label takes whatever shape is left.

    Raises:
        UsageError: several axes fit a label of this shape, and the layer that computes the scores is none of those known.
    """
    if rank(scores) <= 2:
        return min(DEFAULT, rank(scores) - 1)
    sizes = dims(scores) or ()
    fitting = list(range(1, len(sizes))) if label is None else axes_that_fit(sizes, label)
    known = [axis for axis in fitting if isinstance(sizes[axis], int) and sizes[axis] != 1]
    if len(fitting) == 1 or len(known) == 1:
        return (known or fitting)[0]
    axis = feature_axis(scores)
    if axis is not None and (axis in known or axis in fitting):
        return axis
    if label is None or not fitting:
        return DEFAULT  # a wrong shape is refused by who compares it
    options = " or ".join(f"axis={axis}" for axis in known or fitting)
    text = ",".join("?" if size is None else str(size) for size in label)
    raise UsageError(f"labels of shape [{text}] fit {describe_value(scores)} with more than one class axis: say {options}")


def axes_that_fit(scores: Sequence[Dim], label: Sequence[Dim]) -> list[int]:
    """The axes without which ``scores`` have the shape ``label``; equal symbols count more than unknown sizes."""
    certain, possible = [], []
    for axis in range(min(1, len(scores) - 1), len(scores)):
        for want in _label_shapes(scores, axis):
            if len(want) != len(label):
                continue
            pairs = list(zip(want, label, strict=True))
            if all(a == b for a, b in pairs[1:]):  # the batch may have a name in one place and a size in the other
                certain.append(axis)
            if not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
                possible.append(axis)
    return list(dict.fromkeys(certain or possible))


def _label_shapes(scores: Sequence[Dim], axis: int) -> Iterator[Sequence[Dim]]:
    """Shapes of labels for this class axis: without it, with size 1 there, without the ones that follow it."""
    before, after = tuple(scores[:axis]), tuple(scores[axis + 1 :])
    yield before + after
    yield (*before, 1, *after)
    if after and all(d == 1 for d in after):
        yield before


def feature_axis(value: ir.Value, depth: int = 64) -> int | None:
    """The axis of ``value`` that holds the features of the layer that computes it; None if no such layer is found."""
    node = value.producer()
    if node is None or node.domain != "" or value.shape is None or depth == 0:
        return None
    operands = [v for v in node.inputs if v is not None]
    match node.op_type:
        case "Conv" | "ConvTranspose":
            return 1
        case "Gemm" | "LSTM" | "GRU" | "RNN":
            return rank(value) - 1
        case "MatMul" if _is_weight(operands[1]):
            return rank(value) - 1
        case "MatMul" if _is_weight(operands[0]):
            return rank(value) - 2
        case "Einsum":
            return _axis_of_einsum(node, operands)
        case "Transpose":
            axis, order = feature_axis(operands[0], depth - 1), node.attributes.get_ints("perm")
            return None if axis is None or order is None else list(order).index(axis)
        case "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten":
            return _moved(feature_axis(operands[0], depth - 1), dims(operands[0]) or (), dims(value) or ())
        case kind if kind in _SAME_AXES:
            alike = [v for v in operands if v.shape is not None and rank(v) == rank(value) and not _is_weight(v)]
            found = (feature_axis(v, depth - 1) for v in alike[:3])
            return next((axis for axis in found if axis is not None), None)
    return None


def _moved(axis: int | None, before: Sequence[Dim], after: Sequence[Dim]) -> int | None:
    """Where ``axis`` of the shape ``before`` is in ``after``: the only axis of its size."""
    if axis is None or not isinstance(before[axis], int):
        return None
    found = [k for k, size in enumerate(after) if size == before[axis]]
    return found[0] if len(found) == 1 else None


def _axis_of_einsum(node: ir.Node, operands: Sequence[ir.Value]) -> int | None:
    """The axis of the only letter that weights bring into the result: ``v`` of ``btd,vd->btv``."""
    terms, arrow, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or len(letters) != len(operands) or "." in terms + result:
        return None
    weights = [_is_weight(v) for v in operands]
    given = {letter for term, weight in zip(letters, weights, strict=True) if not weight for letter in term}
    own = [axis for axis, letter in enumerate(result) if letter not in given]
    return own[0] if len(own) == 1 else None


def _is_weight(value: ir.Value) -> bool:
    """Whether no input of the model takes part in ``value``: initializers and constants, perhaps cast, joined or scaled."""
    seen, waiting = set(), [value]
    while waiting:
        value = waiting.pop()
        if value in seen or value.is_initializer():
            continue
        seen.add(value)
        node = value.producer()
        if node is None or len(seen) > _MOST:
            return False
        waiting += [v for v in node.inputs if v is not None]
    return True


_MOST = 64
"""Values that may lie between a weight and its initializers."""

_SAME_AXES = frozenset(
    {
        "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Div", "Dropout", "Elu", "Gelu", "HardSigmoid",
        "HardSwish", "Identity", "InstanceNormalization", "LayerNormalization", "LeakyRelu", "LogSoftmax", "MaxPool", "Mul",
        "Neg", "PRelu", "Pad", "RMSNormalization", "Relu", "Resize", "Selu", "Sigmoid", "Slice", "Softmax", "Softplus", "Sub",
        "Sum", "Swish", "Tanh", "Upsample", "Where",
    }
)  # fmt: skip
"""Ops whose output has the axes of an operand of the same rank."""
