"""channels_last: keep tensors between convolutions in channels-last order, with few transposes.

    before   y = Relu(BatchNormalization(Conv(x, w)));  z = Conv(y, v)
    after    y = Relu(…(graphc.ChannelsLastConv(Transpose(x), Transpose(w))))
             z = Transpose(graphc.ChannelsLastConv(y, Transpose(v)))

GPUs run convolutions fastest in this order. The pass walks the nodes once, in order. Convolutions are computed channels-last.
Each result is recorded as a transpose of the tensor that holds it, and later nodes (pooling, batch normalisation, elementwise
ops, reductions, reshapes …) read that tensor directly if most of their operands have that order. A Transpose is emitted only
where the standard order is needed, which never happens in the middle of a network. Parameters keep their order: their
transposes (none for 1 × 1 kernels) are part of the graph, so files and checkpoints do not change.

Shapes are static: a backend asks for this pass over its plans (:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.facts import input_of, required, static_dims
from graphc.ir.ops.channels_last import last_order, spread
from graphc.ir.ops.convolution import Window
from graphc.passes.channels_last import rules
from graphc.passes.channels_last.blocks import Blocks
from graphc.passes.channels_last.values import Arrangement
from graphc.passes.optimize.axis_order import only_user
from graphc.passes.optimize.identities import filled
from graphc.passes.optimize.simplify import dead_code_elimination
from graphc.pipeline import Context, graph_pass

DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@graph_pass("channels_last", aliases=("layout",), changes="form")
def channels_last(model: ir.Model, ctx: Context, *, channels: int = 4) -> bool:
    """Compute convolutions, and the ops between them, in channels-last order.

    Args:
        channels: pads images with fewer input channels than this (three, usually) with zeros.
    """
    graph = model.graph
    if not any(node.op_type in _CONVOLUTIONS for node in graph):
        return False
    walk = Arrangement(graph)
    count = 0
    for node in list(graph):
        if node.graph is not graph:
            continue  # removed together with an earlier node
        walk.op.before, walk.op.scope = node, node.name or node.op_type
        if node.op_type in _CONVOLUTIONS and _accepts(node):
            count += _CONVOLUTIONS[node.op_type](walk, node, channels)
        else:
            rules.follow(walk, node)
    dead_code_elimination(graph)
    ctx.note(f"channels_last: {counted(count, 'convolution')}")
    return count > 0


def _accepts(node: ir.Node) -> bool:
    if any(v is not None and static_dims(v) is None for v in (*node.inputs, *node.outputs)):
        return False
    x = node.inputs[0]
    standard = node.op_type in ("Conv", "ConvTranspose")
    return x is not None and x.dtype in DTYPES and x.shape is not None and len(x.shape) >= 3 and standard == (not node.domain)


def _window(node: ir.Node, image: ir.Value, kernel: ir.Value) -> dict[str, Any]:
    """The attributes of a convolution over ``image`` with explicit padding."""
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    window = Window.of(attributes, (static_dims(image) or ())[2:], (static_dims(kernel) or ())[2:])
    return {"group": attributes.get("group", 1), **window.attributes()}


def _order(value: ir.Value) -> tuple[int, ...]:
    return tuple(last_order(len(static_dims(value) or ())))


def _convolution(walk: Arrangement, node: ir.Node, least: int) -> bool:
    x, w = input_of(node, 0), input_of(node, 1)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    attributes = _window(node, x, w)
    blocks = Blocks.of(x, node.outputs[0], attributes)
    if blocks is None:
        extra = _missing_channels(x, node, least)
        xs, ws = walk.arranged(x, _order(x)), walk.arranged(w, _order(w))
        xs, ws = _padded(walk, xs, extra), _padded(walk, ws, extra)
    else:
        attributes = blocks.attributes
        xs, ws = blocks.image(walk.op, x), blocks.weight(walk.op, w)
    follower = only_user(node.outputs[0])
    rectified = bias is not None and follower is not None and follower.op_type == "Relu" and not follower.domain
    if _is_zero(bias) and not rectified:
        bias = None  # exporters write a zero bias; without it libraries have more algorithms
    y = walk.op.graphc.ChannelsLastConv(xs, ws, bias, activation="relu" if rectified else "", **attributes)
    if rectified and follower is not None:
        walk.settle(follower, [(y, _order(x))])
    walk.settle(node, [(y, _order(x))])
    return True


def _is_zero(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type == "Cast" and not producer.domain:
        return _is_zero(producer.inputs[0])
    return filled(value) == 0


def _gradient_of_input(walk: Arrangement, node: ir.Node, least: int) -> bool:
    dy, w = input_of(node, 0), input_of(node, 1)
    dx = node.outputs[0]
    size, attributes = _last_shape(dx), _window(node, dx, w)
    met, steps = _pixels_met(attributes, _last_shape(dy), size), attributes["strides"]
    if met is not None:
        attributes["strides"] = [1] * (len(size) - 2)
    operands = walk.arranged(dy, _order(dy)), walk.arranged(w, _order(w)), met or size
    found = walk.op.graphc.ChannelsLastConvGradInput(*operands, **attributes)
    if met is not None:  # elsewhere dx is zero
        axes = list(range(1, len(size) - 1))
        found = walk.op.Slice(spread(walk.op, found, steps), [0] * len(axes), size[1:-1], axes)
    walk.settle(node, [(found, _order(dy))])
    return True


def _pixels_met(attributes: Mapping[str, Any], out: Sequence[int], size: Sequence[int]) -> list[int] | None:
    """The spatial sizes of the pixels of x that one-pixel windows read, if they skip others; else None."""
    alone = set(attributes["kernel_shape"]) == {1} and not any(attributes["pads"])
    return [*out[:-1], size[-1]] if alone and max(attributes["strides"]) > 1 else None


def _gradient_of_weight(walk: Arrangement, node: ir.Node, least: int) -> bool:
    x, dy = input_of(node, 0), input_of(node, 1)
    op, dw = walk.op, node.outputs[0]
    attributes = _window(node, x, dw)
    blocks = Blocks.of(x, dy, attributes)
    if blocks is not None:
        shape = [(static_dims(dw) or ())[0], *blocks.kernel, blocks.wide]
        operands = blocks.image(op, x), walk.arranged(dy, _order(dy))
        found = blocks.scattered(op, op.graphc.ChannelsLastConvGradWeight(*operands, shape, **blocks.attributes))
        walk.settle(node, [(found, tuple(range(len(shape))))])
        return True
    extra, shape = _missing_channels(x, node, least), _last_shape(dw)
    xs = _padded(walk, walk.arranged(x, _order(x)), extra)
    wide = [*shape[:-1], shape[-1] + extra]
    found = op.graphc.ChannelsLastConvGradWeight(xs, walk.arranged(dy, _order(dy)), wide, **attributes)
    if extra:
        found = op.Slice(found, [0], [shape[-1]], [len(shape) - 1])
    walk.settle(node, [(found, _order(x))])
    return True


def _transposed_convolution(walk: Arrangement, node: ir.Node, least: int) -> bool:
    """Rewrite a ConvTranspose as the input gradient of the Conv from its result to its operand."""
    x, w = input_of(node, 0), input_of(node, 1)
    y, op = node.outputs[0], walk.op
    attributes = transposed_window(node)
    if attributes is None:
        return False
    operands = walk.arranged(x, _order(x)), walk.arranged(w, _order(w)), _last_shape(y)
    found = op.graphc.ChannelsLastConvGradInput(*operands, **attributes)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        found = op.Add(found, node.inputs[2])
    walk.settle(node, [(found, _order(x))])
    return True


def transposed_window(node: ir.Node) -> dict[str, object] | None:
    """The attributes of the Conv whose gradient a ConvTranspose with static shapes is; else None."""
    x, w = input_of(node, 0), input_of(node, 1)
    size, out = (static_dims(x) or ())[2:], (static_dims(node.outputs[0]) or ())[2:]
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    mode = attributes.get("auto_pad", "NOTSET")
    plain = Window.of({**attributes, "auto_pad": "NOTSET"}, size, (static_dims(w) or ())[2:])
    begin = list(required(plain.begin))
    if mode.startswith("SAME") or "output_shape" in attributes:
        left = attributes.get("output_padding") or [0] * len(out)
        for k, (i, o) in enumerate(zip(size, out, strict=True)):
            total = max(0, plain.strides[k] * (i - 1) + left[k] + plain.span[k] - o)
            begin[k] = total // 2 if mode == "SAME_UPPER" else total - total // 2
    end = [
        (i - 1) * s + k - o - b for i, s, k, o, b in zip(size, plain.strides, plain.span, out, begin, strict=True)
    ]  # the padding that makes the last window end at the end of y; leftover elements come after it
    end = [max(e, 0) for e in end]
    reached = [(o + b + e - k) // s + 1 for o, b, e, k, s in zip(out, begin, end, plain.span, plain.strides, strict=True)]
    if reached != list(size):
        return None
    shown = plain.attributes()
    return {"group": attributes.get("group", 1), **shown, "pads": [*begin, *end]}


def _last_shape(value: ir.Value) -> list[int]:
    batch, channels, *rest = static_dims(value) or ()
    return [batch, *rest, channels]


def _missing_channels(x: ir.Value, node: ir.Node, least: int) -> int:
    """The number of zero channels to add to an image with few channels."""
    channels = (static_dims(x) or ())[1]
    return max(0, least - channels) if node.attributes.get_int("group", 1) == 1 else 0


def _padded(walk: Arrangement, value: ir.Value, extra: int) -> ir.Value:
    count = len(static_dims(value) or ())
    return walk.op.Pad(value, [0] * (2 * count - 1) + [extra]) if extra else value


_CONVOLUTIONS = {
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "ConvGradInput": _gradient_of_input,
    "ConvGradWeight": _gradient_of_weight,
}
