"""Options of one worker on meshes with stages and shards: norms, loss scales, skipped steps, low types, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import graphc
from graphc import Mesh
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from tests.runtime.mpi_run import map_ranks
from tests.tiers import params
from tests.training import pipe_cases, small, tensor_cases

STAGES, SHARDS = Mesh(pipe=2), Mesh(tensor=2)
BOTH_AXES = [STAGES, SHARDS, Mesh(data=2, pipe=2), Mesh(data=2, tensor=2)]


def batches(bad: bool = False) -> list[dict[str, Any]]:
    """Four batches; with ``bad`` the second holds a NaN."""
    found = [dict(zip(("input", "label"), small.batch(16, k), strict=True)) for k in range(4)]
    if bad:
        found[1]["input"][0, 0] = np.nan
    return found


def run(comm: Any, program: graphc.Program, data: list[dict[str, Any]]) -> dict[str, Any]:
    comm.close = lambda: None  # of several runs
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        results = []
        for feeds in data:
            mine = share(len(feeds["label"]), trainer.data_rank, trainer.data_size)
            results.append(trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start))
        scale = trainer.state.scalars.read("graphc.loss_scale") if "graphc.loss_scale" in trainer.state.scalars else 0.0
        return {
            "results": results,
            "values": {n: np.array(v) for n, v in trainer.trained_values().items()},
            "counters": (trainer.skipped_steps, int(trainer.state.scalars.read("graphc.step")), float(scale)),
            "hash": trainer.state_sha256(),
        }


def assert_follows(everyone: list[dict[str, Any]], one: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert len({found["hash"] for found in everyone}) == 1
    for found in everyone:
        assert found["counters"] == one["counters"]
        for mine, wanted in zip(found["results"], one["results"], strict=True):
            assert mine.keys() == wanted.keys()
            for name in wanted:
                np.testing.assert_allclose(mine[name], wanted[name], rtol=tolerance, atol=tolerance, err_msg=name)
        for name, value in one["values"].items():
            np.testing.assert_allclose(found["values"][name], value, rtol=0, atol=tolerance * max(1, np.abs(value).max()))


def follows(mesh: Mesh, options: dict[str, Any], *, bad: bool = False, tolerance: float = 1e-5, **more: Any) -> dict[str, Any]:
    """Train on threads, compare with one worker, and return the run of that one."""
    given = {"accumulate": 2, **options} if "place" not in more else options
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("sgd:lr=0.3", **given), batches(bad)))
    program = small.compiled("sgd:lr=0.3", **given, **more, mesh=mesh)
    assert_follows(run_threads(mesh.size, lambda comm: run(comm, program, batches(bad))), one, tolerance)
    return one


@pytest.mark.parametrize(
    "mesh", params([*BOTH_AXES, Mesh(node=2, pipe=2)], full=[STAGES, SHARDS, Mesh(node=2, pipe=2)]), ids=str
)
def test_the_norm_counts_every_element_once(mesh: Mesh) -> None:
    one = follows(mesh, {"clip_norm": 0.1})
    assert all(result["grad_norm"] > 0.1 for result in one["results"])  # the bound matters


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (Mesh(data=2, tensor=2), "zero:stage=1"),
        pytest.param(Mesh(data=2, tensor=2), "zero:stage=3", marks=pytest.mark.large),
        pytest.param(Mesh(data=2, pipe=2), "zero:stage=2", marks=pytest.mark.large),
        (Mesh(data=2, pipe=2), "zero:stage=3"),
        (Mesh(data=4, pipe=2), "zero:stage=1,shard_size=4"),  # two nodes of two replicas with two stages
        (Mesh(node=2, data=2, pipe=2), "mirrored"),
    ],
    ids=str,
)
def test_the_norm_where_replicas_divide_the_state(mesh: Mesh, strategy: str) -> None:
    follows(mesh, {"clip_norm": 0.1, "nonfinite": "skip"}, bad=True, strategy=strategy)


@pytest.mark.full
def test_the_norm_over_stages_of_shards_and_placed_nodes() -> None:
    follows(WHOLE, {"clip_norm": 0.1, "nonfinite": "skip"}, bad=True)
    follows(STAGES, {"clip_norm": 0.1, "nonfinite": "skip"}, bad=True, place=["*=0", "m2=1", "logits=1"])


@pytest.mark.full
def test_the_norm_of_tied_embeddings() -> None:
    """The gradient of a parameter that two stages read is one sum; a norm of its parts would be another."""
    model = pipe_cases.gpt()
    data = pipe_cases.batches(model, [8, 8])
    wanted = pipe_cases.run(pipe_cases.compiled(model, Mesh(), 4, clip_norm=0.2), data)
    program = pipe_cases.compiled(model, STAGES, 4, clip_norm=0.2, schedule="zero-bubble")
    found = run_threads(2, lambda comm: pipe_cases.run(program, data, comm))
    assert max(pipe_cases.distance(one, wanted) for one in found) < 1e-5


@pytest.mark.large
def test_the_norm_of_a_divided_table_of_embeddings() -> None:
    alone = tensor_cases.train(None, Mesh(), clip_norm=0.2)
    for one in run_threads(2, lambda comm: tensor_cases.train(comm, SHARDS, clip_norm=0.2)):
        np.testing.assert_allclose(one["losses"], alone["losses"], atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("mesh", BOTH_AXES, ids=str)
def test_all_ranks_skip_a_bad_step(mesh: Mesh) -> None:
    one = follows(mesh, {"nonfinite": "skip"}, bad=True)
    assert one["counters"][:2] == (1, 3)


@pytest.mark.full
@pytest.mark.parametrize("mesh", params(BOTH_AXES, large=[SHARDS, Mesh(data=2, pipe=2)]), ids=str)
def test_all_ranks_have_one_loss_scale(mesh: Mesh) -> None:
    """It falls after overflows and grows after good steps; stages give the bits of one worker, sums of shards are rounded."""
    same = mesh == STAGES
    one = follows(mesh, {"precision": "fp16:loss_scale=32768"}, tolerance=0 if same else 2e-3)
    assert 0 < one["counters"][1] < 4  # some steps overflowed, and some did not
    everything = {"precision": "fp16:loss_scale=8192", "nonfinite": "skip", "clip_norm": 0.1}
    follows(mesh, everything, bad=True, tolerance=0 if same else 2e-3)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.large)])
def test_replicas_of_a_stage_share_batch_statistics(schedule: str) -> None:
    """Those of one micro-batch: with one a step, those of one worker; else those of replicas with as many micro-batches."""
    model = pipe_cases.residual_cnn()
    data = pipe_cases.batches(model, [8, 8])

    def train(mesh: Mesh, accumulate: int, **options: Any) -> list[dict[str, Any]]:
        program = pipe_cases.compiled(model, mesh, accumulate, sync_batchnorm=True, **options)
        return run_threads(mesh.size, lambda comm: pipe_cases.run(program, data, comm))

    for accumulate, reference in ((1, Mesh()), (2, Mesh(data=2))):
        (wanted, *_) = train(reference, accumulate)
        found = train(Mesh(data=2, pipe=2), accumulate, schedule=schedule)
        assert len({one["hash"] for one in found}) == 1
        assert max(pipe_cases.distance(one, wanted) for one in found) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(data=2, pipe=2), Mesh(data=2, tensor=2)], ids=str)
def test_gradients_travel_in_a_low_type_between_replicas(mesh: Mesh) -> None:
    options = {"compress": "bf16", "accumulate": 2}
    replicas = run_threads(2, lambda comm: run(comm, small.compiled(**options, mesh=Mesh(data=2)), batches()))
    program = small.compiled(**options, mesh=mesh)
    assert_follows(run_threads(4, lambda comm: run(comm, program, batches())), replicas[0])


def test_shards_give_the_bits_of_any_number_of_replicas() -> None:
    programs = [small.compiled(mesh=mesh, deterministic="any-world") for mesh in (SHARDS, Mesh(data=2, tensor=2))]
    found = [run_threads(p.mesh.size, lambda comm, p=p: run(comm, p, batches()))[0] for p in programs if p.mesh is not None]
    assert found[0]["hash"] == found[1]["hash"]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (STAGES, {"accumulate": 2, "schedule": "zero-bubble"}),
        (Mesh(data=2, pipe=2), {"accumulate": 4}),
        (STAGES, {"place": ["*=0", "m2=1", "logits=1"]}),
    ],
    ids=str,
)
def test_every_rank_gets_the_outputs_that_the_loss_keeps(mesh: Mesh, options: dict[str, Any]) -> None:
    loss = graphc.losses.SoftmaxCrossEntropy(keep_outputs=True)
    model, data = small.model(), batches()

    def outputs(comm: Any, mesh: Mesh, options: dict[str, Any]) -> tuple[list[Any], int]:
        program = graphc.compile(model, loss=loss, optimizer=graphc.optim.SGD(lr=0.3), mesh=mesh, **options)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            mine = share(16, trainer.data_rank, trainer.data_size)
            return [trainer.step({n: a[mine] for n, a in feeds.items()}) for feeds in data], trainer.data_rank

    (wanted, _) = outputs(None, Mesh(), {"accumulate": 2})
    for found, place in run_threads(mesh.size, lambda comm: outputs(comm, mesh, options)):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one["logits"], other["logits"][share(16, place, mesh.data)], rtol=0, atol=1e-5)
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.mpi
@pytest.mark.large
def test_real_processes_agree_over_all_stages_and_shards() -> None:
    found = map_ranks(2, processes)
    for k, mesh in enumerate((STAGES, SHARDS)):
        threads = run_threads(2, lambda comm, mesh=mesh: run(comm, clipped(mesh), batches(bad=True)))
        assert [one[k]["hash"] for one in found] == [one["hash"] for one in threads]
        assert found[0][k]["counters"][:2] == (1, 3)


def clipped(mesh: Mesh) -> graphc.Program:
    return small.compiled("sgd:lr=0.3", accumulate=2, clip_norm=0.1, nonfinite="skip", mesh=mesh)


def processes(comm: Any) -> list[dict[str, Any]]:
    return [run(comm, clipped(mesh), batches(bad=True)) for mesh in (STAGES, SHARDS)]


WHOLE = Mesh(pipe=2, tensor=2)
NODES = Mesh(node=2, data=2)
MESHES = (STAGES, SHARDS, WHOLE, NODES)
PIPE, TENSOR, NODE = "mesh axis pipe=2 and ", "mesh axis tensor=2 does not work with ", "mesh axis node=2 and "

COMBINES: list[tuple[dict[str, Any], tuple[str, str, str, str]]] = [
    ({"clip_norm": 1.0, "clip_value": 0.1}, ("", "", "", "")),
    ({"nonfinite": "skip"}, ("", "", "", "")),
    ({"precision": "bf16"}, ("", "", "", "")),
    ({"precision": "fp16"}, ("", "", "", "")),
    ({"sync_batchnorm": True}, ("", "", "", "")),
    ({"accumulate": 4}, ("", "", "", "")),
    ({"compress": "bf16"}, ("", "", "", "")),
    ({"compress": "topk"}, (PIPE, TENSOR, TENSOR, NODE)),
    ({"compress": "powersgd"}, (PIPE, TENSOR, TENSOR, NODE)),
    ({"deterministic": "any-world"}, (PIPE, "", PIPE, NODE)),
    ({"recompute": "all"}, ("", "", "", "")),
    ({"strategy": "zero:stage=1"}, ("", "", "", "")),
    ({"strategy": "zero:stage=2,shard_size=4"}, ("", "", "", "has nodes of 2 workers, and per_node=4")),
    ({"strategy": "zero:stage=3"}, ("", "", "", "")),
    ({"strategy": "zero:stage=1,offload=true"}, (PIPE, TENSOR, TENSOR, "")),
    ({"allreduce": "hierarchical"}, ("", "", "", "")),
    ({"strategy": "local_sgd"}, (PIPE, TENSOR, TENSOR, "")),
    ({"strategy": "adasum"}, (PIPE, TENSOR, TENSOR, "")),
    ({"strategy": "central_storage"}, (PIPE, TENSOR, TENSOR, NODE)),
    ({"strategy": "parameter_server"}, (PIPE, TENSOR, TENSOR, NODE)),
]
"""Options → the error on each of MESHES, which begins with the axis and names the option; empty: they work together."""


def test_nodes_put_on_devices_by_hand_read_whole_parameters() -> None:
    with pytest.raises(UsageError, match=r"place=\['\*=0', 'm2=1'\] and strategy=zero:stage=3 exclude .* take zero:stage=2"):
        small.compiled(mesh=Mesh(data=2, pipe=2), place=["*=0", "m2=1"], strategy="zero:stage=3")


@pytest.mark.parametrize(("options", "errors"), COMBINES, ids=str)
def test_what_combines_and_what_is_refused_by_name(options: dict[str, Any], errors: tuple[str, ...]) -> None:
    """Where an option works with an axis, other tests train with both."""
    ((name, value), *_) = options.items()
    for mesh, error in zip(MESHES, errors, strict=True):
        if not error:
            small.compiled(mesh=mesh, **options)
            continue
        with pytest.raises(UsageError) as raised:
            small.compiled(mesh=mesh, **options)
        assert error in str(raised.value), mesh
        assert error.startswith("has nodes") or re.search(f"{name}='?{re.escape(str(value))}", str(raised.value)), mesh
