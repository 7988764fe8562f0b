"""The pretended device of the tests is as closed as a GPU, so that what passes on it does not touch device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.backends.strict import DeviceArray, StrictMemory

TOUCHES: dict[str, Callable[[Any], object]] = {
    "asarray": np.asarray,
    "isfinite": np.isfinite,
    "copyto": lambda a: np.copyto(a, np.zeros(4, np.float32)),
    "copy": lambda a: np.copyto(np.zeros(4, np.float32), a),
    "sum": lambda a: a + 1,
    "out": lambda a: np.add(1.0, 1.0, out=a),
    "float": lambda a: float(a[0]),
    "bool": lambda a: bool(a[0]),
    "store": lambda a: a.__setitem__(..., 1.0),
    "walk": list,
    "equal": lambda a: a == a,
}


@pytest.mark.parametrize("how", TOUCHES)
def test_the_host_cannot_touch_memory_of_the_device(how: str) -> None:
    array = StrictMemory().zeros(16).view(np.float32)
    with pytest.raises(TypeError):
        TOUCHES[how](array)


def test_work_waits_until_somebody_does() -> None:
    memory = StrictMemory()
    a, b = (memory.zeros(8).view(np.float32) for _ in range(2))
    source = np.array([1.0, 2.0], np.float32)
    memory.copy(a, source)
    source[:] = 7.0
    memory.bind_copy(b, a)()
    memory.bind_fill(a[1:], 5.0)()
    seen = np.zeros(2, np.float32)
    memory.copy(seen, a)
    assert seen.tolist() == [0.0, 0.0]
    assert memory.fetch(b).tolist() == [1.0, 2.0]
    assert seen.tolist() == [1.0, 5.0]


@pytest.mark.gpu
def test_it_offers_nothing_that_cupy_lacks() -> None:
    cupy = pytest.importorskip("cupy")
    offered = [name for name in vars(DeviceArray) if not name.startswith("_")]
    assert all(hasattr(cupy.ndarray, name) for name in offered)
