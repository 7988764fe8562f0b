"""Convolutions and their gradients through cuDNN.

The library takes the axes as batch, channels, space and reads their order in memory from the strides, so one description
serves both layouts; with channels last it uses tensor cores. A single spatial axis becomes two, the first of size 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphc.backends.cupy.libraries.cudnn import WORKSPACE, Dnn, Tensor
from graphc.backends.cupy.libraries.registry import library
from graphc.device import Array, Run
from graphc.ir.facts import dtype_of, shape_of
from graphc.ir.ops.channels_last import PREFIX, last_order
from graphc.ir.ops.convolution import Window

FORWARD, INPUT, WEIGHT = "Conv", "ConvGradInput", "ConvGradWeight"

RESULT = {FORWARD: "y", INPUT: "dx", WEIGHT: "dw"}


@dataclass(frozen=True, slots=True)
class Convolution:
    """y = Conv(x, w), or its gradient with respect to x or w.

    Attributes:
        kind: ``Conv``, ``ConvGradInput`` or ``ConvGradWeight``.
        x, w, y: the three tensors of the forward convolution (or their gradients), as batch or M, channels, space.
        begin, end: padding in front and behind.
        bias: whether each channel of y gets a bias added.
        activation: empty or ``relu``.
    """

    kind: str
    x: Tensor
    w: Tensor
    y: Tensor
    begin: tuple[int, ...]
    end: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    bias: bool = False
    activation: str = ""

    @property
    def repeatable(self) -> bool:
        return True

    @property
    def variants(self) -> Sequence[Convolution]:
        return ()

    @property
    def operands(self) -> tuple[str, ...]:
        read = {FORWARD: ("x", "w"), INPUT: ("dy", "w"), WEIGHT: ("x", "dy")}[self.kind]
        return (*read, "b") if self.bias else read

    @property
    def skips(self) -> bool:
        """Whether windows of one pixel lie apart, so that the convolution skips most of x."""
        return set(self.w.dims[2:]) == {1} and max(self.strides) > 1

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        forms = {"x": self.x, "dx": self.x, "w": self.w, "dw": self.w, "y": self.y, "dy": self.y}
        named = {name: forms[name] for name in self.operands if name != "b"}
        if self.bias:
            channels, ones = self.y.dims[1], [1] * (len(self.y.dims) - 2)
            named["b"] = Tensor.dense((1, channels, *ones), self.y.dtype, last_memory_order(len(self.y.dims)))
        return {**named, RESULT[self.kind]: forms[RESULT[self.kind]]}

    def emit(self, cudnn: Any, graph: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        window = {
            "pre_padding": list(self.begin),
            "post_padding": list(self.end),
            "stride": list(self.strides),
            "dilation": list(self.dilations),
        }
        if self.kind == INPUT:
            return {"dx": graph.conv_dgrad(tensors["dy"], tensors["w"], **window)}
        if self.kind == WEIGHT:
            return {"dw": graph.conv_wgrad(tensors["x"], tensors["dy"], **window)}
        y = graph.conv_fprop(tensors["x"], tensors["w"], **window)
        if self.bias:
            y = graph.bias(y, tensors["b"])
        return {"y": graph.relu(y) if self.activation == "relu" else y}


def last_memory_order(count: int) -> list[int]:
    """The axes batch, channels, space from slowest to fastest, with channels last."""
    return [0, *range(2, count), 1]


def convolution_of(node: ir.Node) -> Convolution:
    """Describe a node as a convolution; its inputs are in the order of :attr:`Convolution.operands`."""
    last = node.op_type.startswith(PREFIX)
    kind = node.op_type.removeprefix(PREFIX)
    first, second = (shape_of(v) for v in node.inputs[:2])
    result = shape_of(node.outputs[0])
    x, w, y = {FORWARD: (first, second, result), INPUT: (result, second, first), WEIGHT: (first, result, second)}[kind]
    dtype = dtype_of(node.outputs[0])
    of_x, of_w, of_y = (_tensor(shape, dtype, last) for shape in (x, w, y))
    values = {name: attr.value for name, attr in node.attributes.items()}
    window = Window.of(values, _space(x, last), _space(w, last))
    lift = len(window.kernel) == 1
    begin, end = ((0, *side) if lift else side for side in window.padding)
    strides, dilations = ((1, *steps) if lift else steps for steps in (window.strides, window.dilations))
    bias = kind == FORWARD and len(node.inputs) > 2 and node.inputs[2] is not None
    return Convolution(kind, of_x, of_w, of_y, begin, end, strides, dilations, bias, values.get("activation", ""))


def _space(shape: Sequence[int], last: bool) -> tuple[int, ...]:
    return tuple(shape[1:-1] if last else shape[2:])


def _tensor(shape: Sequence[int], dtype: ir.DataType, last: bool) -> Tensor:
    dims = [shape[axis] for axis in last_order(len(shape))] if last else list(shape)
    if len(dims) == 3:
        dims.insert(2, 1)
    return Tensor.dense(dims, dtype, last_memory_order(len(dims)) if last else None)


def depthwise(node: ir.Node) -> bool:
    """Whether every one of several channels is convolved by itself, with channels last, which a kernel of graphc's does.

    The gradient of the weight stays with the library, and so do numbers of 64 bits.
    """
    if node.op_type not in (PREFIX + FORWARD, PREFIX + INPUT) or dtype_of(node.outputs[0]) == ir.DataType.DOUBLE:
        return False
    channels = {shape_of(v)[-1] for v in (node.inputs[0], node.outputs[0])} | {shape_of(node.inputs[1])[0]}
    group = node.attributes.get_int("group", 1)
    return channels == {group} and group > 1 and 0 not in shape_of(node.outputs[0])


def _plain(node: ir.Node) -> bool:
    """Whether the library has plans: nonempty tensors, one to three spatial axes, and a bias with any activation."""
    if depthwise(node):
        return False
    if node.attributes.get_string("activation", "") and (len(node.inputs) < 3 or node.inputs[2] is None):
        return False
    return all(0 not in shape_of(v) for v in (*node.inputs[:2], *node.outputs)) and len(shape_of(node.outputs[0])) in (3, 4, 5)


@library(
    FORWARD,
    f"graphc::{INPUT}",
    f"graphc::{WEIGHT}",
    *(f"graphc::{PREFIX}{kind}" for kind in (FORWARD, INPUT, WEIGHT)),
    when=_plain,
    workspace=("cuDNN", WORKSPACE),
    cost="convolution",
)
def convolution(device: Any, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
    """Bind the node on a GPU."""
    found = convolution_of(node)
    read = dict(zip(found.operands, (v for v in inputs if v is not None), strict=False))
    return device.library(Dnn).bind(found, {**read, RESULT[found.kind]: outputs[0]})  # type: ignore[no-any-return]
