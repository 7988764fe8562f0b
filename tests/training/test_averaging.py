"""Averages are exact: shares that differ or are empty, labels that do not count, and micro-batches leave the step as it is.

Everything is compared with one worker that takes the whole batch in one piece; an average of averages, or a sum that is
divided by the number of workers once too often, is off by far more than the tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.runtime.checkpoint import state_sha256
from graphc.runtime.state import State
from tests.runtime.mpi_run import map_ranks
from tests.training import torch_models
from tests.training.compile_once import compile_once
from tests.training.torch_models import Array

pytestmark = pytest.mark.full


class Plain(nn.Module):
    """20-32-10 with Dropout: nothing in it mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Dropout(0.25), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("averaging")
    kinds: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "norm": torch_models.Mlp}
    return {
        name: torch_models.save(torch_models.make(kind), folder / f"{name}.onnx", torch.randn(4, 20))
        for name, kind in kinds.items()
    }


def train(comm: Any, path: str, batches: Sequence[dict[str, Array]], edges: Sequence[int] | None = None, **options: Any) -> Any:
    """Losses and state of one rank over ``batches``, which are global; ``edges`` are the borders of the shares."""
    loss = options.pop("loss", graphc.losses.SoftmaxCrossEntropy())
    program = compile_once(path, loss=loss, optimizer=graphc.optim.SGD(lr=0.2, momentum=0.9), bucket_mb=0.002, **options)
    losses = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for batch in batches:
            count = len(batch["label"])
            mine = slice(*edges[comm.rank : comm.rank + 2]) if edges else share(count, comm.rank, comm.size)
            losses.append(trainer.step({k: a[mine] for k, a in batch.items()}, offset=mine.start)["loss"])
        return {"losses": losses, "hash": trainer.state_sha256(), "state": trainer.state.snapshot()}


def global_batches(sizes: Sequence[int], **more: Callable[[int], Array]) -> list[dict[str, Array]]:
    made = []
    for step, size in enumerate(sizes):
        x, y = torch_models.batch((20,), size, step)
        made.append({"input": x, "label": y, **{name: function(size) for name, function in more.items()}})
    return made


def same(one: Any, many: Sequence[Any], tolerance: float = 1e-6) -> None:
    assert len({result["hash"] for result in many}) == 1
    np.testing.assert_allclose(many[0]["losses"], one["losses"], rtol=tolerance)
    for key, value in one["state"].items():
        if value.dtype.kind == "f":
            scale = np.abs(value).max()
            np.testing.assert_allclose(many[0]["state"][key], value, rtol=0, atol=tolerance * scale + 1e-8, err_msg=key)


def compare(path: str, batches: Sequence[dict[str, Array]], worlds: Sequence[Any], **options: Any) -> None:
    accumulate = options.pop("accumulate", 1)
    (one,) = run_threads(1, lambda comm: train(comm, path, batches, **options))
    for workers, edges in worlds:
        many = run_threads(workers, lambda comm, e=edges: train(comm, path, batches, e, accumulate=accumulate, **options))
        same(one, many)


UNEVEN = [(2, [0, 1, 12]), (2, [0, 12, 12]), (3, [0, 0, 5, 12]), (4, None)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_shares_that_differ_or_are_empty(accumulate: int, paths: dict[str, str]) -> None:
    """Dropout included: its masks depend on a sample's place in the global batch."""
    compare(paths["plain"], global_batches([12] * 4), UNEVEN, accumulate=accumulate)


def test_a_last_batch_smaller_than_the_world(paths: dict[str, str]) -> None:
    compare(paths["plain"], global_batches([8, 3, 8, 1]), [(2, None), (4, None)], accumulate=2)


def test_no_sample_in_the_first_step_either(paths: dict[str, str]) -> None:
    compare(paths["plain"], global_batches([1, 1, 4]), [(3, None)])


def test_ignored_labels(paths: dict[str, str]) -> None:
    batches = global_batches([12] * 3)
    for batch in batches:
        batch["label"][:5] = -100  # all that the first worker has, or its first micro-batches
    loss = graphc.losses.SoftmaxCrossEntropy(ignore_index=-100, metrics=True)
    compare(paths["plain"], batches, [(1, None), (2, [0, 4, 12]), (4, None)], accumulate=2, loss=loss)


def test_class_weights(paths: dict[str, str]) -> None:
    loss = graphc.losses.SoftmaxCrossEntropy(class_weight=[0.1, 5, 1, 2, 0, 1, 1, 3, 1, 1])
    compare(paths["plain"], global_batches([10] * 3), [(1, None), (2, [0, 3, 10])], accumulate=3, loss=loss)


def test_a_sum_stays_a_sum(paths: dict[str, str]) -> None:
    loss = graphc.losses.SoftmaxCrossEntropy(reduction="sum")
    batches = global_batches([6] * 2)
    compare(paths["plain"], batches, [(1, None), (2, [0, 1, 6])], accumulate=2, loss=loss)


def test_running_statistics_weigh_samples(paths: dict[str, str]) -> None:
    """Σ n·statistic / Σ n over the shares, against numpy on the first layer's output; an empty share counts nothing."""
    (batch,) = global_batches([12])
    module = torch_models.make(torch_models.Mlp)
    with torch.no_grad():
        h = module.layers[0](torch.from_numpy(batch["input"])).numpy().astype(np.float64)
    for edges, accumulate in (([0, 3, 3, 12], 1), ([0, 12], 3), ([0, 4, 12], 2)):
        got = run_threads(len(edges) - 1, lambda c, e=edges, k=accumulate: train(c, paths["norm"], [batch], e, accumulate=k))[0]
        parts = [h[a:b] for a, b in itertools.pairwise(edges) if b > a]
        parts = [p[share(len(p), k, accumulate)] for p in parts for k in range(accumulate)]
        mean = sum(len(p) * p.mean(0) for p in parts) / 12
        var = sum(len(p) * p.var(0) for p in parts) / 12
        np.testing.assert_allclose(got["state"]["layers.1.running_mean"], 0.1 * mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(got["state"]["layers.1.running_var"], 0.9 + 0.1 * var, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_shared_statistics_with_an_empty_share(accumulate: int, paths: dict[str, str]) -> None:
    """Every rank meets in every micro-batch; with one micro-batch the result is that of one worker."""
    batches = global_batches([12] * 3)
    (one,) = run_threads(1, lambda comm: train(comm, paths["norm"], batches, sync_batchnorm=True))
    many = run_threads(
        3, lambda comm: train(comm, paths["norm"], batches, [0, 0, 5, 12], sync_batchnorm=True, accumulate=accumulate)
    )
    assert len({result["hash"] for result in many}) == 1
    if accumulate == 1:
        same(one, many, 1e-5)


def fit(comm: Any, path: str, lengths: Sequence[int], epochs: int) -> Any:
    """``fit`` over a list of ``lengths[rank]`` batches of two samples."""
    program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        steps = [torch_models.batch((20,), 2, 10 * comm.rank + k) for k in range(lengths[comm.rank])]
        means = trainer.fit([{"input": x, "label": y} for x, y in steps], epochs=epochs)
        return means["loss"], trainer.steps_done, trainer.state_sha256(), trainer.state.snapshot()


def test_workers_that_run_out_of_data_take_part_with_weight_zero(paths: dict[str, str]) -> None:
    results = run_threads(3, lambda comm: fit(comm, paths["plain"], [2, 0, 4], 2))
    assert len({result[:3] for result in results}) == 1
    assert results[0][1] == 8  # as many steps as the longest has, in each of two epochs
    program = graphc.compile(paths["plain"], loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(2):
            for k in range(4):
                present = [r for r, length in enumerate([2, 0, 4]) if k < length]
                steps = [torch_models.batch((20,), 2, 10 * r + k) for r in present]
                x, y = (np.concatenate(parts) for parts in zip(*steps, strict=True))
                trainer.step({"input": x, "label": y}, offset=0)
        for key, value in trainer.state.snapshot().items():
            np.testing.assert_allclose(results[0][3][key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def train_in_two(comm: Any, path: str, batches: Sequence[dict[str, Array]]) -> Any:
    return train(comm, path, batches, accumulate=2)


@pytest.mark.mpi
@pytest.mark.large
def test_uneven_accumulation_over_mpi(paths: dict[str, str]) -> None:
    batches = global_batches([7, 3, 1])
    (one,) = run_threads(1, lambda comm: train(comm, paths["plain"], batches))
    same(one, map_ranks(2, train_in_two, paths["plain"], batches))


class Unused(nn.Module):
    """Half of what it computes does not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(20, 10), nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


def test_what_the_loss_does_not_reach_is_not_reduced(tmp_path: Path) -> None:
    from graphc import frontends

    model = frontends.export(Unused(), (torch.randn(4, 20),), input_names=["input"], output_names=["logits", "other"])
    loss = graphc.losses.SoftmaxCrossEntropy(logits="logits", keep_outputs=False)
    program = graphc.compile(model, loss=loss, optimizer=graphc.optim.SGD(lr=0.1))
    reduced = [v for n in program.model.graph if n.op_type == "AllReduceStart" for v in n.inputs]
    shapes = sorted(tuple(v.shape.numpy()) for v in reduced)
    assert shapes == [(), (), (10,), (10, 20)]


def beginning(comm: Any, path: str) -> tuple[str, str]:
    program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    for value in program.model.graph.initializers.values():
        if value.dtype is not None and value.dtype.is_floating_point() and value.shape is not None and len(value.shape) == 2:
            value.const_value = ir.tensor(value.const_value.numpy() + np.float32(comm.rank), name=value.name)
    own = State(program.model).snapshot()
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        return state_sha256(own), trainer.state_sha256()


def test_all_workers_begin_with_the_state_of_rank_0(paths: dict[str, str]) -> None:
    (first, begun), (second, same_begun) = run_threads(2, lambda comm: beginning(comm, paths["plain"]))
    assert first != second
    assert begun == same_begun == first
