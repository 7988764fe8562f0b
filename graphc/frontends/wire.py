"""Reads the weights of an ONNX file in place: no large tensor is copied when the file is parsed, none stays in memory.

A file is a protocol buffer: fields, each a tag (number and kind) and a value; messages and byte strings begin with their
length. Protocol Buffers would copy every tensor when it parses the file, and again at every access. So the bytes of large
tensors are cut out before parsing. They become arrays that refer to the file's bytes or, where they are many, tensors that are
read from the file whenever somebody asks for them: a training keeps its own parameters, and the file's would lie beside them.

Source: https://protobuf.dev/programming-guides/encoding and ``onnx.proto``.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError

LEAST = 1 << 14
"""Smallest tensor, in bytes, that is cut out."""

MANY = 1 << 20
"""Bytes of such tensors in a file from which on they stay in it."""

Span: TypeAlias = tuple[int, int]
"""The first byte of a tensor in its file, and the one behind the last."""

_GRAPH, _INITIALIZER, _DIMS, _DATA_TYPE, _RAW_DATA = 7, 5, 1, 2, 9
"""Field numbers of ModelProto, GraphProto and TensorProto."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _UnreadableError(Exception):
    """The file has an unusual form; the full parser reports what is wrong."""


class OpenFile:
    """A file from which tensors are read while it stays what it was; it may be deleted or replaced, but not overwritten."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = os.dup(descriptor)
        self._stamp = self._now()
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, span: Span) -> bytes:
        """Read some of its bytes.

        Raises:
            ModelError: the file has been written to, or cannot be read.
        """
        try:
            data = os.pread(self._descriptor, span[1] - span[0], span[0])
            changed = len(data) != span[1] - span[0] or self._now() != self._stamp
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from None
        if changed:
            raise ModelError(
                f"{self.path} has been overwritten since the model was loaded, and its weights are read when they are needed;"
                " load or compile it again"
            )
        return data

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns


def cut(data: bytes) -> tuple[bytes, dict[int, Span]]:
    """Return the file without the bytes of its large initializers, and where those lie, by the initializer's index.

    A file that is damaged, or written in an unusual way, is returned unchanged.
    """
    found: dict[int, Span] = {}
    if len(data) < LEAST or sys.byteorder != "little":
        return data, found
    try:
        parts, _ = _without(memoryview(data), 0, 0, 0, found)
    except (_UnreadableError, IndexError):
        return data, {}
    return (b"".join(parts), found) if found else (data, found)


def tensors(
    data: bytes, spans: Mapping[int, Span], like: Mapping[int, ir.TensorProtocol], file: OpenFile | None
) -> dict[int, ir.TensorProtocol]:
    """The tensors at ``spans`` of ``data`` or, where they are many, of ``file``, with names, types and shapes of ``like``."""
    if file is None or sum(stop - start for start, stop in spans.values()) < MANY:
        view = memoryview(data)
        return {k: _held(_array(view[start:stop], like[k]), *_described(like[k])) for k, (start, stop) in spans.items()}
    return {k: FileTensor(file, span, like[k]) for k, span in spans.items()}


class FileTensor(ir.LazyTensor):
    """A tensor that is read whenever somebody asks for it; a copy that leaves the process takes its elements along."""

    def __init__(self, file: OpenFile, span: Span, like: ir.TensorProtocol) -> None:
        dtype, name, doc_string, properties = _described(like)
        shape, last = ir.Shape(like.shape.numpy()), weakref.ref(np.empty(0))

        def read() -> ir.TensorProtocol:
            nonlocal last
            array = last()
            if array is None:
                array = _array(file.read(span), like)
                last = weakref.ref(array)  # what somebody still uses is not read again
            return _held(array, dtype, name, doc_string, properties)

        super().__init__(read, dtype, shape, name=name, doc_string=doc_string, metadata_props=properties)
        self._kept: np.ndarray | None = None

    def hold(self) -> None:
        """Keep the elements in memory from now on, for all models that share the tensor."""
        self._kept = self.numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _held, (self.numpy(), *_described(self))

    def __deepcopy__(self, memo: Any) -> FileTensor:
        return self  # nothing of it changes


def _described(tensor: ir.TensorProtocol) -> tuple[ir.DataType, str | None, str | None, dict[str, str]]:
    return tensor.dtype, tensor.name, tensor.doc_string, dict(tensor.metadata_props)


def _held(
    array: np.ndarray, dtype: ir.DataType, name: str | None, doc_string: str | None, properties: dict[str, str]
) -> ir.TensorProtocol:
    return ir.Tensor(array, dtype=dtype, name=name, doc_string=doc_string, metadata_props=properties)


def _array(data: bytes | memoryview, like: ir.TensorProtocol) -> np.ndarray:
    return np.frombuffer(data, dtype=like.dtype.numpy()).reshape(like.shape.numpy())


def _without(
    data: memoryview, offset: int, level: int, count: int, found: dict[int, Span]
) -> tuple[list[bytes | memoryview], int]:
    """The parts of a message to keep, and the number of initializers up to its end.

    Args:
        offset: where the message begins in the file.
        level: 0 for the model, 1 for its graph.
    """
    parts: list[bytes | memoryview] = []
    kept = 0
    for number, kind, begin, start, end in _fields(data):
        if kind != _BYTES or number != (_GRAPH, _INITIALIZER)[level]:
            continue
        if level == 0:
            inner, count = _without(data[start:end], offset + start, 1, count, found)
        else:
            inner = _without_raw(data[start:end], offset + start, count, found)
            count += 1
        parts += [data[kept:begin], _varint(number << 3 | _BYTES), _varint(sum(map(len, inner))), *inner]
        kept = end
    return [*parts, data[kept:]], count


def _without_raw(data: memoryview, offset: int, index: int, found: dict[int, Span]) -> list[bytes | memoryview]:
    """The parts of a tensor without its raw data, when that is large and elements are whole bytes."""
    raw: tuple[int, int, int] | None = None
    dtype, dims = 0, []
    for number, kind, begin, start, end in _fields(data):
        if number == _RAW_DATA and kind == _BYTES:
            if raw is not None:
                return [data]
            raw = begin, start, end
        elif number == _DATA_TYPE and kind == _VARINT:
            dtype = _read(data, start)[0]
        elif number == _DIMS and kind == _VARINT:
            dims.append(_read(data, start)[0])
        elif number == _DIMS and kind == _BYTES:
            at = start
            while at < end:
                dim, at = _read(data, at)
                dims.append(dim)
    if raw is None or raw[2] - raw[1] < LEAST or dtype not in _WHOLE:
        return [data]
    begin, start, end = raw
    if math.prod(dims) * _WHOLE[dtype] != end - start:
        return [data]  # damaged: the check of tensors reports it
    found[index] = offset + start, offset + end
    return [data[:begin], data[end:]]


_WHOLE = {
    int(d): d.bitwidth // 8 for d in ir.DataType if d.name not in ("UNDEFINED", "STRING") and d.bitwidth and d.bitwidth % 8 == 0
}
"""Element type → bytes of an element."""


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk the fields of a message: (number, kind, start of the field, start of its value, end)."""
    at, size = 0, len(data)
    while at < size:
        begin = at
        tag, at = _read(data, at)
        kind = tag & 7
        if kind == _BYTES:
            length, at = _read(data, at)
            end = at + length
        elif kind == _VARINT:
            end = _read(data, at)[1]
        elif kind in (_FIXED64, _FIXED32):
            end = at + (8 if kind == _FIXED64 else 4)
        else:
            raise _UnreadableError
        if end > size or not tag >> 3:
            raise _UnreadableError
        yield tag >> 3, kind, begin, at, end
        at = end


def _read(data: memoryview, at: int) -> tuple[int, int]:
    """Decode the varint at ``at``, seven bits a byte; returns it and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise _UnreadableError


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
