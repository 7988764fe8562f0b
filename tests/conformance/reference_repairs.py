"""Ops of ``onnx.reference`` that are wrong or compute in float32 whatever their operands, beyond those of the numpy backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_causal_conv_with_state import CausalConvWithState as _CausalConvWithState
from onnx.reference.ops.op_scatter_elements import ScatterElements

from graphc.backends.numpy.operators import REPAIRED
from tests.conformance.sampling_reference import DeformConv, GridSample

Array = np.ndarray[Any, Any]


class CausalConvWithState(_CausalConvWithState):
    """The activation is applied in float32."""

    op_domain = ""

    def _run(self, *operands: Array, activation: str | None = None) -> tuple[Array, Array]:
        y, state = super()._run(*operands, activation="none")
        return (y / (1 + np.exp(-y)) if activation in ("silu", "swish") else y), state


class DynamicQuantizeLinear(OpRun):
    """The scale comes out in float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array, Array, Array]:
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        scale = (high - low) / 255
        zero = np.clip(np.round(-low / scale), 0, 255)
        y = np.clip(np.round(x / scale) + zero, 0, 255)
        return y.astype(np.uint8), np.asarray(scale, x.dtype), zero.astype(np.uint8)


class Gelu(OpRun):
    """The error function is that of float32."""

    op_domain = ""

    def _run(self, x: Array, approximate: str | None = None) -> tuple[Array]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))),)


class MeanVarianceNormalization(OpRun):
    """Runs as a function body with constants of float32, which refuses operands of float64."""

    op_domain = ""

    def _run(self, x: Array, axes: Any = None) -> tuple[Array]:
        over = tuple(axes if axes is not None else (0, 2, 3))
        mean = x.mean(over, keepdims=True)
        deviation = np.sqrt((x**2).mean(over, keepdims=True) - mean**2)
        return ((x - mean) / (deviation + 1e-9),)


class Scatter(ScatterElements):
    """The deprecated name of ScatterElements is not known."""

    op_domain = ""


class Unique(OpRun):
    """``sorted=0`` takes slices along axis 0 whatever the axis, and is ignored when the values are the only output."""

    op_domain = ""

    def _run(self, x: Array, axis: int | None = None, sorted: int | None = None) -> tuple[Array, ...]:
        along = None if axis is None or np.isnan(axis) else int(axis)
        y, first, inverse, counts = np.unique(x, True, True, True, axis=along)
        inverse = inverse.reshape(-1)
        if sorted == 0:
            order = np.argsort(first)
            y, first, counts = np.take(y, order, axis=along or 0), first[order], counts[order]
            inverse = np.argsort(order)[inverse]
        found = (y, *(part.astype(np.int64) for part in (first, inverse, counts)))
        return found[: len(self.onnx_node.output)]


_OWN: tuple[type[OpRun], ...] = (
    CausalConvWithState,
    DeformConv,
    DynamicQuantizeLinear,
    Gelu,
    GridSample,
    MeanVarianceNormalization,
    Scatter,
    Unique,
)
REPAIRS: tuple[type[OpRun], ...] = (*(op for op in REPAIRED if op.__name__ not in {own.__name__ for own in _OWN}), *_OWN)
