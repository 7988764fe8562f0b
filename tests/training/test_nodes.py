"""Meshes of nodes: AllReduces inside the nodes and between them, and ZeRO inside each node with nodes as replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphc
from graphc import Mesh
from graphc.cli import main
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError, WorldError
from graphc.plan.partition import make_plan
from graphc.report.memory import memory_of
from tests.runtime.mpi_run import map_ranks
from tests.tiers import params
from tests.training import small

NODES = Mesh(node=2, data=2)
HYBRID = [f"zero:stage={stage}" for stage in (1, 2, 3)]
WAYS: list[dict[str, Any]] = [
    {"mesh": NODES},
    {"mesh": NODES, "allreduce": "flat"},
    {"mesh": Mesh(data=4), "allreduce": "hierarchical:per_node=2"},
    {"allreduce": "hierarchical:per_node=1"},
    {"allreduce": "hierarchical"},  # all threads are on one machine
    {"mesh": NODES, "accumulate": 2, "nonfinite": "skip"},
    *({"mesh": NODES, "strategy": strategy} for strategy in HYBRID),
    {"strategy": "zero:stage=2,shard_size=2", "accumulate": 2},
    {"strategy": "zero:stage=3,shard_size=node"},
]


def batches(count: int = 4) -> list[dict[str, Any]]:
    return [dict(zip(("input", "label"), small.batch((16, 13)[k % 2], k), strict=True)) for k in range(count)]


def run(comm: Any, program: graphc.Program, folder: str = "", fed: slice = slice(None)) -> dict[str, Any]:
    """Train on this worker's shares; with ``folder`` from the checkpoint there, or to it if there is none."""
    comm.close = lambda: None  # of several runs
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        resumes = bool(folder) and any(Path(folder).iterdir())
        if resumes:
            trainer.restore(folder)
        losses = []
        for feeds in batches()[fed]:
            mine = share(len(feeds["label"]), trainer.data_rank, trainer.data_size)
            losses.append(trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start)["loss"])
        if folder and not resumes:
            trainer.save(folder)
        values = {n: np.array(v) for n, v in trainer.trained_values().items()}
        return {"losses": losses, "values": values, "hash": trainer.state_sha256(), "mesh": str(trainer.groups.mesh)}


def assert_follows(everyone: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert len({found["hash"] for found in everyone}) == 1  # replicas to the bit
    np.testing.assert_allclose(everyone[0]["losses"], one["losses"], rtol=1e-5)
    for name, value in one["values"].items():
        np.testing.assert_allclose(everyone[-1]["values"][name], value, rtol=0, atol=1e-5 * max(1, np.abs(value).max()))


@pytest.mark.parametrize(
    "options",
    params(WAYS, full=WAYS[1:4] + WAYS[5:8] + WAYS[9:]),
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_nodes_compute_what_one_worker_does(options: dict[str, Any]) -> None:
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01")))
    program = small.compiled("adam:lr=0.01", **options)
    assert_follows(run_threads(4, lambda comm: run(comm, program)), one)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["mirrored", "zero:stage=2"])
def test_the_norm_is_that_of_the_whole_gradient(strategy: str) -> None:
    options = {"optimizer": "sgd:lr=0.5", "clip_norm": 0.3}
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled(**options)))
    program = small.compiled(**options, strategy=strategy, mesh=NODES)
    assert_follows(run_threads(4, lambda comm: run(comm, program)), one)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    params(
        [{"compress": "bf16"}, {"precision": "bf16"}, {"precision": "bf16", "strategy": HYBRID[2]}],
        large=[{"precision": "bf16"}],
    ),
)
def test_low_types_travel_in_nodes_too(options: dict[str, Any]) -> None:
    flat = run_threads(4, lambda comm: run(comm, small.compiled(**{**options, "strategy": "mirrored"}, mesh=Mesh(data=4))))
    nodes = run_threads(4, lambda comm: run(comm, small.compiled(**options, mesh=NODES)))
    assert len({found["hash"] for found in nodes}) == 1
    np.testing.assert_allclose(nodes[0]["losses"], flat[0]["losses"], rtol=5e-3)  # roundings of partial sums


def test_a_worker_sends_its_part_alone_between_nodes() -> None:
    program = small.compiled(mesh=Mesh(node=2, data=4))
    steps = make_plan(program.model, {"input": [2, 12], "label": [2]}, mesh=program.mesh, rank=5).steps
    sent = [s.transfer for s in steps if s.transfer is not None and s.kind == "start"]
    within = {t.tag.partition("/")[2]: t for t in sent if t.kind == "reduce_scatter"}
    between = {t.tag.partition("/")[2]: t for t in sent if t.group == "node"}
    assert within.keys() == between.keys()
    assert len(within) >= 2
    for bucket, transfer in between.items():
        start, stop = transfer.offset // 4, transfer.offset // 4 + transfer.elements
        assert (start, stop) == (within[bucket].parts or [])[1]
        assert transfer.elements * 4 == within[bucket].elements


@pytest.mark.full
def test_nodes_are_machines_unless_said() -> None:
    def mesh(machines: str, **options: Any) -> list[str]:
        program = small.compiled(**options)

        def work(comm: Any) -> str:
            comm.machine = lambda: machines[comm.rank]
            return run(comm, program)["mesh"]

        return run_threads(len(machines), work)

    assert mesh("aabb", allreduce="hierarchical") == ["node=2,data=2"] * 4
    assert mesh("aabb", strategy="zero:stage=1,shard_size=node") == ["node=2,data=2"] * 4
    assert mesh("aabb", allreduce="hierarchical:per_node=4") == ["data=4"] * 4
    for machines in ("aaab", "abab"):
        with pytest.raises(WorldError, match="say how many workers a node has"):
            mesh(machines, allreduce="hierarchical")


@pytest.mark.full
@pytest.mark.parametrize("strategy", HYBRID[1:])
def test_checkpoints_of_nodes_restore_on_other_meshes(strategy: str, tmp_path: Path) -> None:
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01")))
    folder = str(tmp_path)
    hybrid = small.compiled("adam:lr=0.01", strategy=strategy, mesh=NODES)
    run_threads(4, lambda comm: run(comm, hybrid, folder, slice(2)))
    for mesh, other in ((Mesh(), "mirrored"), (Mesh(data=2), strategy), (Mesh(node=2), strategy), (NODES, "mirrored")):
        program = small.compiled("adam:lr=0.01", strategy=other, mesh=mesh)
        found = run_threads(mesh.size, lambda comm, program=program: run(comm, program, folder, slice(2, None)))
        assert_follows(found, {**one, "losses": one["losses"][2:]})


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "formula"),
    [
        (HYBRID[0], lambda psi, n: 4 * psi + 12 * psi / n),
        (HYBRID[1], lambda psi, n: 2 * psi + 14 * psi / n),
        (HYBRID[2], lambda psi, n: 16 * psi / n),
    ],
)
def test_a_node_divides_the_bytes(strategy: str, formula: Any) -> None:
    """Mixed precision with Adam; what is shown is what a trainer allocates, and the formulas with the ranks of a node."""
    program = small.compiled("adam", strategy=strategy, precision="bf16", mesh=NODES, bucket_mb=1.0)
    shapes = {"input": [4, small.INPUTS], "label": [4]}

    def held(comm: Any) -> int:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            x, label = small.batch(4, comm.rank)
            trainer.step({"input": x, "label": label})
            (executor,) = trainer.plans.training.values()
            buffers = {**executor.places.buffers, **trainer.state.flat}
            return sum(array.nbytes for array in buffers.values())

    shown = [memory_of(program.model, shapes, mesh=NODES, rank=rank) for rank in range(4)]
    psi = sum(int(np.prod(shape)) for shape in small.SHAPES.values())
    padding = 16 * 4 * 64  # of four tensors to 64 bytes, in the narrowest type
    for found, report in zip(run_threads(4, held), shown, strict=True):
        state = report.parameters + report.masters + report.gradients + report.optimizer
        assert 0 <= state - formula(psi, 2) <= padding
        assert abs(report.total - report.feeds - found) <= 64  # scalars that are neither in a bucket nor in the arena


@pytest.mark.full
def test_the_command_line_shows_the_plan_and_the_memory_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, training = str(tmp_path / "model.onnx"), str(tmp_path / "training.onnx")
    ir.save(small.model(), model)
    job = ["--loss", "softmax_cross_entropy", "--optimizer", "adam", "--mesh", "node=2,data=2", "--strategy", "zero:stage=3"]
    assert main(["compile", model, "-o", training, *job]) == 0
    capsys.readouterr()
    assert main(["show", "plan", training, "--format", "json"]) == 0
    collectives = {one["tag"]: one["bytes"] for one in json.loads(capsys.readouterr().out)["collectives"]}
    padding = 4 * 64  # of a bucket's tensors
    assert 0 <= 2 * collectives["node/b0"] - collectives["data/b0"] <= padding
    held = {}
    for mesh in ("node=2,data=2", "data=2", "data=4"):
        assert main(["inspect", training, "--memory", "--mesh", mesh, "--format", "json"]) == 0
        held[mesh] = json.loads(capsys.readouterr().out)["optimizer"]
    assert held["node=2,data=2"] == held["data=2"] > held["data=4"]


@pytest.mark.mpi
@pytest.mark.large
def test_real_processes_form_nodes() -> None:
    everyone = map_ranks(4, processes)
    (one,) = run_threads(1, lambda comm: run(comm, small.compiled("adam:lr=0.01")))
    for k, mesh in enumerate(("node=2,data=2", "node=2,data=2", "data=4")):
        assert {found[k]["mesh"] for found in everyone} == {mesh}
        assert_follows([found[k] for found in everyone], one)


def processes(comm: Any) -> list[dict[str, Any]]:
    options = [{"mesh": NODES}, {"strategy": "zero:stage=3,shard_size=2"}, {"allreduce": "hierarchical"}]
    return [run(comm, small.compiled("adam:lr=0.01", **given)) for given in options]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allreduce": "ring"}, "allreduce='ring'.*flat, hierarchical or hierarchical:per_node=N"),
        ({"allreduce": "hierarchical:node=2"}, "hierarchical has no option 'node'"),
        ({"allreduce": "flat:per_node=2"}, "flat has no option 'per_node'"),
        ({"allreduce": "hierarchical:per_node=0"}, "'0' is no number of workers"),
        ({"strategy": "zero:stage=1,shard_size=two"}, "'two' is no number of workers.*or 'node'"),
        ({"allreduce": "hierarchical:per_node=2", "strategy": "zero:shard_size=4"}, "nodes of different sizes"),
        ({"allreduce": "hierarchical:per_node=3", "mesh": Mesh(data=4)}, "nodes of 3 workers do not divide .*; 1, 2, 4 would"),
        ({"allreduce": "hierarchical:per_node=4", "mesh": NODES}, "has nodes of 2 workers"),
        ({"mesh": NODES, "compress": "topk:ratio=0.5"}, "mesh axis node=2 and compress=topk:ratio=0.5 exclude each other"),
        ({"mesh": NODES, "compress": "powersgd"}, "compress=powersgd exclude each other"),
        ({"mesh": NODES, "deterministic": "any-world"}, "deterministic=any-world exclude each other"),
        ({"mesh": NODES, "strategy": "central_storage"}, "strategy=central_storage exclude each other"),
        ({"mesh": NODES, "strategy": "parameter_server"}, "strategy=parameter_server exclude each other"),
        ({"allreduce": "hierarchical", "strategy": "local_sgd"}, "strategy=local_sgd exclude each other"),
        ({"allreduce": "hierarchical", "strategy": "adasum"}, "strategy=adasum exclude each other"),
    ],
)
def test_what_nodes_exclude_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small.compiled(**options)
