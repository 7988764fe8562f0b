"""Softmax cross-entropy and its gradient; partial sums are float64.

Where the classes are neighbours in memory, one sweep over the classes of each position. Where positions are (images: N × C ×
H × W), a tile of neighbouring positions at a time, so that the inner loop runs along memory.
"""

from __future__ import annotations

import math

import numpy as np

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import exact, inlined, jit
from graphc.backends.onnxruntime.kernels.common.mathematics import exp, highest_of, log
from graphc.device import Array, Run, in_order
from graphc.errors import InternalError

_TILE = 256
"""Positions whose maxima and sums stay in cache while the classes pass."""
_NEIGHBOURS = 8
"""Positions behind the class axis from which on they are taken along memory."""


def _planes(array: Array, axis: int) -> Array | None:
    """View scores as (before, classes, positions behind); None: no classes, or too few positions are neighbours."""
    before, classes, behind = _around(array, axis)
    return array.reshape(before, classes, behind) if classes and behind >= _NEIGHBOURS else None


def _tiles(planes: Array) -> int:
    return int(planes.shape[0]) * -(-int(planes.shape[2]) // _TILE)


def _by_position(array: Array, axis: int) -> Array:
    """View scores as (before, behind, classes); contiguous, and compiled to vector code, when classes come last."""
    before, classes, behind = _around(array, axis)
    return array.reshape(before, 1, classes) if behind == 1 else array.reshape(before, classes, behind).transpose(0, 2, 1)


def _around(array: Array, axis: int) -> tuple[int, int, int]:
    """The number of places before the class axis, of classes, and of places behind."""
    axis %= array.ndim
    return math.prod(array.shape[:axis]), array.shape[axis], math.prod(array.shape[axis + 1 :])


def _label_arguments(
    k: Binding, scores: Array, label: Array, weight: Array | None
) -> tuple[Array, Array, np.bool_, np.int64, np.float32]:
    """Labels as a vector, class weights (empty: all 1), whether a label is ignored and which, smoothing.

    Raises:
        InternalError: not one label for each position, or not one weight for each class. The loops read one label a
            position and one weight a class, and compare every label with the number of classes before they index by it.
    """
    positions, classes = scores.shape[0] * scores.shape[1], scores.shape[2]
    if label.size != positions or (weight is not None and weight.size != classes):
        weights = "" if weight is None else f" and {weight.size} class weights"
        raise InternalError(
            f"{k.node.op_type} {k.node.name!r} has {label.size} labels{weights} for {positions} positions of {classes} classes"
        )
    ignore = k.attributes["ignore_index"]
    return (
        label.reshape(-1),
        weight if weight is not None else np.empty(0, dtype=np.float32),
        np.bool_(ignore is not None),
        np.int64(ignore or 0),
        np.float32(k.attributes["label_smoothing"]),
    )


@kernel("onnxruntime", "graphc::SoftmaxCrossEntropy", inplace={2: 0})
def softmax_cross_entropy(k: Binding) -> Run:
    """Compute total, weight and the log-softmax."""
    (logits, label), (total, weight, log_prob) = given(k.inputs, 2), given(k.outputs, 3)
    scores = _by_position(logits, k.attributes["axis"])
    positions, classes = scores.shape[0] * scores.shape[1], scores.shape[2]
    labels = _label_arguments(k, scores, label, optional(k.inputs, 2))
    planes, target = _planes(logits, k.attributes["axis"]), _planes(log_prob, k.attributes["axis"])
    grain = max(1, 8192 // max(1, classes))
    parts = max(1, min(k.pool.threads, positions // grain))
    if planes is not None:
        parts = max(1, min(parts, _tiles(planes)))
    sums, same = np.zeros((parts, 2), dtype=np.float64), int(2 in k.aliases)
    if planes is not None:
        room: Array = np.zeros((parts, 3, _TILE), dtype=np.float32)
        sweep = k.pool.bind(_softmax_cross_entropy_planes, (planes, *labels, same, target, sums, room), parts)
    else:
        arguments = (scores, *labels, same, _by_position(log_prob, k.attributes["axis"]), sums)
        sweep = k.pool.bind(_softmax_cross_entropy, arguments, parts)

    return in_order([sweep, k.pool.bind(_add_sums, (sums, total.reshape(1), weight.reshape(1)), 1)])


@exact
def _add_sums(sums, total, weight, start, stop):
    loss, counts = 0.0, 0.0
    for part in range(sums.shape[0]):
        loss += sums[part, 0]
        counts += sums[part, 1]
    total[0], weight[0] = loss, counts


@exact
def _log_share(score, highest, log_mass):
    """Both differences as written: the first is 0 for the highest score, which a loss near 0 must not lose to rounding."""
    return (score - highest) - log_mass


@inlined
def _log_shares(row, target, highest, log_mass):
    for c in range(target.size):
        target[c] = _log_share(row[c], highest, log_mass)


@jit
def _softmax_cross_entropy(scores, label, class_weight, ignores, ignored, smoothing, same, log_prob, sums, start, stop):
    behind, classes = scores.shape[1], scores.shape[2]
    positions, parts = scores.shape[0] * behind, sums.shape[0]
    for part in range(start, stop):
        loss, weight = 0.0, 0.0
        for position in range(positions * part // parts, positions * (part + 1) // parts):
            row, target = scores[position // behind, position % behind], log_prob[position // behind, position % behind]
            highest = highest_of(row)
            mass = np.float32(0.0)
            for c in range(classes):
                mass += exp(row[c] - highest)
            log_mass = np.float32(math.log(mass))
            if same:  # one array to the compiler, which makes vectors only of what cannot overlap
                _log_shares(target, target, highest, log_mass)
            else:
                _log_shares(row, target, highest, log_mass)
            wanted = label[position]
            if ignores and wanted == ignored:
                continue
            if wanted < 0 or wanted >= classes:
                loss, weight = np.nan, np.nan
                continue
            counts = class_weight[wanted] if class_weight.size else np.float32(1.0)
            weight += counts
            loss -= (1.0 - smoothing) * target[wanted] * counts
            if smoothing != 0.0:
                spread = np.float32(0.0)
                for c in range(classes):
                    spread += target[c] * (class_weight[c] if class_weight.size else np.float32(1.0))
                loss -= smoothing / classes * spread
        sums[part, 0], sums[part, 1] = loss, weight


@inlined
def _log_shares_of_class(row, target, highest, log_mass):
    for p in range(target.size):
        target[p] = _log_share(row[p], highest[p], log_mass[p])


@jit
def _softmax_cross_entropy_planes(
    scores, label, class_weight, ignores, ignored, smoothing, same, log_prob, sums, room, start, stop
):
    before, classes, behind = scores.shape
    tiles, parts = (behind + _TILE - 1) // _TILE, sums.shape[0]
    count = before * tiles
    for part in range(start, stop):
        loss, weight = 0.0, 0.0
        highest, mass, spread = room[part, 0], room[part, 1], room[part, 2]
        for tile in range(count * part // parts, count * (part + 1) // parts):
            n, first = tile // tiles, tile % tiles * _TILE
            width = min(_TILE, behind - first)
            row = scores[n, 0, first : first + width]
            for p in range(width):
                highest[p], mass[p], spread[p] = row[p], np.float32(0.0), np.float32(0.0)
            for c in range(1, classes):
                row = scores[n, c, first : first + width]
                for p in range(width):
                    highest[p] = row[p] if row[p] > highest[p] else highest[p]
            for c in range(classes):
                row = scores[n, c, first : first + width]
                for p in range(width):
                    mass[p] += exp(row[p] - highest[p])
            for p in range(width):
                mass[p] = log(mass[p])
            for c in range(classes):
                row, target = scores[n, c, first : first + width], log_prob[n, c, first : first + width]
                if same:
                    _log_shares_of_class(target, target, highest, mass)
                else:
                    _log_shares_of_class(row, target, highest, mass)
                if smoothing != 0.0:
                    share = class_weight[c] if class_weight.size else np.float32(1.0)
                    for p in range(width):
                        spread[p] += target[p] * share
            labels = label[n * behind + first : n * behind + first + width]
            for p in range(width):
                wanted = labels[p]
                if ignores and wanted == ignored:
                    continue
                if wanted < 0 or wanted >= classes:
                    loss, weight = np.nan, np.nan
                    continue
                counts = class_weight[wanted] if class_weight.size else np.float32(1.0)
                weight += counts
                loss -= (1.0 - smoothing) * log_prob[n, wanted, first + p] * counts + smoothing / classes * spread[p]
        sums[part, 0], sums[part, 1] = loss, weight


@kernel("onnxruntime", "graphc::SoftmaxCrossEntropyGrad", inplace={0: 1})
def softmax_cross_entropy_grad(k: Binding) -> Run:
    """dlogits = dtotal · (softmax · Σ_c r_c - r)"""
    (dtotal, log_prob, label), (dlogits,) = given(k.inputs, 3), given(k.outputs, 1)
    weights, same = optional(k.inputs, 3), int(0 in k.aliases)
    scores = _by_position(log_prob, k.attributes["axis"])
    positions, classes = scores.shape[0] * scores.shape[1], scores.shape[2]
    mean_weight: Array = np.ones(1, dtype=np.float32)
    labels = _label_arguments(k, scores, label, weights)
    grain = max(1, 8192 // max(1, classes))
    planes, target = _planes(log_prob, k.attributes["axis"]), _planes(dlogits, k.attributes["axis"])
    if planes is not None:
        parts = max(1, min(k.pool.threads, positions // grain, _tiles(planes)))
        room: Array = np.zeros((parts, 2, _TILE), dtype=np.float32)
        planar = (dtotal.reshape(1), planes, *labels, mean_weight, same, target, room)
        sweep = k.pool.bind(_softmax_cross_entropy_grad_planes, planar, parts)
    else:
        arguments = (dtotal.reshape(1), scores, *labels, mean_weight, same, _by_position(dlogits, k.attributes["axis"]))
        sweep = k.pool.bind(_softmax_cross_entropy_grad, arguments, positions, grain)
    if weights is None:
        return sweep

    return in_order([k.pool.bind(_mean, (weights.reshape(-1), mean_weight), 1), sweep])


@exact
def _mean(weights, mean, start, stop):
    total = 0.0
    for i in range(weights.size):
        total += weights[i]
    mean[0] = total / weights.size


@inlined
def _slopes(row, target, class_weight, scale, spread):
    for c in range(target.size):
        target[c] = exp(row[c]) * scale - spread * (class_weight[c] if class_weight.size else np.float32(1.0))


@jit
def _softmax_cross_entropy_grad(
    dtotal, log_prob, label, class_weight, ignores, ignored, smoothing, mean_weight, same, dlogits, start, stop
):
    behind, classes = log_prob.shape[1], log_prob.shape[2]
    for position in range(start, stop):
        row, target = log_prob[position // behind, position % behind], dlogits[position // behind, position % behind]
        wanted = label[position]
        if ignores and wanted == ignored:
            for c in range(classes):
                target[c] = np.float32(0.0)
            continue
        inside = 0 <= wanted < classes
        counts = np.float32(1.0) if inside else np.float32(np.nan)
        if inside and class_weight.size:
            counts = class_weight[wanted]
        hit = counts * dtotal[0] * (np.float32(1.0) - smoothing)
        scale = hit + smoothing * mean_weight[0] * dtotal[0]
        spread = smoothing / np.float32(classes) * dtotal[0]
        if same:
            _slopes(target, target, class_weight, scale, spread)
        else:
            _slopes(row, target, class_weight, scale, spread)
        if inside:
            target[wanted] -= hit


@inlined
def _slopes_of_class(row, target, hit, shared, spread, counts):
    for p in range(target.size):
        dense = exp(row[p]) * (hit[p] + shared) - spread
        target[p] = dense if counts[p] != np.float32(0.0) else np.float32(0.0)


@jit
def _softmax_cross_entropy_grad_planes(
    dtotal, log_prob, label, class_weight, ignores, ignored, smoothing, mean_weight, same, dlogits, room, start, stop
):
    before, classes, behind = log_prob.shape
    tiles, parts = (behind + _TILE - 1) // _TILE, room.shape[0]
    count = before * tiles
    shared = smoothing * mean_weight[0] * dtotal[0]
    for part in range(start, stop):
        hit, counts = room[part, 0], room[part, 1]
        for tile in range(count * part // parts, count * (part + 1) // parts):
            n, first = tile // tiles, tile % tiles * _TILE
            width = min(_TILE, behind - first)
            labels = label[n * behind + first : n * behind + first + width]
            for p in range(width):
                wanted = labels[p]
                weighs = np.float32(np.nan)
                if 0 <= wanted < classes:
                    weighs = class_weight[wanted] if class_weight.size else np.float32(1.0)
                hit[p] = weighs * dtotal[0] * (np.float32(1.0) - smoothing)
                counts[p] = np.float32(0.0) if ignores and wanted == ignored else np.float32(1.0)
            for c in range(classes):
                row, target = log_prob[n, c, first : first + width], dlogits[n, c, first : first + width]
                spread = smoothing / np.float32(classes) * dtotal[0]
                if class_weight.size:
                    spread *= class_weight[c]
                if same:
                    _slopes_of_class(target, target, hit, shared, spread, counts)
                else:
                    _slopes_of_class(row, target, hit, shared, spread, counts)
            for p in range(width):
                wanted = labels[p]
                if counts[p] != np.float32(0.0) and 0 <= wanted < classes:
                    dlogits[n, wanted, first + p] -= hit[p]
