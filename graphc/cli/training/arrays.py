"""Reads and checks the arrays that feed a model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.data.files import open_arrays
from graphc.device import Array
from graphc.errors import FeedError, nearest
from graphc.ir.facts import describe_value, dims, dtype_of
from graphc.ir.ops.losses import label_checks, label_range
from graphc.training.feeds import converted


def read_arrays(path: str) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file (``"-"``: standard input) or of a folder of ``.npy`` files, by name.

    Raises:
        FeedError: a missing or damaged file, not an ``.npz``, or an array of Python objects.
    """
    return open_arrays(io.BytesIO(sys.stdin.buffer.read()) if path == "-" else path)


def gather_sequences(graph: ir.Graph, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return the arrays by input; ``s.0``, ``s.1`` … become the elements of the sequence ``s``."""
    found: dict[str, Any] = dict(arrays)
    for value in graph.inputs:
        type_ = value.type.elem_type if isinstance(value.type, ir.OptionalType) else value.type
        if isinstance(type_, ir.SequenceType) and value.name not in found:
            elements: list[Array] = []
            while f"{value.name}.{len(elements)}" in found:
                elements.append(found.pop(f"{value.name}.{len(elements)}"))
            found[value.name or ""] = elements
    return found


def samples_first(arrays: Mapping[str, Array], axes: Mapping[str, int]) -> dict[str, Array]:
    """Return the arrays with their samples on axis 0; those of ``axes`` may have them where the model does."""
    others = {len(array) for name, array in arrays.items() if name not in axes and array.ndim}
    found = dict(arrays)
    for name, axis in axes.items():
        array = found.get(name)
        if array is not None and 0 < axis < array.ndim and (array.shape[axis] in others or len(array) not in others):
            found[name] = np.moveaxis(array, axis, 0)
    return found


def match_inputs(arrays: Mapping[str, Array], graph: ir.Graph, where: str, note: Callable[[str], None]) -> dict[str, Array]:
    """Check names, shapes and labels; return the arrays in the order and dtypes of the graph's inputs.

    Args:
        where: file name for messages.
        note: called with a line for every converted array.

    Raises:
        FeedError: a missing or unknown name, a dtype that cannot be converted, a wrong shape, or a label outside the
            classes.
    """
    wanted = {value.name or "": value for value in graph.inputs}
    missing = [name for name in wanted if name not in arrays]
    for name in arrays:
        if name not in wanted:
            lacking = f"; the file has no array {', '.join(map(repr, missing))}" if missing else ""
            close = nearest(name, missing or wanted)
            raise FeedError(f"{where}: the model has no input {name!r}{close}; its inputs are {_names(wanted)}{lacking}")
    if missing:
        raise FeedError(
            f"{where}: no array {', '.join(map(repr, missing))}; one is needed for each of {_names(wanted)}, "
            f"and the file has {_names(arrays) or 'none'}"
        )
    found: dict[str, Array] = {}
    for name, value in wanted.items():
        if name in label_checks(graph) and arrays[name].dtype.kind == "f" and arrays[name].ndim == len(dims(value) or ()) + 1:
            raise FeedError(
                f"{where}: array {name!r} of shape {list(arrays[name].shape)} holds a row for each label, the loss wants"
                f" the number of the class: save {name}.argmax(-1), or give the loss label_kind=probabilities"
            )
        array = convert(arrays[name], np.dtype(dtype_of(value).numpy()), name, where, note)
        _check_shape(array, value, where)
        found[name] = array
    check_labels(graph, found, where)
    return found


def check_labels(graph: ir.Graph, arrays: Mapping[str, Array], where: str) -> None:
    """Raise FeedError for a label outside the classes of the loss."""
    for name, (low, high, ignore) in label_checks(graph).items():
        labels = arrays.get(name)
        if labels is None or labels.size == 0:
            continue
        wrong = (labels < low) | (labels >= high)
        if ignore is not None:
            wrong &= labels != ignore
        if wrong.any():
            place = [int(i) for i in np.argwhere(wrong)[0]]
            raise FeedError(f"{where}: label {int(labels[tuple(place)])} at {name}{place} is outside {label_range(low, high)}")


def convert(array: Array, dtype: np.dtype[Any], name: str, where: str, note: Callable[[str], None]) -> Array:
    """Convert ``array`` to ``dtype`` if only floating-point precision is lost, as feeds of a trainer are.

    Raises:
        FeedError: any other conversion, or values out of range of a narrower type.
    """
    if array.dtype == dtype:
        return array
    if dtype == np.dtype(object) and array.dtype.kind in "US":  # strings
        return array.astype(object)
    if array.dtype.kind == "V" and dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)  # a type without a name in numpy's file format, such as bfloat16
    result = converted(array, dtype, f"{where}: array {name!r}")
    note(f"{where}: array {name!r} converted from {array.dtype} to {dtype}")
    return result


def _check_shape(array: Array, value: ir.Value, where: str) -> None:
    declared = dims(value)
    if declared is None:
        return
    rest: Sequence[object] = declared[1:]
    fits = array.ndim == len(declared) and all(
        not isinstance(want, int) or want == have for have, want in zip(array.shape[1:], rest, strict=True)
    )
    if not fits or not declared:
        hint = "" if declared else f"; an input without samples takes a constant: --input {value.name}=VALUE"
        raise FeedError(
            f"{where}: array {value.name!r} has shape {list(array.shape)}, the model wants {describe_value(value)}{hint}"
        )


def _names(values: Mapping[str, object]) -> str:
    return ", ".join(map(repr, values))
