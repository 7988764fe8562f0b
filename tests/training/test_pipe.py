"""Pipelines of stages: the numbers of one worker for every schedule, on threads."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import Mesh
from graphc.compiler import training_pipeline
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError, UsageError
from graphc.report.memory import feed_shapes
from graphc.report.pipe_memory import memory_of_stages
from tests.tiers import params
from tests.training import pipe_cases as cases

MODELS = {"mlp": cases.mlp, "cnn": cases.residual_cnn, "gpt": cases.gpt}


def on_threads(program: graphc.Program, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mesh = program.mesh
    assert mesh is not None
    return run_threads(mesh.size, lambda comm: cases.run(program, data, comm), deadline=60)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Each model on one worker with four micro-batches."""
    found = {}
    for name, make in MODELS.items():
        model = make()
        found[name] = cases.run(cases.compiled(model, Mesh(), 4), cases.batches(model, [8, 8, 6]))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "pipe", "schedule"),
    params(
        product(MODELS, (2,), ("gpipe", "1f1b", "interleaved", "zero-bubble")),
        large=[
            *(("cnn", 2, name) for name in ("gpipe", "1f1b", "zero-bubble")),
            *(("gpt", 2, name) for name in ("gpipe", "1f1b")),
        ],
    )
    + params(product(MODELS, (4,), ("1f1b",)), large=[("gpt", 4, "1f1b")]),
)
def test_a_pipeline_computes_what_one_worker_does(
    name: str, pipe: int, schedule: str, alone: dict[str, dict[str, Any]]
) -> None:
    model = MODELS[name]()
    program = cases.compiled(model, Mesh(pipe=pipe), 4, schedule=schedule)
    found = on_threads(program, cases.batches(model, [8, 8, 6]))
    assert max(cases.distance(one, alone[name]) for one in found) < 1e-5
    assert len({one["hash"] for one in found}) == 1
    whole = alone[name]["held"]
    assert all(one["held"] < whole for one in found), "every rank holds its part only"


@pytest.mark.full
@pytest.mark.parametrize("name", params(MODELS, large=["cnn"]))
def test_replicas_of_stages_average_their_gradients(name: str) -> None:
    model = MODELS[name]()
    data = cases.batches(model, [8, 8])
    wanted = cases.run(cases.compiled(model, Mesh(), 4), data)
    found = on_threads(cases.compiled(model, Mesh(data=2, pipe=2), 2, schedule="1f1b"), data)
    assert max(cases.distance(one, wanted) for one in found) < 1e-5
    assert len({one["hash"] for one in found}) == 1


def test_frozen_stages_take_no_backward_pass() -> None:
    model = cases.mlp()
    data, freeze = cases.batches(model, [8]), ["w0", "b0", "w1", "b1"]
    wanted = cases.run(cases.compiled(model, Mesh(), 2, freeze=freeze), data)
    found = on_threads(cases.compiled(model, Mesh(pipe=2), 2, freeze=freeze, cut=["h1"]), data)
    assert max(cases.distance(one, wanted) for one in found) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("options", [{"recompute": "all"}, {"precision": "bf16"}, {"clip_value": 0.01}])
def test_options_of_one_worker_mean_the_same_on_stages(options: dict[str, Any]) -> None:
    model = cases.gpt()
    data = cases.batches(model, [8])
    wanted = cases.run(cases.compiled(model, Mesh(), 2, **options), data)
    program = cases.compiled(model, Mesh(pipe=2), 2, schedule="gpipe", **options)
    assert max(cases.distance(one, wanted) for one in on_threads(program, data)) < 1e-5


@pytest.mark.full
def test_recomputation_makes_the_stash_smaller() -> None:
    model = cases.gpt(blocks=4)

    def held(recompute: str) -> list[int]:
        program = cases.compiled(model, Mesh(pipe=2), 4, schedule="gpipe", recompute=recompute)
        return [report.activations for report in memory_of_stages(program.model, feed_shapes(program.model, 2))]

    for before, after in zip(held("none"), held("all"), strict=True):
        assert after < 0.7 * before


@pytest.mark.full
def test_a_checkpoint_of_one_mesh_restores_under_another(tmp_path: Any) -> None:
    model = cases.mlp()
    data = cases.batches(model, [8, 8])
    wanted = cases.run(cases.compiled(model, Mesh(), 2), data)["hash"]

    def first(comm: Any) -> None:
        with graphc.Trainer(cases.compiled(model, Mesh(pipe=2), 2), comm=comm, threads=1) as trainer:
            trainer.step(data[0])
            trainer.save(tmp_path / "ckpt")

    def second(comm: Any) -> str:
        with graphc.Trainer(cases.compiled(model, Mesh(pipe=4), 2, schedule="gpipe"), comm=comm, threads=1) as trainer:
            trainer.restore(tmp_path / "ckpt")
            trainer.step(data[1])
            trainer.export(tmp_path / "trained.onnx")
            return trainer.state_sha256()

    run_threads(2, first, deadline=60)
    assert set(run_threads(4, second, deadline=60)) == {wanted}
    with graphc.Trainer(cases.compiled(model, Mesh(), 2), threads=1) as trainer:
        trainer.restore(tmp_path / "ckpt")
        trainer.step(data[1])
        assert trainer.state_sha256() == wanted
        weights = trainer.trained_values()
    exported = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert all(np.array_equal(exported[name], weights[name]) for name in weights)


def test_a_nan_stops_all_ranks_before_the_updates() -> None:
    model = cases.mlp()
    good, bad = cases.batches(model, [8, 8])
    bad["x"][3] = np.nan

    def work(comm: Any) -> tuple[str, str]:
        with graphc.Trainer(cases.compiled(model, Mesh(pipe=2), 4), comm=comm, threads=1) as trainer:
            trainer.step(good)
            before = trainer.state_sha256()
            with pytest.raises(NonFiniteError, match="gradients of stage 0, 1") as caught:
                trainer.step(bad)
            assert caught.value.step == 1
            return before, trainer.state_sha256()

    for before, after in run_threads(2, work, deadline=60):
        assert before == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut": ["h1", "h0"]}, "make a cycle between stages: 'h0' does not depend on 'h1'"),
        ({"cut": ["h1"]}, "3 stages need 2 cuts"),
        ({"cut": ["h1", "hh2"]}, "cut 'hh2': no node .* makes it"),
        ({"cut": ["a0", "h0"]}, "stage 1 has no parameters of its own"),
        ({"stage_memory_mb": 0.005}, "cannot fit into 0.005 MB each; the smallest number that can is 7"),
        ({"stage_memory_mb": 0.0005}, "no number of stages fits"),
        ({"balance": "size"}, "it is time or memory"),
        ({"strategy": "adasum"}, "mesh axis pipe=3 and strategy=adasum exclude each other"),
        ({"compress": "topk"}, "mesh axis pipe=3 and compress=topk exclude each other"),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
    ],
)
def test_wrong_requests_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cases.compiled(cases.mlp(), Mesh(pipe=3), 2, **options)


def test_too_many_stages_and_options_without_a_pipeline_are_refused() -> None:
    with pytest.raises(UsageError, match="10 stages are too many"):
        cases.compiled(cases.mlp(), Mesh(pipe=10), 2)
    with pytest.raises(UsageError, match="schedule=gpipe needs a mesh with pipeline stages"):
        cases.compiled(cases.mlp(), Mesh(data=2), 2, schedule="gpipe")


@pytest.mark.full
def test_fit_counts_each_sample_once() -> None:
    model = cases.gpt()
    data = cases.batches(model, [8, 6])

    def fit(comm: Any = None, mesh: Mesh | None = None) -> tuple[float, str]:
        program = cases.compiled(model, mesh or Mesh(), 2)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            means = trainer.fit([cases.own_part(trainer, batch) for batch in data])
            return means["loss"], trainer.state_sha256()

    wanted, _ = fit()
    for mesh in (Mesh(pipe=2), Mesh(data=2, pipe=2)):
        found = run_threads(mesh.size, lambda comm, mesh=mesh: fit(comm, mesh), deadline=60)
        assert [loss for loss, _ in found] == pytest.approx([wanted] * mesh.size, rel=1e-5)


def test_a_pipeline_of_passes_without_stages_is_refused() -> None:
    steps = training_pipeline(cases.LOSS, graphc.optim.SGD(lr=0.1))
    with pytest.raises(UsageError, match="neither 'pipe_stages' nor 'place'"):
        cases.compiled(cases.mlp(), Mesh(pipe=2), 1, passes=steps)
