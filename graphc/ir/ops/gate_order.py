"""The order in which a recurrent layer's weights hold its gates.

ONNX's layers want an LSTM's gates as i, o, f, new, PyTorch and Keras keep them as i, f, new, o. So an exported model cuts every
weight into its gates and puts them together again in another order, and the gradient once more. RecurrentTraining reads either
order: :func:`as_kept` finds the weights as they were before the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, static_dims

Places: TypeAlias = Sequence[int]

ONNX, PYTORCH = "onnx", "pytorch"

LSTM_PLACES: Mapping[str, Places] = {ONNX: (0, 1, 2, 3), PYTORCH: (0, 3, 1, 2)}
GRU_PLACES: Mapping[str, Places] = {ONNX: (0, 1, 2), PYTORCH: (1, 0, 2)}
"""Order → where each gate lies, by its number in ONNX's order: of an LSTM i, o, f, new, of a GRU z, r, new."""


def as_kept(op: Builder, value: ir.Value, axis: int, places: Places) -> ir.Value | None:
    """The value that ``value`` was made of, with the gates along ``axis`` at ``places`` in place of ONNX's order.

    None when it was made in another way than by cutting, joining and adding axes. A bias holds the gates twice.
    """
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Unsqueeze":
        axes = constant(node.inputs[1])
        inner = node.inputs[0]
        if axes is None or axes.size != 1 or inner is None or axes[0] < 0 or axes[0] == axis:
            return None
        found = as_kept(op, inner, axis - int(axes[0] < axis), places)
        return None if found is None else op.Unsqueeze(found, node.inputs[1])
    if node.op_type != "Concat":
        return None
    pieces, along = [v for v in node.inputs if v is not None], node.attributes.get_int("axis", 0) % len(dims(value) or (1,))
    if along == axis and len(pieces) % len(places) == 0:
        groups = [_whole(pieces[k : k + len(places)], axis, places) for k in range(0, len(pieces), len(places))]
    else:
        groups = [as_kept(op, piece, axis, places) for piece in pieces]
    found_groups = [v for v in groups if v is not None]
    if len(found_groups) < len(groups):
        return None
    return op.Concat(*found_groups, axis=along) if len(groups) > 1 else found_groups[0]


def _whole(pieces: Sequence[ir.Value], axis: int, places: Places) -> ir.Value | None:
    """The value of which these are the gates, in ONNX's order, when they lie at ``places`` of it."""
    sources = [_place(piece, axis) for piece in pieces]
    found = [source for source in sources if source is not None]
    if len(found) < len(pieces) or [at for _, at in found] != list(places) or len({source for source, _ in found}) > 1:
        return None
    whole, sizes = found[0][0], [(static_dims(piece) or (0,) * (axis + 1))[axis] for piece in pieces]
    shape = static_dims(whole)
    return whole if shape is not None and {shape[axis]} == {len(places) * size for size in sizes} else None


def _place(piece: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """What a piece along ``axis`` was cut from, and how many of its size lie before it."""
    node, shape = piece.producer(), static_dims(piece)
    source = node.inputs[0] if node is not None and node.inputs else None
    if node is None or node.domain or source is None or shape is None or shape[axis] == 0:
        return None
    if node.op_type == "Split":
        sizes = {static_dims(v) for v in node.outputs}
        same = sizes == {shape} and node.attributes.get_int("axis", 0) % len(shape) == axis
        return (source, node.outputs.index(piece)) if same else None
    if node.op_type != "Slice":
        return None
    starts, ends, axes, steps = (constant(v) for v in (*node.inputs[1:], None, None)[:4])
    if starts is None or ends is None or axes is None or starts.size != 1 or axes.tolist() != [axis]:
        return None
    if starts[0] < 0 or starts[0] % shape[axis] or (steps is not None and steps[0] != 1):
        return None
    return source, int(starts[0]) // shape[axis]
