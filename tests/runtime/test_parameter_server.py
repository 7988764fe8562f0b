"""Parameter servers in real MPI processes: bits, and who may die."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from graphc.distributed.threads import run_threads
from tests.parameter_server.parameter_server_cases import COUNTING, OPTIMIZERS, train
from tests.runtime.mpi_run import Done, map_ranks, run_mpi

pytestmark = [pytest.mark.full, pytest.mark.mpi]


@pytest.mark.large  # threads have the same bits in tests/parameter_server; below, processes train by the command line
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_synchronous_is_mirrored_to_the_bit(optimizer: str, exported: Callable[[str], str]) -> None:
    """The mirrored workers are threads: two ranks have one sum, whoever adds it."""
    path = exported("mlp")
    mirrored = run_threads(2, lambda comm: train(comm, path, "mlp", "mirrored", optimizer))
    served = map_ranks(4, train, path, "mlp", "parameter_server:servers=2,staleness=0", optimizer)
    assert {digest for _, digest in served} == {mirrored[0][1]}
    assert [losses for losses, _ in served[2:]] == [mirrored[0][0]] * 2


START = """
import os, random, sys, threading
import numpy as np
import graphc
from tests.tiers import params
path, strategy = sys.argv[1:3]
program = graphc.compile(path, loss=graphc.losses.Output("loss"), optimizer=graphc.optim.SGD(lr=1.0), strategy=strategy)
one = np.ones((1, 1), np.float32)
pushes = 0
def wrap(kind, name, run):  # a worker dies a random moment after its N-th push began
    def step():
        global pushes
        if name.startswith("push/"):
            pushes += 1
            if pushes == N: threading.Timer(random.uniform(0, 5e-3), os.kill, (os.getpid(), 9)).start()
        run()
    return step
"""

FIT = """
victim = int(os.environ["OMPI_COMM_WORLD_RANK"]) == VICTIM
N = random.randint(20, 400)
with graphc.Trainer(program, threads=1, wrap=wrap if victim else None) as trainer:
    def strike(event):  # of the first server
        if event["event"] == "step" and event["step"] == N: os.kill(os.getpid(), 9)
    data = graphc.data.shard({"x": np.ones((1000, 1), np.float32)}, global_batch=2, rank=0, size=trainer.workers)
    trainer.fit(data, epochs=2, callbacks=[strike] if victim else [], log_every=1)
    values = {float(v) for n, a in trainer.state.arrays.items() if n in "vw" for v in a.ravel()}
    print("rank", trainer.rank, trainer.steps_done, sorted(trainer.lost), sorted(values), trainer.state_sha256()[:8])
"""


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("counting") / "counting.onnx"
    onnx.save(onnx.parser.parse_model(COUNTING), path)
    return str(path)


def fit(path: str, strategy: str, ranks: int, victim: int) -> Done:
    program = START + FIT.replace("VICTIM", str(victim))
    return run_mpi(ranks, program, path, strategy, keep_going=True)


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        pytest.param("parameter_server:servers=2", 2, marks=pytest.mark.large),
        ("parameter_server:staleness=0", 1),
    ],
)
def test_the_others_go_on_without_a_killed_worker(strategy: str, servers: int, counting: str) -> None:
    """Killed at a random moment: what it pushed counts once on all servers, and the others take its share of the data."""
    done = fit(counting, strategy, servers + 2, victim=servers + 1)
    assert done.code == 0, done.text
    lost = rf"^graphc: worker 1 \(rank {servers + 1}, pid \d+\) was lost; the others went on without it$"
    assert re.search(lost, done.err, re.MULTILINE), done.text
    lines = re.findall(r"^rank (\d+) (\d+) \[([\d, ]*)\] \[([-\d., ]+)\] (\w+)$", done.out, re.MULTILINE)
    assert len(lines) == servers + 1, done.text
    steps = next(int(n) for rank, n, *_ in lines if rank == "0")
    # 500 batches, twice: a step each when synchronous, else two shares each, of which one may have died with its worker.
    assert steps == 1000 if strategy.endswith("=0") else steps in (1999, 2000), done.text
    assert next(who for rank, _, who, *_ in lines if rank == "0") == "1"
    assert {values for *_, values, _ in lines} == {f"{-float(steps)}"}, done.text
    assert len({digest for *_, digest in lines}) == 1, done.text


def test_a_killed_server_ends_the_run_by_name(counting: str) -> None:
    done = fit(counting, "parameter_server", 3, victim=0)
    assert done.code == 1, done.text
    assert re.search(r"^graphc: server 0 \(rank 0, pid \d+\) is gone", done.err, re.MULTILINE), done.text


@pytest.mark.large  # test_failure.py has an error of a worker that nobody can spare, with the same launcher
def test_an_error_on_a_worker_ends_the_run(counting: str) -> None:
    program = START + (
        "with graphc.Trainer(program, threads=1) as trainer:\n"
        "    def feeds():\n        yield {'x': one}\n        raise ValueError('bad sample 7')\n"
        "    trainer.fit(feeds() if trainer.rank == 1 else [{'x': one}] * 100_000)"
    )
    done = run_mpi(3, program, counting, "parameter_server", keep_going=True)
    assert done.code == 1, done.text
    assert "rank 1 failed: ValueError: bad sample 7" in done.err, done.text


def test_the_command_line(tmp_path: Path) -> None:
    """Asynchronous training of the digits, from file to file."""
    import json
    import subprocess
    import sys

    from graphc import demo
    from graphc.cli.demo import onnxruntime_accuracy

    digits = demo.load_digits()
    np.savez(tmp_path / "train.npz", **digits.train)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "graphc", "train", str(demo.MODEL), "--data", "train.npz", "-o", "trained.onnx"]
    command += ["--loss", "softmax_cross_entropy:logits=logits,label=label", "--optimizer", "adam:lr=2e-3"]
    command += ["--epochs", "4", "--batch-size", "64", "-n", "2", "--format", "json", "--checkpoint", "saved"]
    command += ["--strategy", "parameter_server:servers=1,staleness=8"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    events = [json.loads(line) for line in run.stdout.splitlines()]
    end = events[-1]
    assert (end["event"], end["steps"], end["world_size"], end["servers"], end["lost"]) == ("end", 4 * 23 * 2, 3, 1, [])
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [1, 2, 3, 4]
    assert onnxruntime_accuracy(str(tmp_path / "trained.onnx"), digits.test) >= 0.95
    again = subprocess.run(
        [*command[:-1], "parameter_server:servers=2", "--resume", "saved", "--epochs", "5", "--transport", "threads"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 5 * 23 * 2
