"""Pipelines on real MPI processes: the numbers of one worker, and who is named when a worker dies."""

from __future__ import annotations

from typing import Any

import pytest

from graphc import Mesh
from tests.runtime.mpi_run import map_ranks, run_mpi
from tests.training import pipe_cases as cases

MODELS = {"mlp": cases.mlp, "cnn": cases.residual_cnn, "gpt": cases.gpt}


def train(comm: Any, runs: list[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    """Each run: model, mesh, schedule, micro-batches."""
    found = []
    comm.close = lambda: None  # each run's trainer would close it
    for name, mesh, schedule, accumulate in runs:
        model = MODELS[name]()
        program = cases.compiled(model, Mesh.parse(mesh), accumulate, schedule=schedule)
        found.append(cases.run(program, cases.batches(model, [8, 8]), comm))
    return found


@pytest.mark.parametrize(
    "runs",
    [
        [("cnn", "pipe=2", "1f1b", 4)],
        [("gpt", "data=2,pipe=2", "zero-bubble", 2)],
    ],
)
def test_processes_compute_what_one_worker_does(runs: list[tuple[str, str, str, int]]) -> None:
    mesh = Mesh.parse(runs[0][1])
    everyone = map_ranks(mesh.size, train, runs)
    for k, (name, *_) in enumerate(runs):
        model = MODELS[name]()
        wanted = cases.run(cases.compiled(model, Mesh(), 4), cases.batches(model, [8, 8]))
        assert max(cases.distance(found[k], wanted) for found in everyone) < 1e-5
        assert len({found[k]["hash"] for found in everyone}) == 1


DIES = """
import os, sys
import graphc
from tests.training import pipe_cases as cases

calls, last = 0, ""  # runs of the last segment of the backward pass, which is bound last

def wrap(kind, name, run):
    global last
    last = name if name.startswith("1B") and kind == "segment" else last
    def counted():
        global calls
        calls += name == last
        if calls == 3:
            os._exit(7)
        run()
    return counted

model = cases.mlp()
program = cases.compiled(model, graphc.Mesh(pipe=2), 4, cut=["h1"])
with graphc.Trainer(program, threads=1, wrap=wrap) as trainer:
    for batch in cases.batches(model, [8] * 3):
        trainer.step(batch)
"""


def test_a_worker_that_dies_is_named_with_its_stage_and_micro_batch() -> None:
    done = run_mpi(2, DIES)
    assert done.code
    assert "rank 1" in done.err
    assert "1B→0B micro-batch 2" in done.err, done.text
