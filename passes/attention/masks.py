"""Masks of attention: what each hides, and whether it is causal.

    Reshape (batch, windows, heads, t, s) → Add (1, windows, …) → Reshape     one for each window of an image

Source: Z. Liu et al., "Swin Transformer", 2021, whose windows are samples of a batch, in this order.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphc.ir import OPSET
from graphc.ir.builder import Builder
from graphc.ir.evaluate import evaluate
from graphc.ir.facts import constant, dims, input_of
from graphc.passes.optimize.axis_order import RESHAPES, View, only_user
from graphc.passes.optimize.identities import filled

HIDES = -1e30
"""A mask value at or below this removes a float32 score entirely."""

_LARGEST_MASK = 1 << 24
"""Largest mask, in elements, that is checked for being causal."""


def is_choice(shown: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether a choice between these adds 0 or minus infinity."""
    return filled(shown) == 0 and filled(other) == -math.inf


_OF_MATRICES = frozenset(
    {"Trilu", "Not", "And", "Or", "Xor", "Cast", "Where", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
    | {"Add", "Sub", "Mul", "Neg", "Identity"}
)
"""Ops that compute each matrix of their result from the same matrix of their operands."""


def known_mask(mask: ir.Value, depth: int = 8, *, one: bool = True) -> np.ndarray | None:
    """The elements of a mask computed from constants only.

    Args:
        one: of equal matrices, as many as a batch of no known size has, one will do.
    """
    found, node = constant(mask), mask.producer()
    if found is not None or node is None or depth == 0:
        return found
    if one and node.domain == "" and node.op_type == "Expand" and (matrix := _repeated(node)) is not None:
        return matrix
    one = one and node.op_type in _OF_MATRICES
    copies = [None if v is None else known_mask(v, depth - 1, one=one) for v in node.inputs]
    if any(v is not None and copy is None for v, copy in zip(node.inputs, copies, strict=True)):
        return None
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="mask")
    op = Builder(graph)
    again = [None if copy is None else op.const(copy) for copy in copies]
    outputs = op.emit(node.op_type, again, dict(node.attributes), outputs=1) if node.domain == "" else ()
    producer = outputs[0].producer() if outputs else None
    return evaluate(producer, limit=_LARGEST_MASK) if producer is not None else None


def _repeated(expand: ir.Node) -> np.ndarray | None:
    """The matrix that an Expand repeats."""
    source, shape = constant(expand.inputs[0]), dims(expand.outputs[0])
    if source is None or shape is None or len(shape) < 3 or any(size != 1 for size in source.shape[:-2]):
        return None
    last = shape[-2:]
    if not all(isinstance(size, int) for size in last) or math.prod(last) > _LARGEST_MASK:  # type: ignore[arg-type]
        return None
    return np.broadcast_to(source.reshape(source.shape[-2:]), last).reshape((1,) * (len(shape) - 2) + tuple(last))  # type: ignore[arg-type]


def adds_causal(added: np.ndarray | None) -> bool:
    """Whether numbers that are added hide what a causal mask hides."""
    return added is not None and bool(((added == 0) | (added <= HIDES)).all()) and shows_causal(added == 0)


def hides_causal(hidden: np.ndarray | None) -> bool:
    """Whether booleans mark what a causal mask hides."""
    return hidden is not None and shows_causal(hidden == 0)


def shows_causal(seen: np.ndarray | None) -> bool:
    """Whether a boolean mask is causal: query i sees the keys 0 to i."""
    if seen is None or seen.ndim < 2 or seen.size == 0 or seen.shape[-1] == 1:
        return False
    return bool(((seen != 0) == (np.tri(*seen.shape[-2:]) > 0)).all())


def aligned_mask(mask: ir.Value, view: View) -> ir.Value | None:
    """``mask`` if it broadcasts to (b, h, t, length of keys) as it broadcasts to the scores."""
    found = dims(mask)
    if found is None or view.axes[-2:] != ["t", "s"]:
        return None
    in_place = view.axes == list("bhts"[4 - len(view.axes) :])
    return mask if in_place or all(d == 1 for d in found[:-2]) else None


def window_mask(node: ir.Node, view: View) -> tuple[ir.Value, ir.Value] | None:
    """The scores before each window gets a mask of its own, and these masks as one of the shape of the scores.

    Args:
        node: produces ``view``, the masked scores.
    """
    parted = input_of(node, 0).producer() if node.op_type in RESHAPES else None
    if parted is None or parted.op_type != "Add" or parted.domain or only_user(parted.outputs[0]) is None:
        return None
    for wide, mask in (parted.inputs, reversed(parted.inputs)):
        before = wide.producer() if wide is not None else None
        if wide is None or mask is None or before is None or before.op_type not in RESHAPES:
            continue
        scores, found, own = input_of(before, 0), dims(wide) or (), dims(mask) or ()
        fits = len(found) == len(own) == 5 and found[2:] == (dims(scores) or ())[1:] and dims(scores) == dims(view.value)
        if fits and own[0] == 1 and own[3:] == found[3:] and only_user(wide) is not None and view.axes == list("bhts"):
            op = Builder(node.graph, before=node, scope=f"{node.name}/mask")  # type: ignore[arg-type]
            every = op.Expand(mask, op.Concat(op.Shape(wide, start=0, end=2), [1, 1, 1], axis=0))
            return scores, op.Reshape(every, op.Concat([-1], op.Shape(mask, start=2), axis=0))
    return None
