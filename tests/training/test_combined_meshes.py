"""Data × pipe × tensor: the numbers of one worker, with any strategy that divides the optimizer's state, on threads."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc import Mesh
from graphc.backend import make_backend
from graphc.distributed.collective_proof import check_events
from graphc.distributed.communicator import Communicator
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError, UsageError, WorldError
from graphc.ir.names import STEP
from graphc.ir.ops.collectives import collective_of
from graphc.pipe.split import Pipe
from graphc.plan.group_places import CollectiveEvent, collective_events
from graphc.plan.partition import make_plan
from graphc.plan.pipe_events import pipe_events
from graphc.report.memory import feed_shapes, memory_of
from graphc.report.pipe_memory import memory_of_stages, table_of
from tests.tiers import params
from tests.training import combined_cases as cases
from tests.training import pipe_cases, tensor_cases

ALL = [
    ("gpt", "pipe=2,tensor=2", 4, {"schedule": "1f1b"}),
    ("mlp", "data=2,pipe=2,tensor=2", 2, {"schedule": "zero-bubble", "strategy": "zero"}),
    ("mlp", "pipe=2,tensor=2", 1, {"place": ["m0=0", "a2=1"]}),
    ("mlp", "data=2,pipe=2", 2, {"strategy": "zero:stage=3"}),
    ("mlp", "node=2,pipe=2,tensor=2", 2, {}),
    ("cnn", "pipe=2,tensor=2", 4, {"schedule": "gpipe"}),
    ("gpt", "data=2,pipe=2,tensor=2", 2, {"schedule": "interleaved", "strategy": "zero:stage=2"}),
    ("gpt", "pipe=2,tensor=4", 4, {"schedule": "zero-bubble"}),
    ("gpt", "pipe=4,tensor=2", 4, {"schedule": "gpipe"}),
    ("gpt", "data=2,pipe=2", 2, {"strategy": "zero"}),
    ("gpt", "data=2,pipe=4", 2, {"strategy": "zero:stage=2", "schedule": "zero-bubble"}),
    ("gpt", "data=2,tensor=2", 2, {"strategy": "zero:stage=3"}),
    ("cnn", "data=2,pipe=2,tensor=2", 2, {"schedule": "1f1b", "strategy": "zero"}),
    ("gpt", "data=2,pipe=2", 2, {"schedule": "zero-bubble", "strategy": "zero:stage=3"}),
    ("gpt", "data=2,pipe=2,tensor=2", 2, {"schedule": "interleaved", "strategy": "zero:stage=3"}),
    ("cnn", "node=2,data=2,pipe=2", 1, {"schedule": "gpipe", "strategy": "zero:stage=3"}),
]


@pytest.fixture(scope="module")
def alone() -> Callable[[str], dict[str, Any]]:
    """Each model on one worker with four micro-batches."""
    found: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in found:
            found[name] = cases.train(None, name, "data=1", 4, {})
        return found[name]

    return of


def on_threads(name: str, mesh: str, accumulate: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    program, data = cases.compiled(name, Mesh.parse(mesh), accumulate, **options), cases.batches(name)
    return run_threads(Mesh.parse(mesh).size, lambda comm: pipe_cases.run(program, data, comm), deadline=120)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "accumulate", "options"), params(ALL, large=ALL[4:]))
def test_every_combination_computes_what_one_worker_does(
    name: str, mesh: str, accumulate: int, options: dict[str, Any], alone: Callable[[str], dict[str, Any]]
) -> None:
    """Embeddings tied over stages, the loss over sharded classes, and dropout too: a mask depends on the place in the whole."""
    wanted, found = alone(name), on_threads(name, mesh, accumulate, options)
    assert max(pipe_cases.distance(one, wanted) for one in found) < 1e-5
    assert len({one["hash"] for one in found}) == 1
    assert all(one["held"] < 0.7 * wanted["held"] for one in found), "every rank holds its shards of its stages only"


@pytest.mark.full
def test_one_norm_clips_all_stages_and_shards() -> None:
    options, data = {"clip_norm": 0.1}, cases.batches("mlp")
    wanted = pipe_cases.run(cases.compiled("mlp", Mesh(), 4, **options), data)
    for found in on_threads("mlp", "data=2,pipe=2,tensor=2", 2, {**options, "strategy": "zero"}):
        assert pipe_cases.distance(found, wanted) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("cut", params(["b0_h0", "b0_n2", "b1_y3"], large=["b0_n2", "b1_y3"]))
def test_a_cut_between_nodes_that_would_be_fused(cut: str, alone: Callable[[str], dict[str, Any]]) -> None:
    """A product and its bias on two stages stay two nodes, and their weights on theirs."""
    found = on_threads("gpt", "pipe=2", 4, {"cut": [cut]})
    assert max(pipe_cases.distance(one, alone("gpt")) for one in found) < 1e-5


@pytest.mark.large
def test_optimizer_state_is_divided_among_the_replicas_of_a_stage() -> None:
    def state_of(strategy: str) -> int:
        program = cases.compiled("gpt", Mesh(data=2, pipe=2, tensor=2), 2, strategy=strategy)
        reports = memory_of_stages(program.model, feed_shapes(program.model, 2))
        return sum(report.optimizer for report in reports)

    assert state_of("zero") == pytest.approx(state_of("mirrored") / 2, rel=0.02)


def collectives(program: graphc.Program) -> Counter[str]:
    """How often each collective of the graph stands in it, by tag."""
    nodes = (node for node in program.model.graph if collective_of(node) is not None)
    return Counter(f"{node.op_type} {node.attributes['tag'].as_string()}" for node in nodes)


def activations(program: graphc.Program) -> int:
    """Bytes that a rank of the first stage holds for four samples."""
    mesh, shapes = program.mesh or Mesh(), feed_shapes(program.model, 4)
    found = memory_of_stages(program.model, shapes)[0] if mesh.pipe > 1 else memory_of(program.model, shapes, mesh=mesh)
    return found.activations


RECOMPUTED = [
    ("pipe=2,tensor=2", 4, {"recompute": "all"}),
    ("tensor=2", 4, {"recompute": "all"}),
    ("tensor=2", 4, {"recompute": "cheap"}),
    ("data=2,pipe=2,tensor=2", 2, {"recompute": "all", "strategy": "zero", "schedule": "zero-bubble"}),
    ("data=2,tensor=2", 2, {"recompute": "all", "strategy": "zero:stage=3"}),
    ("data=2,pipe=2,tensor=2", 2, {"recompute": "all", "strategy": "zero:stage=3"}),
]


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "accumulate", "options"), RECOMPUTED)
def test_shards_recompute_without_another_collective(
    mesh: str, accumulate: int, options: dict[str, Any], alone: Callable[[str], dict[str, Any]]
) -> None:
    """Sums over the tensor axis are kept, what lies between them runs again: the same bits, from less memory.

    The same bits where every op is computed alone (docs/memory.md).
    """
    apart = {"backend": "onnxruntime:fuse=false"}
    found = on_threads("gpt", mesh, accumulate, options)
    assert max(pipe_cases.distance(one, alone("gpt")) for one in found) < 1e-5
    kept = {name: value for name, value in options.items() if name != "recompute"}
    again, plain = (on_threads("gpt", mesh, accumulate, {**given, **apart}) for given in (options, kept))
    assert {one["hash"] for one in again} == {one["hash"] for one in plain}
    fewer, all_kept = (cases.compiled("gpt", Mesh.parse(mesh), accumulate, **given) for given in (options, kept))
    assert collectives(fewer) == collectives(all_kept)
    assert activations(fewer) < 0.9 * activations(all_kept)


@pytest.mark.full
@pytest.mark.parametrize("schedule", params(["1f1b", "zero-bubble"], large=["zero-bubble"]))
def test_parameters_of_a_stage_are_divided_among_its_replicas(schedule: str) -> None:
    """A rank holds what ``inspect --memory`` says: its shard, and whole parameters only where another stage reads them too."""
    mesh, given = Mesh(data=2, pipe=2), {"schedule": schedule, "optimizer": graphc.optim.Adam()}
    program, plain = (cases.compiled("gpt", mesh, 2, strategy=f"zero:stage={k}", **given) for k in (3, 2))
    divided, whole = (memory_of_stages(p.model, feed_shapes(p.model, 2)) for p in (program, plain))
    table = tensor_cases.VOCABULARY * tensor_cases.WIDTH * 4  # bytes of the embeddings, which the last stage reads too
    assert divided[0].parameters == pytest.approx((whole[0].parameters + table) / 2, rel=0.02)
    assert divided[1].parameters == pytest.approx(whole[1].parameters / 2, rel=0.02)

    def held(comm: Communicator) -> int:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            return sum(flat.nbytes for name, flat in trainer.state.flat.items() if not name.startswith(STEP))

    for rank, nbytes in enumerate(run_threads(4, held, deadline=60)):
        report = divided[mesh.coordinate("pipe", rank)]
        assert nbytes == report.parameters + report.optimizer


def continued(
    comm: Communicator, program: graphc.Program, batch: dict[str, Any], number: int, folder: Path
) -> tuple[float, str]:
    """Step ``number`` of a run, from the checkpoint of the step before; its loss, and the hash of the state."""
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        if number:
            trainer.restore(folder / str(number - 1))
        loss = trainer.step(pipe_cases.own_part(trainer, batch))["loss"]
        trainer.save(folder / str(number))
        return loss, trainer.state_sha256()


@pytest.mark.full
@pytest.mark.parametrize("name", params(["mlp", "gpt"], large=["gpt"]))
def test_checkpoints_go_from_mesh_to_mesh(name: str, tmp_path: Path) -> None:
    meshes = [
        ("data=2,pipe=2", 2, {"strategy": "zero:stage=3"}),
        ("tensor=2", 4, {}),
        ("data=1", 4, {}),
        ("data=2,pipe=2,tensor=2", 2, {"strategy": "zero", "schedule": "gpipe"}),
    ]
    losses, data = [], cases.batches(name, 4)
    for k, (mesh, accumulate, options) in enumerate(meshes):
        program = cases.compiled(name, Mesh.parse(mesh), accumulate, **options)
        go_on = functools.partial(continued, program=program, batch=data[k], number=k, folder=tmp_path)
        found = run_threads(Mesh.parse(mesh).size, go_on, deadline=120)
        assert len({digest for _, digest in found}) == 1
        losses.append(found[0][0])
    with graphc.Trainer(cases.compiled(name, Mesh(), 4), threads=1) as trainer:
        wanted = [trainer.step(batch)["loss"] for batch in data]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_a_smaller_last_batch_on_a_tensor_axis() -> None:
    data = pipe_cases.batches(pipe_cases.mlp(), [8, 6])
    program = cases.compiled("mlp", Mesh(tensor=2), 4)
    wanted = pipe_cases.run(cases.compiled("mlp", Mesh(), 4), data)
    for found in run_threads(2, lambda comm: pipe_cases.run(program, data, comm)):
        assert pipe_cases.distance(found, wanted) < 1e-5


BEYOND = ["data=2,pipe=2,tensor=2", "data=2,tensor=2"]


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    params(["data=2,pipe=2", *BEYOND], large=BEYOND),
)
def test_low_copies_of_divided_masters(mesh: str) -> None:
    """bfloat16 copies beside sharded float32 parameters: of an embedding tied over stages, and of shards."""
    wanted = cases.train(None, "gpt", "data=1", 4, {"precision": "bf16"})
    found = on_threads("gpt", mesh, 2, {"precision": "bf16", "strategy": "zero"})
    assert max(pipe_cases.distance(one, wanted) for one in found) < 0.02, "rounded in other places"


@pytest.mark.full
def test_a_nan_stops_all_ranks_before_the_updates() -> None:
    good, bad = cases.batches("mlp", 2)
    bad["x"][3] = np.nan

    def work(comm: Any) -> bool:
        with graphc.Trainer(cases.compiled("mlp", Mesh(pipe=2, tensor=2), 4), comm=comm, threads=1) as trainer:
            trainer.step(good)
            before = trainer.state_sha256()
            with pytest.raises(NonFiniteError, match="gradients of stage 0, 1"):
                trainer.step(bad)
            return before == trainer.state_sha256()

    assert all(run_threads(4, work, deadline=60))


# The proof before the first step ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events() -> list[list[CollectiveEvent]]:
    """The events of a step of all ranks of a mesh of three axes."""
    mesh, backend = Mesh(data=2, pipe=2, tensor=2), make_backend("auto", threads=1)
    program = cases.compiled("mlp", mesh, 2)
    shapes, found = feed_shapes(program.model, 2), []
    for rank in range(mesh.size):
        pipe = Pipe.of(program.model, mesh.coordinate("pipe", rank), mesh.pipe)
        plan = make_plan(program.model, shapes, backend, rank=rank, mesh=mesh, pipe=pipe)
        found.append(pipe_events(plan, pipe, table_of(program.model)))
    backend.close()
    check_events(mesh, found)
    return found


def test_the_proof_knows_every_group_and_channel(events: list[list[CollectiveEvent]]) -> None:
    assert {event.group for event in events[0]} == {"data", "pipe", "tensor"}
    names = [event.tag for event in events[0] if event.begins]
    assert any(name.startswith("0F micro-batch 1: tensor/") for name in names)
    assert "1B→0B micro-batch 1" in names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: e.begins and e.tag == "0F→1F micro-batch 1",
            "rank 2 receives '0F→1F micro-batch 1' .* from rank 0, which never",
        ),
        (
            lambda e: e.group == "tensor" and e.tag.startswith("0F micro-batch 1"),
            "collectives of group 'tensor': entry .* rank 1",
        ),
        (lambda e: e.group == "data", "collectives of group 'data': entry .* on rank 4"),
    ],
)
def test_the_proof_finds_what_one_rank_leaves_out(
    change: Callable[[CollectiveEvent], bool], message: str, events: list[list[CollectiveEvent]]
) -> None:
    broken = [[event for event in events[0] if not change(event)], *events[1:]]
    assert len(broken[0]) < len(events[0])
    with pytest.raises(WorldError, match=message):
        check_events(Mesh(data=2, pipe=2, tensor=2), broken)


def test_the_proof_finds_ranks_that_would_wait_for_each_other(events: list[list[CollectiveEvent]]) -> None:
    """Each of two ranks waits for what the other sends after its own wait."""
    mesh = Mesh(data=2, pipe=2, tensor=2)
    send, wait = (CollectiveEvent("x", begins, "FLOAT[1]", "pipe", 0, 1) for begins in (True, False))
    back, answer = (replace(event, tag="y", source=1, target=0) for event in (send, wait))
    lists: list[list[CollectiveEvent]] = [[] for _ in range(mesh.size)]
    lists[0] = [back, answer, send, wait]
    lists[2] = [send, wait, back, answer]
    with pytest.raises(WorldError, match="rank 0 waits in 'y' for rank 2; rank 2 waits in 'x' for rank 0"):
        check_events(mesh, lists)


# Overlap ------------------------------------------------------------------------------------------------------------------


def in_flight_together(events: Sequence[CollectiveEvent]) -> set[frozenset[str]]:
    """Pairs of groups of which a rank begins a collective of one before it has waited for one of the other."""
    flying: dict[tuple[str, object], str] = {}
    pairs = set()
    for event in events:
        if event.begins:
            pairs |= {frozenset((group, event.group)) for group in flying.values() if group != event.group}
            flying[event.tag, event.lane] = event.group
        else:
            flying.pop((event.tag, event.lane), None)
    return pairs


@pytest.mark.full
def test_collectives_of_different_axes_overlap(events: list[list[CollectiveEvent]]) -> None:
    """Sends fly beside the all-reduces of shards and of replicas, and buckets of gradients beside those of shards."""
    mesh = Mesh(data=2, tensor=2)
    program = cases.compiled("gpt", mesh, 2, bucket_mb=0.01)
    plan = make_plan(program.model, feed_shapes(program.model, 2), mesh=mesh)
    assert all(in_flight_together(one) == {frozenset(("pipe", other)) for other in ("data", "tensor")} for one in events)
    gradients = [event for event in collective_events(plan.steps) if event.tag != "data/metrics"]
    assert in_flight_together(gradients) == {frozenset(("data", "tensor"))}


# Bad requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            Mesh(pipe=2, tensor=3),
            {"shard": ["b0_up=1"]},
            "axis 1 of 'b0_up' has 64 elements; 2, 4, 8, 16, 32, 64 would divide it",
        ),
        (Mesh(pipe=2, tensor=3), {"shard": ["b0_qkv=1"]}, "none of which 3 divides; 2, 4 would divide the 4"),
        (Mesh(data=2, pipe=2), {"strategy": "adasum"}, "pipe=2 and strategy=adasum exclude each other"),
        (Mesh(pipe=2, tensor=2), {"schedule": "interleaved"}, "3 micro-batches cannot go in rounds of 2"),
    ],
)
def test_what_cannot_be_combined_is_said(mesh: Mesh, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cases.compiled("gpt", mesh, 3, **options)
