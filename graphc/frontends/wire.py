"""The weights of an ONNX file where they lie in it: the file is read once, and no large tensor is copied out of it.

A file is a protocol buffer: fields, each a tag (number and kind) and a value, of which messages and bytes begin with their
length. Protocol Buffers would copy every tensor when it parses the file, and again whenever somebody looks at one. So the
bytes of large tensors are cut out first, and become arrays that refer to the file's.

Source: https://protobuf.dev/programming-guides/encoding and ``onnx.proto``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

LEAST = 1 << 14
"""Bytes from which a tensor is worth a cut."""

_GRAPH, _INITIALIZER, _DIMS, _DATA_TYPE, _RAW_DATA = 7, 5, 1, 2, 9
"""Numbers of fields: of ModelProto, GraphProto and TensorProto."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _UnreadableError(Exception):
    """Not what a writer of ONNX files writes; whoever parses the whole says what is wrong."""


def cut(data: bytes) -> tuple[bytes, dict[int, memoryview]]:
    """The file without the bytes of its large initializers, and these by the initializer's index.

    A file that is damaged, or written in an unusual way, comes back as it is.
    """
    found: dict[int, memoryview] = {}
    if len(data) < LEAST or sys.byteorder != "little":
        return data, found
    try:
        parts, _ = _without(memoryview(data), 0, 0, found)
    except (_UnreadableError, IndexError):
        return data, {}
    return (b"".join(parts), found) if found else (data, found)


def tensor(data: memoryview, like: ir.TensorProtocol) -> ir.TensorProtocol:
    """The tensor whose bytes are ``data``, with name, type and shape of ``like``."""
    array = np.frombuffer(data, dtype=like.dtype.numpy()).reshape(like.shape.numpy())
    return ir.Tensor(
        array, dtype=like.dtype, name=like.name, doc_string=like.doc_string, metadata_props=dict(like.metadata_props)
    )


def _without(data: memoryview, level: int, count: int, found: dict[int, memoryview]) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a message that stay, and how many initializers there are up to its end; level 0: model, 1: graph."""
    parts: list[bytes | memoryview] = []
    kept = 0
    for number, kind, begin, start, end in _fields(data):
        if kind != _BYTES or number != (_GRAPH, _INITIALIZER)[level]:
            continue
        if level == 0:
            inner, count = _without(data[start:end], 1, count, found)
        else:
            inner = _without_raw(data[start:end], count, found)
            count += 1
        parts += [data[kept:begin], _tag(number), _varint(sum(map(len, inner))), *inner]
        kept = end
    return [*parts, data[kept:]], count


def _without_raw(data: memoryview, index: int, found: dict[int, memoryview]) -> list[bytes | memoryview]:
    """The pieces of a tensor without its raw data, where that is large and each element takes whole bytes."""
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
        return [data]  # damaged: whoever checks the tensor says so
    found[index] = data[start:end]
    return [data[:begin], data[end:]]


_WHOLE = {
    int(d): d.bitwidth // 8 for d in ir.DataType if d.name not in ("UNDEFINED", "STRING") and d.bitwidth and d.bitwidth % 8 == 0
}
"""Element type → bytes of an element."""


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """(number, kind, where the field begins, where its value begins, where it ends) of each field of a message."""
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
    """The number that begins at ``at``, seven bits a byte, and where it ends."""
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


def _tag(number: int) -> bytes:
    return _varint(number << 3 | _BYTES)


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
