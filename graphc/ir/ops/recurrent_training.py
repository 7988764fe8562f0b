"""A recurrent layer that keeps its gates for its gradient.

    y, y_h, gates, cells?, y_c? = graphc.RecurrentTraining(projected, r, bias?, hidden_bias?, lengths?, h?, c?; cell, …)
    dprojected, dr, dh, dbias, dextra? = graphc.RecurrentTrainingGrad(y, gates, r, cells?, lengths?, h?, c?, dy?, dy_h?, dy_c?)

``projected`` is x·Wᵀ for all steps and directions, so that the products with W are ordinary matrix products
(:func:`training_form`). The bias is added here, since the loop back through time adds up its gradient: a sum over the gradient
of ``projected`` would read that once more. Other loops, with clipping, peepholes or rare activations, train through a Scan
(:mod:`graphc.ir.ops.recurrent`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.facts import dims, input_of, is_zero, static_dims
from graphc.ir.ops.gate_order import GRU_PLACES, LSTM_PLACES, ONNX, PYTORCH, Places, as_kept
from graphc.ir.ops.recurrent import DEFAULTS, GATES, by_direction, initial_states, step_mask
from graphc.ir.subgraphs import finish_body, new_body

LSTM, GRU, GRU_RESET_AFTER, TANH, RELU = "lstm", "gru", "gru_reset_after", "tanh", "relu"
"""Cells: a GRU resets the state before the product with R, or the product (``linear_before_reset``); the last two are RNNs."""

OUTPUTS = {LSTM: 5, GRU: 4, GRU_RESET_AFTER: 4, TANH: 3, RELU: 3}

_CELLS = {
    (4, ("sigmoid", "tanh", "tanh"), False): LSTM,
    (3, ("sigmoid", "tanh"), False): GRU,
    (3, ("sigmoid", "tanh"), True): GRU_RESET_AFTER,
    (1, ("tanh",), False): TANH,
    (1, ("relu",), False): RELU,
}
"""Number of gates, activations and ``linear_before_reset`` of each cell."""

PLACES: Mapping[str, Mapping[str, Places]] = {LSTM: LSTM_PLACES, GRU_RESET_AFTER: GRU_PLACES}
"""Cells of which the gates may lie in PyTorch's order (:mod:`.gate_order`)."""

_PEEPHOLES = 7


def _cell_of(node: ir.Node) -> str | None:
    """The cell of an RNN, GRU or LSTM node; None when only a Scan computes it."""
    attributes, count = node.attributes, 2 if node.attributes.get_string("direction", "") == "bidirectional" else 1
    names = [a.lower() for a in attributes.get_strings("activations", None) or DEFAULTS[node.op_type] * count]
    each = len(names) // count
    special = [attributes.get_int(name, 0) for name in ("input_forget", "layout")]
    clip = attributes.get_float("clip", 0.0)
    if names != names[:each] * count or any(special) or clip != 0:
        return None
    if len(node.inputs) > _PEEPHOLES and node.inputs[_PEEPHOLES] is not None:
        return None
    return _CELLS.get((GATES[node.op_type], tuple(names[:each]), bool(attributes.get_int("linear_before_reset", 0))))


def training_form(op: Builder, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """Emit the outputs of an RNN, GRU or LSTM node, Y, Y_h and, for an LSTM, Y_c, by way of RecurrentTraining.

    None when the node clips, has peepholes, other than the default activations (or Relu), or weights of unknown shape.
    """
    cell, (x, w, r) = _cell_of(node), (input_of(node, k) for k in range(3))
    shapes = static_dims(w), static_dims(r)
    if cell is None or shapes[0] is None or shapes[1] is None:
        return None
    (count, rows, width), hidden = shapes[0], shapes[1][-1]
    b, lengths, *states = [*node.inputs, *[None] * 4][3:7]
    w, r, b, order = _as_kept(op, cell, w, r, b)
    h, c = (None if v is None or is_zero(v) else v for v in states)  # PyTorch's exporters always write zeros
    bias, hidden_bias = _biases(op, b, cell, hidden)
    product = op.Gemm(op.Reshape(x, [-1, width]), op.Reshape(w, [count * rows, width]), transB=1)
    projected = op.Reshape(product, op.lengths((x, 0), (x, 1), count * rows))
    attributes = {"cell": cell, "direction": node.attributes.get_string("direction", "forward"), "order": order}
    operands = [projected, r, bias, hidden_bias, lengths, h, c if cell == LSTM else None]
    made = op.emit("RecurrentTraining", operands, attributes, domain="graphc", outputs=OUTPUTS[cell])
    return (made[0], made[1], made[4]) if cell == LSTM else (made[0], made[1])


def _as_kept(op: Builder, cell: str, w: Any, r: Any, b: Any) -> tuple[Any, Any, Any, str]:
    """Weights and bias without the cuts that bring their gates into ONNX's order, and the order that they have then."""
    if cell not in PLACES:
        return w, r, b, ONNX
    places = PLACES[cell][PYTORCH]
    kept = [as_kept(op, v, 1, places) for v in (w, r, b) if v is not None]
    if any(v is None for v in kept):
        return w, r, b, ONNX
    return kept[0], kept[1], kept[2] if b is not None else None, PYTORCH


def _biases(op: Builder, bias: ir.Value | None, cell: str, hidden: int) -> tuple[Any, Any]:
    """The bias of every projected gate, and what a GRU adds to h·Rᵀ of the new state before it resets it."""
    if bias is None:
        return None, None
    of_input, of_hidden = op.Split(bias, axis=1, num_outputs=2, _outputs=2)
    if cell != GRU_RESET_AFTER:
        return op.Add(of_input, of_hidden), None
    of_gates, of_new = op.Split(of_hidden, op.const([2 * hidden, hidden]), axis=1, _outputs=2)
    return op.Add(of_input, op.Concat(of_gates, op.zeros_like(of_new), axis=1)), of_new


def check_cell(attributes: Mapping[str, Any]) -> None:
    """Refuse a cell that is not known, and an order that it does not have.

    Raises:
        ModelError: a file has such a node.
    """
    cell, order = attributes["cell"], attributes["order"]
    if cell not in OUTPUTS:
        raise ModelError(f"cell is one of {', '.join(OUTPUTS)}, not {cell!r}")
    orders = PLACES.get(cell, {ONNX: ()})
    if order not in orders:
        raise ModelError(f"the order of the gates of {cell!r} is one of {', '.join(orders)}, not {order!r}")


def _infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    check_cell(attributes)
    projected, r = inputs[:2]
    assert projected is not None
    assert r is not None
    dtype, shape = spec_of(projected)
    time, batch, _ = dims(projected) or (None,) * 3
    count, _, hidden = dims(r) or (None,) * 3
    state: Spec = dtype, ir.Shape([count, batch, hidden])
    wide = count * hidden if isinstance(count, int) and isinstance(hidden, int) else None
    y: Spec = dtype, ir.Shape([time, count, batch, hidden])
    return [y, state, (dtype, shape), (dtype, ir.Shape([time, batch, wide])), state][: OUTPUTS[attributes["cell"]]]


@declare(
    "RecurrentTraining",
    inputs="projected r bias? hidden_bias? lengths? h? c?",
    outputs="y y_h gates cells? y_c?",
    infer=_infer,
    attributes={"cell": REQUIRED, "direction": "forward", "order": ONNX},
)
def recurrent_training(
    op: Builder,
    projected: ir.Value,
    r: ir.Value,
    bias: ir.Value | None = None,
    hidden_bias: ir.Value | None = None,
    lengths: ir.Value | None = None,
    h: ir.Value | None = None,
    c: ir.Value | None = None,
    *,
    cell: str,
    direction: str,
    order: str,
) -> tuple[ir.Value, ...]:
    """Run a recurrent layer and keep what its gradient reads.

    ``projected``: time × batch × directions·gates·hidden, gates in ONNX's order (LSTM i, o, f, new; GRU z, r, new)
    or, with ``order="pytorch"``, in PyTorch's (LSTM i, f, new, o; GRU r, z, new).
    ``r``: directions × gates·hidden × hidden. ``bias``: directions × gates·hidden, added to ``projected``. ``hidden_bias``:
    directions × hidden, of a GRU that resets the product.
    ``lengths``: batch, int32; ``h`` and ``c``: directions × batch × hidden, zero by default.
    ``y``: time × directions × batch × hidden; ``y_h`` and, of an LSTM, ``y_c``: the final states.
    ``gates``: the gates after their activation, shaped as ``projected``. ``cells``: time × batch × directions·hidden: an
    LSTM's cell states, a GRU's r∘h, or its h·Rᵀ + b of the new state before the reset. Behind the end of a sequence, ``y``,
    ``gates`` and ``cells`` are zero.
    """
    count, _, hidden = static_dims(r) or (1, 0, 0)
    if bias is not None:
        projected = op.Add(projected, op.Reshape(bias, [-1]))
    steps = split(op, projected, count)
    mask = step_mask(op, projected, lengths)
    weights, biases = (by_direction(op, v, count) for v in (r, hidden_bias))
    starts = [initial_states(op, v, projected, count, hidden, False) for v in ([h, c] if cell == LSTM else [h])]
    found = []
    for k in range(count):
        operands = op.Transpose(weights[k], perm=[1, 0]), biases[k], hidden, PLACES.get(cell, {}).get(order, ())
        scanned = [steps[k], *([] if mask is None else [mask])]
        states = [s[k] for s in starts]
        graph, inner, values = loop_body(op, states, scanned)
        before, now = values[: len(states)], values[len(states)]
        after, saved = _FORWARD[cell](inner, now, before, *operands)
        seen = [after[0], *saved]
        if mask is not None:
            seen = [inner.Where(values[-1], v, inner.scalar(0, v)) for v in seen]
            after = [inner.Where(values[-1], new, old) for new, old in zip(after, before, strict=True)]
        finish_body(inner, [*after, *seen])
        found.append(scan(op, graph, states, scanned, len(seen), backward=is_backward(direction, k)))
    states_, y, *saved_ = zip(*([f[: len(starts)], *f[len(starts) :]] for f in found), strict=True)
    finals = [stack(op, [s[k] for s in states_], 0) for k in range(len(starts))]
    return (stack(op, y, 1), finals[0], *(joined(op, v) for v in saved_), *finals[1:])


def is_backward(direction: str, k: int) -> bool:
    return direction == "reverse" or k == 1


def split(op: Builder, value: Any, count: int) -> list[Any]:
    return list(op.Split(value, axis=-1, num_outputs=count, _outputs=count)) if count > 1 else [value]


def joined(op: Builder, parts: Sequence[Any]) -> Any:
    return op.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]


def stack(op: Builder, parts: Sequence[Any], axis: int) -> Any:
    wide = [op.Unsqueeze(v, [axis]) for v in parts]
    return op.Concat(*wide, axis=axis) if len(wide) > 1 else wide[0]


def loop_body(op: Builder, states: Sequence[Any], scanned: Sequence[Any]) -> tuple[ir.Graph, Builder, list[Any]]:
    inputs = [("state", s.type, s.shape) for s in states]
    inputs += [("step", v.type, ir.Shape((dims(v) or (None,) * 3)[1:])) for v in scanned]
    return new_body(op, inputs, name=f"{op.scope}/step")


def scan(op: Builder, body: ir.Graph, states: Sequence[Any], scanned: Sequence[Any], seen: int, *, backward: bool) -> Any:
    turn = {"scan_input_directions": [1] * len(scanned), "scan_output_directions": [1] * seen} if backward else {}
    attributes = {"body": body, "num_scan_inputs": len(scanned), **turn}
    return op.emit("Scan", [*states, *scanned], attributes, outputs=len(states) + seen)


StepResult: TypeAlias = tuple[list[Any], list[Any]]
"""What a step gives: the states after it and what it keeps; backward, gradients of the states before it and of its gates."""


def by_gate(parts: Sequence[Any], places: Places) -> list[Any]:
    """The gates in ONNX's order."""
    return [parts[place] for place in places]


def at_places(gates: Sequence[Any], places: Places) -> list[Any]:
    """Gates that are given in ONNX's order, each at its place."""
    return [gates[places.index(k)] for k in range(len(gates))]


def _lstm(op: Builder, x: Any, before: Sequence[Any], r: Any, bias: Any, hidden: int, places: Places) -> StepResult:
    h, c = before
    i, o, f, new = by_gate(op.Split(op.Add(x, op.MatMul(h, r)), axis=-1, num_outputs=4, _outputs=4), places)
    i, o, f, new = op.Sigmoid(i), op.Sigmoid(o), op.Sigmoid(f), op.Tanh(new)
    cell = op.Add(op.Mul(f, c), op.Mul(i, new))
    return [op.Mul(o, op.Tanh(cell)), cell], [op.Concat(*at_places((i, o, f, new), places), axis=-1), cell]


def _gru(op: Builder, x: Any, before: Sequence[Any], r: Any, bias: Any, hidden: int, places: Places) -> StepResult:
    (h,), sizes = before, op.const([2 * hidden, hidden])
    (of_gates, of_new), (r_gates, r_new) = (op.Split(v, sizes, axis=-1, _outputs=2) for v in (x, r))
    update, reset = op.Split(op.Sigmoid(op.Add(of_gates, op.MatMul(h, r_gates))), axis=-1, num_outputs=2, _outputs=2)
    kept = op.Mul(reset, h)
    new = op.Tanh(op.Add(of_new, op.MatMul(kept, r_new)))
    return [_mixed(op, update, new, h)], [op.Concat(update, reset, new, axis=-1), kept]


def _gru_reset_after(op: Builder, x: Any, before: Sequence[Any], r: Any, bias: Any, hidden: int, places: Places) -> StepResult:
    (h,), sizes = before, op.const([2 * hidden, hidden])
    (of_gates, of_new), (gates, kept) = (op.Split(v, sizes, axis=-1, _outputs=2) for v in (x, op.MatMul(h, r)))
    kept = kept if bias is None else op.Add(kept, bias)
    of_both = op.Split(op.Sigmoid(op.Add(of_gates, gates)), axis=-1, num_outputs=2, _outputs=2)
    update, reset = by_gate(of_both, places[:2])
    new = op.Tanh(op.Add(of_new, op.Mul(reset, kept)))
    return [_mixed(op, update, new, h)], [op.Concat(*at_places((update, reset, new), places), axis=-1), kept]


def _mixed(op: Builder, update: Any, new: Any, h: Any) -> Any:
    return op.Add(op.Mul(op.Sub(1.0, update), new), op.Mul(update, h))


def _tanh(op: Builder, x: Any, before: Sequence[Any], r: Any, bias: Any, hidden: int, places: Places) -> StepResult:
    h = op.Tanh(op.Add(x, op.MatMul(before[0], r)))
    return [h], [h]


def _relu(op: Builder, x: Any, before: Sequence[Any], r: Any, bias: Any, hidden: int, places: Places) -> StepResult:
    h = op.Relu(op.Add(x, op.MatMul(before[0], r)))
    return [h], [h]


_FORWARD = {LSTM: _lstm, GRU: _gru, GRU_RESET_AFTER: _gru_reset_after, TANH: _tanh, RELU: _relu}
