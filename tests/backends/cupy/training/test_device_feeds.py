"""Fitting on a device: the next batch travels while a step runs, and nothing that the user sees depends on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.segment.bind import BoundSegment
from graphc.bench.specs import SPECS
from graphc.data import shard
from graphc.distributed.threads import run_threads
from graphc.errors import DataError, DeviceError, FeedError, WorldError
from tests.backends.host_kernels import HostDevice, cupy_on

pytestmark = [pytest.mark.full, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")]


@pytest.fixture
def devices(register_backend: Callable[..., None]) -> list[HostDevice]:
    made: list[HostDevice] = []

    def make(**_: Any) -> CupyBackend:
        made.append(HostDevice())
        made[-1].early = len(made) % 2 == 0
        return cupy_on(made[-1])

    register_backend("pretended", make)
    return made


def compiled(path: str, backend: str = "pretended", **options: Any) -> graphc.Program:
    loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.05, momentum=0.9)
    return graphc.compile(path, loss=loss, optimizer=optimizer, backend=backend, **options)


BATCHES = [SPECS["lenet"].batch(count, seed=count) for count in (6, 6, 6, 4, 6)]


def reused(pulled: list[int]) -> Iterator[dict[str, Any]]:
    """Batches in arrays that are filled anew for each, as a loader does that saves memory."""
    held: dict[int, dict[str, Any]] = {}
    for number, (x, y) in enumerate(BATCHES):
        arrays = held.setdefault(len(x), {"input": np.empty_like(x), "label": np.empty_like(y)})
        np.copyto(arrays["input"], x)
        np.copyto(arrays["label"], y)
        pulled.append(number)
        yield arrays


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.large), 2])
def test_fit_on_a_device_takes_every_batch_as_it_was_though_the_arrays_are_used_again(
    accumulate: int, exported: Callable[[str], str], devices: list[HostDevice]
) -> None:
    path = exported("lenet")

    def fitted(backend: str) -> tuple[Any, list[dict[str, Any]]]:
        pulled: list[int] = []
        events: list[dict[str, Any]] = []
        with graphc.Trainer(compiled(path, backend, accumulate=accumulate), threads=1) as trainer:
            for _ in range(2):
                trainer.fit(reused(pulled), callbacks=[lambda e: events.append({**e, "pulled": len(pulled)})], log_every=1)
            return trainer.state.snapshot(), events

    (wanted, host), *found = [fitted(backend) for backend in ("onnxruntime", "pretended", "pretended")]
    for state, log in found:
        for name, value in wanted.items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=2e-5 * max(1.0, np.abs(value).max()), err_msg=name)
        np.testing.assert_allclose([e["loss"] for e in log], [e["loss"] for e in host], rtol=1e-4)
    assert [e["pulled"] for e in host if e["event"] == "step"][:4] == [1, 2, 3, 4]
    assert [e["pulled"] for e in found[0][1] if e["event"] == "step"][:4] == [2, 3, 4, 5], "one batch ahead of the step"


def test_the_position_in_the_data_is_that_of_the_step_and_not_of_the_batch_fetched_ahead(
    exported: Callable[[str], str], devices: list[HostDevice]
) -> None:
    x, y = SPECS["lenet"].batch(20)

    def positions(backend: str) -> list[Any]:
        shards = shard({"input": x, "label": y}, global_batch=6, seed=1)
        seen: list[Any] = []
        with graphc.Trainer(compiled(exported("lenet"), backend), threads=1) as trainer:
            note = lambda event: seen.append((event["event"], shards.position))  # noqa: E731
            trainer.fit(shards, epochs=2, callbacks=[note], log_every=1)
        return seen

    assert positions("pretended") == positions("onnxruntime")


def test_a_batch_that_cannot_be_read_or_fed_is_told_after_the_step_before_it(
    exported: Callable[[str], str], devices: list[HostDevice]
) -> None:
    x, y = SPECS["lenet"].batch(4)

    def broken() -> Iterator[dict[str, Any]]:
        yield {"input": x, "label": y}
        raise DataError("the disk is gone")

    with graphc.Trainer(compiled(exported("lenet")), threads=1) as trainer:
        with pytest.raises(DataError, match="disk"):
            trainer.fit(broken())
        assert trainer.steps_done == 1
        with pytest.raises(FeedError, match="label 10"):
            trainer.fit([{"input": x, "label": y}, {"input": x, "label": np.full(4, 10)}])
        assert trainer.steps_done == 2
        trainer.step({"input": x, "label": y})  # nothing of what was fetched ahead is left over
        assert trainer.steps_done == 3


@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_a_device_that_is_lost_ends_all_ranks_with_step_and_cause(
    exported: Callable[[str], str], devices: list[HostDevice]
) -> None:
    path = exported("lenet")
    x, y = SPECS["lenet"].batch(4)
    errors: dict[int, BaseException] = {}

    def worker(comm: Any) -> None:
        with graphc.Trainer(compiled(path), comm=comm, threads=1) as trainer:
            trainer.step({"input": x, "label": y})
            if comm.rank == 1:
                trainer.backend.memory.lost = DeviceError("the GPU is gone (cudaErrorUnknown)")  # type: ignore[attr-defined]
            try:
                trainer.step({"input": x, "label": y})
            except BaseException as error:
                errors[comm.rank] = error
                raise

    with pytest.raises((DeviceError, WorldError)):
        run_threads(2, worker)
    assert isinstance(errors[1], DeviceError)
    assert "rank 1 lost its GPU in step 1" in str(errors[1])
    assert "cudaErrorUnknown" in str(errors[1])
    assert isinstance(errors[0], WorldError)


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"nonfinite": "skip"}], ids=str)
def test_a_step_of_one_worker_is_replayed_as_one_and_python_walks_through_none_of_it(
    options: dict[str, Any], exported: Callable[[str], str], devices: list[HostDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = SPECS["lenet"].batch(8)
    with graphc.Trainer(compiled(exported("lenet"), **options), threads=1) as trainer:
        for _ in range(2):
            trainer.step({"input": x, "label": y})
        (executor,) = trainer.plans.training.values()
        assert len(executor.runs) == 1
        monkeypatch.setattr(BoundSegment, "__call__", lambda self: pytest.fail("a segment is launched call by call"))
        losses = [trainer.step({"input": x, "label": y})["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


class ForeignTensor:
    """An array of another library on the pretended device, which hands it over by DLPack."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.shape, self.dtype, self.ndim = held.shape, held.dtype, held.ndim

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: Any) -> ForeignTensor:
        return ForeignTensor(self.held[index])

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self) -> Any:
        return self.held


@pytest.mark.parametrize(("accumulate", "wrap"), [(1, lambda held: held), (2, ForeignTensor)], ids=["own", "foreign-in-parts"])
def test_feeds_that_lie_on_the_device_train_as_those_of_the_host(
    accumulate: int, wrap: Callable[[Any], Any], exported: Callable[[str], str], devices: list[HostDevice]
) -> None:
    def fitted(place: Callable[[Any, Any], Any]) -> tuple[Any, dict[str, float]]:
        with graphc.Trainer(compiled(exported("lenet"), "pretended", accumulate=accumulate), threads=1) as trainer:
            feeds = [{"input": place(trainer, x), "label": place(trainer, y)} for x, y in BATCHES[:3]]
            trainer.step(feeds[0])
            return trainer.fit(feeds, epochs=2), trainer.evaluate(feeds)

    here = fitted(lambda trainer, array: array)
    there = fitted(lambda trainer, array: wrap(trainer.backend.memory.put(array)))
    assert there == here, "the same numbers, bit by bit"
