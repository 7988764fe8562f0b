"""Replacements for ops whose implementation in ``onnx.reference`` is wrong or less precise than its operands.

====================  ========================================================================================
ConvTranspose         mixes up groups
MaxPool               Indices of overlapping windows, asymmetric pads
AveragePool, LpPool   take minutes for volumes
GlobalLpPool          missing
GlobalMaxPool         reduces other axes than the spatial ones, unless there are two
GatherElements        along an axis of one element
LRN                   sums around the sample's index instead of the channel's; four dimensions only
Mean                  of operands that broadcast
LpNormalization       p = 1 without absolute values, axis = 0
Erf, GroupNormalization, LayerNormalization, AffineGrid   float32 inside whatever the type
====================  ========================================================================================

The evaluator finds the classes by the names of the ops; attributes come as keyword arguments.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from graphc.backends.numpy.control import If, Loop, Optional, OptionalGetElement, Scan, SequenceInsert, SequenceMap
from graphc.device import Array

Ints = Sequence[int]


class _Operator(OpRun):
    """Base of the replacements for ops of the standard domain."""

    op_domain = ""


def _same_pads(x: Array, strides: Ints, reach: Ints, auto_pad: str | None) -> list[tuple[int, int]] | None:
    """(begin, end) pads of SAME_UPPER and SAME_LOWER; None for explicit pads."""
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return None
    totals = [max(0, (-(-n // s) - 1) * s + r - n) for n, s, r in zip(x.shape[2:], strides, reach, strict=True)]
    halves = [(t // 2, t - t // 2) for t in totals]
    return halves if auto_pad == "SAME_UPPER" else [half[::-1] for half in halves]


def _windows(x: Array, fill: Any, pool: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """All windows of ``x`` as (N, C, *out, elements), which elements are real, and which are at least in the padding.

    The last window of ``ceil_mode`` may reach over the padding; it must begin inside of the input or its left padding.
    ``pool`` holds the op's attributes.
    """
    kernel, ceil_mode, sizes = pool["kernel_shape"], pool.get("ceil_mode"), x.shape[2:]
    count = len(kernel)
    strides, dilations = pool.get("strides") or [1] * count, pool.get("dilations") or [1] * count
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = pool.get("pads") or [0] * 2 * count
    both = _same_pads(x, strides, reach, pool.get("auto_pad")) or list(zip(pads[:count], pads[count:], strict=True))
    outs = []
    for n, s, (begin, end), r in zip(sizes, strides, both, reach, strict=True):
        room = n + begin + end - r
        out = -(-room // s) + 1 if ceil_mode else room // s + 1
        outs.append(out - 1 if ceil_mode and (out - 1) * s >= n + begin else out)
    needed = [(out - 1) * s + r for out, s, r in zip(outs, strides, reach, strict=True)]
    spill = [max(0, need - n - b - e) for need, n, (b, e) in zip(needed, sizes, both, strict=True)]

    def cut(array: Array, outer: Any, inner: Any) -> Array:
        """Pad with ``inner``, then to the reach of the last window with ``outer``, and take the windows."""
        array = np.pad(array, [(0, 0), (0, 0), *both], constant_values=inner)
        array = np.pad(array, [(0, 0), (0, 0), *((0, extra) for extra in spill)], constant_values=outer)
        view = np.lib.stride_tricks.sliding_window_view(array, reach, axis=tuple(range(2, array.ndim)))
        steps = tuple(slice(0, out * s, s) for out, s in zip(outs, strides, strict=True))
        view = view[(slice(None), slice(None), *steps, *(slice(None, None, d) for d in dilations))]
        return view.reshape(*view.shape[: 2 + count], math.prod(kernel))

    ones = np.ones((1, 1, *sizes), dtype=bool)
    return cut(x, fill, fill), cut(ones, False, False), cut(ones, False, True)


class MaxPool(_Operator):
    """y = max over the window; Indices: its place in the whole input: the first of equal ones, the last NaN; no padding."""

    def _run(self, x: Array, storage_order: int | None = None, **pool: Any) -> tuple[Array, ...]:
        least = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
        windows, real, _ = _windows(x, least, pool)
        y = windows.max(axis=-1)
        if len(self.output) == 1:
            return (y,)
        places = np.arange(math.prod(x.shape[2:]), dtype=np.int64).reshape(x.shape[2:], order="F" if storage_order else "C")
        positions, _, _ = _windows(places[None, None], 0, pool)
        chosen = np.argmax((windows == y[..., None]) & real, axis=-1)
        unknown = np.not_equal(windows, windows)
        chosen = np.where(unknown.any(axis=-1), unknown.shape[-1] - 1 - np.argmax(unknown[..., ::-1], axis=-1), chosen)
        inside = np.take_along_axis(np.broadcast_to(positions, windows.shape), chosen[..., None], axis=-1)[..., 0]
        planes = np.arange(x.shape[0] * x.shape[1], dtype=np.int64) * math.prod(x.shape[2:])
        return y, inside + planes.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


class AveragePool(_Operator):
    """y = Σ window / number of its elements, those in the padding counted with ``count_include_pad``."""

    def _run(self, x: Array, count_include_pad: int | None = None, **pool: Any) -> tuple[Array, ...]:
        windows, real, padded = _windows(x, 0, pool)
        count = (padded if count_include_pad else real).sum(axis=-1)
        return ((windows.sum(axis=-1) / count).astype(x.dtype),)


class LpPool(_Operator):
    """y = (Σ |window|^p)^(1/p)"""

    def _run(self, x: Array, p: int = 2, **pool: Any) -> tuple[Array, ...]:
        windows, _, _ = _windows(x, 0, pool)
        return (((np.abs(windows) ** p).sum(axis=-1) ** (1.0 / p)).astype(x.dtype),)


class GlobalLpPool(_Operator):
    """y = (Σ |channel|^p)^(1/p)"""

    def _run(self, x: Array, p: int = 2) -> tuple[Array, ...]:
        total = (np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
        return ((total ** (1.0 / p)).astype(x.dtype),)


class GlobalMaxPool(_Operator):
    """The largest element of a channel."""

    def _run(self, x: Array) -> tuple[Array, ...]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GatherElements(_Operator):
    """Elements by their index along an axis; a negative one counts from its end."""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array, ...]:
        places: list[Array] = list(np.indices(indices.shape, sparse=True))
        places[axis] = indices
        return (data[tuple(places)],)


class Mean(_Operator):
    """The mean of the operands, which broadcast."""

    def _run(self, *operands: Array) -> tuple[Array, ...]:
        total = functools.reduce(np.add, operands)
        return (np.asarray(total / len(operands), total.dtype),)


class ConvTranspose(_Operator):
    """Every input element adds its multiple of the kernel to the output, ``strides`` apart; the pads are cut off."""

    def _run(
        self, X: Array, W: Array, B: Array | None = None, group: int = 1, output_padding: Ints | None = None, **window: Any
    ) -> tuple[Array, ...]:
        count = X.ndim - 2
        kernel, sizes = W.shape[2:], X.shape[2:]
        strides, dilations = window.get("strides") or [1] * count, window.get("dilations") or [1] * count
        full = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)]
        wanted, auto_pad = window.get("output_shape"), window.get("auto_pad")
        if wanted is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            wanted = [n * s for n, s in zip(sizes, strides, strict=True)]
        grown = [f + e for f, e in zip(full, output_padding or [0] * count, strict=True)]
        if wanted is not None:
            outs = list(wanted)[-count:]
            totals = [max(0, g - o) for g, o in zip(grown, outs, strict=True)]
            begins = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals]
        else:
            pads = list(window.get("pads") or [0] * 2 * count)
            begins = pads[:count]
            outs = [g - b - a for g, b, a in zip(grown, begins, pads[count:], strict=True)]
        channels = W.shape[1] * group
        total = np.zeros((X.shape[0], channels, *(max(f, b + o) for f, b, o in zip(full, begins, outs, strict=True))), X.dtype)
        x = X.reshape(X.shape[0], group, X.shape[1] // group, -1)
        w = W.reshape(group, W.shape[0] // group, *W.shape[1:])
        for place in itertools.product(*map(range, kernel)):
            part = np.einsum("ngci,gco->ngoi", x, w[(slice(None),) * 3 + place]).reshape(X.shape[0], channels, *sizes)
            steps = zip(place, dilations, sizes, strides, strict=True)
            where: Any = (..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in steps))
            total[where] += part
        inside: Any = (..., *(slice(b, b + o) for b, o in zip(begins, outs, strict=True)))
        y = total[inside]
        if B is not None:
            y = y + B.reshape(1, -1, *[1] * count)
        return (y.astype(X.dtype),)


class LRN(_Operator):
    """y = x / (bias + alpha/size · Σ x² over ``size`` channels around each)^beta"""

    def _run(self, x: Array, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int = 1) -> tuple[Array, ...]:
        squares = np.pad(x * x, [(0, 0), ((size - 1) // 2, size - 1 - (size - 1) // 2), *[(0, 0)] * (x.ndim - 2)])
        total = sum(squares[:, k : k + x.shape[1]] for k in range(size))
        return ((x / (bias + (alpha / size) * total) ** beta).astype(x.dtype),)


class LpNormalization(_Operator):
    """y = x / (Σ |x|^p)^(1/p) over the axis; 0 where the norm is 0"""

    def _run(self, x: Array, axis: int = -1, p: int = 2) -> tuple[Array, ...]:
        norm = (np.abs(x) ** p).sum(axis=axis, keepdims=True) ** (1.0 / p)
        return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(x.dtype),)


class Erf(_Operator):
    """erf in float64 inside"""

    def _run(self, x: Array) -> tuple[Array, ...]:
        return (np.vectorize(math.erf, otypes=["d"])(np.asarray(x, dtype=np.float64)).astype(x.dtype),)


def _stash(x: Array) -> Array:
    """Half precision is widened before statistics are taken, as ``stash_type`` asks; float64 stays."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


class LayerNormalization(_Operator):
    """y = (x − mean) / √(var + ε) · scale + bias over the dimensions from ``axis`` on"""

    def _run(
        self, X: Array, scale: Array, bias: Array | None = None, axis: int = -1, epsilon: float = 1e-5, **_: Any
    ) -> tuple[Array, ...]:
        x, axes = _stash(X), tuple(range(axis % X.ndim, X.ndim))
        mean = x.mean(axis=axes, keepdims=True)
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axis=axes, keepdims=True) + x.dtype.type(epsilon))
        y = ((x - mean) * inverse).astype(X.dtype) * scale
        y = y if bias is None else y + bias
        return (y.astype(X.dtype), mean, inverse)[: len(self.output)]


class GroupNormalization(_Operator):
    """y = (x − mean) / √(var + ε) · scale + bias, with statistics of each group of channels"""

    def _run(
        self, X: Array, scale: Array, bias: Array, epsilon: float = 1e-5, num_groups: int = 1, **_: Any
    ) -> tuple[Array, ...]:
        x = _stash(X).reshape(X.shape[0], num_groups, -1)
        mean = x.mean(axis=-1, keepdims=True)
        y = (x - mean) / np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + x.dtype.type(epsilon))
        column = (1, -1, *[1] * (X.ndim - 2))
        return ((y.reshape(X.shape).astype(X.dtype) * scale.reshape(column) + bias.reshape(column)).astype(X.dtype),)


class AffineGrid(_Operator):
    """grid = theta · (x, y[, z], 1) of every point of the output, in the type of ``theta``"""

    def _run(self, theta: Array, size: Array, align_corners: int | None = None) -> tuple[Array, ...]:
        sizes = [int(d) for d in size[2:]]
        steps = [(2 * np.arange(n) - n + 1) / (max(n - 1, 1) if align_corners else n) for n in sizes]
        points = np.stack([*np.meshgrid(*steps, indexing="ij")[::-1], np.ones(sizes)], axis=-1)
        grid = np.einsum("nij,...j->n...i", theta.astype(np.float64), points)
        return (grid.astype(theta.dtype),)


REPAIRED: tuple[type[OpRun], ...] = (
    AffineGrid,
    AveragePool,
    ConvTranspose,
    Erf,
    GatherElements,
    GlobalLpPool,
    GlobalMaxPool,
    GroupNormalization,
    If,
    LRN,
    LayerNormalization,
    Loop,
    LpNormalization,
    LpPool,
    MaxPool,
    Mean,
    Optional,
    OptionalGetElement,
    Scan,
    SequenceInsert,
    SequenceMap,
)
"""The implementations that replace the evaluator's own."""
