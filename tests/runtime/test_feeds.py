"""Feeds that travel while the step before runs: right for whoever reuses its arrays, early or late as the transfer may be."""

from __future__ import annotations

import numpy as np
import pytest

from graphc.device import HostMemory
from graphc.runtime.feeds import Feeds
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
