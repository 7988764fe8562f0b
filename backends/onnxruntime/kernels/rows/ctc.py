"""Connectionist temporal classification: a thread takes a sample after another.

States are the labels with a blank before, between and behind them. Logarithms of the probabilities of paths are float64; what a
frame adds to them is computed in float32, a vector of states at a time.
"""

from __future__ import annotations

import math

import numpy as np

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import exact, inlined, jit
from graphc.backends.onnxruntime.kernels.common.mathematics import exp, highest_of, log
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.vectors.functions import array_of, floats_at
from graphc.device import Array, Run
from graphc.errors import InternalError

NOTHING = -1e30
"""The logarithm of a probability that is zero, here."""
MARGIN = 2
"""States before the first, and behind the last, that no path reaches."""


@kernel("onnxruntime", "graphc::CTCLoss")
def ctc_loss(k: Binding) -> Run:
    """Losses and slopes.

    Raises:
        InternalError: not one row of labels, or one length, for each sample, or a blank that is no class: loops read that far.
    """
    (logits, label), (losses, slope), lengths = given(k.inputs, 2), given(k.outputs, 2), optional(k.inputs, 2)
    if len(label) != len(losses) or (lengths is not None and len(lengths) != len(losses)):
        raise InternalError(f"CTCLoss {k.node.name!r} has {len(label)} rows of labels for {len(losses)} samples")
    if not 0 <= k.attributes["blank"] < logits.shape[2]:
        raise InternalError(f"CTCLoss {k.node.name!r} has blank {k.attributes['blank']} of {logits.shape[2]} classes")
    if k.attributes["time_axis"] == 0:
        logits, slope = logits.transpose(1, 0, 2), slope.transpose(1, 0, 2)
    samples, frames, _ = logits.shape
    parts, width = max(1, min(k.pool.threads, samples)), 2 * label.shape[1] + 1 + 2 * MARGIN
    known: Array = np.full(samples, frames, dtype=np.int64) if lengths is None else lengths
    emitted, paths = (on_lines((parts, frames, width), np.float64) for _ in range(2))
    rows = on_lines((parts, 3, width), np.float64)
    states, shares = on_lines((parts, width), np.int64), on_lines((parts, width), np.float32)
    attributes = k.attributes["blank"], k.attributes["zero_infinity"]
    arguments = (logits, label, known, *attributes, losses, slope, emitted, paths, rows, states, shares)
    return k.pool.bind(_ctc_loss, arguments, parts)


@inlined
def _log_sum(a, b, c):
    highest = a if a > b else b
    highest = highest if highest > c else c
    mass = exp(np.float32(a - highest)) + exp(np.float32(b - highest)) + exp(np.float32(c - highest))
    return highest + np.float64(log(mass))


@jit
def _row(array, sample, frame):
    return array_of(floats_at(array[sample, frame].ctypes.data), (array.shape[2],))


@exact
def _probabilities(row, target):
    """target = softmax(row); returns the logarithm of what each exponential was divided by."""
    highest, mass = highest_of(row), 0.0
    for c in range(row.size):
        target[c] = exp(row[c] - highest)
    for c in range(row.size):
        mass += target[c]
    for c in range(row.size):
        target[c] = target[c] / np.float32(mass)
    return np.float64(highest) + math.log(mass)


@jit
def _ctc_loss(logits, label, lengths, blank, zero_infinity, losses, slope, emitted, paths, rows, states, shares, start, stop):
    parts, (samples, frames, classes) = states.shape[0], logits.shape
    for part in range(start, stop):
        for n in range(samples * part // parts, samples * (part + 1) // parts):
            time, count, wrong = min(frames, max(0, lengths[n])), 0, False
            while count < label.shape[1] and label[n, count] >= 0:
                wrong |= label[n, count] >= classes or label[n, count] == blank
                count += 1
            skips, width = rows[part, 0], 2 * count + 1
            skips[:] = NOTHING
            for s in range(0 if wrong else width):
                states[part, s] = label[n, s // 2] if s % 2 else blank
                if s % 2 and s > 1 and label[n, s // 2] != label[n, s // 2 - 1]:
                    skips[s] = 0.0
            loss = np.nan
            if not wrong:
                for t in range(time):
                    row = _row(logits, n, t)
                    log_mass = _probabilities(row, _row(slope, n, t))
                    for s in range(width):
                        emitted[part, t, s] = np.float64(row[states[part, s]]) - log_mass
                loss = _loss_of_paths(emitted[part], paths[part], skips, width, time)
            taken = time if loss < np.inf else 0
            if taken > 0:
                _subtract(
                    emitted[part], paths[part], skips, rows[part, 1], rows[part, 2], states[part], shares[part], width, time,
                    loss, slope, n,
                )  # fmt: skip
            for t in range(taken, frames):
                _row(slope, n, t)[:] = np.float32(0.0)
            losses[n] = 0.0 if loss == np.inf and zero_infinity else loss


@jit
def _loss_of_paths(emitted, paths, skips, width, time):
    """paths[t, MARGIN + s] = log of the probability of all paths to state s at frame t; returns the loss."""
    if time == 0:
        return 0.0 if width == 1 else np.inf
    first = paths[0]
    first[: MARGIN + width] = NOTHING
    for s in range(min(2, width)):
        first[MARGIN + s] = emitted[0, s]
    for t in range(1, time):
        before, after, now = paths[t - 1], paths[t], emitted[t]
        after[:MARGIN] = NOTHING
        for s in range(width):
            after[s + MARGIN] = _log_sum(before[s + 2], before[s + 1], before[s] + skips[s]) + now[s]
    last = paths[time - 1]
    total = _log_sum(last[width + 1], last[width] if width > 1 else NOTHING, NOTHING)
    return -total if total > NOTHING / 2 else np.inf


@jit
def _subtract(emitted, paths, skips, beta, stay, states, shares, width, time, loss, slope, n):
    """Subtract from the probabilities of each frame those that the paths of the labels take."""
    for t in range(time - 1, -1, -1):
        if t == time - 1:
            beta[:width] = NOTHING
            beta[max(0, width - 2) : width] = 0.0
        else:
            following = emitted[t + 1]
            for s in range(width):
                stay[s] = beta[s] + following[s]
            stay[width : width + MARGIN] = NOTHING
            for s in range(width):
                beta[s] = _log_sum(stay[s], stay[s + 1], stay[s + 2] + skips[s + 2])
        path = paths[t]
        for s in range(width):
            shares[s] = exp(np.float32(path[s + MARGIN] + beta[s] + loss))
        row = _row(slope, n, t)
        for s in range(width):
            row[states[s]] -= shares[s]
