"""Connectionist temporal classification: a thread takes a sample after another; logarithms of paths are float64.

States are the labels with a blank before, between and behind them. Those from which the last cannot be reached in the frames
that are left, or that cannot be reached from the first, are left out.
"""

from __future__ import annotations

import math

import numpy as np

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.arrays import given, optional
from graphc.backends.onnxruntime.kernels.jit import exact, jit
from graphc.backends.onnxruntime.kernels.mathematics import exp, highest_of
from graphc.backends.onnxruntime.kernels.scratch import on_lines
from graphc.backends.onnxruntime.vectors.functions import array_of, floats_at
from graphc.device import Array, Run


@kernel("onnxruntime", "graphc::CTCLoss")
def ctc_loss(k: Binding) -> Run:
    """Losses and slopes."""
    (logits, label), (losses, slope), lengths = given(k.inputs, 2), given(k.outputs, 2), optional(k.inputs, 2)
    if k.attributes["time_axis"] == 0:
        logits, slope = logits.transpose(1, 0, 2), slope.transpose(1, 0, 2)
    samples, time, _ = logits.shape
    parts, width = max(1, min(k.pool.threads, samples)), 2 * label.shape[1] + 1
    known: Array = np.full(samples, time, dtype=np.int64) if lengths is None else lengths
    emitted, paths = (on_lines((parts, frames, width), np.float64) for frames in (time, time + 2))
    states = on_lines((parts, width), np.int64)
    attributes = k.attributes["blank"], k.attributes["zero_infinity"]
    arguments = (logits, label, known, *attributes, losses, slope, emitted, paths, states)
    return k.pool.bind(_ctc_loss, arguments, parts)


@exact
def _log_sum(a, b, c):
    highest = max(a, max(b, c))
    if highest == -np.inf:
        return highest
    return highest + math.log(math.exp(a - highest) + math.exp(b - highest) + math.exp(c - highest))


@jit
def _row(array, sample, frame):
    return array_of(floats_at(array[sample, frame].ctypes.data), (array.shape[2],))


@exact
def _probabilities(row, target):
    """target = softmax(row); returns the highest number and the logarithm of the rest."""
    highest, mass = highest_of(row), np.float32(0.0)
    for c in range(row.size):
        target[c] = exp(row[c] - highest)
    for c in range(row.size):
        mass += target[c]
    for c in range(row.size):
        target[c] = target[c] / mass
    return highest, math.log(np.float64(mass))


@exact
def _ctc_loss(logits, label, lengths, blank, zero_infinity, losses, slope, emitted_room, paths_room, states_room, start, stop):
    parts, (samples, frames, classes) = states_room.shape[0], logits.shape
    for part in range(start, stop):
        emitted, paths, states = emitted_room[part], paths_room[part], states_room[part]
        for n in range(samples * part // parts, samples * (part + 1) // parts):
            time = min(frames, max(0, lengths[n]))
            count, wrong = 0, False
            while count < label.shape[1] and label[n, count] >= 0:
                wrong |= label[n, count] >= classes or label[n, count] == blank
                count += 1
            width = 2 * count + 1
            for s in range(width):
                states[s] = label[n, s // 2] if s % 2 else blank
            loss = np.nan
            if not wrong:
                for t in range(time):
                    row = _row(logits, n, t)
                    highest, log_mass = _probabilities(row, _row(slope, n, t))
                    for s in range(width):
                        emitted[t, s] = np.float64(row[states[s]]) - np.float64(highest) - log_mass
                loss = _paths(emitted, paths, states, width, time)
            taken = time if loss < np.inf else 0
            if taken:
                _subtract(emitted, paths, states, width, time, loss, slope, n)
            for t in range(taken, frames):
                _row(slope, n, t)[:] = np.float32(0.0)
            losses[n] = 0.0 if loss == np.inf and zero_infinity else loss


@exact
def _skips(states, s):
    """Whether a path may come from two states before."""
    return s >= 2 and s % 2 == 1 and states[s] != states[s - 2]


@exact
def _paths(emitted, paths, states, width, time):
    """paths[t, s] = log of the probability of all paths to state s at frame t; returns the loss."""
    if time == 0:
        return 0.0 if width == 1 else np.inf
    for t in range(time):
        low, high = max(0, width - 2 * (time - t)), min(width, 2 * (t + 1))
        paths[t, :width] = -np.inf
        for s in range(low, high):
            if t == 0:
                paths[t, s] = emitted[t, s]
                continue
            one = paths[t - 1, s - 1] if s >= 1 else -np.inf
            two = paths[t - 1, s - 2] if _skips(states, s) else -np.inf
            paths[t, s] = _log_sum(paths[t - 1, s], one, two) + emitted[t, s]
    return -_log_sum(paths[time - 1, width - 1], paths[time - 1, width - 2] if width > 1 else -np.inf, -np.inf)


@exact
def _subtract(emitted, paths, states, width, time, loss, slope, n):
    """Subtract from the probabilities of each frame those that the paths of the labels take."""
    now, then = paths.shape[0] - 2, paths.shape[0] - 1
    for t in range(time - 1, -1, -1):
        row, low, high = _row(slope, n, t), max(0, width - 2 * (time - t)), min(width, 2 * (t + 1))
        for s in range(width):
            beta = -np.inf
            if t == time - 1:
                beta = 0.0 if s >= width - 2 else -np.inf
            elif s >= low:
                stay = paths[then, s] + emitted[t + 1, s]
                one = paths[then, s + 1] + emitted[t + 1, s + 1] if s + 1 < width else -np.inf
                two = paths[then, s + 2] + emitted[t + 1, s + 2] if s + 2 < width and _skips(states, s + 2) else -np.inf
                beta = _log_sum(stay, one, two)
            paths[now, s] = beta
            if low <= s < high:
                row[states[s]] -= math.exp(paths[t, s] + beta + loss)
        now, then = then, now
