"""One step of a cell for one row of the batch, forward and backward, in vector registers.

Backward rows add the slopes of the gates to ``sums``: gradients of biases, without another pass over the slopes of all steps.
A GRU that resets the product has one part more there, of its hidden bias.

Rows hold the gates one behind another, in ONNX's order or each at its place (:mod:`graphc.ir.ops.gate_order`). The formulas are
those of :mod:`graphc.ir.ops.recurrent_training`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from graphc.backends.onnxruntime.vectors.functions import Vector, row_function
from graphc.ir.ops.gate_order import GRU_PLACES, LSTM_PLACES, ONNX, PYTORCH, Places


def _in_orders(rows: int, body: Callable[..., None], places: Mapping[str, Places]) -> tuple[Any, Any]:
    """Functions for gates in ONNX's order and in PyTorch's."""
    at_onnx, at_pytorch = (functools.partial(body, places=places[order]) for order in (ONNX, PYTORCH))
    return row_function(rows, at_onnx), row_function(rows, at_pytorch)


def _fetch(v: Vector, row: int, parts: int) -> None:
    """Fetch the gates of the next row while those of this one are computed: too short for a processor's own prefetching."""
    for part in range(parts):
        v.fetch(row, part)


def _gate(v: Vector, part: int, *rows: int) -> Any:
    """The sum of a part of these rows: of the projected step, its bias and the product with the state."""
    return functools.reduce(v.add, (v.load(row, part) for row in rows))


def _keep(v: Vector, value: Any, part: int, slopes: int, sums: int) -> None:
    """Store the slope of a gate, and add it to the sum over steps and rows, the gradient of its bias."""
    v.store(value, slopes, part)
    v.store(v.add(v.load(sums, part), value), sums, part)


def _lstm(v: Vector, places: Places) -> None:
    projected, ahead, bias, product, gates, c, cells, h, y = range(9)
    _fetch(v, ahead, 4)
    i, o, f = (v.sigmoid(_gate(v, k, projected, bias, product)) for k in places[:3])
    new = v.tanh(_gate(v, places[3], projected, bias, product))
    cell = v.fma(f, v.load(c), v.mul(i, new))
    out = v.mul(o, v.tanh(cell))
    for k, gate in zip(places, (i, o, f, new), strict=True):
        v.store(gate, gates, k)
    for value, rows in ((cell, (c, cells)), (out, (h, y))):
        for row in rows:
            v.store(value, row)


def _gru_gates(v: Vector) -> None:
    projected, bias, product, gates, h, kept = range(6)
    update, reset = (v.sigmoid(_gate(v, k, projected, bias, product)) for k in range(2))
    v.store(update, gates, 0)
    v.store(reset, gates, 1)
    v.store(v.mul(reset, v.load(h)), kept)


def _gru(v: Vector) -> None:
    projected, bias, product, gates, h, y = range(6)
    new, update = v.tanh(v.add(_gate(v, 2, projected, bias), v.load(product))), v.load(gates, 0)
    out = v.fma(update, v.sub(v.load(h), new), new)
    v.store(new, gates, 2)
    v.store(out, h)
    v.store(out, y)


def _gru_reset_after(v: Vector, places: Places) -> None:
    projected, ahead, bias, product, gates, h, y, kept, hidden_bias = range(9)
    _fetch(v, ahead, 3)
    update, reset = (v.sigmoid(_gate(v, k, projected, bias, product)) for k in places[:2])
    inner = v.add(v.load(product, 2), v.load(hidden_bias))
    new = v.tanh(v.fma(reset, inner, _gate(v, 2, projected, bias)))
    out = v.fma(update, v.sub(v.load(h), new), new)
    for k, gate in zip(places, (update, reset, new), strict=True):
        v.store(gate, gates, k)
    v.store(inner, kept)
    v.store(out, h)
    v.store(out, y)


def _tanh(v: Vector) -> None:
    projected, bias, product, gates, h, y = range(6)
    out = v.tanh(_gate(v, 0, projected, bias, product))
    for row in (gates, h, y):
        v.store(out, row)


def _relu(v: Vector) -> None:
    projected, bias, product, gates, h, y = range(6)
    total = _gate(v, 0, projected, bias, product)
    out = v.where_positive(total, total)
    for row in (gates, h, y):
        v.store(out, row)


lstm, pytorch_lstm = _in_orders(9, _lstm, LSTM_PLACES)
gru_reset_after, pytorch_gru = _in_orders(9, _gru_reset_after, GRU_PLACES)
gru_gates, gru = row_function(6, _gru_gates), row_function(6, _gru)
tanh, relu = row_function(6, _tanh), row_function(6, _relu)


def _add(v: Vector) -> None:
    total, other = range(2)
    v.store(v.add(v.load(total), v.load(other)), total)


def _lstm_back(v: Vector, places: Places) -> None:
    gates, ahead, cell, c, dy, dh, dc, da, sums = range(9)
    _fetch(v, ahead, 4)
    i, o, f, new = (v.load(gates, k) for k in places)
    slope, t = v.add(v.load(dh), v.load(dy)), v.tanh(v.load(cell))
    dcell = v.fma(v.mul(slope, o), v.bend(t), v.load(dc))
    of_i, of_o, of_f, of_new = places
    _keep(v, v.mul(v.mul(dcell, new), v.slope(i)), of_i, da, sums)
    _keep(v, v.mul(v.mul(slope, t), v.slope(o)), of_o, da, sums)
    _keep(v, v.mul(v.mul(dcell, v.load(c)), v.slope(f)), of_f, da, sums)
    _keep(v, v.mul(v.mul(dcell, i), v.bend(new)), of_new, da, sums)
    v.store(v.mul(dcell, f), dc)
    v.store(v.number(0.0), dh)


def _gru_new_back(v: Vector) -> None:
    gates, h, dy, dh, da, sums = range(6)
    update, new = v.load(gates, 0), v.load(gates, 2)
    slope = v.add(v.load(dh), v.load(dy))
    _keep(v, v.mul(v.mul(slope, v.sub(v.load(h), new)), v.slope(update)), 0, da, sums)
    _keep(v, v.mul(v.mul(slope, v.rest(update)), v.bend(new)), 2, da, sums)
    v.store(v.mul(slope, update), dh)


def _gru_reset_back(v: Vector) -> None:
    gates, h, dkept, dh, da, sums = range(6)
    reset, slope = v.load(gates, 1), v.load(dkept)
    _keep(v, v.mul(v.mul(slope, v.load(h)), v.slope(reset)), 1, da, sums)
    v.store(v.fma(slope, reset, v.load(dh)), dh)


def _gru_reset_after_back(v: Vector, places: Places) -> None:
    gates, ahead, kept, h, dy, dh, da, dproduct, sums = range(9)
    _fetch(v, ahead, 3)
    update, reset, new = (v.load(gates, k) for k in places)
    slope = v.add(v.load(dh), v.load(dy))
    dnew = v.mul(v.mul(slope, v.rest(update)), v.bend(new))
    of_gates = v.mul(v.mul(slope, v.sub(v.load(h), new)), v.slope(update)), v.mul(v.mul(dnew, v.load(kept)), v.slope(reset))
    of_product = v.mul(dnew, reset)
    for k, value in zip(places, (*of_gates, dnew), strict=True):
        _keep(v, value, k, da, sums)
    for k, value in zip(places, (*of_gates, of_product), strict=True):
        v.store(value, dproduct, k)
    v.store(v.add(v.load(sums, 3), of_product), sums, 3)
    v.store(v.mul(slope, update), dh)


def _tanh_back(v: Vector) -> None:
    gates, dy, dh, da, sums = range(5)
    _keep(v, v.mul(v.add(v.load(dh), v.load(dy)), v.bend(v.load(gates))), 0, da, sums)
    v.store(v.number(0.0), dh)


def _relu_back(v: Vector) -> None:
    gates, dy, dh, da, sums = range(5)
    _keep(v, v.where_positive(v.load(gates), v.add(v.load(dh), v.load(dy))), 0, da, sums)
    v.store(v.number(0.0), dh)


add = row_function(2, _add)
lstm_back, pytorch_lstm_back = _in_orders(9, _lstm_back, LSTM_PLACES)
gru_reset_after_back, pytorch_gru_back = _in_orders(9, _gru_reset_after_back, GRU_PLACES)
gru_new_back, gru_reset_back = row_function(6, _gru_new_back), row_function(6, _gru_reset_back)
tanh_back, relu_back = row_function(5, _tanh_back), row_function(5, _relu_back)
