"""Two workers do what one does on the whole batch, and stay bit-identical, over threads and over real MPI processes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.distributed.threads import run_threads
from tests.runtime.mpi_run import map_ranks
from tests.tiers import params
from tests.training.compile_once import compile_once

pytestmark = pytest.mark.full

# BatchNormalization is left out where one worker is compared with two: its batch statistics are those of a worker's share.
ALIKE = ["mlp", "lenet", "transformer-small"]


def train(comm: Any, path: str, name: str, steps: int, optimizer: str = "sgd", sizes: tuple[int, ...] = (8,)) -> dict[str, Any]:
    """Losses, state hash and final state of one rank; ``sizes`` are global batch sizes, used in turn."""
    chosen = graphc.optim.parse({"sgd": "sgd:lr=0.05,momentum=0.9", "adam": "adam:lr=1e-3"}[optimizer])
    program = compile_once(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=chosen, bucket_mb=0.05)
    losses = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for step in range(steps):
            count = sizes[step % len(sizes)]
            x, y = SPECS[name].batch(count, step)
            mine = share(count, comm.rank, comm.size)
            losses.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["loss"])
        return {"losses": losses, "hash": trainer.state_sha256(), "state": trainer.state.snapshot()}


def close(one: dict[str, Any], many: dict[str, Any], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=tolerance)
    for key, value in one["state"].items():
        if value.dtype.kind == "f" and "::" not in key:
            scale = np.abs(value).max()
            np.testing.assert_allclose(many["state"][key], value, rtol=0, atol=max(5 * tolerance * scale, 1e-6), err_msg=key)


@pytest.mark.parametrize(
    ("name", "workers"),
    params(product(ALIKE, (2, 3)), large=[("mlp", 3), ("lenet", 3), ("transformer-small", 2)]),
)
def test_workers_in_threads_follow_one(name: str, workers: int, exported: Callable[[str], str]) -> None:
    path = exported(name)
    (one,) = run_threads(1, lambda comm: train(comm, path, name, 6))
    many = run_threads(workers, lambda comm: train(comm, path, name, 6))
    assert len({result["hash"] for result in many}) == 1
    close(one, many[0])


@pytest.mark.mpi
@pytest.mark.large  # tests/cli/test_train.py trains two processes beside one
@pytest.mark.parametrize("name", ALIKE)
def test_mpi_workers_follow_one(name: str, exported: Callable[[str], str]) -> None:
    path = exported(name)
    (one,) = run_threads(1, lambda comm: train(comm, path, name, 6))
    two = map_ranks(2, train, path, name, 6)
    assert two[0]["hash"] == two[1]["hash"]
    close(one, two[0])


def test_uneven_shares_average_exactly(exported: Callable[[str], str]) -> None:
    """Global batches of 7 and 5 over two workers: shares of 4 and 3, then 3 and 2, and a plan for each."""
    path = exported("mlp")
    (one,) = run_threads(1, lambda comm: train(comm, path, "mlp", 6, sizes=(7, 5)))
    two = run_threads(2, lambda comm: train(comm, path, "mlp", 6, sizes=(7, 5)))
    close(one, two[0])


def ignoring(comm: Any, path: str) -> list[float]:
    program = graphc.compile(
        path, loss=graphc.losses.SoftmaxCrossEntropy(ignore_index=-100), optimizer=graphc.optim.SGD(lr=0.1)
    )
    x, y = SPECS["mlp"].batch(8)
    y[1:4] = -100  # all on the first of two workers: a mean of means would be wrong
    mine = share(8, comm.rank, comm.size)
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        return [trainer.step({"input": x[mine], "label": y[mine]})["loss"] for _ in range(4)]


def test_ignored_labels_average_exactly(exported: Callable[[str], str]) -> None:
    path = exported("mlp")
    (one,) = run_threads(1, lambda comm: ignoring(comm, path))
    two = run_threads(2, lambda comm: ignoring(comm, path))
    np.testing.assert_allclose(two[0], one, rtol=1e-5)


@pytest.mark.mpi
@pytest.mark.large
@pytest.mark.parametrize("name", ["mlp", "resnet18-small"])
def test_replicas_are_bit_identical_after_fifty_steps(name: str, exported: Callable[[str], str]) -> None:
    results = map_ranks(2, train, exported(name), name, 50, "adam")
    assert results[0]["hash"] == results[1]["hash"]
    for key, value in results[0]["state"].items():
        np.testing.assert_array_equal(results[1]["state"][key], value, err_msg=key)
    assert np.isfinite(results[0]["losses"]).all()


def test_same_seed_same_bits(exported: Callable[[str], str]) -> None:
    path = exported("lenet")
    first, second = (run_threads(2, lambda comm: train(comm, path, "lenet", 5, "adam"))[0]["hash"] for _ in range(2))
    assert first == second


def test_mesh_and_world_must_agree(exported: Callable[[str], str]) -> None:
    program = graphc.compile(
        exported("mlp"),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.1),
        mesh=graphc.Mesh(data=2),
    )
    with pytest.raises(graphc.GraphcError, match=r"data=2.*launch -n 2"):
        graphc.Trainer(program)


def disagreeing(comm: Any, path: str) -> None:
    optimizer = graphc.optim.SGD(lr=0.1, momentum=0.9 if comm.rank else 0.0)
    program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=optimizer)
    with graphc.Trainer(program, comm=comm, threads=1):
        pass


def test_workers_with_different_programs_are_told_apart(exported: Callable[[str], str]) -> None:
    path = exported("mlp")
    with pytest.raises(graphc.GraphcError, match=r"disagree on program.*rank 0.*rank 1"):
        run_threads(2, lambda comm: disagreeing(comm, path))


def poisoned(comm: Any, path: str) -> tuple[str, str]:
    program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    x, y = SPECS["mlp"].batch(4, comm.rank)
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        trainer.step({"input": x, "label": y})
        before = trainer.state_sha256()
        if comm.rank == 1:
            x[2, 7] = np.nan
        with pytest.raises(graphc.errors.NonFiniteError) as caught:
            trainer.step({"input": x, "label": y})
        assert trainer.state_sha256() == before
        return before, str(caught.value)


def test_a_nan_on_one_worker_stops_all_and_is_traced_to_its_rank(exported: Callable[[str], str]) -> None:
    path = exported("mlp")
    first, second = run_threads(2, lambda comm: poisoned(comm, path))
    assert first == second
    assert "in step 1, first in tensor 'input' on rank 1" in first[1]
