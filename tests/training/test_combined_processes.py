"""Data × pipe × tensor on real MPI processes: the numbers of one worker, and who is named when one dies in mid-schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.mpi_run import map_ranks, run_mpi
from tests.training import combined_cases as cases
from tests.training import pipe_cases

pytestmark = pytest.mark.mpi

Run = tuple[str, str, int, dict[str, Any]]

TWO: list[Run] = [
    *(("mlp", "pipe=2", 4, {"schedule": schedule}) for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")),
    *(("cnn", "pipe=2", 4, {"schedule": schedule}) for schedule in ("interleaved", "zero-bubble")),
    ("mlp", "tensor=2", 4, {}),
    ("gpt", "tensor=2", 4, {}),
]

FOUR: list[Run] = [
    *(("mlp", "pipe=2,tensor=2", 4, {"schedule": schedule}) for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")),
    ("cnn", "pipe=2,tensor=2", 4, {"schedule": "interleaved"}),
    ("cnn", "data=2,pipe=2", 2, {"strategy": "zero", "schedule": "gpipe"}),
    ("gpt", "pipe=2,tensor=2", 4, {"schedule": "zero-bubble"}),
    ("gpt", "data=2,tensor=2", 2, {"strategy": "zero:stage=2"}),
]

SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "strategy": "zero"},
    {"schedule": "interleaved", "strategy": "zero:stage=2"},
    {"schedule": "zero-bubble", "strategy": "zero:stage=3"},
]


def eight(name: str, mesh: str) -> list[Run]:
    """All schedules on a mesh of eight, in micro-batches of two of the sixteen samples; with replicas also divided state."""
    replicas = mesh.startswith("data=2")
    runs = [options if replicas else {"schedule": options["schedule"]} for options in SCHEDULES]
    return [(name, mesh, 4 if replicas else 8, options) for options in runs]


def in_pieces(workers: int, runs: list[Run], each: int = 2) -> list[Any]:
    """``each`` runs a launch."""
    pieces = [runs[k : k + each] for k in range(0, len(runs), each)]
    return [pytest.param(workers, piece, marks=pytest.mark.large, id=f"{workers}-{k}") for k, piece in enumerate(pieces)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("workers", "runs"), [pytest.param(4, FOUR[1:2], id="4"), *in_pieces(2, TWO, 4), *in_pieces(4, FOUR)])
@pytest.mark.large  # a stage, a shard and a replica a process have tests of their own; threads combine them
def test_processes_compute_what_one_worker_does(workers: int, runs: list[Run]) -> None:
    compare(workers, runs, 4, 8)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["data=2,pipe=2,tensor=2", "pipe=4,tensor=2", "pipe=2,tensor=4", "data=2,pipe=4"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
@pytest.mark.large  # twelve launches of eight processes, of about a minute each
def test_eight_processes_compute_what_one_worker_does(name: str, mesh: str) -> None:
    compare(8, eight(name, mesh), 8, 16)


@pytest.mark.large  # threads do the same in test_combined_meshes.py, and four processes above
def test_eight_processes_with_stages_shards_and_replicas() -> None:
    compare(8, eight("mlp", "data=2,pipe=2,tensor=2")[1:2], 8, 16)


def compare(workers: int, runs: list[Run], accumulate: int, samples: int) -> None:
    """Run on MPI processes, and on one worker with as many micro-batches in all."""
    everyone = map_ranks(workers, cases.train_all, runs, samples, timeout=850)
    alone = {name: cases.train(None, name, "data=1", accumulate, {}, samples) for name in {name for name, *_ in runs}}
    for k, run in enumerate(runs):
        assert max(pipe_cases.distance(found[k], alone[run[0]]) for found in everyone) < 1e-5, run
        assert len({found[k]["hash"] for found in everyone}) == 1, run


DIES = """
import os
import graphc
from tests.training import combined_cases as cases
from tests.training import pipe_cases

calls, last = 0, ""  # runs of the last segment of the backward pass of stage 1, which is bound last

def wrap(kind, name, run):
    global last
    last = name if name.startswith("1B") and kind == "segment" else last
    def counted():
        global calls
        calls += name == last and trainer.rank == 3
        if calls == 3:
            os._exit(7)
        run()
    return counted

program = cases.compiled("mlp", graphc.Mesh(pipe=2, tensor=2), 4, cut=["h1"])
with graphc.Trainer(program, threads=1, wrap=wrap) as trainer:
    for batch in cases.batches("mlp"):
        trainer.step(batch)
"""


@pytest.mark.large  # so does test_pipe_processes.py, without a tensor axis
def test_a_worker_that_dies_is_named_with_stage_and_micro_batch() -> None:
    """Its partner on the tensor axis waits in a collective of the stage, the stage before for its gradient."""
    done = run_mpi(4, DIES)
    assert done.code
    assert "rank 3" in done.err
    waits = ("1B→0B micro-batch 2", "1B micro-batch 2: tensor/", "1B micro-batch 3: tensor/", "1F micro-batch 3: tensor/")
    assert any(text in done.err for text in waits), done.text
