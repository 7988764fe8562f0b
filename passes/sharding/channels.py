"""Relations of ops over channels: convolutions, normalisations of channels, pooling.

Channels are axis 1. A convolution sums over those of its input, so that two of them in a row are divided as two products are:
the first by its output channels, the second by its input channels. One with groups is divided by whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.facts import constant, describe, dims, input_of
from graphc.passes.sharding.axis_classes import AxisClasses
from graphc.passes.sharding.ratio import Ratio


def _keep(classes: AxisClasses, node: ir.Node, value: ir.Value, axes: Sequence[int], doing: str) -> None:
    for axis in axes:
        classes.block((value, axis), f"{describe(node)} {doing} it")


def _rank(value: ir.Value) -> int:
    return len(dims(value) or ())


def groups_of(node: ir.Node) -> int:
    """The groups of a convolution or GroupNormalization; 1 for other nodes."""
    name = "num_groups" if node.op_type == "GroupNormalization" else "group"
    return node.attributes.get_int(name, 1)


def relate_convolution(classes: AxisClasses, node: ir.Node) -> None:
    """X [N, C, …], W [M, C / groups, …] (Conv) or [C, M / groups, …] (ConvTranspose), B [M]."""
    x, weight, out = input_of(node), input_of(node, 1), node.outputs[0]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    inner, outer = (1, 0) if node.op_type == "Conv" else (0, 1)
    groups = groups_of(node)
    classes.join((x, 0), (out, 0))
    for value in (x, weight, out):
        _keep(classes, node, value, range(2, _rank(value)), "moves a window over")
    if groups == 1:
        classes.join((x, 1), (weight, inner))
        classes.join((out, 1), (weight, outer))
    else:
        classes.join((x, 1), (weight, 0))
        classes.join((out, 1), (weight, 0))
        _keep(classes, node, weight, [1], "has several groups along")
        for axis in ((x, 1), (out, 1), (weight, 0)):
            classes.require(axis, Ratio.of(groups))
    if bias is not None:
        classes.join((bias, 0), (out, 1))


def relate_channel_norm(classes: AxisClasses, node: ir.Node) -> None:
    """Normalisations by channel or group of channels, with vectors of one entry a channel."""
    x, outputs = input_of(node), [value for value in node.outputs if value is not None]
    for value in (v for v in (*node.inputs, *outputs) if v is not None):
        if _rank(value) == 1 < _rank(x):
            classes.join((value, 0), (x, 1))
    classes.join((outputs[0], 0), (x, 0))
    classes.join((outputs[0], 1), (x, 1))
    if node.op_type == "BatchNormalizationTraining":
        _keep(classes, node, x, [0], "normalises over")
    for value in (x, outputs[0]):
        _keep(classes, node, value, range(2, _rank(value)), "normalises over")
    if node.op_type == "GroupNormalization":
        for value in (v for v in (*node.inputs, outputs[0]) if v is not None):
            classes.require((value, min(1, _rank(value) - 1)), Ratio.of(groups_of(node)))


def relate_moments(classes: AxisClasses, node: ir.Node) -> None:
    """The ops of a normalisation over the global batch: a vector of one entry a channel beside values with channels."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and _rank(v)]
    full = [v for v in values if _rank(v) > 1]
    anchor = (full[0], 1) if full else (values[0], 0)
    for value in values:
        channel = min(1, _rank(value) - 1)
        classes.join((value, channel), anchor)
        _keep(classes, node, value, [axis for axis in range(_rank(value)) if axis != channel], "normalises over")


def relate_pooling(classes: AxisClasses, node: ir.Node) -> None:
    """Samples and channels stay what they are."""
    x = input_of(node)
    for value in (x, *node.outputs):
        _keep(classes, node, value, range(2, _rank(value)), "moves a window over")
        if value is not x:
            classes.join((value, 0), (x, 0))
            classes.join((value, 1), (x, 1))
            if value is not node.outputs[0]:
                _keep(classes, node, value, [0, 1], "counts places along")


def relate_scaled(classes: AxisClasses, node: ir.Node, unchanged: Sequence[int]) -> None:
    """Join the axes that the op leaves as they are; the others stay whole."""
    x, out = input_of(node), node.outputs[0]
    for axis in range(_rank(x)):
        classes.join((x, axis), (out, axis))
        if axis not in unchanged:
            _keep(classes, node, x, [axis], "makes a new axis of")


def relate_pad(classes: AxisClasses, node: ir.Node) -> None:
    """Axes with nothing before and behind."""
    x, pads = input_of(node), constant(node.inputs[1])
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    if pads is None or (axes is None and len(pads) != 2 * _rank(x)):
        relate_scaled(classes, node, ())
        return
    listed = range(_rank(x)) if axes is None else [int(axis) % _rank(x) for axis in axes.reshape(-1)]
    padded = {axis for k, axis in enumerate(listed) if pads[k] or pads[k + len(pads) // 2]}
    relate_scaled(classes, node, [axis for axis in range(_rank(x)) if axis not in padded])


def relate_tile(classes: AxisClasses, node: ir.Node) -> None:
    """Axes that are repeated once."""
    repeats = constant(node.inputs[1])
    relate_scaled(classes, node, () if repeats is None else [axis for axis, count in enumerate(repeats) if count == 1])


def relate_resize(classes: AxisClasses, node: ir.Node) -> None:
    """Axes of scale 1, where scales are given."""
    scales = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    same = [] if scales is None or node.attributes.get("axes") is not None else list(scales)
    relate_scaled(classes, node, [axis for axis, scale in enumerate(same) if scale == 1])
