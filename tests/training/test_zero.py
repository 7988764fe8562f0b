"""ZeRO and central storage: what mirrored training computes, with state divided among the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import graphc
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError, UsageError
from graphc.ir.declare import OPS
from graphc.report.memory import memory_of
from tests.runtime.mpi_run import map_ranks
from tests.tiers import params
from tests.training import small, torch_models
from tests.training.zero_cases import SIZES, STRATEGIES, digits, each_strategy, run

pytestmark = pytest.mark.full

SYNCHRONOUS = ["mirrored", *STRATEGIES]


def compile_for(path: Any, strategy: str = "mirrored", optimizer: str = "adam:lr=0.002", **options: Any) -> graphc.Program:
    return graphc.compile(
        path,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.parse(optimizer),
        strategy=strategy,
        **{"bucket_mb": 0.02, **options},
    )


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses and parameters within 1e-5; an element of Adam's whose gradient is rounding noise moves by its sign."""
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        if "::" not in name and value.dtype == np.float32:
            scale = np.abs(value).max()
            np.testing.assert_allclose(found["state"][name], value, rtol=0, atol=1e-5 * max(scale, 1), err_msg=name)


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sharding")
    return torch_models.save(torch_models.make(torch_models.Cnn), folder / "cnn.onnx", torch.randn(4, 3, 8, 8))


def cnn_batches(steps: int) -> list[dict[str, Any]]:
    return [
        dict(zip(("input", "label"), torch_models.batch((3, 8, 8), 2 * SIZES[k % 2], k), strict=True)) for k in range(steps)
    ]


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.large), 4])
def test_a_classifier_follows_one_worker(strategy: str, workers: int) -> None:
    batches = digits(1, 20)
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01"), batches))
    program = small.compiled("adam:lr=0.01", strategy=strategy)
    many = run_threads(workers, lambda comm: run(comm, program, batches))
    assert len({result["hash"] for result in many}) == 1
    assert_close(many[-1], one)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.large), 4])
def test_batch_normalization_follows_mirrored(workers: int, cnn: str) -> None:
    """Statistics are those of each worker's share, so it is mirrored training that the strategies have to follow."""
    batches = cnn_batches(12)
    expected = run_threads(workers, lambda comm: run(comm, compile_for(cnn, optimizer="sgd:lr=0.05,momentum=0.9"), batches))[0]
    for strategy in STRATEGIES:
        program = compile_for(cnn, strategy, "sgd:lr=0.05,momentum=0.9")
        many = run_threads(workers, lambda comm, program=program: run(comm, program, batches))
        assert len({result["hash"] for result in many}) == 1, strategy
        assert_close(many[-1], expected)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.large), 4])
def test_shared_batch_statistics_follow_one_worker(workers: int, cnn: str) -> None:
    batches, options = cnn_batches(12), {"optimizer": "sgd:lr=0.05,momentum=0.9", "sync_batchnorm": True}
    (one,) = run_threads(1, lambda comm: run(comm, compile_for(cnn, **options), batches))
    for strategy in SYNCHRONOUS:
        program = compile_for(cnn, strategy, **options)
        many = run_threads(workers, lambda comm, program=program: run(comm, program, batches))
        assert len({result["hash"] for result in many}) == 1, strategy
        assert_close(many[-1], one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bad_step_is_skipped_by_all_workers(strategy: str) -> None:
    batches = digits(1, 4)
    batches[1]["input"][0, 0] = np.nan
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01", nonfinite="skip"), batches))
    program = small.compiled("adam:lr=0.01", nonfinite="skip", strategy=strategy)
    two = run_threads(2, lambda comm: run(comm, program, batches))
    assert np.isnan(two[0]["losses"]).tolist() == [False, True, False, False]
    assert two[0]["hash"] == two[1]["hash"]
    assert_close(two[0], one)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.large), 4])
def test_a_transformer_follows_one_worker(workers: int, exported: Callable[[str], str]) -> None:
    path, spec = exported("transformer-small"), SPECS["transformer-small"]
    batches = [dict(zip(("input", "label"), spec.batch(SIZES[k % 2], k), strict=True)) for k in range(8)]
    options = {"optimizer": "sgd:lr=0.05,momentum=0.9", "bucket_mb": 0.3}
    (one,) = run_threads(1, lambda comm: run(comm, compile_for(path, **options), batches))
    for strategy in SYNCHRONOUS:
        program = compile_for(path, strategy, **options)
        many = run_threads(workers, lambda comm, program=program: run(comm, program, batches))
        assert len({result["hash"] for result in many}) == 1, strategy
        assert_close(many[-1], one)


@pytest.mark.mpi
def test_real_processes_give_what_threads_give() -> None:
    two, threads = map_ranks(2, each_strategy), run_threads(2, each_strategy)
    for first, second, expected in zip(*two, threads[0], strict=True):
        assert first["hash"] == second["hash"]
        assert_close(first, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_do_not_depend_on_the_number_of_workers(strategy: str, tmp_path: Path) -> None:
    """Save at 2; restore at 1, 2 and 4 and go on: as one worker that never stopped. So does an export, and an evaluation."""
    program, batches, folder = small.compiled("adam:lr=0.01", strategy=strategy), digits(1, 6), tmp_path / "saved"
    saved = run_threads(2, lambda comm: run(comm, program, batches[:3], lambda trainer: trainer.save(folder)))[0]
    (whole,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01"), batches))

    def resumed(comm: Any) -> dict[str, Any]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.restore(folder)
            before = trainer.state_sha256()
            for feeds in batches[3:]:
                mine = share(len(feeds["label"]), comm.rank, comm.size)
                trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start)
            mine = share(8, comm.rank, comm.size)
            loss = trainer.evaluate([{n: a[mine] for n, a in batches[0].items()}])["loss"]
            trainer.export(tmp_path / f"{comm.size}.onnx")
            return {"before": before, "state": trainer.state.snapshot(comm), "loss": loss, "losses": []}

    for workers in (1, 2, 4):
        found = run_threads(workers, resumed)
        assert {result["before"] for result in found} == {saved["hash"]}
        assert_close(found[-1], {**whole, "losses": []})
        written = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / f"{workers}.onnx").graph.initializer}
        for name in small.SHAPES:
            np.testing.assert_array_equal(written[name], found[0]["state"][name])
        assert np.isfinite(found[0]["loss"])
        assert len({result["loss"] for result in found}) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_stops_all_workers_before_any_update(strategy: str) -> None:
    program, batches = small.compiled("adam:lr=0.01", strategy=strategy), digits(1, 1)

    def work(comm: Any) -> bool:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            before = trainer.state_sha256()
            feeds = {n: a[share(8, comm.rank, comm.size)].copy() for n, a in batches[0].items()}
            if comm.rank == 1:
                feeds["input"][0, 0] = np.nan
            with pytest.raises(NonFiniteError, match="'input' on rank 1"):
                trainer.step(feeds)
            return trainer.state_sha256() == before

    assert run_threads(2, work) == [True, True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_is_that_of_all_shards(strategy: str) -> None:
    batches = digits(1, 6)
    options = {"optimizer": "sgd:lr=0.5", "clip_norm": 0.3}
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled(**options), batches))
    many = run_threads(2, lambda comm: run(comm, small.compiled(**options, strategy=strategy), batches))
    free = run_threads(1, lambda comm: run(comm, small.compiled("sgd:lr=0.5"), batches))[0]
    assert small.largest_difference(free["state"], one["state"]) > 1e-3  # the bound matters here
    assert_close(many[0], one)


@pytest.mark.parametrize("strategy", ["zero:stage=1", "zero:stage=3"])
def test_loss_scaling_skips_on_all_workers_together(strategy: str) -> None:
    batches = digits(1, 6)
    options = {"optimizer": "sgd:lr=0.05", "precision": "fp16:loss_scale=1e9"}
    mirrored = run_threads(2, lambda comm: run(comm, small.compiled(**options), batches))[0]
    many = run_threads(2, lambda comm: run(comm, small.compiled(**options, strategy=strategy), batches))
    assert int(mirrored["state"]["graphc.step"]) < 6  # some step overflowed
    assert int(many[0]["state"]["graphc.step"]) == int(mirrored["state"]["graphc.step"])
    assert small.largest_difference(many[0]["state"], mirrored["state"]) < 1e-3  # of sums rounded to float16
    assert many[0]["hash"] == many[1]["hash"]


def test_what_cannot_be_sharded_is_named() -> None:
    with pytest.raises(UsageError, match="stage=4; the stages are 1, 2 and 3"):
        small.compiled(strategy="zero:stage=4")
    with pytest.raises(UsageError, match="'zero' and compress=bf16 exclude each other"):
        small.compiled(strategy="zero:stage=1", compress="bf16")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    params(product(STRATEGIES, ("bf16", "fp16")), large=[(s, "fp16") for s in STRATEGIES if s != "zero:stage=3"]),
)
def test_float32_masters_are_divided_too(precision: str, strategy: str, tmp_path: Path) -> None:
    """On one worker to the bit what mixed precision is without the strategy; on two up to the rounding of summed gradients."""
    batches = digits(1, 10)
    (plain,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01", precision=precision), batches))
    program = small.compiled("adam:lr=0.01", precision=precision, strategy=strategy)
    (one,) = run_threads(1, lambda comm: run(comm, program, batches))
    assert one["losses"] == plain["losses"]
    assert one["hash"] == plain["hash"]  # copies in the low type are no part of a checkpoint
    two = run_threads(2, lambda comm: run(comm, program, batches, lambda trainer: trainer.save(tmp_path)))
    assert two[0]["hash"] == two[1]["hash"]
    assert small.largest_difference(two[0]["state"], plain["state"]) < 1e-3

    def restored(comm: Any) -> dict[str, Any]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.restore(tmp_path)
            mine = share(8, comm.rank, comm.size)
            return {"loss": trainer.step({n: a[mine] for n, a in digits(1, 1)[0].items()})["loss"]}

    losses = [run_threads(workers, restored)[0]["loss"] for workers in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "formula"),
    [
        pytest.param("mirrored", lambda psi, n: 16 * psi, marks=pytest.mark.large),
        pytest.param("zero:stage=1", lambda psi, n: 4 * psi + 12 * psi / n, marks=pytest.mark.large),
        ("zero:stage=2,offload=true", lambda psi, n: 2 * psi + 14 * psi / n),
        ("zero:stage=3", lambda psi, n: 16 * psi / n),
    ],
)
def test_bytes_per_rank_follow_the_formulas(
    strategy: str, formula: Callable[[int, int], float], exported: Callable[[str], str]
) -> None:
    """Mixed precision with Adam: what is shown is what is allocated, and both are the figures of the paper."""
    program = compile_for(exported("mlp"), strategy, precision="bf16", bucket_mb=1.0)
    x, y = SPECS["mlp"].batch(8, 0)

    def work(comm: Any) -> int:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            mine = share(8, comm.rank, comm.size)
            trainer.step({"input": x[mine], "label": y[mine]})
            return small.allocated(trainer)

    psi = sum(int(np.prod(v.shape.numpy())) for v in program.original.graph.initializers.values())
    for workers in (2, 4):
        found = run_threads(workers, work)
        for rank in range(workers):
            shapes = {"input": (8 // workers, *x.shape[1:]), "label": (8 // workers,)}
            shown = memory_of(program.model, shapes, world_size=workers, rank=rank)
            assert shown.total == found[rank]
            state = shown.parameters + shown.masters + shown.gradients + shown.optimizer
            assert state == pytest.approx(formula(psi, workers), rel=0.01)
            assert shown.host == (shown.masters + shown.optimizer if "offload" in strategy else 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_are_reduced_once_into_the_shards(strategy: str) -> None:
    batches = digits(2, 6)
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01"), batches))
    program = small.compiled("adam:lr=0.01", strategy=strategy, accumulate=2)
    two = run_threads(2, lambda comm: run(comm, program, batches))
    assert two[0]["hash"] == two[1]["hash"]
    assert_close(two[0], one)


def test_an_optimizer_that_looks_at_whole_tensors_is_named() -> None:
    """Layer-wise rates, say: the declaration of such an op does not promise that elements are independent."""
    with OPS.restored():
        OPS.register("SGD", dataclasses.replace(OPS["SGD"], elementwise=False), origin=__name__, override=True)
        with pytest.raises(UsageError, match="zero cannot shard the optimizer SGD of 'w1'"):
            small.compiled("sgd:lr=0.1", strategy="zero:stage=2")
