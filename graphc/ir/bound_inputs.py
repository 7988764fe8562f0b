"""Gives inputs of a model a constant value, moves their batch axis to the front, or takes them as integers.

    before   x: [b, 576],  state: [2, b, 128],  sr: []
    after    x: [b, 576]                                            state = zeros:2,1,128 (repeated for the batch), sr = 16000
    or       x: [b, 576],  state: [b, 2, 128] ─► Transpose          batch_axis={"state": 1}

    before   image: float[b, 3, 224, 224]
    after    image: uint8[b, 3, 224, 224] ─► Cast ─► Mul            scale={"image": "1/255"}

Whatever splits a batch (shards, micro-batches, padding) then finds the samples on axis 0 of every input that is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.atomic_files import open_regular
from graphc.errors import UsageError, nearest
from graphc.ir import OPSET
from graphc.ir.facts import describe_value, dims, dtype_of
from graphc.ir.model_bytes import limit_of, shown
from graphc.ir.names import BUFFER

Array = np.ndarray[Any, Any]

_INTEGERS = ("uint8", "int8", "uint16", "int16", "int32")


@dataclass(frozen=True, slots=True)
class Scale:
    """How integers x that are fed become the numbers of the model: (x·factor − mean) / std.

    Attributes:
        factor: such as 1/255 for images with values from 0 to 1.
        mean: one number, or one for each channel.
        std: as ``mean``.
        dtype: the integers' type.
    """

    factor: float
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    dtype: str = "uint8"

    @classmethod
    def parse(cls, name: str, given: float | str) -> Scale:
        """Read ``1/255``, ``0.5``, or ``1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225,dtype=uint8``.

        Raises:
            UsageError: text of another form, a factor or ``std`` that is 0, or no such integer type.
        """
        first, *rest = str(given).split(",")
        options = {key.strip(): text for key, _, text in (part.partition("=") for part in rest)}
        dtype = options.pop("dtype", "uint8").strip()
        try:
            over, _, under = first.partition("/")
            factor = float(over) / float(under or 1)
            mean, std = (tuple(float(n) for n in options.pop(key, default).split(":")) for key, default in _NORMAL)
            if options or dtype not in _INTEGERS or not factor or not all(std) or not np.isfinite([factor, *mean, *std]).all():
                raise ValueError
        except (ValueError, ZeroDivisionError):
            raise UsageError(
                f"scale {name}={given}: write a factor as in {name}=1/255; means and deviations of channels follow it, as in"
                f" {name}=1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225, and dtype= one of {', '.join(_INTEGERS)}"
            ) from None
        return cls(factor, mean, std, dtype)

    def linear(self, value: ir.Value) -> tuple[Array, Array]:
        """The factor and the offset that an input's integers take, in float64 and of a shape that broadcasts to the input.

        Raises:
            UsageError: no axis, or two, has as many channels as ``mean`` or ``std``.
        """
        count = max(len(self.mean), len(self.std))
        shape: tuple[int, ...] = ()
        if count > 1:
            sizes = dims(value) or ()
            found = [axis for axis in {1, len(sizes) - 1} if 0 < axis < len(sizes) and sizes[axis] == count]
            if len(found) != 1 or {len(self.mean), len(self.std)} - {1, count}:
                raise UsageError(
                    f"scale: {len(self.mean)} means and {len(self.std)} deviations do not fit the channels of"
                    f" {describe_value(value)}; give one number, or one for each channel of axis 1 or of the last axis"
                )
            shape = (count, *[1] * (len(sizes) - 1 - found[0]))
        mean, std = np.asarray(self.mean), np.asarray(self.std)
        return np.broadcast_to(self.factor / std, count).reshape(shape), np.broadcast_to(-mean / std, count).reshape(shape)


_NORMAL = (("mean", "0"), ("std", "1"))


def bind_inputs(
    model: ir.Model, constants: Mapping[str, Any], batch_axes: Mapping[str, int], scales: Mapping[str, Scale]
) -> None:
    """Replace inputs by constants, give inputs their samples on axis 0, and scale inputs that are fed as integers.

    Args:
        constants: input → an array, a number, or text: ``zeros:2,1,128``, ``ones:4``, ``0.5``, ``1,2,3``, ``file.npy``.
        batch_axes: input → the axis of its samples. A constant of size 1 there is repeated for every sample.
        scales: input → how its integers become the numbers that the model wants.

    Raises:
        UsageError: an unknown input, or a value or axis that does not fit it.
    """
    graph = model.graph
    fed = {value.name or "": value for value in graph.inputs if not value.is_initializer()}
    for name in (*constants, *batch_axes, *scales):
        if name not in fed:
            raise UsageError(f"the model has no input {name!r}{nearest(name, fed)}; its inputs are {', '.join(fed)}")
    for name, scale in scales.items():
        if name in constants:
            raise UsageError(f"input {name!r} has a constant value; a scale is for an input that is fed")
        fed[name] = _Maker(graph).scaled(fed[name], scale)
    if not {"", "ai.onnx"} & model.opset_imports.keys() and all(n.domain not in ("", "ai.onnx") for n in graph.all_nodes()):
        model.opset_imports[""] = OPSET  # of the constants
    axes = {name: _checked_axis(fed[name], axis) for name, axis in batch_axes.items()}
    leader = next((value for name, value in fed.items() if name not in constants and dims(value)), None)
    size = None if leader is None else (dims(leader) or ())[axes.get(leader.name or "", 0)]
    maker = _Maker(graph)
    moved = {name: maker.samples_first(fed[name], axis, size) for name, axis in axes.items() if axis and name not in constants}
    batch = None if leader is None else moved.get(leader.name or "", leader)
    for name, given in constants.items():
        maker.constant(fed[name], array_of(fed[name], given, axes.get(name)), axes.get(name), size, batch)


def choices(graph: ir.Graph) -> list[ir.Value]:
    """Inputs that are one whole number or truth value: a branch that their value rules out may not fit the other feeds."""
    return [
        value
        for value in graph.inputs
        if isinstance(value.type, ir.TensorType)
        and value.dtype is not None
        and value.dtype.numpy().kind in "iub"
        and dims(value) in ((), (1,))
    ]


def how_to_choose(graph: ir.Graph) -> str:
    """What to do about a branch that does not fit the feeds, and may be ruled out by the value of an input."""
    names = [value.name for value in choices(graph)]
    if not names or not any(node.op_type == "If" for node in graph):
        return ""
    return f"; if the value of {names[0]!r} rules the branch out, say so with inputs={{{names[0]!r}: …}} (--input {names[0]}=…)"


def _checked_axis(value: ir.Value, axis: int) -> int:
    found = dims(value)
    if found is None or not 0 <= axis < len(found):
        raise UsageError(f"batch axis {axis}: {describe_value(value)} has no such axis")
    return axis


def array_of(value: ir.Value, given: Any, axis: int | None = None) -> Array:
    """The array that ``given`` says for an input, of its element type.

    Args:
        axis: the axis of the samples, which may have any size.

    Raises:
        UsageError: text that says no array, or an array of another shape or kind of numbers than the input.
    """
    array = _parsed(value, given) if isinstance(given, str) else np.asarray(given)
    declared, dtype = dims(value), dtype_of(value).numpy()
    if array.ndim == 0 and declared:
        array = np.broadcast_to(array, [d if isinstance(d, int) else 1 for d in declared])
    fits = declared is None or array.ndim == len(declared)
    for k, (wanted, have) in enumerate(zip(declared or (), array.shape, strict=False)):
        fits &= wanted == have or not isinstance(wanted, int) or k == axis
    if not fits:
        raise UsageError(f"input {value.name!r}: a value of shape {list(array.shape)} does not fit {describe_value(value)}")
    taken = array.size * np.dtype(dtype).itemsize
    if taken > limit_of(value.graph if isinstance(value.graph, ir.Graph) else None):
        raise UsageError(
            f"input {value.name!r}: {given} takes {shown(taken)}, more than the constants of this model may take; allow it with"
            " --max-model-bytes N (max_model_bytes=N in Python)"
        )
    converted = array.astype(dtype)
    if array.dtype.kind in "fc" and np.dtype(dtype).kind in "iub" and not np.array_equal(converted, array):
        raise UsageError(f"input {value.name!r}: {given} is no {np.dtype(dtype)}, which {describe_value(value)} takes")
    return converted


def _parsed(value: ir.Value, text: str) -> Array:
    kind, colon, sizes = text.partition(":")
    try:
        if colon and kind in ("zeros", "ones"):
            return np.broadcast_to(0.0 if kind == "zeros" else 1.0, [int(d) for d in sizes.split(",") if d.strip()])
        if text.endswith(".npy"):
            with open_regular(text) as file:
                return np.asarray(np.load(file, allow_pickle=False))
        words = {"true": 1.0, "false": 0.0}
        numbers = [words[w.strip().lower()] if w.strip().lower() in words else _number(w) for w in text.split(",")]
    except (ValueError, OSError, EOFError, MemoryError, OverflowError, TypeError, SyntaxError) as error:
        reason = f" ({error})" if text.endswith(".npy") else ""
        raise UsageError(
            f"input {value.name!r}: {text!r} is no value{reason}; give zeros:SHAPE, ones:SHAPE, a number, numbers with commas,"
            f" or FILE.npy, as in {value.name}=zeros:2,1,128"
        ) from None
    return np.asarray(numbers[0] if len(numbers) == 1 else numbers)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


class _Maker:
    """Puts nodes in front of a graph of any opset."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._first = graph, next(iter(graph), None)
        self._taken = {v.name for node in graph.all_nodes() for v in node.outputs} | set(graph.initializers)
        self._taken |= {v.name for v in graph.inputs}

    def _emit(self, op: str, inputs: list[ir.Value], attributes: list[ir.Attr], name: str) -> ir.Value:
        while name in self._taken:
            name += ".1"
        self._taken.add(name)
        node = ir.Node("", op, inputs, attributes, num_outputs=1, name=name)
        node.outputs[0].name = name
        if self._first is None:
            self._graph.append(node)
        else:
            self._graph.insert_before(self._first, node)
        return node.outputs[0]

    def _hold(self, array: Array, name: str, dtype: ir.DataType | None = None) -> ir.Value:
        out = self._emit("Constant", [], [ir.AttrTensor("value", ir.Tensor(array, dtype=dtype))], name)
        out.metadata_props[BUFFER] = "1"  # it never trains
        return out

    def samples_first(self, value: ir.Value, axis: int, size: int | str | None) -> ir.Value:
        """Replace an input by one with its samples on axis 0; ``size``: those of the first input, for a size without a name."""
        found = dims(value) or ()
        order = [axis, *(k for k in range(len(found)) if k != axis)]
        shape = [size if k == axis and found[k] is None else found[k] for k in order]
        new = ir.Value(name=value.name, type=value.type, shape=ir.Shape(shape))
        perm = [order.index(k) for k in range(len(order))]
        out = self._emit("Transpose", [new], [ir.AttrInt64s("perm", perm)], f"{value.name}/samples_first")
        out.type, out.shape = value.type, value.shape
        value.replace_all_uses_with(out, replace_graph_outputs=True)
        self._graph.inputs[list(self._graph.inputs).index(value)] = new
        return new

    def scaled(self, value: ir.Value, scale: Scale) -> ir.Value:
        """Replace an input by one of integers, from which the graph computes its values."""
        dtype, name = dtype_of(value), value.name or ""
        if not dtype.is_floating_point():
            raise UsageError(f"scale: {describe_value(value)} takes no floating-point numbers, so there is nothing to scale")
        factor, offset = scale.linear(value)
        new = ir.Value(name=value.name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(scale.dtype))), shape=value.shape)
        out = self._emit("Cast", [new], [ir.AttrInt64("to", int(dtype))], f"{name}/float")
        out = self._emit("Mul", [out, self._hold(factor.astype(dtype.numpy()), f"{name}/scale")], [], f"{name}/scaled")
        if offset.any():
            out = self._emit("Add", [out, self._hold(offset.astype(dtype.numpy()), f"{name}/offset")], [], f"{name}/normal")
        out.type, out.shape = value.type, value.shape
        value.replace_all_uses_with(out, replace_graph_outputs=True)
        self._graph.inputs[list(self._graph.inputs).index(value)] = new
        return new

    def constant(self, value: ir.Value, array: Array, axis: int | None, size: int | str | None, batch: ir.Value | None) -> None:
        """Replace an input by a constant, repeated along the batch where its size there is 1."""
        declared = dims(value) or ()
        if axis is None and isinstance(size, str):
            axis = next((k for k, d in enumerate(declared) if d == size), None)
        out = self._hold(array, f"{value.name}/value", dtype_of(value))
        if axis is not None and batch is not None and array.shape[axis] == 1:
            out = self._repeated(out, array, axis, batch, value.name or "")
        value.replace_all_uses_with(out, replace_graph_outputs=True)
        self._graph.inputs.remove(value)

    def _repeated(self, value: ir.Value, array: Array, axis: int, batch: ir.Value, name: str) -> ir.Value:
        zero = ir.AttrInt64("axis", 0)
        shape = self._emit("Shape", [batch], [], f"{name}/shape")
        rows = self._emit("Gather", [shape, self._hold(np.zeros(1, np.int64), f"{name}/first")], [zero], f"{name}/samples")
        before, behind = array.shape[:axis], array.shape[axis + 1 :]
        known = [self._hold(np.asarray(part, np.int64), f"{name}/sizes") if part else None for part in (before, behind)]
        sizes = [part for part in (known[0], rows, known[1]) if part is not None]
        target = sizes[0] if len(sizes) == 1 else self._emit("Concat", sizes, [zero], f"{name}/target")
        return self._emit("Expand", [value, target], [], f"{name}/repeated")
