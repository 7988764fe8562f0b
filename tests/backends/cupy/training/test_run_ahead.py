"""``fit`` queues a step before the results of the last one are read: bit by bit what ``step`` computes, with and without a NaN.

The device is the one of the tests, whose work runs as late as possible, and with ``-m gpu`` a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.data import shard, share
from graphc.errors import NonFiniteError, UsageError
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.training.progress import Log
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.conftest import emulated
from tests.runtime.mpi_run import map_ranks
from tests.training import small

pytestmark = pytest.mark.full

ADAM = "adam:lr=0.01"
SIZES = (12, 12, 12, 7, 12, 12)
"""Samples of the steps: the fourth has a plan of its own."""

DEVICES = [
    pytest.param("pretended", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def device(register_backend: Callable[..., None]) -> None:
    register_backend("pretended", lambda **_: cupy_on(HostDevice()))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which steps are queued and read."""
    return watch_order(monkeypatch)


def watch_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    queue, finish = Executor.queue, Executor.finish

    def queued(self: Executor, *args: Any, **options: Any) -> Any:
        if self.plan.groups and options.get("last", True):
            seen.append("queue")
        return queue(self, *args, **options)

    def finished(self: Executor, *args: Any, **options: Any) -> Any:
        if self.plan.groups:
            seen.append("read")
        try:
            return finish(self, *args, **options)
        except NonFiniteStepError:
            seen.append("stop")
            raise

    monkeypatch.setattr(Executor, "queue", queued)
    monkeypatch.setattr(Executor, "finish", finished)
    return seen


def early(order: list[str]) -> int:
    """How often a step was queued before the last one was read."""
    found = depth = 0
    for what in order:
        depth = {"queue": depth + 1, "read": depth - 1, "stop": 0}[what]
        found += what == "queue" and depth == 2
    return found


def batches(bad: int | None = None, sizes: tuple[int, ...] = SIZES, part: Any = lambda size: slice(None)) -> list[Any]:
    """Feeds of each step; those of step ``bad`` hold an infinity in their last sample."""
    found = []
    for step, size in enumerate(sizes):
        x, y = small.batch(size, step)
        if step == bad:
            x[-1, 3] = np.inf
        found.append({"input": x[part(size)], "label": y[part(size)]})
    return found


def reused(items: list[Any]) -> Iterator[Any]:
    """The same batches in arrays that are filled anew for each."""
    held: dict[int, Any] = {}
    for feeds in items:
        arrays = held.setdefault(len(feeds["label"]), {name: np.empty_like(array) for name, array in feeds.items()})
        for name, array in feeds.items():
            np.copyto(arrays[name], array)
        yield arrays


def schedule(step: int) -> float:
    return 0.01 / (1 + step)


def trained(
    backend: str, *, ahead: bool, bad: int | None = None, part: Any = lambda size: slice(None), **how: Any
) -> dict[str, Any]:
    """All that a user can see of six steps and one more, by ``fit`` or step by step."""
    comm, options = how.pop("comm", None), how.pop("options", {})
    place = how.pop("place", None)
    program = small.compiled(ADAM, backend=backend, deterministic="run", **options)
    losses: list[Any] = []
    error = None
    with graphc.Trainer(program, threads=1, schedule=schedule, comm=comm, **how) as trainer:
        feeds = batches(bad, part=part)
        if place is not None:
            feeds = [{name: place(trainer, array) for name, array in one.items()} for one in feeds]
        try:
            if ahead:
                note = Log(lambda event: losses.append((event.get("step"), event["loss"], trainer.steps_done)))
                trainer.fit(reused(feeds) if place is None else feeds, callbacks=[note], log_every=1)
            else:
                for one in feeds:
                    losses.append((trainer.steps_done + 1, trainer.step(one)["loss"], trainer.steps_done))
        except NonFiniteError as found:
            error = (str(found), found.step, found.tensor)
        losses = [one for one in losses if one[0] is not None]
        seen = {"losses": losses, "error": error, "steps": trainer.steps_done, "rate": trainer.learning_rate}
        seen["hash"] = trainer.state_sha256()
        seen["next"] = trainer.step(batches(part=part)[0])["loss"]
        return seen | {"state": {name: array.tobytes() for name, array in trainer.state.snapshot(trainer.comm).items()}}


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("backend", DEVICES)
def test_fit_computes_the_bits_of_single_steps(backend: str, options: dict[str, Any], order: list[str]) -> None:
    found = trained(backend, ahead=True, options=options)
    assert early(order) == len(SIZES) - 1, "every step but the first is queued before the last one is read"
    assert found == trained(backend, ahead=False, options=options)
    assert [step for step, *_ in found["losses"]] == [done for *_, done in found["losses"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("bad", range(len(SIZES)))
@pytest.mark.parametrize("backend", DEVICES)
def test_a_nan_stops_at_its_own_step_though_the_next_one_is_queued(backend: str, bad: int, order: list[str]) -> None:
    found = trained(backend, ahead=True, bad=bad)
    assert early(order) == min(bad + 1, len(SIZES) - 1)
    assert found == trained(backend, ahead=False, bad=bad)
    message, step, tensor = found["error"]
    assert (step, tensor) == (bad, "input")
    assert "the state is that of the last good step" in message
    assert found["steps"] == bad == len(found["losses"])


@pytest.mark.parametrize("bad", [None, 2])
@pytest.mark.parametrize("backend", DEVICES)
def test_feeds_on_the_device(backend: str, bad: int | None, order: list[str]) -> None:
    def place(trainer: graphc.Trainer, array: Any) -> Any:
        memory = trainer.backend.memory
        there = memory.zeros(array.nbytes).view(array.dtype).reshape(array.shape)
        memory.copy(there, array)
        return there

    found = trained(backend, ahead=True, bad=bad, place=place)
    assert early(order) == (5 if bad is None else bad + 1)
    assert found == trained(backend, ahead=False, bad=bad)


@pytest.mark.parametrize("backend", DEVICES)
def test_a_callback_finds_the_trainer_after_its_step(backend: str, tmp_path: Path, order: list[str]) -> None:
    """State, position in the data, checkpoint and a new learning rate; a Log beside it changes nothing."""
    x, y = small.batch(60, 0)

    def seen(log_every: int) -> tuple[list[Any], str]:
        shards = shard({"input": x, "label": y}, global_batch=12, seed=1)
        found: list[Any] = []
        with graphc.Trainer(small.compiled(ADAM, backend=backend), threads=1) as trainer:

            def look(event: dict[str, Any]) -> None:
                if trainer.steps_done % 2 == 0 or event["event"] == "epoch":
                    found.append((event, trainer.state_sha256(), shards.position, trainer.steps_done))
                    trainer.save(tmp_path / f"{log_every}-{trainer.steps_done}")
                    trainer.learning_rate = 0.01 / trainer.steps_done

            trainer.fit(shards, epochs=2, callbacks=[look, Log(lambda event: None)], log_every=log_every)
            return found, trainer.state_sha256()

    every_step = seen(1)
    assert early(order) == 0
    assert seen(2) == every_step
    assert early(order) == 4, "steps 2 and 4, and 1 and 3 of the second epoch"
    for steps in (2, 4, 5, 6, 8, 10):
        one, two = (graphc.runtime.checkpoint.load(tmp_path / f"{every}-{steps}") for every in (1, 2))
        assert one[1] == two[1]
        assert {n: a.tobytes() for n, a in one[0].items()} == {n: a.tobytes() for n, a in two[0].items()}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["callback", "data"])
@pytest.mark.parametrize("backend", DEVICES)
def test_after_an_interrupt_state_steps_and_position_belong_together(
    backend: str, where: str, error: type[BaseException], tmp_path: Path
) -> None:
    x, y = small.batch(72, 0)

    def run(stop: str, resume: bool) -> str:
        shards = shard({"input": x, "label": y}, global_batch=12, seed=1)
        read, steps = shards.epoch, list[int]()

        def broken(epoch: int, *, start: int = 0) -> Iterator[Any]:
            for number, batch in enumerate(read(epoch, start=start)):
                if stop == "data" and number == 3:
                    raise error("stop")
                yield batch

        def log(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                steps.append(event["step"])
            if stop == "callback" and event.get("step") == 2:
                raise error("stop")

        shards.epoch = broken  # type: ignore[method-assign]
        with graphc.Trainer(small.compiled(ADAM, backend=backend), threads=1) as trainer:
            if resume:
                trainer.attach(shards)
                trainer.restore(tmp_path)
            if not stop:
                trainer.fit(shards, callbacks=[Log(log)], log_every=1)
                return trainer.state_sha256()
            with pytest.raises(error, match="stop"):
                trainer.fit(shards, callbacks=[Log(log)], log_every=1)
            assert trainer.steps_done == 3, "the step that was queued counts"
            assert shards.position == (0, 36)
            assert steps == [1, 2, 3], "its event comes, too"
            trainer.attach(shards)
            trainer.save(tmp_path)
            return trainer.state_sha256()

    run(where, resume=False)
    assert run("", resume=True) == run("", resume=False)


@pytest.mark.parametrize("backend", DEVICES)
def test_a_log_that_asks_something_of_the_trainer_is_refused(backend: str, tmp_path: Path) -> None:
    feeds = batches()
    with graphc.Trainer(small.compiled(ADAM, backend=backend), threads=1) as trainer:
        for ask in (
            lambda: trainer.save(tmp_path),
            lambda: trainer.step(feeds[0]),
            lambda: trainer.export(tmp_path / "m.onnx"),
        ):
            with pytest.raises(UsageError, match=r"has queued its next step already: a callback that .* must not be wrapped"):
                trainer.fit(feeds[:3], callbacks=[Log(lambda event, ask=ask: ask())], log_every=1)
        done = trainer.steps_done
        trainer.fit(feeds[:3])
        assert trainer.steps_done == done + 3


@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "skip"}, {"accumulate": 2}, {"precision": "fp16"}, {"keep_outputs": True}, {"check_finite": False}],
    ids=str,
)
def test_the_rest_waits_for_every_step(options: dict[str, Any], order: list[str]) -> None:
    rest = {name: value for name, value in options.items() if name not in ("keep_outputs", "check_finite")}
    loss = graphc.losses.SoftmaxCrossEntropy(keep_outputs="keep_outputs" in options)
    program = graphc.compile(small.model(), loss=loss, optimizer=graphc.optim.parse(ADAM), backend="pretended", **rest)
    with graphc.Trainer(program, threads=1, check_finite="check_finite" not in options) as trainer:
        trainer.fit(batches(sizes=(12, 12, 12)), log_every=1)
    assert early(order) == 0


STRATEGIES: dict[str, dict[str, Any]] = {"mirrored": {}, "zero": {"strategy": "zero:stage=2"}}


def two_ranks(comm: Any) -> dict[Any, Any]:
    """One of two ranks; only the second one's share holds the infinity."""
    comm.close = lambda: None  # one world for all of them
    order = watch_order(pytest.MonkeyPatch())
    found: dict[Any, Any] = {}
    for strategy, options in STRATEGIES.items():
        for bad in (None, 2):
            for ahead in (True, False):
                order.clear()
                how = {"comm": comm, "part": lambda size: share(size, comm.rank, comm.size), "transport": "nccl"}
                found[strategy, bad, ahead] = trained("cupy", ahead=ahead, bad=bad, options=options, **how)
                found[strategy, bad, ahead, "early"] = early(order)
    return found


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.skipif(not emulated(), reason="says how many GPUs there are")
def test_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCUDA_DEVICES", "2")
    ranks = map_ranks(2, two_ranks, timeout=600)
    for strategy in STRATEGIES:
        for bad in (None, 2):
            for rank in ranks:
                assert rank[strategy, bad, True] == rank[strategy, bad, False]
                assert rank[strategy, bad, True, "early"] == (5 if bad is None else bad + 1)
                assert rank[strategy, bad, False, "early"] == 0
            first, second = (rank[strategy, bad, True] for rank in ranks)
            assert first["hash"] == second["hash"]
            if bad is not None:
                assert "step 2, first in tensor 'input' on rank 1" in first["error"][0]
                assert first["error"] == second["error"]


def watched_by_one(comm: Any) -> tuple[int, str]:
    order = watch_order(pytest.MonkeyPatch())
    with graphc.Trainer(small.compiled(ADAM, backend="cupy"), comm=comm, threads=1, transport="nccl") as trainer:
        mine = batches(part=lambda size: share(size, comm.rank, comm.size))
        trainer.fit(mine, callbacks=[lambda event: None] if comm.rank == 0 else [], log_every=3)
        return early(order), trainer.state_sha256()


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.skipif(not emulated(), reason="says how many GPUs there are")
def test_all_ranks_wait_where_one_has_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCUDA_DEVICES", "2")
    first, second = map_ranks(2, watched_by_one, timeout=600)
    assert first == second
    assert first[0] == 4, "not after step 3, and nothing comes after step 6"
