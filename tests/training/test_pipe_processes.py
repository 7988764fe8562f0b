"""Pipelines on real MPI processes: the numbers of one worker, and who is named when a worker dies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import Mesh
from graphc.distributed.communicator import Communicator
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


@pytest.mark.full
@pytest.mark.parametrize(
    "runs",
    [
        [("cnn", "pipe=2", "1f1b", 4)],
        pytest.param([("gpt", "data=2,pipe=2", "zero-bubble", 2)], marks=pytest.mark.large),
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
import os, time
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
            time.sleep(1)  # the thread that sends delivers micro-batch 1, or rank 0 rightly names that one
            os._exit(7)
        run()
    return counted

model = cases.mlp()
program = cases.compiled(model, graphc.Mesh(pipe=2), 4, cut=["h1"])
with graphc.Trainer(program, threads=1, wrap=wrap) as trainer:
    for batch in cases.batches(model, [8] * 3):
        trainer.step(batch)
"""


@pytest.mark.full
def test_a_worker_that_dies_is_named_with_its_stage_and_micro_batch() -> None:
    done = run_mpi(2, DIES)
    assert done.code
    assert "rank 1" in done.err
    assert "1B→0B micro-batch 2" in done.err, done.text


WIDE, DEEP = 2048, 24
"""A network with 403 MB of parameters."""


def large_network(path: Path) -> None:
    """A file that keeps its parameters beside it, as large models do."""
    lines, value = [], "x"
    for k in range(DEEP):
        lines += [f"m{k} = MatMul({value}, w{k})", f"h{k} = Tanh(m{k})"]
        value = f"h{k}"
    shape, text = f"float[batch, {WIDE}]", "\n".join([*lines, f"y = Identity({value})"])
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net ({shape} x) => ({shape} y) {{ {text} }}')
    rng = np.random.default_rng(0)
    for k in range(DEEP):
        weight = rng.standard_normal((WIDE, WIDE), dtype=np.float32) / np.float32(WIDE**0.5)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{k}"))
    onnx.save(model, path, save_as_external_data=True, location="weights")


def own_memory() -> int:
    """Bytes of this process that lie in memory and in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def most_memory(comm: Communicator, path: str, mesh: str) -> tuple[float, int]:
    """The loss of the first step, and how far this process grew from before the compilation to behind that step."""
    before, most, ended = own_memory(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, own_memory() - before)

    watch = threading.Thread(target=look)
    watch.start()
    loss, optimizer = graphc.losses.MSE(prediction="y", label="target"), graphc.optim.SGD(lr=0.01)
    program = graphc.compile(path, loss=loss, optimizer=optimizer, mesh=graphc.Mesh.parse(mesh), accumulate=4)
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal((8, WIDE), dtype=np.float32) for name in ("x", "target")}
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        value = trainer.step(feeds)["loss"]
    ended.set()
    watch.join()
    return value, most


@pytest.mark.large  # 403 MB of parameters
@pytest.mark.timeout(600)
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """Neither while it starts nor while it trains: the file is mapped, and a rank takes memory for its stages."""
    path = tmp_path / "model.onnx"
    large_network(path)
    whole = DEEP * WIDE**2 * 4
    ((wanted, alone),) = map_ranks(1, most_memory, str(path), "data=1", timeout=500)
    assert alone > 2 * whole, "parameters and gradients"
    for found, most in map_ranks(4, most_memory, str(path), "pipe=4", timeout=500):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert most < whole
