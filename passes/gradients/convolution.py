"""Gradient rules of convolution and pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, rank, static_dims
from graphc.ir.ops.convolution import CONV, POOL, Window, spatial


def attributes_of(node: ir.Node, names: Any) -> dict[str, Any]:
    """The node's attributes with those names, as Python values."""
    found = {name: node.attributes[name].value for name in names if name in node.attributes}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def canonical_attributes(node: ir.Node, names: Any, kernel: ir.Value | None = None) -> dict[str, Any]:
    """Those attributes with explicit kernel, strides, dilations and, if known, padding."""
    found = attributes_of(node, names)
    (x,) = operands(node, 1)
    try:
        window = Window.of(found, spatial(x.shape), spatial(kernel.shape) if kernel is not None else None)
    except UnsupportedOpError as error:
        raise UnsupportedOpError(f"{error}: {describe(node)}") from None
    if window.pads is not None:
        found.pop("auto_pad", None)
        found.update(window.attributes())
    return found


def sum_per_channel(op: Builder, dy: ir.Value) -> ir.Value:
    """Σ over every axis except the channels'."""
    return op.ReduceSum(dy, [0, *range(2, rank(dy))], keepdims=0)  # type: ignore[no-any-return]


@gradient("Conv")
def conv(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y[n,m,o] = Σ x[n,c,o·s + t·d - p]·w[m,c,t] + b[m]; both gradients are convolutions again, ∂b = Σ dy per channel"""
    x, w = operands(node, 2)
    attributes = canonical_attributes(node, CONV, w)
    return (
        lambda: op.graphc.ConvGradInput(dy, w, op.shape(x), **attributes),
        lambda: op.graphc.ConvGradWeight(x, dy, op.shape(w), **attributes),
        lambda: sum_per_channel(op, dy),
    )


@gradient("graphc::ConvGradInput")
def conv_grad_input(op: Builder, node: ir.Node, g: ir.Value) -> Any:
    """dx is linear in dy and in w: the adjoint of both is that of Conv with g in the place of x"""
    dy, w = operands(node, 2)
    attributes = attributes_of(node, CONV)
    return lambda: op.Conv(g, w, **attributes), lambda: op.graphc.ConvGradWeight(g, dy, op.shape(w), **attributes)


@gradient("graphc::ConvGradWeight")
def conv_grad_weight(op: Builder, node: ir.Node, g: ir.Value) -> Any:
    """dw is linear in x and in dy: the adjoint of both is that of Conv with g in the place of w"""
    x, dy = operands(node, 2)
    attributes = attributes_of(node, CONV)
    return lambda: op.graphc.ConvGradInput(dy, g, op.shape(x), **attributes), lambda: op.Conv(x, g, **attributes)


@gradient("ConvTranspose")
def conv_transpose(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = ConvGradInput(x, w), so ∂x = Conv(dy, w), ∂w = ConvGradWeight(dy, x), ∂b = Σ dy per channel"""
    x, w = operands(node, 2)
    attributes = _as_convolution(node)
    return (
        lambda: op.Conv(dy, w, **attributes),
        lambda: op.graphc.ConvGradWeight(dy, x, op.shape(w), **attributes),
        lambda: sum_per_channel(op, dy),
    )


def _as_convolution(node: ir.Node) -> dict[str, Any]:
    """Attributes of the Conv that maps y to x."""
    x, w = operands(node, 2)
    names = ("dilations", "group", "kernel_shape", "strides", "auto_pad", "pads", "output_padding", "output_shape")
    found = attributes_of(node, names)
    same = found.pop("auto_pad", "NOTSET")
    target = found.pop("output_shape", None)
    extra = found.pop("output_padding", None)
    window = Window.of({**found, "auto_pad": "NOTSET"}, (), spatial(w.shape))
    n = len(window.kernel)
    extra = extra or [0] * n
    found.update(window.attributes())
    if same in ("SAME_UPPER", "SAME_LOWER") or target:
        found["pads"] = _chosen_padding(node, window, spatial(x.shape), same, target, extra)
    if any(e >= s for e, s in zip(extra, window.strides, strict=True)):
        raise UnsupportedOpError(f"no runtime accepts output_padding as large as the stride: no gradient for {describe(node)}")
    return found


def _chosen_padding(
    node: ir.Node, window: Window, size: tuple[int | None, ...], same: str, target: list[int] | None, extra: list[int]
) -> list[int]:
    """The padding that ConvTranspose derives from ``output_shape``, or from ``auto_pad`` (output = input · stride).

    ``extra`` (the output padding) grows by the part of the output that no window reaches.
    """
    begin, end = [], []
    for axis, (span, s, e) in enumerate(zip(window.span, window.strides, extra, strict=True)):
        i = size[axis]
        if target:
            if i is None:
                raise UnsupportedOpError(f"output_shape needs static spatial sizes to be differentiated: {describe(node)}")
            total = (i - 1) * s + e + span - target[-len(window.kernel) :][axis]
        else:
            total = e + span - s
        extra[axis] = e + max(-total, 0)
        total = max(total, 0)
        upper = same == "SAME_UPPER"
        begin.append(total // 2 if upper else total - total // 2)
        end.append(total - begin[-1])
    return [*begin, *end]


@gradient("MaxPool")
def max_pool(op: Builder, node: ir.Node, dy: ir.Value | None, *_: ir.Value | None) -> Any:
    """dy goes to the first maximum of its window"""
    (x,) = operands(node, 1)
    return lambda: op.graphc.MaxPoolGrad(dy, x, node.outputs[0], **canonical_attributes(node, POOL))


@gradient("graphc::MaxPoolGrad")
def max_pool_grad(op: Builder, node: ir.Node, g: ir.Value) -> Any:
    """linear in dy: ∂dy picks g at the maxima"""
    _, x = operands(node, 2)

    def pick() -> ir.Value:
        _, indices = op.MaxPool(x, **attributes_of(node, POOL), _outputs=2)
        return op.Gather(op.Reshape(g, [-1]), indices)  # type: ignore[no-any-return]

    return (pick,)


@gradient("AveragePool")
def average_pool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """every element of a window gets dy / count"""
    (x,) = operands(node, 1)
    names = (*POOL, "count_include_pad")
    return lambda: op.graphc.AveragePoolGrad(dy, op.shape(x), **canonical_attributes(node, names))


@gradient("graphc::AveragePoolGrad")
def average_pool_grad(op: Builder, node: ir.Node, g: ir.Value) -> Any:
    """linear in dy: ∂dy = AveragePool(g)"""
    return lambda: op.AveragePool(g, **attributes_of(node, (*POOL, "count_include_pad")))


@gradient("GlobalAveragePool")
def global_average_pool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """dx = dy / (number of positions), everywhere"""
    (x,) = operands(node, 1)

    def spread() -> ir.Value:
        known = static_dims(x)
        if known is not None:
            share = op.Mul(dy, 1.0 / float(np.prod(known[2:])))
        else:
            positions = op.ReduceProd(op.Shape(x, start=2), keepdims=0)
            share = op.Div(dy, op.cast_like(positions, dy))
        return op.expand_like(share, x)

    return spread


@gradient("GlobalMaxPool")
def global_max_pool(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """dy goes to the first maximum of each channel"""
    (x,) = operands(node, 1)

    def scatter() -> ir.Value:
        flat = op.Reshape(x, [0, 0, -1])
        first = op.ArgMax(flat, axis=2, keepdims=1)
        return op.reshape_like(op.ScatterElements(op.zeros_like(flat), first, op.Reshape(dy, [0, 0, -1]), axis=2), x)

    return scatter
