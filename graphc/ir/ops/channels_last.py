"""Convolution and pooling with channels on the last axis, the fastest layout on GPUs; ONNX has none.

    y  = graphc.ChannelsLastConv(x, w, b?; attributes of Conv, activation)
    dx = graphc.ChannelsLastConvGradInput(dy, w, shape(x); attributes of Conv)
    dw = graphc.ChannelsLastConvGradWeight(x, dy, shape(w); attributes of Conv)
    y  = graphc.ChannelsLastMaxPool(x),  dx = graphc.ChannelsLastMaxPoolGrad(dy, x, y)
    y, tap = graphc.ChannelsLastMaxPoolTaps(x),  dx = graphc.ChannelsLastMaxPoolTapsGrad(dy, tap, shape(x))
    y  = graphc.ChannelsLastAveragePool(x),  dx = graphc.ChannelsLastAveragePoolGrad(dy, shape(x))

Tensors are N × spatial axes × C, weights M × kernel × C/group. Otherwise each op equals the op named after
``ChannelsLast``, which its decomposition wraps in transposes. The ``channels_last`` pass creates these ops.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import InferFunction, Spec, declare, same_as
from graphc.ir.facts import rank, required, shape_of_result
from graphc.ir.infer import infer_outputs
from graphc.ir.ops.convolution import CONV, FORWARD, POOL, Window, of_shape

PREFIX, MAX_POOL = "ChannelsLast", "MaxPool"

ACTIVATIONS = ("", "relu")


def static_dims_of(shape: ir.Shape | None) -> tuple[int, ...]:
    """The sizes of a static shape."""
    return required(shape).numpy()


def last_order(count: int) -> list[int]:
    """The position of each axis of N × C × spatial in channels-last order; as ``perm`` it moves channels to the front."""
    return [0, count - 1, *range(1, count - 1)]


def to_last(count: int) -> list[int]:
    """The ``perm`` that moves channels to the end."""
    return [0, *range(2, count), 1]


def first(op: Builder, x: ir.Value) -> ir.Value:
    """``x`` with its channels moved behind the batch axis."""
    return op.Transpose(x, perm=last_order(rank(x)))  # type: ignore[no-any-return]


def last(op: Builder, x: ir.Value) -> ir.Value:
    """``x`` with its channels moved to the end."""
    return op.Transpose(x, perm=to_last(rank(x)))  # type: ignore[no-any-return]


def _shape_first(op: Builder, shape: ir.Value, count: int) -> ir.Value:
    return op.Gather(shape, np.array(last_order(count), dtype=np.int64))  # type: ignore[no-any-return]


def _as(base: str) -> InferFunction:
    """Inference through the standard op ``base``, with the channels of the result moved to the end."""

    def infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
        turned: list[ir.Value | None] = []
        for k, value in enumerate(inputs):
            if value is None or value.shape is None or k > 1:
                turned.append(value)
                continue
            dims = [value.shape[axis] for axis in last_order(len(value.shape))]
            turned.append(ir.Value(name=value.name, type=value.type, shape=ir.Shape(dims)))
        known = {k: v for k, v in attributes.items() if v is not None and k not in ("activation", "storage_order")}
        attrs = {attr.name: attr for attr in ir.convenience.convert_attributes(known)}
        ((type_, shape),) = infer_outputs(base, "", turned, attrs, num_outputs=1)
        dtype = type_.dtype if type_ is not None else inputs[0].dtype if inputs[0] is not None else None
        return [(required(dtype), None if shape is None else ir.Shape([shape[axis] for axis in to_last(len(shape))]))]

    return infer


@declare("ChannelsLastConv", inputs="x w b?", outputs="y", infer=_as(FORWARD), attributes={**CONV, "activation": ""})
def channels_last_conv(
    op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None = None, *, activation: str, **attributes: Any
) -> ir.Value:
    """y = activation(Conv(x, w, b)); ``activation`` is empty or ``relu``."""
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation of ChannelsLastConv is one of {ACTIVATIONS}, not {activation!r}")
    y = last(op, op.Conv(first(op, x), first(op, w), b, **_given(attributes)))
    return op.Relu(y) if activation == "relu" else y


@declare("ChannelsLastConvGradInput", inputs="dy w shape", outputs="dx", infer=of_shape(0, 2), attributes=CONV)
def channels_last_conv_grad_input(op: Builder, dy: ir.Value, w: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """ConvGradInput; ``shape`` is the shape of x, channels last."""
    sizes = _shape_first(op, shape, rank(dy))
    return last(op, op.graphc.ConvGradInput(first(op, dy), first(op, w), sizes, **_given(attributes)))


@declare("ChannelsLastConvGradWeight", inputs="x dy shape", outputs="dw", infer=of_shape(0, 2), attributes=CONV)
def channels_last_conv_grad_weight(op: Builder, x: ir.Value, dy: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """ConvGradWeight; ``shape`` is the shape of w, channels last."""
    sizes = _shape_first(op, shape, rank(dy))
    return last(op, op.graphc.ConvGradWeight(first(op, x), first(op, dy), sizes, **_given(attributes)))


@declare("ChannelsLastMaxPool", inputs="x", outputs="y", infer=_as(MAX_POOL), attributes=POOL)
def channels_last_max_pool(op: Builder, x: ir.Value, **attributes: Any) -> ir.Value:
    """MaxPool without indices."""
    return last(op, op.MaxPool(first(op, x), **_given(attributes)))


@declare("ChannelsLastMaxPoolGrad", inputs="dy x y", outputs="dx", infer=same_as(1), attributes=POOL)
def channels_last_max_pool_grad(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, **attributes: Any) -> ir.Value:
    """MaxPoolGrad."""
    return last(op, op.graphc.MaxPoolGrad(first(op, dy), first(op, x), first(op, y), **_given(attributes)))


def _pooled_and_taps(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    ((dtype, shape),) = _as(MAX_POOL)(inputs, attributes)
    return [(dtype, shape), (ir.DataType.UINT8, shape)]


@declare("ChannelsLastMaxPoolTaps", inputs="x", outputs="y tap", infer=_pooled_and_taps, attributes=POOL)
def channels_last_max_pool_taps(op: Builder, x: ir.Value, **attributes: Any) -> tuple[ir.Value, ir.Value]:
    """MaxPool, and each maximum's position in its window (the first of ties, the last NaN): from 1, in row-major order.

    Built from elementwise ops over slices of x, so that a fusing backend computes x on the fly. Positions go up to 255. x
    has a static shape, and windows have no dilations.
    """
    (_, pooled), _ = _pooled_and_taps([x], attributes)
    size, out = (static_dims_of(shape)[1:-1] for shape in (x.shape, pooled))
    window = Window.of(attributes, size)
    assert window.begin is not None
    behind = [
        max(0, (o - 1) * s + k - i - b)
        for i, o, k, s, b in zip(size, out, window.kernel, window.strides, window.begin, strict=True)
    ]
    padded = op.Pad(x, [0, *window.begin, 0, 0, *behind, 0], op.scalar(-np.inf, x))
    places, axes = [], list(range(1, 1 + len(size)))
    for at in itertools.product(*map(range, window.kernel)):
        end = [a + (o - 1) * s + 1 for a, o, s in zip(at, out, window.strides, strict=True)]
        places.append(op.Slice(padded, list(at), end, axes, list(window.strides)))
    best, tap = places[0], op.const(np.array(1, dtype=np.uint8))
    for number, element in enumerate(places[1:], 2):
        greater = op.Or(op.Greater(element, best), op.IsNaN(element))
        tap = op.Where(greater, op.const(np.array(number, dtype=np.uint8)), tap)
        best = op.Where(greater, element, best)
    return best, op.Expand(tap, op.shape(best))


@declare("ChannelsLastMaxPoolTapsGrad", inputs="dy tap shape", outputs="dx", infer=of_shape(0, 2), attributes=POOL)
def channels_last_max_pool_taps_grad(op: Builder, dy: ir.Value, tap: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """Σ dy over the windows whose maximum is this element: the gradient of ChannelsLastMaxPoolTaps."""
    size = static_dims_of(shape_of_result(shape))[1:-1]
    window = Window.of(attributes, size)
    assert window.begin is not None
    wide = op.Cast(dy, to=int(ir.DataType.FLOAT)) if dy.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dy
    out, parts = static_dims_of(dy.shape)[1:-1], []
    for number, at in enumerate(itertools.product(*map(range, window.kernel)), 1):
        chosen = op.Where(op.Equal(tap, op.const(np.array(number, dtype=np.uint8))), wide, op.scalar(0, wide))
        front = [a - b for a, b in zip(at, window.begin, strict=True)]
        rest = [i - o * s - f for i, o, s, f in zip(size, out, window.strides, front, strict=True)]
        parts.append(op.Pad(spread(op, chosen, window.strides), [0, *front, 0, 0, *rest, 0]))
    return op.cast_like(functools.reduce(op.Add, parts), dy)


def spread(op: Builder, value: ir.Value, steps: Sequence[int]) -> ir.Value:
    """``value`` (N × spatial axes × C) with zeros inserted behind each pixel: ``steps`` times as large along each spatial axis.

    It is index arithmetic when fused, so the zeros never reach memory.
    """
    batch, *small, channels = static_dims_of(value.shape)
    apart = op.Reshape(value, [batch, *(n for few in small for n in (few, 1)), channels])
    padded = op.Pad(apart, [0] * (2 * len(small) + 3) + [n for step in steps for n in (0, step - 1)] + [0])
    return op.Reshape(padded, [batch, *(few * step for few, step in zip(small, steps, strict=True)), channels])  # type: ignore[no-any-return]


_AVERAGE = {**POOL, "count_include_pad": 0}


@declare("ChannelsLastAveragePool", inputs="x", outputs="y", infer=_as("AveragePool"), attributes=_AVERAGE)
def channels_last_average_pool(op: Builder, x: ir.Value, **attributes: Any) -> ir.Value:
    """AveragePool."""
    return last(op, op.AveragePool(first(op, x), **_given(attributes)))


@declare("ChannelsLastAveragePoolGrad", inputs="dy shape", outputs="dx", infer=of_shape(0, 1), attributes=_AVERAGE)
def channels_last_average_pool_grad(op: Builder, dy: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """AveragePoolGrad; ``shape`` is the shape of x, channels last."""
    sizes = _shape_first(op, shape, rank(dy))
    return last(op, op.graphc.AveragePoolGrad(first(op, dy), sizes, **_given(attributes)))


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
