"""Adapts nodes of older opsets to the opset of a legalised graph.

    @until(13, "Squeeze", "Unsqueeze")
    def axes_become_an_input(op, node): ...

An adapter runs on nodes of files whose opset is below its number; adapters of one op run in the order of their
numbers. It edits the node in place and returns None, or returns new values for the node's outputs. The inputs of the
node are typed already. An op needs no adapter if newer versions only allow more (element types, optional inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, input_of, required, unknown_rank

Adapter: TypeAlias = "Callable[[Builder, ir.Node], Sequence[ir.Value] | None]"

ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {}
"""Op type → (opset that no longer needs the adapter, adapter), oldest first."""


def until(opset: int, *op_types: str) -> Callable[[Adapter], Adapter]:
    """Register an adapter for nodes of files with an opset below ``opset``."""

    def register(function: Adapter) -> Adapter:
        for op_type in op_types:
            ADAPTERS.setdefault(op_type, []).append((opset, function))
            ADAPTERS[op_type].sort(key=lambda entry: entry[0])
        return function

    return register


def adapt(op: Builder, node: ir.Node, version: int) -> Sequence[ir.Value] | None:
    """Adapt a standard node of opset ``version``; returns new output values when it was replaced."""
    if version < 7:
        take(node, "consumed_inputs")  # inputs whose memory the output might take
    for opset, adapter in ADAPTERS.get(node.op_type, ()):
        if version < opset:
            replaced = adapter(op, node)
            if replaced is not None:
                return replaced
    return None


def set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    """Make ``value`` input ``index``, padding with absent inputs."""
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def take(node: ir.Node, name: str, default: Any = None) -> Any:
    """Remove attribute ``name`` and return its value."""
    attr = node.attributes.pop(name, None)
    if attr is None:
        return default
    return list(attr.value) if isinstance(attr.value, (tuple, list)) else attr.value


def _int64(op: Builder, values: Any) -> ir.Value:
    return op.const(np.asarray(values, dtype=np.int64))


def _like(op: Builder, value: float, x: ir.Value | None) -> ir.Value:
    if x is None or x.dtype is None:
        raise ModelError("the element type of an input is unknown")
    return op.const(np.asarray(value, dtype=x.dtype.numpy()))


def became_inputs(opset: int, *op_types: str, **types: Any) -> None:
    """Register an adapter: attributes became inputs 1, 2 and so on, of these types; None: that of input 0."""

    def adapter(op: Builder, node: ir.Node) -> None:
        for index, (name, dtype) in enumerate(types.items(), 1):
            value = take(node, name)
            if value is not None:
                made = op.const(np.asarray(value, dtype)) if dtype is not None else _like(op, value, node.inputs[0])
                set_input(node, index, made)

    until(opset, *op_types)(adapter)


became_inputs(5, "Reshape", shape=np.int64)
became_inputs(10, "Upsample", scales=np.float32)
became_inputs(10, "Slice", starts=np.int64, ends=np.int64, axes=np.int64)
became_inputs(11, "Clip", min=None, max=None)
became_inputs(13, "Squeeze", "Unsqueeze", "ReduceSum", axes=np.int64)
became_inputs(13, "Split", split=np.int64)
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
became_inputs(18, *(f"Reduce{name}" for name in _REDUCTIONS), axes=np.int64)


@until(2, "GlobalLpPool", "LpPool")
def lp_pool_1(op: Builder, node: ir.Node) -> None:
    p = float(take(node, "p", 2.0))
    if not p.is_integer():
        raise ModelError(f"{describe(node)} has p={p}, and whole numbers alone are supported")
    node.attributes["p"] = ir.AttrInt64("p", int(p))


@until(2, "Pad")
def pad_1(op: Builder, node: ir.Node) -> None:
    node.attributes["pads"] = ir.AttrInt64s("pads", take(node, "paddings"))


@until(4, "Concat")
def concat_1(op: Builder, node: ir.Node) -> None:
    node.attributes.setdefault("axis", ir.AttrInt64("axis", 1))


@until(6, "Cast")
def cast_1(op: Builder, node: ir.Node) -> None:
    """The type was a text."""
    node.attributes["to"] = ir.AttrInt64("to", ir.DataType[take(node, "to").upper()])


@until(6, "Tile")
def tile_1(op: Builder, node: ir.Node) -> None:
    """One axis was repeated; how often, and which, were inputs of the type of the first."""
    x, held = input_of(node), [ir.convenience.get_const_tensor(input_of(node, k)) for k in (1, 2)]
    found = [tensor.numpy().reshape(-1) for tensor in held if tensor is not None and tensor.size == 1]
    rank = len(x.shape) if x.shape is not None else 0
    if len(found) < 2 or not -rank <= found[1][0] < rank:
        raise ModelError(f"{describe(node)} repeats an axis that is not known; export with opset 6 or newer")
    repeats = np.ones(rank, np.int64)
    repeats[int(found[1][0])] = int(found[0][0])
    node.resize_inputs(2)
    set_input(node, 1, _int64(op, repeats))


@until(7, "Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
def broadcasting_6(op: Builder, node: ir.Node) -> None:
    """Before opset 7 the second operand was aligned with dimensions of the first one from ``axis`` on."""
    axis = take(node, "axis")
    if not take(node, "broadcast", 0) or axis is None:
        return
    a, b = node.inputs
    if a is None or b is None or a.shape is None or b.shape is None:
        raise unknown_rank(next((v for v in (a, b) if v is not None and v.shape is None), input_of(node)))
    axis = axis + len(a.shape) if axis < 0 else axis
    _append_ones(op, node, 1, len(a.shape) - axis - len(b.shape))


@until(7, "PRelu")
def prelu_6(op: Builder, node: ir.Node) -> None:
    """Before opset 7 a one-dimensional slope held one number per channel."""
    x, slope = node.inputs
    if x is not None and slope is not None and x.shape is not None and dims(slope) not in (None, (1,)):
        _append_ones(op, node, 1, len(x.shape) - 2)


def _append_ones(op: Builder, node: ir.Node, index: int, count: int) -> None:
    value = node.inputs[index]
    if count > 0 and value is not None and value.shape is not None:
        first = len(value.shape)
        node.replace_input_with(index, op.Unsqueeze(value, list(range(first, first + count))))


@until(7, "BatchNormalization", "Dropout", "GRU", "Gemm", "LSTM", "RNN")
def obsolete_6(op: Builder, node: ir.Node) -> None:
    """Removes attributes that opset 7 dropped; the number of outputs replaced them."""
    for name in ("is_test", "broadcast", "output_sequence"):
        take(node, name)


@until(7, "Upsample")
def upsample_1(op: Builder, node: ir.Node) -> None:
    if "height_scale" in node.attributes:
        scales = [1.0, 1.0, take(node, "height_scale"), take(node, "width_scale")]
        node.attributes["scales"] = ir.AttrFloat32s("scales", scales)


@until(9, "BatchNormalization")
def batch_normalization_per_activation(op: Builder, node: ir.Node) -> None:
    if not take(node, "spatial", 1):
        raise ModelError(f"BatchNormalization with spatial=0 is not supported: {describe(node)}; export with opset 9 or newer")


@until(14, "BatchNormalization")
def batch_normalization_mode(op: Builder, node: ir.Node) -> None:
    """Before opset 14 the number of outputs selected training mode: y, mean, var, saved mean, saved var."""
    wanted = [v for v in node.outputs[1:] if v.uses() or v.is_graph_output()]
    if any(v in node.outputs[3:] for v in wanted):
        raise ModelError(
            f"the saved statistics of an old BatchNormalization are used: {describe(node)}; export with opset 14 or newer"
        )
    if len(node.outputs) > 1:
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        node.resize_outputs(3)


@until(11, "Upsample", "Resize")
def resize_10(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Upsample(x, scales) and the first Resize sample at x/scale, rounded down."""
    mode = take(node, "mode", "nearest")
    extra = {"nearest_mode": "floor"} if mode == "nearest" else {}
    y = op.Resize(node.inputs[0], None, node.inputs[1], mode=mode, coordinate_transformation_mode="asymmetric", **extra)
    return [y]


@until(10, "TopK")
def top_k_1(op: Builder, node: ir.Node) -> None:
    set_input(node, 1, _int64(op, [take(node, "k")]))


@until(11, "Pad")
def pad_2(op: Builder, node: ir.Node) -> None:
    pads, value = take(node, "pads"), take(node, "value", 0.0)
    set_input(node, 1, _int64(op, pads))
    if value:
        set_input(node, 2, _like(op, value, node.inputs[0]))


@until(11, "Scatter")
def scatter_9(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return [op.ScatterElements(*node.inputs, axis=take(node, "axis", 0))]


@until(12, "Dropout")
def dropout_10(op: Builder, node: ir.Node) -> None:
    """The ratio becomes an input; old Dropout was always the identity, and its mask was float before opset 10."""
    set_input(node, 1, op.const(np.float32(take(node, "ratio", 0.5))))


@until(10, "Dropout")
def dropout_mask_7(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    if len(node.outputs) < 2 or not (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return None
    x = input_of(node)
    y, mask = op.Dropout(x, np.float32(take(node, "ratio", 0.5)), _outputs=2)
    return [y, op.cast_like(mask, x)]


@until(13, "Softmax", "LogSoftmax", "Hardmax")
def softmax_11(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Before opset 13 the input was viewed as a matrix: dimensions from ``axis`` on formed one row."""
    axis = take(node, "axis", 1)
    x = node.inputs[0]
    found = dims(x) if x is not None else None
    if found is not None:
        axis = axis + len(found) if axis < 0 else axis
        long = [k for k in range(axis, len(found)) if found[k] != 1]
        if len(long) <= 1:
            node.attributes["axis"] = ir.AttrInt64("axis", long[0] if long else len(found) - 1)
            return None
    rows = op.emit(node.op_type, [op.Flatten(x, axis=axis)], {"axis": 1})[0]
    return [op.reshape_like(rows, required(x))]


@until(18, "Split")
def split_13(op: Builder, node: ir.Node) -> None:
    """Without sizes the input is split into equal parts; opset 18 requires their number."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


@until(16, "RoiAlign")
def roi_align_10(op: Builder, node: ir.Node) -> None:
    mode = "coordinate_transformation_mode"
    node.attributes[mode] = ir.AttrString(mode, "output_half_pixel")


@until(20, "GridSample")
def grid_sample_16(op: Builder, node: ir.Node) -> None:
    mode = take(node, "mode", "bilinear")
    node.attributes["mode"] = ir.AttrString("mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


@until(20, "DFT")
def dft_17(op: Builder, node: ir.Node) -> None:
    set_input(node, 2, op.const(np.asarray(take(node, "axis", 1), dtype=np.int64)))


@until(21, "GroupNormalization")
def group_normalization_18(op: Builder, node: ir.Node) -> None:
    """Scale and bias were per group; now they are per channel."""
    x, groups = node.inputs[0], node.attributes["num_groups"].as_int()
    shape = dims(x) if x is not None else None
    channels = shape[1] if shape is not None else None
    if not isinstance(channels, int):
        raise ModelError(f"the number of channels is unknown: {describe(node)}; export with opset 21 or newer")
    for index in (1, 2):
        column = op.Reshape(node.inputs[index], [groups, 1])
        set_input(node, index, op.Reshape(op.Expand(column, [groups, channels // groups]), [channels]))
