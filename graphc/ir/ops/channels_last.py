"""Convolution and pooling of tensors whose channels are the last axis, which GPUs compute fastest; ONNX has none.

    y  = graphc.ChannelsLastConv(x, w, b?; attributes of Conv, activation)
    dx = graphc.ChannelsLastConvGradInput(dy, w, shape(x); attributes of Conv)
    dw = graphc.ChannelsLastConvGradWeight(x, dy, shape(w); attributes of Conv)
    y  = graphc.ChannelsLastMaxPool(x),  dx = graphc.ChannelsLastMaxPoolGrad(dy, x, y)
    y  = graphc.ChannelsLastAveragePool(x),  dx = graphc.ChannelsLastAveragePoolGrad(dy, shape(x))

Tensors are N × spatial axes × C, weights M × kernel × C/group: the order of axes is the only difference from the ops whose
names stand behind ``ChannelsLast``, which the decompositions use between transposes. The ``layout`` pass makes these ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import InferFunction, Spec, declare, same_as
from graphc.ir.facts import rank
from graphc.ir.infer import infer_outputs
from graphc.ir.ops.convolution import CONV, POOL, of_shape

PREFIX = "ChannelsLast"

ACTIVATIONS = ("", "relu")


def last_order(count: int) -> list[int]:
    """For each axis of N × C × spatial, where it is when channels come last; as ``perm`` it brings channels to the front."""
    return [0, count - 1, *range(1, count - 1)]


def to_last(count: int) -> list[int]:
    """The ``perm`` that brings channels to the end."""
    return [0, *range(2, count), 1]


def first(op: Builder, x: ir.Value) -> ir.Value:
    """``x`` with its channels behind the batch."""
    return op.Transpose(x, perm=last_order(rank(x)))  # type: ignore[no-any-return]


def last(op: Builder, x: ir.Value) -> ir.Value:
    """``x`` with its channels at the end."""
    return op.Transpose(x, perm=to_last(rank(x)))  # type: ignore[no-any-return]


def _shape_first(op: Builder, shape: ir.Value, count: int) -> ir.Value:
    return op.Gather(shape, np.array(last_order(count), dtype=np.int64))  # type: ignore[no-any-return]


def _as(base: str) -> InferFunction:
    """Inference through the standard op ``base``: its result, with the channels moved to the end."""

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
        assert dtype is not None
        return [(dtype, None if shape is None else ir.Shape([shape[axis] for axis in to_last(len(shape))]))]

    return infer


@declare("ChannelsLastConv", inputs="x w b?", outputs="y", infer=_as("Conv"), attributes={**CONV, "activation": ""})
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
    """ConvGradInput; ``shape`` is that of x, channels last."""
    sizes = _shape_first(op, shape, rank(dy))
    return last(op, op.graphc.ConvGradInput(first(op, dy), first(op, w), sizes, **_given(attributes)))


@declare("ChannelsLastConvGradWeight", inputs="x dy shape", outputs="dw", infer=of_shape(0, 2), attributes=CONV)
def channels_last_conv_grad_weight(op: Builder, x: ir.Value, dy: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """ConvGradWeight; ``shape`` is that of w, channels last."""
    sizes = _shape_first(op, shape, rank(dy))
    return last(op, op.graphc.ConvGradWeight(first(op, x), first(op, dy), sizes, **_given(attributes)))


@declare("ChannelsLastMaxPool", inputs="x", outputs="y", infer=_as("MaxPool"), attributes=POOL)
def channels_last_max_pool(op: Builder, x: ir.Value, **attributes: Any) -> ir.Value:
    """MaxPool without indices."""
    return last(op, op.MaxPool(first(op, x), **_given(attributes)))


@declare("ChannelsLastMaxPoolGrad", inputs="dy x y", outputs="dx", infer=same_as(1), attributes=POOL)
def channels_last_max_pool_grad(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, **attributes: Any) -> ir.Value:
    """MaxPoolGrad."""
    return last(op, op.graphc.MaxPoolGrad(first(op, dy), first(op, x), first(op, y), **_given(attributes)))


_AVERAGE = {**POOL, "count_include_pad": 0}


@declare("ChannelsLastAveragePool", inputs="x", outputs="y", infer=_as("AveragePool"), attributes=_AVERAGE)
def channels_last_average_pool(op: Builder, x: ir.Value, **attributes: Any) -> ir.Value:
    """AveragePool."""
    return last(op, op.AveragePool(first(op, x), **_given(attributes)))


@declare("ChannelsLastAveragePoolGrad", inputs="dy shape", outputs="dx", infer=of_shape(0, 1), attributes=_AVERAGE)
def channels_last_average_pool_grad(op: Builder, dy: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """AveragePoolGrad; ``shape`` is that of x, channels last."""
    sizes = _shape_first(op, shape, rank(dy))
    return last(op, op.graphc.AveragePoolGrad(first(op, dy), sizes, **_given(attributes)))


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


__all__ = ["PREFIX", "last_order", "to_last"]
