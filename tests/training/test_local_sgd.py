"""Local SGD against PyTorch: workers that train alone and average every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import GraphcError, UsageError
from tests.training import small

pytestmark = pytest.mark.full

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd:lr=0.1": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd:lr=0.05,momentum=0.9": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam:lr=0.01": lambda p: torch.optim.Adam(p, lr=0.01),
}


def simulate(optimizer: str, workers: int, steps: int, size: int, every: int, start: int, states: bool) -> list[small.Torch]:
    alone = [small.Torch(OPTIMIZERS[optimizer]) for _ in range(workers)]
    for step in range(steps):
        x, y = small.batch(size, step)
        for rank, worker in enumerate(alone):
            mine = share(size, rank, workers)
            worker.backward(x[mine], y[mine])
            worker.optimizer.step()
        if step >= start and (step + 1) % every:
            continue
        for name in small.SHAPES:
            average([worker.parameters[name].data for worker in alone])
            for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                found = [worker.optimizer.state[worker.parameters[name]].get(kind) for worker in alone]
                if states and found[0] is not None:
                    average(found)
    return alone


def average(tensors: list[torch.Tensor]) -> None:
    mean = torch.stack(tensors).mean(0)
    for tensor in tensors:
        tensor.copy_(mean)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "every", "start", "states"), [(2, 3, 0, True), (2, 4, 5, False), (4, 2, 0, True)])
def test_local_steps_and_averages_are_those_of_pytorch(
    optimizer: str, workers: int, every: int, start: int, states: bool
) -> None:
    strategy = f"local_sgd:every={every},start={start},states={str(states).lower()}"
    program = small.compiled(optimizer, strategy=strategy)
    for steps in (11, 12):  # between two averages, and right after one
        alone = simulate(optimizer, workers, steps, 14, every, start, states)
        ranks = run_threads(workers, lambda comm, n=steps: small.train(comm, program, n, (14,)))
        for rank, worker in zip(ranks, alone, strict=True):
            assert small.largest_difference(rank["state"], worker.state()) < 2e-5
        assert len({rank["hash"] for rank in ranks}) == 1
        apart = small.largest_difference(ranks[0]["state"], ranks[1]["state"])
        assert apart > 0 if steps % every else apart == 0


@pytest.mark.parametrize("workers", [2, 4])
def test_averaging_every_step_is_mirrored_for_equal_shares(workers: int) -> None:
    programs = [small.compiled("sgd:lr=0.1", strategy=s) for s in ("local_sgd:every=1", "mirrored")]
    local, mirrored = (run_threads(workers, lambda comm, p=p: small.train(comm, p, 10))[0] for p in programs)
    assert small.largest_difference(local["state"], mirrored["state"]) < 1e-5
    np.testing.assert_allclose([m["loss"] for m in local["metrics"]], [m["loss"] for m in mirrored["metrics"]], rtol=1e-5)


def test_between_averages_only_the_loss_is_exchanged() -> None:
    sent: list[str] = []

    def train(comm: Any) -> None:
        if comm.rank == 0:
            comm.observer = lambda handle: sent.append(handle.what)
        small.train(comm, small.compiled("adam:lr=0.01", strategy="local_sgd:every=3", bucket_mb=25), 3)

    run_threads(2, train)
    kinds = [what.partition("data/")[2] for what in sent if "data/" in what]
    assert kinds == ["metrics", "metrics", "metrics", "b0.average0", "b0.average1", "b0.average2"]


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_bad_gradient_of_one_rank_concerns_all(nonfinite: str) -> None:
    program = small.compiled("sgd:lr=0.1", strategy="local_sgd:every=4", nonfinite=nonfinite)

    def train(comm: Any) -> tuple[int, bool]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            x, y = small.batch(8, comm.rank)
            trainer.step({"input": x, "label": y})
            before = trainer.state.snapshot()
            x[0, 0] = np.nan if comm.rank == 1 else x[0, 0]
            stopped = False
            try:
                trainer.step({"input": x, "label": y})
            except GraphcError:
                stopped = True
            same = all(np.array_equal(before[n], a) for n, a in trainer.state.snapshot().items() if n in small.SHAPES)
            assert same
            return trainer.skipped_steps, stopped

    assert run_threads(2, train) == [(1, False)] * 2 if nonfinite == "skip" else run_threads(2, train) == [(0, True)] * 2


def test_options_out_of_range() -> None:
    with pytest.raises(UsageError, match="every=0"):
        small.compiled(strategy="local_sgd:every=0")
