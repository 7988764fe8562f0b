"""Says what the elements of a constant look like: a learned weight, a repeated number, or the result of a formula.

A weight that was learned, or drawn at random, is irregular. What a framework computes once and keeps (position tables,
windows, Fourier bases, filter banks, masks, grids, anchors) follows a rule that shows in the numbers.
"""

from __future__ import annotations

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
    RAMP = "a ramp: equal steps along an axis"
    CURVE = "a table of ramps, powers or sinusoids"
    FILTERS = "a bank of filters: not negative, one hump each"
    REPEATED = "the same filter for every channel"
    WHOLE = "whole numbers or simple fractions"
    IRREGULAR = "irregular values"


COMPUTED = frozenset({Look.RAMP, Look.CURVE, Look.FILTERS})
"""Looks of what a formula makes and training never leaves."""

_FEWEST = 8
"""Elements that a pattern needs before it is believed; a mask needs as many."""

_FIBRES = 64
"""Number of lines along an axis that are looked at."""

_LIMIT = 1 << 18
"""Elements above which only the first are looked at."""


def look(tensor: ir.TensorProtocol) -> Look:
    """What the elements look like; of several descriptions that fit, the most telling one."""
    if tensor.size < 2 or repeats_one_value(tensor):
        return Look.UNIFORM
    exact = _first(np.asarray(tensor.numpy())).astype(np.float64)
    tolerance = 16 * _precision(tensor.dtype)
    if not np.isfinite(exact).all():
        return Look.TWO_VALUES if _values(exact) <= 2 else Look.IRREGULAR
    if exact.size >= _FEWEST and _values(exact) <= 2:
        return Look.TWO_VALUES
    if _is_ramp(exact, tolerance):
        return Look.RAMP
    if any(_follows_recurrence(exact, axis, tolerance) for axis in range(exact.ndim)):
        return Look.CURVE
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
    while rest.size and count < 3:
        rest = rest[rest != rest[0]]
        count += 1
    return count


def _is_ramp(array: Array, tolerance: float) -> bool:
    """Whether one axis alone has several elements, at equal steps: ``arange`` or ``linspace``."""
    if sum(size > 1 for size in array.shape) != 1 or array.size < 4:
        return False
    flat = array.reshape(-1)
    return bool(np.abs(np.diff(flat, 2)).max() <= tolerance / 2 * np.abs(flat).max())


def _follows_recurrence(array: Array, axis: int, tolerance: float) -> bool:
    """Whether every line along ``axis`` obeys a linear recurrence of order 3 or less, and not all are constant.

    x[i+3] = a·x[i+2] + b·x[i+1] + c·x[i] holds for ramps, powers, sinusoids and raised cosines (Hann, Hamming), each line with
    its own a, b, c; for random numbers never. Halves of the axis count by themselves: cosines and sines are often stacked.
    """
    length = array.shape[axis]
    if length < _FEWEST:
        return False
    lines = np.moveaxis(array, axis, -1).reshape(-1, length)
    lines = lines[:: max(1, len(lines) // _FIBRES)]
    moving = lines[(lines != lines[:, :1]).any(axis=1)]
    if len(moving) == 0:
        return False
    half = length // 2
    parts = [(slice(None),), (slice(1, half - 1), slice(half + 1, length - 1))] if half - 2 >= _FEWEST else [(slice(None),)]
    floor = 1e-3 * float(np.abs(array).max())  # sines of multiples of π are rounding errors
    return any(all(_residual(line[part], floor) <= tolerance for line in moving for part in cut) for cut in parts)


def _residual(line: Array, floor: float) -> float:
    """How far a line is from a recurrence of order 3, relative to its largest element, at least ``floor``."""
    line = line[:512]
    top = max(floor, float(np.abs(line).max()))
    windows = np.lib.stride_tricks.sliding_window_view(line, 4)
    return float(np.linalg.svd(windows, compute_uv=False)[-1]) / np.sqrt(len(windows)) / top


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
    scaled = array * 64
    return bool(np.abs(array).max() < (1 << 20) and (scaled == np.round(scaled)).all())
