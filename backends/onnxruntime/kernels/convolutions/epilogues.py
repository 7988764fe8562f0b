"""What follows a convolution: y = activation(scale · y + shift + residual).

Kernels of our own compute it where they write their results, which costs next to nothing. oneDNN scales and shifts; behind it,
:func:`finish` sweeps over the results for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphc.backend import Binding, Pool
from graphc.backends.onnxruntime.kernels.common.arrays import optional
from graphc.backends.onnxruntime.kernels.common.jit import inlined, jit
from graphc.device import Array, Run, in_order

CODES = {"leaky_relu": 1, "hard_sigmoid": 2, "hard_swish": 3}
BETWEEN, LEAKY_RELU, HARD_SIGMOID, HARD_SWISH = range(4)
"""Activations as compiled code knows them: the first leaves results between two bounds, which may be infinite, as a loop does
that writes them; :func:`activate_line` does the others.
"""

GRAIN, BLOCK = 16384, 2048
"""Results that are worth handing to another thread, and those that are swept over at a time."""


@dataclass(frozen=True, slots=True)
class ConvEpilogue:
    """What follows; ``scale`` and ``shift`` have a number for each channel."""

    scale: Array | None = None
    shift: Array | None = None
    residual: Array | None = None
    activation: str = ""
    alpha: float = 0.0
    beta: float = 0.0

    @classmethod
    def of(cls, k: Binding, first: int) -> ConvEpilogue:
        """That of a node whose operands from ``first`` on are scale, shift and residual."""
        scale, shift, residual = (optional(k.inputs, first + i) for i in range(3))
        return cls(scale, shift, residual, *(k.attributes[name] for name in ("activation", "alpha", "beta")))

    @property
    def is_shift(self) -> bool:
        """Whether nothing but a shift follows, or nothing."""
        return self.scale is None and self.residual is None and not self.activation

    @property
    def is_nothing(self) -> bool:
        """Whether results stay as they are."""
        return self.is_shift and self.shift is None

    @property
    def bias(self) -> Array | None:
        """What a kernel may add to its results by itself: the shift, if no scale comes before it."""
        return self.shift if self.scale is None else None

    @property
    def behind_bias(self) -> ConvEpilogue:
        """What follows :attr:`bias`."""
        return replace(self, shift=None) if self.scale is None else self

    def numbers(self) -> tuple[Any, ...]:
        """The code of the activation and its two numbers, for compiled code."""
        bounds = {"": (-np.inf, np.inf), "relu": (0.0, np.inf)}.get(self.activation, (self.alpha, self.beta))
        return CODES.get(self.activation, BETWEEN), *map(np.float32, bounds)

    def vectors(self, channels: int) -> tuple[Array, Array]:
        """Scale and shift of each channel."""
        scale = np.ones(channels, dtype=np.float32) if self.scale is None else self.scale.reshape(-1)
        shift = np.zeros(channels, dtype=np.float32) if self.shift is None else self.shift.reshape(-1)
        return scale, shift

    def others(self, y: Array) -> Array:
        """The residual in the shape of y; empty: there is none."""
        return np.empty((0,) * y.ndim, dtype=np.float32) if self.residual is None else self.residual.reshape(y.shape)


PLAIN = ConvEpilogue()


@inlined
def between(x, low, high):
    """x, or the bound beyond which it lies; NaN stays NaN."""
    above = low if x < low else x
    return high if above > high else above


@jit
def activate_line(line, code, alpha, beta):
    """line = activation(line); NaN stays NaN"""
    zero, one = np.float32(0.0), np.float32(1.0)
    if code == LEAKY_RELU:
        for v in range(line.size):
            line[v] = alpha * line[v] if line[v] < zero else line[v]
    elif code == HARD_SIGMOID:
        for v in range(line.size):
            line[v] = between(alpha * line[v] + beta, zero, one)
    elif code == HARD_SWISH:
        for v in range(line.size):
            line[v] *= between(line[v] * np.float32(1 / 6) + np.float32(0.5), zero, one)


def finish(pool: Pool, run: Run, y: Array, epilogue: ConvEpilogue) -> Run:
    """``run``, which makes y, N × channels × space, and a sweep over y for what follows."""
    if epilogue.is_nothing:
        return run
    planes = y.reshape(len(y) * y.shape[1], -1)
    arguments = (planes, *epilogue.vectors(y.shape[1]), epilogue.others(planes), *epilogue.numbers())
    return in_order([run, pool.bind(_finish_planes, arguments, len(planes), max(1, GRAIN // planes.shape[1]))])


@jit
def _finish_planes(y, scale, shift, others, code, alpha, beta, start, stop):
    infinity = np.float32(np.inf)
    low, high = (alpha, beta) if code == BETWEEN else (-infinity, infinity)
    for plane in range(start, stop):
        factor, added = scale[plane % scale.size], shift[plane % scale.size]
        for at in range(0, y.shape[1], BLOCK):
            line = y[plane, at : min(y.shape[1], at + BLOCK)]
            if others.size > 0:
                other = others[plane, at : at + line.size]
                for v in range(line.size):
                    line[v] = between(factor * line[v] + added + other[v], low, high)
            else:
                for v in range(line.size):
                    line[v] = between(factor * line[v] + added, low, high)
            if code != BETWEEN:
                activate_line(line, code, alpha, beta)
