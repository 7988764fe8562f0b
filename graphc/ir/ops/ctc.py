"""Connectionist temporal classification: the loss of label sequences whose places in time are not known.

Source: A. Graves et al., Connectionist Temporal Classification, 2006.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, spec_of
from graphc.ir.facts import FLOATS, describe_value, dims, required
from graphc.ir.ops.losses import class_count
from graphc.ir.ops.recurrent_training import loop_body, scan
from graphc.ir.subgraphs import finish_body

NOTHING = -1e30
"""The logarithm of a probability that is zero, here."""

_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def _infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> list[Spec]:
    logits, label = required(inputs[0]), required(inputs[1])
    lengths = inputs[2] if len(inputs) > 2 else None
    dtype, shape = spec_of(logits)
    if dtype not in FLOATS:
        raise ValueError(f"scores must be floating point, not {dtype}")
    if attributes["time_axis"] not in (0, 1):
        raise ValueError(f"time_axis={attributes['time_axis']} is neither 0 nor 1")
    for value, rank, what in ((logits, 3, "scores"), (label, 2, "labels"), (lengths, 1, "lengths")):
        sizes = None if value is None else dims(value)
        if sizes is not None and len(sizes) != rank:
            raise ValueError(f"{what} {describe_value(required(value))} must have rank {rank}")
        if value is not None and what != "scores" and value.dtype not in _INTEGERS:
            raise ValueError(f"{what} must be int32 or int64, not {value.dtype}")
    classes = (dims(logits) or (None,))[-1]
    if attributes["blank"] < 0 or (isinstance(classes, int) and attributes["blank"] >= classes):
        raise ValueError(f"blank={attributes['blank']} is none of the classes of {describe_value(logits)}")
    samples = None if shape is None else required(dims(logits))[1 - attributes["time_axis"]]
    for value in (label, lengths):
        sizes = None if value is None else dims(value)
        if sizes and isinstance(samples, int) and isinstance(sizes[0], int) and sizes[0] != samples:
            raise ValueError(f"{describe_value(required(value))} does not fit {samples} samples of {describe_value(logits)}")
    return [(dtype, ir.Shape([samples])), (dtype, shape)]


@declare(
    "CTCLoss",
    inputs="logits label lengths?",
    outputs="losses slope",
    attributes={"time_axis": 0, "blank": 0, "zero_infinity": 0},
    infer=_infer,
)
def ctc_loss(
    op: Builder,
    logits: ir.Value,
    label: ir.Value,
    lengths: ir.Value | None = None,
    *,
    time_axis: int,
    blank: int,
    zero_infinity: int,
) -> tuple[ir.Value, ir.Value]:
    """Compute −log of the probability that softmax(logits) gives each label sequence, over all its places in time.

    logits: T × N × C, or N × T × C with ``time_axis`` 1; log-probabilities are logits, too. label: int N × S, each row up to
    its first negative number; lengths: int N, frames that count, all by default.
    losses: N. Where a label sequence fits into no path: infinity, or 0 with ``zero_infinity``; where a label is ``blank`` or no
    class, NaN. slope: ∂losses/∂logits, of the shape of logits; 0 where a loss is not finite and behind the frames that count.
    """
    half = logits.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    x = op.Cast(logits, to=int(ir.DataType.FLOAT)) if half else logits
    x = op.Transpose(x, perm=[1, 0, 2]) if time_axis else x
    log_prob = op.LogSoftmax(x, axis=2)
    label = op.Cast(label, to=int(ir.DataType.INT64))
    counts = op.Equal(op.CumSum(op.Cast(op.Less(label, 0), to=int(ir.DataType.INT64)), 1), 0)
    classes = op.Cast(class_count(op, x, 2), to=int(ir.DataType.INT64))
    proper = op.And(op.Less(label, classes), op.Not(op.Equal(label, blank)))
    wrong = op.Greater(op.ReduceMax(op.Cast(op.And(counts, op.Not(proper)), to=int(ir.DataType.INT32)), [1], keepdims=0), 0)
    none = op.const(np.array(blank, dtype=np.int64))
    column = op.Unsqueeze(op.Where(op.And(counts, proper), label, none), [2])
    pairs = op.Flatten(op.Concat(op.Expand(none, op.Shape(column)), column, axis=2), axis=1)
    first = op.Expand(none, op.Concat(op.Shape(label, start=0, end=1), [1], axis=0))
    states = op.Concat(pairs, first, axis=1)

    rows, width, time = op.Shape(states, start=0, end=1), op.Shape(states, start=1, end=2), op.Shape(x, start=0, end=1)
    place = op.Range(op.const(0), op.Squeeze(width, [0]), op.const(1))
    frame = op.Unsqueeze(op.Range(op.const(0), op.Squeeze(time, [0]), op.const(1)), [1])
    last = op.Mul(op.ReduceSum(op.Cast(counts, to=int(ir.DataType.INT64)), [1], keepdims=1), 2)
    nothing, zero = op.scalar(NOTHING, x), op.scalar(0.0, x)
    ends = op.Where(op.Or(op.Equal(place, last), op.Equal(place, op.Sub(last, 1))), zero, nothing)
    start = op.Expand(op.Where(op.Equal(place, 0), zero, nothing), op.Concat(rows, width, axis=0))
    margin = op.Expand(nothing, op.Concat(rows, [1], axis=0))
    held = op.Concat(rows, [1], axis=0)
    before = op.Concat(op.Expand(none, held), op.Expand(none, held), states, axis=1)  # two places before each state
    skips = op.And(op.Not(op.Equal(states, none)), op.Not(op.Equal(states, op.Slice(before, [0], [-2], [1]))))

    spread = op.Expand(op.Unsqueeze(states, [0]), op.Concat(time, rows, width, axis=0))
    emitted = op.GatherElements(log_prob, spread, axis=2)
    until = time if lengths is None else op.Unsqueeze(op.Cast(lengths, to=int(ir.DataType.INT64)), [0])
    alive, moves = (op.Unsqueeze(op.Less(op.Add(frame, k), until), [2]) for k in (0, 1))
    alive, moves = (op.Expand(flag, op.Concat(time, rows, [1], axis=0)) for flag in (alive, moves))

    graph, inner, (alpha, now, counted) = loop_body(op, [start], [emitted, alive])
    one = inner.Concat(margin, inner.Slice(alpha, [0], [-1], [1]), axis=1)
    two = inner.Concat(margin, inner.Slice(one, [0], [-1], [1]), axis=1)
    reached = inner.Add(_log_sum(inner, [alpha, one, inner.Where(skips, two, nothing)]), now)
    after = inner.Where(counted, reached, alpha)
    finish_body(inner, [after, after])
    final, alphas = scan(op, graph, [start], [emitted, alive], 1, backward=False)

    following = op.Concat(op.Slice(emitted, [1], [2**31 - 1], [0]), op.Slice(emitted, [-1], [2**31 - 1], [0]), axis=0)
    graph, inner, (beta, then, moving) = loop_body(op, [ends], [following, moves])
    stay = inner.Add(beta, then)
    one = inner.Concat(inner.Slice(stay, [1], [2**31 - 1], [1]), margin, axis=1)
    two = inner.Where(skips, stay, nothing)
    for _ in range(2):
        two = inner.Concat(inner.Slice(two, [1], [2**31 - 1], [1]), margin, axis=1)
    after = inner.Where(moving, _log_sum(inner, [stay, one, two]), beta)
    finish_body(inner, [after, after])
    _, betas = scan(op, graph, [ends], [following, moves], 1, backward=True)

    paths = op.Add(final, ends)
    highest = op.ReduceMax(paths, [1], keepdims=1)
    log_total = op.Add(highest, op.Log(op.ReduceSum(op.Exp(op.Sub(paths, highest)), [1], keepdims=1)))
    reachable = op.And(op.Greater(log_total, op.scalar(NOTHING / 2, x)), op.Unsqueeze(op.Not(wrong), [1]))
    share = op.Exp(op.Sub(op.Add(alphas, betas), op.Where(reachable, log_total, zero)))
    taken = op.And(alive, reachable)
    share = op.Where(taken, share, zero)
    posterior = op.ScatterElements(op.zeros_like(log_prob), spread, share, axis=2, reduction="add")
    slope = op.Where(taken, op.Sub(op.Exp(log_prob), posterior), zero)
    unreached = zero if zero_infinity else op.scalar(np.inf, x)
    losses = op.Where(op.Squeeze(reachable, [1]), op.Neg(op.Squeeze(log_total, [1])), unreached)
    losses = op.Where(wrong, op.scalar(np.nan, x), losses)
    slope = op.Transpose(slope, perm=[1, 0, 2]) if time_axis else slope
    return op.cast_like(losses, logits), op.cast_like(slope, logits)


def _log_sum(op: Builder, terms: Sequence[ir.Value]) -> ir.Value:
    """log Σ exp, of numbers of which none is an infinity."""
    highest = op.Max(*terms)
    return op.Add(highest, op.Log(op.Sum(*(op.Exp(op.Sub(term, highest)) for term in terms))))  # type: ignore[no-any-return]
