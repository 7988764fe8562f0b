"""Feeds that travel while the step before runs: right for whoever reuses its arrays, early or late as the transfer may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphc.device import HostMemory
from graphc.errors import FeedError
from graphc.runtime.input_staging import Feeds
from graphc.training.feeds import check_arrays
from tests.backends.strict import StrictMemory

SPECS = {"x": ((3, 4), np.dtype(np.float32)), "label": ((3,), np.dtype(np.int64)), "empty": ((0, 2), np.dtype(np.float32))}


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_a_step_reads_its_own_feeds_though_the_next_are_staged_and_the_arrays_used_again(early: bool) -> None:
    memory = StrictMemory()
    memory.early = early
    feeds = Feeds(memory, SPECS)
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in SPECS.items()}
    seen = [{name: memory.zeros(a.nbytes).view(a.dtype).reshape(a.shape) for name, a in arrays.items()} for _ in range(6)]

    def fill(number: int) -> None:
        arrays["x"][:] = number
        arrays["label"][:] = 100 * number

    fill(0)
    feeds.stage(arrays)
    for number, results in enumerate(seen):
        feeds.bring(arrays)
        for name, array in results.items():
            memory.bind_copy(array, feeds.inputs[name])()  # the step: it runs when its turn comes
        fill(number + 1)
        feeds.stage(arrays)
        fill(-1)  # the caller is free to use its arrays for something else
        if number % 3 == 2:
            memory.synchronize()
    for number, results in enumerate(seen):
        assert (memory.fetch(results["x"]) == number).all()
        assert (memory.fetch(results["label"]) == 100 * number).all()


def test_on_the_host_the_plan_reads_where_the_feeds_were_put() -> None:
    feeds = Feeds(HostMemory(), SPECS)
    arrays = {name: np.full(shape, 7, dtype) for name, (shape, dtype) in SPECS.items()}
    feeds.stage(arrays)
    feeds.bring(arrays)
    arrays["x"][:] = 0
    assert (feeds.inputs["x"] == 7).all()
    assert all(array.ctypes.data % 64 == 0 for array in feeds.inputs.values())


def test_feeds_that_were_staged_and_never_asked_for_are_forgotten() -> None:
    memory = StrictMemory()
    feeds = Feeds(memory, {"x": ((2,), np.dtype(np.float32))})
    feeds.stage({"x": np.full(2, 1, np.float32)})
    feeds.bring({"x": np.full(2, 2, np.float32)})
    np.testing.assert_array_equal(memory.fetch(feeds.inputs["x"]), [2, 2])


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("there", [("x",), ("label",), ("x", "label", "empty")], ids=str)
def test_feeds_on_the_device_are_taken_where_they_lie_staged_or_not(there: tuple[str, ...], early: bool) -> None:
    memory = StrictMemory()
    memory.early = early
    feeds = Feeds(memory, SPECS)
    results = []
    for number in range(8):
        given: dict[str, Any] = {name: np.full(shape, number + 1, dtype) for name, (shape, dtype) in SPECS.items()}
        for name in there:
            held = memory.zeros(given[name].nbytes).view(given[name].dtype).reshape(given[name].shape)
            memory.copy(held, given[name])
            given[name] = held
        if number % 3:
            feeds.stage(given)
        feeds.bring(given)
        results.append({name: memory.zeros(a.nbytes).view(a.dtype).reshape(a.shape) for name, a in feeds.inputs.items()})
        for name, array in results[-1].items():
            memory.bind_copy(array, feeds.inputs[name])()
        for name in SPECS.keys() - set(there):
            given[name][:] = 0  # the host's arrays may be used again at once
    for number, found in enumerate(results):
        assert (memory.fetch(found["x"]) == number + 1).all()
        assert (memory.fetch(found["label"]) == number + 1).all()


def test_a_feed_that_cannot_be_taken_from_its_device_is_named() -> None:
    class Tensor:
        """What another library has on device ``kind``."""

        shape, dtype = (3, 4), np.dtype(np.float32)

        def __init__(self, kind: int) -> None:
            self.kind = kind

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.kind, 0

        def __dlpack__(self) -> Any:
            raise BufferError("it is still needed for gradients")

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("it does not lie in the host's memory")

    memory = StrictMemory()
    inputs = {"x": memory.zeros(48).view(np.float32).reshape(3, 4)}
    for kind, message in (
        (2, "'x' on a device cannot be taken: it is still needed"),
        (10, "'x' is not in the memory of"),
    ):
        with pytest.raises(FeedError, match=message):
            check_arrays({"x": Tensor(kind)}, inputs, {}, memory)  # type: ignore[dict-item]
    with pytest.raises(FeedError, match="'x' is not in the memory of the host"):
        check_arrays({"x": Tensor(2)}, {"x": np.zeros((3, 4), np.float32)}, {}, HostMemory())  # type: ignore[dict-item]
    with pytest.raises(FeedError, match="'x' is not contiguous on the device"):
        check_arrays({"x": memory.zeros(96).view(np.float32).reshape(3, 8)[:, :4]}, inputs, {}, memory)
    with pytest.raises(FeedError, match="'x' is float64, the model wants float32"):
        check_arrays({"x": memory.zeros(96).view(np.float64).reshape(3, 4)}, inputs, {}, memory)
