"""The gradient of RecurrentTraining: one loop back through time, then the products with the earlier states.

dprojected, dr, dh, dbias, dextra? = graphc.RecurrentTrainingGrad(y, gates, r, cells?, lengths?, h?, c?, dy?, dy_h?, dy_c?; …)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.facts import dims, static_dims
from graphc.ir.ops.gate_order import ONNX, Places
from graphc.ir.ops.recurrent import by_direction, initial_states, step_mask
from graphc.ir.ops.recurrent_training import (
    GRU,
    GRU_RESET_AFTER,
    LSTM,
    PLACES,
    RELU,
    TANH,
    StepResult,
    at_places,
    by_gate,
    check_cell,
    is_backward,
    joined,
    loop_body,
    scan,
    split,
    stack,
)
from graphc.ir.subgraphs import finish_body

GRADIENTS = {LSTM: 5, GRU: 4, GRU_RESET_AFTER: 5, TANH: 4, RELU: 4}
"""Number of outputs of the gradient of a cell."""


def _infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    check_cell(attributes)
    y, gates, r = inputs[:3]
    assert y is not None
    assert r is not None
    dtype, _ = spec_of(y)
    _, count, batch, hidden = dims(y) or (None,) * 4
    state: Spec = dtype, ir.Shape([count, batch, hidden])
    extra = state if attributes["cell"] == LSTM else (dtype, ir.Shape([count, hidden]))
    bias: Spec = dtype, ir.Shape((dims(r) or (count, None, hidden))[:2])
    return [spec_of(gates), spec_of(r), state, bias, extra][: GRADIENTS[attributes["cell"]]]


@declare(
    "RecurrentTrainingGrad",
    inputs="y gates r cells? lengths? h? c? dy? dy_h? dy_c?",
    outputs="dprojected dr dh dbias dextra?",
    infer=_infer,
    attributes={"cell": REQUIRED, "direction": "forward", "order": ONNX},
)
def recurrent_training_grad(
    op: Builder,
    y: ir.Value,
    gates: ir.Value,
    r: ir.Value,
    cells: ir.Value | None = None,
    lengths: ir.Value | None = None,
    h: ir.Value | None = None,
    c: ir.Value | None = None,
    dy: ir.Value | None = None,
    dy_h: ir.Value | None = None,
    dy_c: ir.Value | None = None,
    *,
    cell: str,
    direction: str,
    order: str,
) -> tuple[ir.Value, ...]:
    """Gradient of RecurrentTraining: of ``projected``, ``r``, ``h`` and ``bias``; as ``dextra`` that of ``c`` (LSTM) or of
    ``hidden_bias`` (of a GRU that resets the product).

    For t from the last step to the first, with a the gates before their activation: ∂a by the cell's formula from ∂hₜ,
    ∂hₜ₋₁ = ∂a·R;  then ∂R = Σ ∂aᵀ·hₜ₋₁ over all steps in one product.
    """
    (count, _, hidden), places = static_dims(r) or (1, 0, 0), PLACES.get(cell, {}).get(order, ())
    mask = step_mask(op, gates, lengths)
    parts = [split(op, v, count) if v is not None else [None] * count for v in (gates, cells)]
    outs = [_unstacked(op, v, count) for v in (y, dy)]
    weights = by_direction(op, r, count)
    starts = [initial_states(op, v, gates, count, hidden, False) for v in ([h, c] if cell == LSTM else [h])]
    ends = [initial_states(op, v, gates, count, hidden, False) for v in ([dy_h, dy_c] if cell == LSTM else [dy_h])]
    found = []
    for k in range(count):
        backward = is_backward(direction, k)
        earlier = _earlier(op, outs[0][k], starts[0][k], mask, backward)
        held = [_earlier(op, parts[1][k], starts[1][k], mask, backward)] if cell == LSTM else [earlier]
        scanned = [parts[0][k], *held, *(v for v in (parts[1][k], outs[1][k], mask) if v is not None)]
        states = [e[k] for e in ends]
        graph, inner, values = loop_body(op, states, scanned)
        before, (now, held_now, *rest) = values[: len(states)], values[len(states) :]
        saved = rest.pop(0) if cells is not None else None
        dh = inner.Add(before[0], rest.pop(0)) if dy is not None else before[0]
        after, seen = _BACKWARD[cell](inner, now, saved, held_now, [dh, *before[1:]], weights[k], hidden, places)
        if mask is not None:
            after = [inner.Where(rest[-1], new, old) for new, old in zip(after, before, strict=True)]
            seen = [inner.Where(rest[-1], v, inner.scalar(0, v)) for v in seen]
        finish_body(inner, [*after, *seen])
        made = scan(op, graph, states, scanned, len(seen), backward=not backward)
        slopes, last = made[len(states)], made[-1]
        pieces = [(slopes, earlier)]
        if cell in (GRU, GRU_RESET_AFTER):
            of_gates, of_new = op.Split(slopes, op.const([2 * hidden, hidden]), axis=-1, _outputs=2)
            pieces = [(of_gates, earlier), (of_new, parts[1][k]) if cell == GRU else (last, earlier)]
        dr = [op.MatMul(op.Transpose(_rows(op, a), perm=[1, 0]), _rows(op, b)) for a, b in pieces]
        extra = made[1] if cell == LSTM else op.ReduceSum(last, [0, 1], keepdims=0) if cell == GRU_RESET_AFTER else None
        of_bias = op.ReduceSum(slopes, [0, 1], keepdims=0)
        found.append((slopes, op.Concat(*dr, axis=0) if len(dr) > 1 else dr[0], made[0], of_bias, extra))
    columns = list(zip(*found, strict=True))
    return (joined(op, columns[0]), *(stack(op, v, 0) for v in columns[1 : GRADIENTS[cell]]))


def _rows(op: Builder, value: Any) -> Any:
    return op.Reshape(value, [-1, (dims(value) or (None,))[-1]])


def _unstacked(op: Builder, value: Any, count: int) -> list[Any]:
    """time × directions × batch × hidden by direction."""
    if value is None:
        return [None] * count
    pieces = op.Split(value, axis=1, num_outputs=count, _outputs=count) if count > 1 else [value]
    return [op.Squeeze(piece, [1]) for piece in pieces]


def _earlier(op: Builder, values: Any, start: Any, mask: Any, backward: bool) -> Any:
    """What each step started from: the values of the step before it in the loop's order, at first ``start``."""
    first = op.Unsqueeze(start, [0])
    if not backward:
        return op.Concat(first, op.Slice(values, [0], [-1], [0]), axis=0)
    later = op.Slice(values, [1], [np.iinfo(np.int64).max], [0])
    if mask is not None:
        later = op.Where(op.Slice(mask, [1], [np.iinfo(np.int64).max], [0]), later, first)
    return op.Concat(later, first, axis=0)


def _slope(op: Builder, gate: Any) -> Any:
    """s·(1 - s) of a sigmoid."""
    return op.Mul(gate, op.Sub(1.0, gate))


def _bend(op: Builder, gate: Any) -> Any:
    """1 - t² of a tanh."""
    return op.Sub(1.0, op.Mul(gate, gate))


def _lstm(
    op: Builder, gates: Any, cell: Any, held: Any, slopes: Sequence[Any], r: Any, hidden: int, places: Places
) -> StepResult:
    (dh, dc), (i, o, f, new) = slopes, by_gate(op.Split(gates, axis=-1, num_outputs=4, _outputs=4), places)
    t = op.Tanh(cell)
    dcell = op.Add(dc, op.Mul(op.Mul(dh, o), _bend(op, t)))
    di, do = op.Mul(op.Mul(dcell, new), _slope(op, i)), op.Mul(op.Mul(dh, t), _slope(op, o))
    df, dnew = op.Mul(op.Mul(dcell, held), _slope(op, f)), op.Mul(op.Mul(dcell, i), _bend(op, new))
    da = op.Concat(*at_places((di, do, df, dnew), places), axis=-1)
    return [op.MatMul(da, r), op.Mul(dcell, f)], [da]


def _gru(op: Builder, gates: Any, kept: Any, h: Any, slopes: Sequence[Any], r: Any, hidden: int, places: Places) -> StepResult:
    (dh,), (z, reset, new) = slopes, op.Split(gates, axis=-1, num_outputs=3, _outputs=3)
    r_gates, r_new = op.Split(r, op.const([2 * hidden, hidden]), axis=0, _outputs=2)
    dnew = op.Mul(op.Mul(dh, op.Sub(1.0, z)), _bend(op, new))
    dkept = op.MatMul(dnew, r_new)
    dz, dreset = op.Mul(op.Mul(dh, op.Sub(h, new)), _slope(op, z)), op.Mul(op.Mul(dkept, h), _slope(op, reset))
    through = op.Add(op.Mul(dh, z), op.Mul(dkept, reset))
    gate_slopes = op.Concat(dz, dreset, axis=-1)
    return [op.Add(through, op.MatMul(gate_slopes, r_gates))], [op.Concat(gate_slopes, dnew, axis=-1)]


def _gru_reset_after(
    op: Builder, gates: Any, kept: Any, h: Any, slopes: Sequence[Any], r: Any, hidden: int, places: Places
) -> StepResult:
    (dh,), (z, reset, new) = slopes, by_gate(op.Split(gates, axis=-1, num_outputs=3, _outputs=3), places)
    dnew = op.Mul(op.Mul(dh, op.Sub(1.0, z)), _bend(op, new))
    dz, dreset = op.Mul(op.Mul(dh, op.Sub(h, new)), _slope(op, z)), op.Mul(op.Mul(dnew, kept), _slope(op, reset))
    dkept = op.Mul(dnew, reset)
    product = op.MatMul(op.Concat(*at_places((dz, dreset, dkept), places), axis=-1), r)
    return [op.Add(op.Mul(dh, z), product)], [op.Concat(*at_places((dz, dreset, dnew), places), axis=-1), dkept]


def _tanh(op: Builder, gates: Any, kept: Any, h: Any, slopes: Sequence[Any], r: Any, hidden: int, places: Places) -> StepResult:
    da = op.Mul(slopes[0], _bend(op, gates))
    return [op.MatMul(da, r)], [da]


def _relu(op: Builder, gates: Any, kept: Any, h: Any, slopes: Sequence[Any], r: Any, hidden: int, places: Places) -> StepResult:
    da = op.graphc.ReluGrad(slopes[0], gates)
    return [op.MatMul(da, r)], [da]


_BACKWARD = {LSTM: _lstm, GRU: _gru, GRU_RESET_AFTER: _gru_reset_after, TANH: _tanh, RELU: _relu}
