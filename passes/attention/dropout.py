"""Finds the dropout after a softmax, and draws its mask without the probabilities' shape."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import OPS
from graphc.ir.facts import dims, producer_of
from graphc.passes.optimize.axis_order import View, only_user


def dropping(value: ir.Value) -> ir.Node | None:
    """Return the dropout of a value whose only other reader is the shape of the mask."""
    users = [node for node in value.consumers() if node.op_type != "Shape"]
    if len(users) != 1 or value.is_graph_output() or users[0].op_type != "Mul":
        return None
    shape = next((_shape_of(v) for v in users[0].inputs if v is not None and _is_drawn(v)), None)
    alone = shape is not None and shape.inputs[0] is value and only_user(shape.outputs[0]) is not None
    return users[0] if alone and len(list(value.uses())) == 2 else None


def dropout_mask(node: ir.Node, view: View) -> View | None:
    """The factor by which ``node`` multiplies the probabilities ``view``; None for another op or permuted axes."""
    mask = next((v for v in node.inputs if v is not None and _is_drawn(v)), None)
    if node.domain or node.op_type != "Mul" or mask is None or dims(mask) != dims(view.value):
        return None
    joined = any(len(axis) > 1 for axis in view.axes)
    if not "bhts".endswith("".join(view.axes)) or (joined and _shape_of(mask) is not None):
        return None
    return view.of(mask)


def drawn_again(op: Builder, mask: View, q: tuple[ir.Value, str], k: tuple[ir.Value, str]) -> ir.Value:
    """The mask with one axis a letter; its shape comes from q and k instead of from the probabilities.

    Args:
        q, k: each with the axes of its value.
    """
    drawn = producer_of(mask.value)
    if _shape_of(mask.value) is None:
        return mask.emit(op)
    places = {"s": (k[0], k[1].find("t")), **{c: (q[0], q[1].find(c)) for c in "bht"}}
    shape = op.lengths(*(n if isinstance(n := mask.sizes[c], int) else places[c] for c in mask.axes))
    values = OPS[drawn.op_type].attribute_values(drawn)
    return op.emit(drawn.op_type, (shape, *drawn.inputs[1:]), values, domain=drawn.domain, outputs=1)[0]


def _is_drawn(value: ir.Value) -> bool:
    """Whether the value is the mask of a dropout with a ratio below 1."""
    node = value.producer()
    return node is not None and node.op_type == "DropoutMask" and node.attributes.get_float("ratio", 0.5) < 1


def _shape_of(mask: ir.Value) -> ir.Node | None:
    """The node that reads the mask's size from the values to drop."""
    drawn = mask.producer()
    shape = drawn.inputs[0] if drawn is not None else None
    node: ir.Node | None = shape.producer() if shape is not None else None
    return node if node is not None and node.op_type == "Shape" else None
