"""Rounds trained parameters to the integers in which their file holds them.

    parameter = (integers - zero) · scale          trained: integers' = round(parameter' / scale) + zero

A parameter that has left the range of its integers gets a larger scale, where nothing else in the file uses that scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.quantized import QUANTIZED, Array, Factor, Quantized, Read


def quantized_parameters(graph: ir.Graph) -> dict[str, Quantized]:
    """The float initializers of ``graph`` that the file holds as integers."""
    found = {name: value.metadata_props.get(QUANTIZED) for name, value in graph.initializers.items()}
    return {name: Quantized.from_json(text) for name, text in found.items() if text is not None}


def requantize(records: Mapping[str, Quantized], values: Mapping[str, Array], read: Read) -> dict[str, Array]:
    """Constants of the file, by name, that give its parameters new values as nearly as their integers can.

    Args:
        records: parameter → where the file holds it.
        values: parameter → new value; one without keeps its value.
        read: constant of the file → its array.

    Warns (``UserWarning``) of values that are cut off, because their scale serves other tensors too.
    """
    made: dict[str, Array] = {}
    cut: list[str] = []
    for name, record in sorted(records.items(), key=lambda item: item[1].wide):  # scales of biases follow those of weights
        levels, zero = record.levels(read), record.zero_point(read)
        scale = record.scale(read)
        value = values.get(name)
        if value is None:
            value = record.value(levels, scale, zero)
        before = record.value(levels, scale.astype(value.dtype), zero)
        low, high = limits(levels) if record.packed is None else (0, 2**record.packed.bits - 1)
        if record.wide:
            made |= _followed_scale(record, read, made)
        else:
            made |= _wider(record, value, scale, zero, (low, high), read)
        after, shift = record.scale(_latest(read, made)), record.zero_point(_latest(read, made))
        exact = np.divide(value, after, out=np.zeros(value.shape), where=after != 0, dtype=np.float64) + shift
        rounded = exact if levels.dtype.kind == "V" and _is_float(levels) else np.rint(exact)
        if not record.wide and ((rounded < low) | (rounded > high)).any():
            cut.append(name)
        new = np.clip(rounded, low, high).astype(levels.dtype)
        kept = (value == before) & (after == scale) & (shift == zero)
        new = np.where(kept, levels, new)
        if (new != levels).any():
            made[record.integers] = new if record.packed is None else record.packed.pack(new, read(record.integers))
    if cut:
        names = ", ".join(map(repr, cut[:8])) + (f" and {len(cut) - 8} more" if len(cut) > 8 else "")
        warnings.warn(
            f"export: {counted(len(cut), 'parameter')} left the range of their integers and are cut off: {names}", stacklevel=2
        )
    return made


def _latest(read: Read, made: Mapping[str, Array]) -> Read:
    return lambda name: made[name] if name in made else read(name)


def _is_float(levels: Array) -> bool:
    try:
        ml_dtypes.finfo(levels.dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return False
    return True


def limits(levels: Array) -> tuple[float, float]:
    """The range in which new integers must lie: that of the type, or the smaller one that the file's keep to.

    Exporters leave out -128, and with ``reduce_range`` use 7 of 8 bits, for the sake of instructions that overflow.
    """
    if _is_float(levels):
        most = float(ml_dtypes.finfo(levels.dtype).max)  # type: ignore[no-untyped-call]
        return -most, most
    info: Any = np.iinfo if levels.dtype.kind in "iu" else ml_dtypes.iinfo
    low, high = int(info(levels.dtype).min), int(info(levels.dtype).max)
    if levels.size == 0:
        return low, high
    least, most = int(levels.min()), int(levels.max())
    if levels.dtype == np.int8 and least >= -64 and most <= 64 and max(-least, most) >= 63:
        return -64, 64
    if levels.dtype == np.uint8 and most in (126, 127):
        return 0, 127
    return (low + 1 if low < 0 and least > low and high < 2**31 - 1 else low), high


def _wider(
    record: Quantized, value: Array, scale: Array, zero: Array, bounds: tuple[float, float], read: Read
) -> dict[str, Array]:
    """New scales, and zero points, of the groups of elements that left the range of their integers."""
    low, high = bounds
    steps = np.divide(value, scale, out=np.zeros(value.shape), where=scale != 0, dtype=np.float64)
    if bool(((np.rint(steps) + zero >= low) & (np.rint(steps) + zero <= high)).all()):
        return {}
    factor = next((f for f in record.scales if f.free and f.packed is None), None)
    if factor is None:
        return {}
    above, below = np.maximum(high - zero, 1e-9), np.maximum(zero - low, 1e-9)
    need = np.broadcast_to(np.where(steps > 0, steps / above, -steps / below), value.shape)
    ratio = np.maximum(record.greatest(need, factor.view), 1.0)
    moved: dict[str, Array] = {}
    middle = record.zero
    if (
        middle is not None
        and middle.free
        and middle.packed is None
        and middle.view == factor.view
        and _is_lopsided(zero, bounds)
    ):
        # an asymmetric range, which may have to reach to the other side of 0
        most, least = (np.maximum(record.greatest(side, factor.view), 0.0) for side in (steps, -steps))
        over = ratio > 1.0
        whole = np.where(over, (most + least) / (high - low), 1.0)
        point = np.rint(low + least / np.where(whole > 0, whole, 1.0))
        old = middle.read(read)
        moved[middle.name] = _shaped(np.where(over, np.clip(point, low, high), old), read(middle.name))
        ratio = whole
    moved[factor.name] = _shaped(factor.read(read) * ratio, read(factor.name))
    return moved


def _is_lopsided(zero: Array, bounds: tuple[float, float]) -> bool:
    """Whether a zero point lies off the middle: the range was chosen by the values, not symmetric around 0."""
    return bool((np.abs(zero - (bounds[0] + bounds[1]) / 2) > 1).any())


def _followed_scale(record: Quantized, read: Read, made: Mapping[str, Array]) -> dict[str, Array]:
    """The scale of a bias whose weight got another one; runtimes that fuse the layer assume the product."""
    if record.follows is None or record.follows not in made:
        return {}
    factor: Factor = record.scales[0]
    ratio = made[record.follows].astype(np.float64) / read(record.follows)
    own = factor.read(read)
    if not factor.free or ratio.size not in (1, own.size):
        return {}
    return {factor.name: _shaped(own * ratio.reshape(own.shape if ratio.size == own.size else ()), read(factor.name))}


def _shaped(array: Any, like: Array) -> Array:
    return np.asarray(array).reshape(like.shape).astype(like.dtype)
