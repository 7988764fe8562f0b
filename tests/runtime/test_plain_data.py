"""What workers send to each other is plain data: it comes back as it was, and reading it runs nothing."""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphc.distributed.plain_data import pack, unpack
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError, WorldError

ITEMS: list[Any] = [
    None,
    True,
    -(10**30),
    0.1,
    float("-inf"),
    "ä\ud800\0",
    b"\0\xff",
    [],
    (),
    {},
    (1, [2.5, "x", (None,)], {"a": {1: b"b"}, (1, 2): [True]}),
    {"tuple": [1], "bytes": 2},
]
ARRAYS = [
    np.float64(0.1),
    np.array(3),
    np.zeros((0, 2), bool),
    np.arange(6, dtype=">i2").reshape(2, 3).T,
    np.array([1.5, -2], ml_dtypes.bfloat16),
    np.array(["a", "bc"]),
]


@pytest.mark.parametrize("item", ITEMS, ids=repr)
def test_plain_data_comes_back(item: Any) -> None:
    found = unpack(pack(item))
    assert found == item
    assert repr(found) == repr(item)


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_arrays_come_back(array: Any) -> None:
    found, again = unpack(pack([array, array]))
    for one in (found, again):
        assert type(one) is type(array)
        assert one.dtype == array.dtype
        assert one.shape == array.shape
        assert one.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "item",
    [object(), [{1, 2}], np.array([None]), np.zeros(1, "i4,f4"), print],
    ids=["object", "set", "array of objects", "record", "function"],
)
def test_other_objects_are_refused(item: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent between workers"):
        pack(item)


def foreign(form: Any, data: bytes = b"") -> bytes:
    text = form if isinstance(form, bytes) else json.dumps(form).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 64,
        pickle.dumps(1),
        foreign(b"{"),
        foreign(b"[" * 100_000),
        foreign({"pickle": 1}),
        foreign({"tuple": 5}),
        foreign({"dict": [[[], 1]]}),
        foreign({"a": 1, "b": 2}),
        foreign({"bytes": -1}),
        foreign({"bytes": 1 << 62}),
        foreign({"array": ["|O", [1]]}, b"12345678"),
        foreign({"array": ["<f4", [1 << 40, 1 << 40]]}),
        foreign({"array": ["<f4", [-1, -4]]}, b"1234" * 4),
        foreign({"array": ["<f4", ["x"]]}),
        foreign({"array": ["finfo", [1]]}),
        foreign({"array": ["nothing", [1]]}),
    ],
    ids=repr,
)
def test_what_is_no_plain_data_ends_in_an_error(data: bytes) -> None:
    with pytest.raises(WorldError, match="another worker sent data that cannot be read"):
        unpack(data)


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran')",)


def test_no_transport_pickles() -> None:
    with pytest.raises(UsageError, match="an object of type Evil cannot be sent between workers"):
        run_threads(2, lambda comm: comm.allgather_object(Evil()))
