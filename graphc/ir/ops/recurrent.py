"""RNN, GRU and LSTM as a Scan of standard ops, ragged sequences included.

    xₜ·Wᵀ + b for all t at once;  Scan over t: gates = xₜ·Wᵀ + b + hₜ₋₁·Rᵀ, activations, (hₜ, cₜ)

Covers every direction, activation, peephole and layout. The product with W leaves the Scan, so that it and its gradient are
one large matrix product each. Source of the formulas: the ONNX operator reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, input_of
from graphc.ir.subgraphs import finish_body, new_body

RECURRENT = frozenset({"RNN", "GRU", "LSTM"})

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}

Function = Callable[[Builder, Any], Any]

_ACTIVATIONS: dict[str, tuple[str, float | None, float | None]] = {
    "affine": ("", 1.0, 0.0),
    "elu": ("Elu", 1.0, None),
    "hardsigmoid": ("HardSigmoid", 0.2, 0.5),
    "leakyrelu": ("LeakyRelu", 0.01, None),
    "relu": ("Relu", None, None),
    "scaledtanh": ("", 1.0, 1.0),
    "sigmoid": ("Sigmoid", None, None),
    "softplus": ("Softplus", None, None),
    "softsign": ("Softsign", None, None),
    "tanh": ("Tanh", None, None),
    "thresholdedrelu": ("ThresholdedRelu", 1.0, None),
}
"""Activation → its op (empty: a formula), default alpha and beta; None for a parameter it lacks."""


def _function(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Function:
    """The activation ``name``, with the next of the given parameters."""
    op_type, *defaults = _ACTIVATIONS[name]
    given = zip(("alpha", "beta"), defaults, (alphas, betas), strict=True)
    options = {key: float(str(np.float32(next(rest, default)))) for key, default, rest in given if default is not None}
    if name == "affine":
        return lambda op, x: op.Add(op.Mul(x, options["alpha"]), options["beta"])
    if name == "scaledtanh":
        return lambda op, x: op.Mul(op.Tanh(op.Mul(x, options["beta"])), options["alpha"])
    return lambda op, x: op.emit(op_type, [x], options)[0]


def _activations(node: ir.Node, directions: int) -> list[list[Function]]:
    """The activations of each direction; those with parameters consume alpha and beta in order."""
    default = DEFAULTS[node.op_type] * directions
    names = [name.lower() for name in node.attributes.get_strings("activations", None) or default]
    unknown = [name for name in names if name not in _ACTIVATIONS]
    if unknown or len(names) != len(default):
        problem = f"the activation {unknown[0]!r}" if unknown else f"{len(names)} activations instead of {len(default)}"
        raise UnsupportedOpError(f"{describe(node)} has {problem}; known are {', '.join(sorted(_ACTIVATIONS))}")
    alphas, betas = (iter(node.attributes.get_floats(f"activation_{n}", ())) for n in ("alpha", "beta"))
    made = [_function(name, alphas, betas) for name in names]
    each = len(default) // directions
    return [made[k * each : (k + 1) * each] for k in range(directions)]


@dataclass
class _Direction:
    """One direction of a layer: its weights (all gates in one, without the direction axis) and its time order."""

    node: ir.Node
    w: Any
    r: Any
    input_bias: Any
    hidden_bias: Any
    peepholes: list[Any]
    functions: list[Function]
    backward: bool
    hidden: int


def recurrence(op: Builder, node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Emit the outputs of an RNN, GRU or LSTM node: Y, Y_h and, for an LSTM, Y_c.

    Raises:
        UnsupportedOpError: an activation without a formula, or an unknown hidden size.
    """
    x, w, r = (input_of(node, index) for index in range(3))
    b, lengths, initial_h, initial_c, peepholes = [*node.inputs, *[None] * 8][3:8]
    direction = node.attributes.get_string("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    hidden = node.attributes.get_int("hidden_size", 0) or (dims(r) or (None,))[-1]
    if not isinstance(hidden, int):
        raise UnsupportedOpError(f"the hidden size of {describe(node)} must be known; set the attribute hidden_size")
    batch_first = bool(node.attributes.get_int("layout", 0))
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    states = [
        initial_states(op, s, x, count, hidden, batch_first)
        for s in (initial_h, initial_c)[: 2 if node.op_type == "LSTM" else 1]
    ]
    functions = _activations(node, count)
    parts = [by_direction(op, v, count) for v in (w, r, b, peepholes)]
    made = []
    for k in range(count):
        input_bias, hidden_bias = _biases(op, node, parts[2][k])
        way = _Direction(
            node,
            parts[0][k],
            parts[1][k],
            input_bias,
            hidden_bias,
            list(op.Split(parts[3][k], axis=0, num_outputs=3, _outputs=3)) if parts[3][k] is not None else [],
            functions[k],
            direction == "reverse" or k == 1,
            hidden,
        )
        made.append(_run(op, way, x, lengths, [s[k] for s in states]))
    outputs = []
    for k, columns in enumerate(zip(*made, strict=True)):
        axis = 1 if k == 0 else 0
        wide = [op.Unsqueeze(v, [axis]) for v in columns]
        joined = op.Concat(*wide, axis=axis) if count > 1 else wide[0]
        if batch_first:
            joined = op.Transpose(joined, perm=[2, 0, 1, 3] if k == 0 else [1, 0, 2])
        outputs.append(joined)
    return tuple(outputs)


def by_direction(op: Builder, value: ir.Value | None, count: int) -> list[Any]:
    """Split a weight by direction, without the direction axis."""
    if value is None:
        return [None] * count
    pieces = op.Split(value, axis=0, num_outputs=count, _outputs=count) if count > 1 else [value]
    return [op.Squeeze(piece, [0]) for piece in pieces]


def initial_states(op: Builder, value: ir.Value | None, x: Any, count: int, hidden: int, batch_first: bool) -> list[Any]:
    """The initial state of each direction: (batch, hidden), zero by default."""
    if value is not None:
        return by_direction(op, op.Transpose(value, perm=[1, 0, 2]) if batch_first else value, count)
    batch = (dims(x) or (None,) * 3)[1]
    size = op.const([batch, hidden]) if isinstance(batch, int) else op.Concat(op.Shape(x, start=1, end=2), [hidden], axis=0)
    return [op.Expand(op.scalar(0, x), size)] * count


def _biases(op: Builder, node: ir.Node, bias: Any) -> tuple[Any, Any]:
    """The biases of x·Wᵀ and of h·Rᵀ: only a GRU that resets after the product needs the latter separately."""
    if bias is None:
        return None, None
    of_input, of_hidden = op.Split(bias, axis=0, num_outputs=2, _outputs=2)
    if node.op_type == "GRU" and node.attributes.get_int("linear_before_reset", 0) != 0:
        return of_input, of_hidden
    return op.Add(of_input, of_hidden), None


def _run(op: Builder, way: _Direction, x: Any, lengths: ir.Value | None, states: list[Any]) -> list[Any]:
    """Emit one direction: the hidden states of all times (time, batch, hidden), then the final state or states."""
    flip = way.backward and lengths is not None
    if flip:
        x = op.ReverseSequence(x, op.Cast(lengths, to=7), batch_axis=1, time_axis=0)
    projected = op.MatMul(x, op.Transpose(way.w, perm=[1, 0]))
    if way.input_bias is not None:
        projected = op.Add(projected, way.input_bias)
    recurrent = op.Transpose(way.r, perm=[1, 0])
    scanned, mask = [projected], step_mask(op, x, lengths)
    if mask is not None:
        scanned.append(mask)
    inputs = [("state", s.type, ir.Shape(_pick(s, 0, 1))) for s in states]
    inputs += [("step", v.type, ir.Shape(_pick(v, 1, 2))) for v in scanned]
    graph, inner, values = new_body(op, inputs, name=f"{op.scope}/step")
    before, now = values[: len(states)], values[len(states)]
    after = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}[way.node.op_type](inner, way, now, recurrent, before)
    seen = after[0]
    if mask is not None:
        valid = values[-1]
        seen = inner.Where(valid, seen, inner.scalar(0, seen))
        after = [inner.Where(valid, new, old) for new, old in zip(after, before, strict=True)]
    finish_body(inner, [*after, seen])
    turn = {"scan_input_directions": [1] * len(scanned), "scan_output_directions": [1]} if way.backward and not flip else {}
    made = op.emit(
        "Scan", [*states, *scanned], {"body": graph, "num_scan_inputs": len(scanned), **turn}, outputs=len(states) + 1
    )
    y = made[-1]
    if flip:
        y = op.ReverseSequence(y, op.Cast(lengths, to=7), batch_axis=1, time_axis=0)
    return [y, *made[:-1]]


def _pick(value: ir.Value, *axes: int) -> list[Any]:
    found = dims(value)
    return [found[axis] if found is not None else None for axis in axes]


def step_mask(op: Builder, x: Any, lengths: ir.Value | None) -> Any:
    """(time, batch, 1): whether a time step lies inside its sequence."""
    if lengths is None:
        return None
    time = (dims(x) or (None,))[0]
    if isinstance(time, int):
        steps = op.const(np.arange(time, dtype=np.int64).reshape(-1, 1, 1))
    else:
        steps = op.Unsqueeze(op.Range(np.int64(0), op.Squeeze(op.Shape(x, end=1), [0]), np.int64(1)), [1, 2])
    return op.Less(steps, op.Unsqueeze(op.Cast(lengths, to=7), [0, 2]))


def _clipped(op: Builder, way: _Direction, gates: Any) -> Any:
    clip = way.node.attributes.get_float("clip", 0.0)
    return op.Clip(gates, op.scalar(-clip, gates), op.scalar(clip, gates)) if clip else gates


def _rnn(op: Builder, way: _Direction, x: Any, r: Any, before: list[Any]) -> list[Any]:
    """h = f(x + h·Rᵀ)"""
    return [way.functions[0](op, _clipped(op, way, op.Add(x, op.MatMul(before[0], r))))]


def _gru(op: Builder, way: _Direction, x: Any, r: Any, before: list[Any]) -> list[Any]:
    """z, r = f(x + h·Rᵀ);  n = g(xₙ + (r∘h)·Rₙᵀ), or g(xₙ + r∘(h·Rₙᵀ + b));  h = (1 - z)∘n + z∘h"""
    (f, g), (h,), size = way.functions, before, [2 * way.hidden, way.hidden]
    of_gates, of_new = op.Split(x, op.const(size), axis=-1, _outputs=2)
    if way.node.attributes.get_int("linear_before_reset", 0):
        product = op.MatMul(h, r)
        if way.hidden_bias is not None:
            product = op.Add(product, way.hidden_bias)
        gates, new = op.Split(product, op.const(size), axis=-1, _outputs=2)
        update, reset = _halves(op, f(op, _clipped(op, way, op.Add(of_gates, gates))))
        inside = op.Add(of_new, op.Mul(reset, new))
    else:
        r_gates, r_new = op.Split(r, op.const(size), axis=-1, _outputs=2)
        update, reset = _halves(op, f(op, _clipped(op, way, op.Add(of_gates, op.MatMul(h, r_gates)))))
        inside = op.Add(of_new, op.MatMul(op.Mul(reset, h), r_new))
    new = g(op, _clipped(op, way, inside))
    return [op.Add(op.Mul(op.Sub(1.0, update), new), op.Mul(update, h))]


def _halves(op: Builder, x: Any) -> Any:
    return op.Split(x, axis=-1, num_outputs=2, _outputs=2)


def _lstm(op: Builder, way: _Direction, x: Any, r: Any, before: list[Any]) -> list[Any]:
    """i, f = f(… + p∘c), n = g(…), c = f∘c + i∘n, o = f(… + p∘c), h = o∘h(c)"""
    (f, g, h_of), (h, c) = way.functions, before
    i, o, forget, new = op.Split(op.Add(x, op.MatMul(h, r)), axis=-1, num_outputs=4, _outputs=4)
    if way.peepholes:
        i, forget = op.Add(i, op.Mul(way.peepholes[0], c)), op.Add(forget, op.Mul(way.peepholes[2], c))
    i = f(op, _clipped(op, way, i))
    if way.node.attributes.get_int("input_forget", 0):
        forget = op.Sub(1.0, i)
    else:
        forget = f(op, _clipped(op, way, forget))
    cell = op.Add(op.Mul(forget, c), op.Mul(i, g(op, _clipped(op, way, new))))
    if way.peepholes:
        o = op.Add(o, op.Mul(way.peepholes[1], cell))
    return [op.Mul(f(op, _clipped(op, way, o)), h_of(op, cell)), cell]
