"""``deterministic="any-world"``: the same bits after ten steps on one, two and four workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from tests.runtime.mpi_run import map_ranks
from tests.training import torch_models
from tests.training.compile_once import compile_once

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[str], str]) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("any-world")
    cnn, mlp = torch_models.Cnn, torch_models.Mlp
    return {
        "cnn": torch_models.save(torch_models.make(cnn), folder / "cnn.onnx", torch.randn(4, 3, 8, 8)),
        "mlp": torch_models.save(torch_models.make(lambda: mlp(0.2)), folder / "mlp.onnx", torch.randn(4, 20)),
        "transformer": exported("transformer-small"),
    }


def batch(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if name == "transformer":
        return SPECS["transformer-small"].batch(16, seed)
    return torch_models.batch((3, 8, 8) if name == "cnn" else (20,), 16, seed)


def train(comm: Any, path: str, name: str, deterministic: str | None = "any-world", steps: int = 10) -> tuple[str, float]:
    program = compile_once(
        path,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.Adam(lr=0.01),
        deterministic=deterministic,
        bucket_mb=0.01,
    )
    with graphc.Trainer(program, comm=comm, threads=2 // comm.size or 1) as trainer:
        for step in range(steps):
            x, y = batch(name, step)
            mine = share(16, comm.rank, comm.size)
            loss = trainer.step({"input": x[mine], "label": y[mine]})["loss"]
        return trainer.state_sha256(), loss


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_the_same_bits_on_one_two_and_four_workers(name: str, paths: dict[str, str]) -> None:
    results = [run_threads(n, lambda comm: train(comm, paths[name], name)) for n in (1, 2, 4)]
    assert len({result for ranks in results for result in ranks}) == 1, results


@pytest.mark.mpi
@pytest.mark.large
@pytest.mark.parametrize("workers", [2, 4])
def test_the_same_bits_over_mpi(workers: int, paths: dict[str, str]) -> None:
    (one,) = run_threads(1, lambda comm: train(comm, paths["cnn"], "cnn"))
    assert set(map_ranks(workers, train, paths["cnn"], "cnn")) == {one}


def test_without_it_bits_depend_on_the_number_of_workers(paths: dict[str, str]) -> None:
    one, two = (run_threads(n, lambda comm: train(comm, paths["transformer"], "transformer", None, 5))[0] for n in (1, 2))
    assert one[0] != two[0]


def test_what_cannot_be_divided_is_refused(paths: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="4 shards for 3 workers"):
        run_threads(3, lambda comm: train(comm, paths["mlp"], "mlp"))
    with pytest.raises(UsageError, match="shards=3 must be a power of two"):
        run_threads(1, lambda comm: train(comm, paths["mlp"], "mlp", "any-world:shards=3"))
    with pytest.raises(UsageError, match="16 samples does not divide into 32 shards"):
        run_threads(1, lambda comm: train(comm, paths["mlp"], "mlp", "any-world:shards=32"))
