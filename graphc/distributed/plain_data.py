"""Objects that workers send to each other, as bytes: plain data only, so that reading them runs nothing.

The form is a header of JSON, in which an object such as ``{"tuple": …}`` or ``{"array": …}`` stands for what JSON lacks, and
behind it the bytes of all arrays and byte strings, one after the other.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from graphc.errors import UsageError, WorldError

_LENGTH = struct.Struct("<Q")


def pack(item: Any) -> bytes:
    """Write None, numbers, texts, bytes, arrays, and lists, tuples and dicts of these.

    Raises:
        UsageError: it holds something else.
    """
    pieces: list[bytes] = []
    text = json.dumps(_described(item, pieces)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *pieces])


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Read what :func:`pack` wrote; arrays are new ones.

    Raises:
        WorldError: it is something else.
    """
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack(view[: _LENGTH.size])
        start = _LENGTH.size + length
        reader = _Reader(view[start:])
        item = reader.restored(json.loads(bytes(view[_LENGTH.size : start])))
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, OverflowError, MemoryError, RecursionError) as error:
        raise WorldError(f"another worker sent data that cannot be read ({error})") from None
    return item


def _described(item: Any, pieces: list[bytes]) -> Any:
    if isinstance(item, np.ndarray | np.generic):
        dtype = item.dtype
        if dtype.hasobject or dtype.names is not None:
            raise UsageError(f"an array of dtype {dtype} cannot be sent between workers")
        pieces.append(item.tobytes())
        kind = "array" if isinstance(item, np.ndarray) else "scalar"
        return {kind: [dtype.name if dtype.kind == "V" else dtype.str, list(item.shape)]}
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, bytes | bytearray | memoryview):
        pieces.append(bytes(item))
        return {"bytes": len(pieces[-1])}
    if isinstance(item, list):
        return [_described(entry, pieces) for entry in item]
    if isinstance(item, tuple):
        return {"tuple": [_described(entry, pieces) for entry in item]}
    if isinstance(item, dict):
        return {"dict": [[_described(key, pieces), _described(value, pieces)] for key, value in item.items()]}
    raise UsageError(
        f"an object of type {type(item).__name__} cannot be sent between workers: send None, numbers, texts, bytes, arrays, "
        "or lists, tuples and dicts of these"
    )


class _Reader:
    """Takes the pieces in their order."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def restored(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.restored(entry) for entry in form]
        if not isinstance(form, dict):
            return form
        ((kind, content),) = form.items()
        if kind == "tuple":
            return tuple(self.restored(entry) for entry in content)
        if kind == "dict":
            return {self.restored(key): self.restored(value) for key, value in content}
        if kind == "bytes":
            return bytes(self._take(content))
        if kind not in ("array", "scalar"):
            raise ValueError(f"no such kind of data: {kind}")
        name, shape = content
        dtype = _dtype(name)
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        array = np.frombuffer(bytes(self._take(size)), dtype).reshape(shape)
        return array.copy() if kind == "array" else array[()]

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self._view):
            raise ValueError("its data is cut short")
        piece, self._view = self._view[:size], self._view[size:]
        return piece


def _dtype(name: str) -> np.dtype[Any]:
    if name.isidentifier():  # bfloat16 and its like
        import ml_dtypes

        low: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return low
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("objects are no plain data")
    return dtype
