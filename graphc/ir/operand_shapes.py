"""Checks shapes of operands that ONNX's inference accepts and kernels do not.

Conv(x: [n, 3, 8, 8], w: [6, 3, 3, 3], b: [6, 1, 1])    b must have shape [6]
LSTM(x, w, r, b, initial_c: [1, n, 12]; hidden_size=6)  initial_c must have 6 elements on its last axis
MaxPool(x: [n, 3, 8, 8]; kernel_shape=[2147483648, 2])  a loop over 2³¹ taps, nearly all in the padding
Pad(x: [n, 8], pads=[0, 8, 0, 0]; mode="reflect")       there are 7 elements to reflect
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import constant, describe_value, dims

_FEW_TAPS = 64
"""A window over an axis may have so many taps, however small the axis is."""


def check_operands(schema: onnx.defs.OpSchema, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> None:
    """Check the bias of convolutions, the windows of pooling, the operands of recurrent layers and what is reflected, as far
    as sizes are known.

    Raises:
        ModelError: a bias of another rank or size; a window that is mostly padding; a weight or state of another hidden size;
            more elements to reflect than there are.
    """
    if len(schema.inputs) > 1 and schema.inputs[1].name == "pads" and len(inputs) > 1 and "mode" in attributes:
        _check_reflection(schema.name, inputs, attributes["mode"])
    if "hidden_size" in schema.attributes:
        _check_recurrent(schema, inputs, attributes)
    if not _has_window(schema):
        return
    operands = {formal.name.lower(): value for formal, value in zip(schema.inputs, inputs, strict=False)}
    if "w" in operands:
        _check_vector(schema.name, operands.get("b"), _output_channels(schema, operands["w"], attributes))
    elif len(schema.inputs) == 1:
        _check_window(schema.name, inputs[0], attributes)


def _has_window(schema: onnx.defs.OpSchema) -> bool:
    """Whether it is a convolution or a pooling."""
    return "kernel_shape" in schema.attributes


def check_result(schema: onnx.defs.OpSchema, inputs: Sequence[ir.Value | None], sizes: Iterable[int]) -> None:
    """Refuse the negative size that inference gives to the result of a window that is larger than its input.

    Raises:
        ModelError: one of ``sizes``, the known sizes of the result, is negative.
    """
    if _has_window(schema) and any(size < 0 for size in sizes):
        operands = ", ".join(describe_value(v) for v in inputs if v is not None)
        raise ModelError(f"{schema.name} has a window that is larger than its input with its padding: {operands}")


def _shape(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    found = dims(value) if value is not None else None
    return None if found is None else tuple(found)


def _output_channels(
    schema: onnx.defs.OpSchema, weight: ir.Value | None, attributes: Mapping[str, ir.Attr]
) -> int | str | None:
    shape = _shape(weight)
    if shape is None or len(shape) < 2:
        return None
    if "output_shape" not in schema.attributes:  # else it is transposed
        return shape[0]
    groups = attributes.get("group")
    per_group, count = shape[1], 1 if groups is None or groups.is_ref() else groups.as_int()
    return per_group * count if isinstance(per_group, int) else None


def _check_vector(op_type: str, value: ir.Value | None, size: int | str | None) -> None:
    shape = _shape(value)
    if value is None or shape is None:
        return
    if len(shape) != 1 or (isinstance(shape[0], int) and isinstance(size, int) and shape[0] != size):
        expected = f"[{size}]" if isinstance(size, int) else "one axis"
        raise ModelError(f"{op_type} gets {describe_value(value)}, which must have {expected}: one element for each channel")


def _check_reflection(op_type: str, inputs: Sequence[ir.Value | None], mode: ir.Attr) -> None:
    if mode.is_ref() or mode.as_string() != "reflect":
        return
    shape, pads = _shape(inputs[0]), constant(inputs[1])
    axes = constant(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else np.arange(len(shape or ()))
    if shape is None or pads is None or axes is None or pads.size != 2 * axes.size:
        return
    for axis, pad in zip([*axes.tolist()] * 2, pads.tolist(), strict=True):
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if isinstance(size, int) and pad > max(0, size - 1):
            what = describe_value(inputs[0]) if inputs[0] is not None else ""
            raise ModelError(f"{op_type} reflects {pad} elements of {what}, which has {size} along axis {axis}")


def _check_recurrent(schema: onnx.defs.OpSchema, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> None:
    hidden = attributes.get("hidden_size")
    if hidden is None or hidden.is_ref():
        return
    size, rows = hidden.as_int(), _shape(inputs[2])
    gates = rows[1] if rows is not None and len(rows) == 3 else None
    both = 2 * gates if isinstance(gates, int) else None
    wanted = {
        "W": (1, gates),
        "R": (2, size),
        "B": (1, both),
        "P": (1, 3 * size),
        "initial_h": (2, size),
        "initial_c": (2, size),
    }
    for formal, value in zip(schema.inputs, inputs, strict=False):
        shape, (axis, length) = _shape(value), wanted.get(formal.name, (0, None))
        if value is None or shape is None or axis >= len(shape):
            continue
        if isinstance(shape[axis], int) and isinstance(length, int) and shape[axis] != length:
            raise ModelError(
                f"{schema.name} with hidden_size={size} gets {describe_value(value)} as {formal.name}, "
                f"whose axis {axis} must have {length} elements"
            )


def _check_window(op_type: str, x: ir.Value | None, attributes: Mapping[str, ir.Attr]) -> None:
    """Refuse windows more than twice as large as what they slide over: taps in the padding cost time and find nothing."""
    taps, shape = attributes.get("kernel_shape"), _shape(x)
    if taps is None or taps.is_ref() or shape is None:
        return
    for axis, (count, size) in enumerate(zip(taps.as_ints(), shape[2:], strict=False)):
        most = max(_FEW_TAPS, 2 * size) if isinstance(size, int) else count
        if count > most and (not isinstance(size, int) or covered_once(attributes, axis, size) is None):
            raise ModelError(f"{op_type} has a window of {count} elements over an axis of {size}; at most {most} make sense")


def covered_once(attributes: Mapping[str, ir.Attr], axis: int, size: int) -> int | None:
    """Elements of a spatial axis and its padding, if a pool with ``ceil_mode`` has one window there that reaches beyond them.

    A window as long as that has the same result. None: there are more windows, or none.
    """
    ceil, taps = attributes.get("ceil_mode"), attributes["kernel_shape"].as_ints()
    if ceil is None or ceil.is_ref() or not ceil.as_int():
        return None
    settings: dict[str, Sequence[int]] = {"strides": [1] * len(taps), "dilations": [1] * len(taps), "pads": [0] * 2 * len(taps)}
    for name, default in settings.items():
        given = attributes.get(name)
        if given is not None and (given.is_ref() or len(given.as_ints()) != len(default)):
            return None
        settings[name] = default if given is None else given.as_ints()
    strides, dilations, pads = settings.values()
    total = size + pads[axis] + pads[axis + len(taps)]
    beyond = taps[axis] - total
    return total if dilations[axis] == 1 and 0 < beyond < strides[axis] else None
