"""Says what the elements of a constant look like: a learned weight, a repeated number, or the result of a formula.

A weight that was learned, or drawn at random, is irregular. What a framework computes once and keeps (position tables,
windows, Fourier bases, filter banks, masks, grids, anchors) follows a rule that shows in the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.ir.state import repeats_one_value

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Look(Enum):
    """What the elements of a tensor look like; the value says it in words."""

    UNIFORM = "one repeated value"
    TWO_VALUES = "a mask or selection: two values only"
    RAMP = "a ramp: equal steps or ratios along an axis"
    CURVE = "a table of ramps, powers or sinusoids"
    BASIS = "a basis of windowed sinusoids, or symmetric filters"
    FILTERS = "a bank of filters: not negative, one hump each"
    REPEATED = "the same filter for every channel"
    WHOLE = "whole numbers or simple fractions"
    IRREGULAR = "irregular values"


COMPUTED = frozenset({Look.RAMP, Look.CURVE, Look.BASIS, Look.FILTERS})
"""Looks of what a formula makes and training never leaves."""

_FEWEST = 8
"""Elements that a pattern needs before it is believed; a mask needs as many."""

_SHORT = 5
"""Elements of a line that can say anything."""

_SEEN = 64
"""Elements of a line that are looked at."""

_LONG = 24
"""Elements that a windowed sinusoid needs."""

_FIBRES = 64
"""Number of lines along an axis that are looked at."""

_LIMIT = 1 << 18
"""Elements above which only the first are looked at."""


def look(tensor: ir.TensorProtocol) -> Look:
    """What the elements look like; of several descriptions that fit, the most telling one."""
    if tensor.size < 2 or repeats_one_value(tensor):
        return Look.UNIFORM
    exact = _first(np.asarray(tensor.numpy())).astype(np.float64)
    precision = _precision(tensor.dtype)
    if not np.isfinite(exact).all():
        return Look.TWO_VALUES if _values(exact) <= 2 else Look.IRREGULAR
    if exact.size >= _FEWEST and _values(exact) <= 2:
        return Look.TWO_VALUES
    if _is_ramp(exact, 8 * precision):
        return Look.RAMP
    if any(_follows_recurrence(exact, axis, max(1e-5, 16 * precision)) for axis in range(exact.ndim)):
        return Look.CURVE
    if any(_is_basis(exact, axis, 16 * precision) for axis in range(exact.ndim)):
        return Look.BASIS
    if _is_filter_bank(exact):
        return Look.FILTERS
    if exact.ndim >= 3 and exact.shape[0] > 2 and bool((exact == exact[:1]).all()):
        return Look.REPEATED
    return Look.WHOLE if _is_whole(exact) else Look.IRREGULAR


def _first(array: Array) -> Array:
    """The first elements of a large array, cut along its first axis of several."""
    if array.size <= _LIMIT:
        return array
    axis = next(k for k, size in enumerate(array.shape) if size > 1)
    kept = max(1, _LIMIT * array.shape[axis] // array.size)
    return array[(slice(None),) * axis + (slice(kept),)]


def _precision(dtype: ir.DataType) -> float:
    """The spacing of numbers near 1."""
    return {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}.get(dtype, 6e-8)


def _values(array: Array) -> int:
    """Number of different elements, counted up to 3."""
    rest, count = array.reshape(-1), 0
    if len(np.unique(rest[:_SEEN])) > 2:
        return 3
    while rest.size and count < 3:
        rest = rest[rest != rest[0]]
        count += 1
    return count


def _is_ramp(array: Array, tolerance: float) -> bool:
    """Whether one axis alone has several elements, at equal steps or ratios: ``arange``, ``linspace``, ``logspace``."""
    if sum(size > 1 for size in array.shape) != 1 or array.size < 4:
        return False
    flat = array.reshape(-1)
    if bool(np.abs(np.diff(flat, 2)).max() <= tolerance * np.abs(flat).max()):
        return True
    ratios = flat[1:] / flat[:-1] if flat.all() else np.zeros(1)
    return bool(ratios[0] > 0 and np.abs(ratios / ratios[0] - 1).max() <= 4 * tolerance)


def _follows_recurrence(array: Array, axis: int, tolerance: float) -> bool:
    """Whether every line along ``axis`` obeys a linear recurrence of order 3 or less, and not all are constant.

    x[i+3] = a·x[i+2] + b·x[i+1] + c·x[i] holds for ramps, powers, sinusoids and raised cosines (Hann, Hamming), each line with
    its own a, b, c; for random numbers never. Halves of the axis count by themselves: cosines and sines are often stacked.
    """
    length = array.shape[axis]
    if length < _SHORT:
        return False
    lines = np.moveaxis(array, axis, -1).reshape(-1, length)
    lines = lines[:: max(1, len(lines) // _FIBRES)]
    moving = lines[(lines != lines[:, :1]).any(axis=1)]
    if len(moving) == 0:
        return False
    half = length // 2
    parts = [(slice(None),), (slice(1, half - 1), slice(half + 1, length - 1))] if half - 2 >= _FEWEST else [(slice(None),)]
    top = np.abs(array).max()
    moving = moving[np.abs(moving).max(axis=1) > 1e-3 * top]  # sines of multiples of π are rounding errors
    if length < _FEWEST:  # an order of 2 leaves few numbers of a short line unexplained, but those of many lines
        return (length - 4) * len(moving) >= 2 * _FEWEST and _most(_residuals(moving, order=2) <= tolerance)
    some = moving[: len(moving) // 4 + 1]  # where none of them does, most do not
    return len(moving) > 0 and any(
        bool(_follow(some, cut, tolerance).any()) and _most(_follow(moving, cut, tolerance)) for cut in parts
    )


def _follow(lines: Array, cut: Sequence[slice], tolerance: float) -> Array:
    """Which of the lines obey a recurrence in every part of the cut."""
    found = np.ones(len(lines), bool)
    for part in cut:
        found[found] = _residuals(_seen(lines[found][:, part])) <= tolerance
    return found


def _seen(lines: Array) -> Array:
    """A few elements of each line, from shortly before its first step on; of lines that step late the last ones."""
    first = np.argmax(lines != lines[:, :1], axis=1)
    count = min(_SEEN, lines.shape[1])
    start = np.clip(first - _FEWEST, 0, lines.shape[1] - count)
    return np.take_along_axis(lines, start[:, None] + np.arange(count), axis=1)


def _most(found: Array) -> bool:
    """Whether three of four are true: tables computed in float32 are inexact where their arguments are large."""
    return 4 * int(found.sum()) >= 3 * len(found)


def _is_basis(array: Array, axis: int, tolerance: float) -> bool:
    """Whether the lines along ``axis`` are sinusoids under a raised-cosine window, zero around it: recurrences of order 6."""
    length = array.shape[axis]
    if length < _LONG:
        return False
    lines = np.moveaxis(array, axis, -1).reshape(-1, length)
    lines = lines[:: max(1, len(lines) // _FIBRES)]
    lines = lines[np.abs(lines).max(axis=1) > 1e-3 * np.abs(array).max()]
    lines = lines[(lines != lines[:, :1]).any(axis=1)]
    inner = [line[np.flatnonzero(line)[0] : np.flatnonzero(line)[-1] + 1] for line in lines if line.any()]
    long = [line for line in inner if len(line) >= _LONG]
    if 2 * len(long) <= len(lines):
        return False
    mirrored = all(bool((np.abs(line) == np.abs(line[::-1])).all()) for line in long)  # filters of linear phase
    return mirrored or all(_residuals(line[None], order=6)[0] <= tolerance for line in long)


def _residuals(lines: Array, order: int = 3) -> Array:
    """How far each line is from a linear recurrence, relative to its largest element."""
    top = np.abs(lines).max(axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(lines, order + 1, axis=1)
    least = np.linalg.svd(windows, compute_uv=False)[:, -1]
    found: Array = least / (math.sqrt(windows.shape[1]) * np.where(top > 0, top, 1.0))  # of a line of zeros, 0
    return found


def _is_filter_bank(array: Array) -> bool:
    """Whether the lines along one axis are overlapping humps: mel filters."""
    if array.squeeze().ndim != 2 or array.min() < 0 or (array == 0).mean() < 0.5:
        return False
    matrix = array.squeeze()
    return min(matrix.shape) >= 4 and any(all(_one_hump(line) for line in lines) for lines in (matrix, matrix.T))


def _one_hump(line: Array) -> bool:
    """Whether a line is zero, rises once, falls once and is zero again."""
    turns = np.sign(np.diff(line))
    turns = turns[turns != 0]
    return int((np.diff(turns) != 0).sum()) <= 1 and (len(turns) == 0 or turns[0] > 0 or len(np.unique(turns)) == 1)


def _is_whole(array: Array) -> bool:
    """Whether all elements are multiples of 1/64."""
    scaled = array.reshape(-1)[:_SEEN] * 64
    if (scaled != np.round(scaled)).any():
        return False
    scaled = array * 64
    return bool(np.abs(array).max() < (1 << 20) and (scaled == np.round(scaled)).all())
