"""Writes model files whole or not at all; the weights of large models go to a file of their own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import onnx
import onnx_ir as ir

from graphc.atomic_files import whole_file
from graphc.errors import ModelError
from graphc.ir.serialize import to_proto
from graphc.ir.text import to_text
from graphc.ir.toposort import check_whole

EXTERNAL_ABOVE = 1 << 30
"""Bytes of tensors above which :func:`save` writes them to a separate file; a protobuf message ends at 2 GB."""

APART = "graphc.apart"
"""Entry of ``ir.Model.meta``: the model came with external data, although its tensors are others by now."""

_SMALL = 1024
"""Tensors of fewer bytes always stay in the ``.onnx`` file: shape inference reads small ones."""

_ALIGNMENT = 4096
"""Alignment of tensors in a data file, so that they can be memory-mapped."""


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the block ends without an error, and leaves no trace otherwise.

    Raises:
        ModelError: the folder does not exist or cannot be written to, or the disk is full.
    """
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}") from None


def write_standard_output(data: bytes) -> None:
    """Write ``data`` to standard output.

    Raises:
        BrokenPipeError: its reader is gone.
        ModelError: it cannot be written to, for example because a disk is full.
    """
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ModelError(f"cannot write to standard output: {error.strerror or error}") from None


def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write ``model`` to ``path`` (``"-"``: standard output), whole or not at all.

    The tensors of a model that came with external data go to ``<name>.data`` beside it, and so do more than 1 GiB of any
    other model. Tensors that are memory-mapped from elsewhere are copied into the new files.

    Raises:
        ModelError: the file cannot be written, the model is too large for standard output, or a pass has broken its graph.
    """
    try:
        check_whole(model.graph)
    except ModelError as error:
        raise ModelError(
            f"the graph cannot be written: {error}; 'graphc opt --verify-each' names the pass that did it"
        ) from None
    copy = model.clone()
    total = sum(t.nbytes for t in _owned_tensors(copy))
    if os.fspath(path) == "-":
        if total > EXTERNAL_ABOVE:
            raise ModelError(f"a model with {total:,} bytes of tensors cannot go to standard output; name a file")
        write_standard_output(_internal(copy).SerializeToString(deterministic=True))
        return
    path = Path(os.path.realpath(path))  # both files go to the same folder, wherever links lead
    with contextlib.ExitStack() as stack:
        # the data file is renamed last-in first-out: after the model file is complete, and before it appears
        file = stack.enter_context(atomic_write(path))
        if total > EXTERNAL_ABOVE or (came_with_data(model) and any(t.nbytes >= _SMALL for t in _owned_tensors(copy))):
            data = stack.enter_context(atomic_write(path.with_name(f"{path.name}.data")))
            _move_out(copy, data, f"{path.name}.data")
            file.write(to_proto(copy).SerializeToString(deterministic=True))
        else:
            file.write(_internal(copy).SerializeToString(deterministic=True))


def save_text(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write ``model`` in ONNX text syntax; tensors of more than 16 elements go to ``<name>.data`` beside it.

    Raises:
        ModelError: a file cannot be written, or the model has no text form.
    """
    path = Path(os.path.realpath(path))
    location = f"{path.name}.data"
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(atomic_write(path))
        data: list[IO[bytes]] = []

        def move_out(tensor: ir.TensorProtocol) -> str:
            if tensor.dtype == ir.DataType.STRING:
                raise ModelError(f"the strings of {tensor.name!r} have no text form; write an .onnx file")
            if not data:
                data.append(stack.enter_context(atomic_write(path.with_name(location))))
            offset = data[0].tell()
            data[0].write(tensor.tobytes())
            return f'["location": {json.dumps(location)}, "offset": "{offset}", "length": "{tensor.nbytes}"]'

        file.write(to_text(model, large=move_out).encode())


def came_with_data(model: ir.Model) -> bool:
    """Whether the tensors of a model lay in files of their own."""
    return APART in model.meta or any(isinstance(t, ir.ExternalTensor) for t in _owned_tensors(model))


def _owned_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph in model.graphs():
        yield from (v.const_value for v in graph.initializers.values() if v.const_value is not None)
        for node in graph:
            yield from (a.as_tensor() for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR and not a.is_ref())


def _internal(model: ir.Model) -> onnx.ModelProto:
    """The model as one message; tensors that were external are written into it."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _inside(value.const_value)
        _take_in_attributes(graph)
    return to_proto(model)


def _take_in_attributes(graph: ir.Graph) -> None:
    for node in graph:
        for name, attr in list(node.attributes.items()):
            if attr.type == ir.AttributeType.TENSOR and isinstance(attr.value, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, _inside(attr.value))


def _inside(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


def _move_out(model: ir.Model, file: IO[bytes], location: str) -> None:
    """Write the large initializers of ``model`` to ``file`` and make them refer to ``location``."""
    for graph in model.graphs():
        _take_in_attributes(graph)
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _SMALL:
                if isinstance(tensor, ir.ExternalTensor):
                    value.const_value = _inside(tensor)
                continue
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.seek(offset)
            if isinstance(tensor, ir.ExternalTensor):
                tensor.tofile(file)
            else:
                file.write(tensor.tobytes())
            value.const_value = ir.ExternalTensor(
                location, offset, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=value.name or ""
            )
