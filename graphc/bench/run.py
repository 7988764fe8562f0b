"""The benchmark suite; every figure compares two medians measured in turn in one run."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphc.bench.specs import TIMED
from graphc.distributed.world import available_cores
from graphc.errors import GraphcError, UsageError

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One row of the table; ``ratio`` is the peer's time ÷ graphc's."""

    name: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float
    goal: float


def run_suite(
    models: Sequence[str] = TIMED, *, workers: bool = True, zoo: bool = True, rounds: int = 3, seconds: float = 3.0, say: Report
) -> list[BenchRow]:
    """Measure step times on one and two workers, AllReduces between two, pipelines of two, and compile times of the zoo.

    Args:
        models: benchmark models to measure.
        rounds: number of times graphc and its peer are measured in turn; the median round counts.
        seconds: duration of one measurement.
        say: called with a line of progress.
    """
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory(prefix="graphc-bench-") as folder:
        for model in models:
            path = _exported(model, folder)
            rows += _one_worker(model, path, rounds, seconds, say)
            if workers:
                rows.append(_two_workers(model, path, rounds, seconds, say))
    if workers:
        rows += _bandwidth(seconds, say)
        rows += _pipelines(rounds, seconds, say)
    if zoo:
        rows += _zoo_compile(say)
    return rows


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Step times of one worker with some threads; an efficiency is the time of one thread ÷ (threads · time)."""

    model: str
    threads: int
    ours_ms: float
    ours_efficiency: float
    peer_ms: float
    peer_efficiency: float


def run_scaling(models: Sequence[str], threads: Sequence[int], *, rounds: int, seconds: float, say: Report) -> list[ScalingRow]:
    """Measure step times of one worker by its number of threads, beside PyTorch's.

    Args:
        threads: numbers of threads, one of them 1; all are measured in turn in every round.
        rounds: number of times all are measured; the fastest round counts, since what else a host runs slows one core of two
            for seconds at a time, and an efficiency divides two such times.

    Raises:
        UsageError: a number below 1, no 1 among them, or more threads than cores.
    """
    cores = available_cores()
    if min(threads) < 1:
        raise UsageError(f"--threads {min(threads)}: a worker has at least 1 thread")
    if 1 not in threads:
        raise UsageError("--threads needs 1 among its numbers: efficiency is relative to one thread")
    if max(threads) > cores:
        raise UsageError(f"{max(threads)} threads on {cores} usable cores would measure how they wait; ask for {cores} at most")
    rows = []
    with tempfile.TemporaryDirectory(prefix="graphc-bench-") as folder:
        for model in models:
            path = _exported(model, folder)
            found: dict[tuple[str, int], list[float]] = {}
            for _ in range(rounds):
                for count in threads:
                    common = ["--threads", str(count), "--seconds", str(seconds)]
                    found.setdefault(("graphc", count), []).append(_measure("graphc", model, "--file", path, *common)["ms"])
                    found.setdefault(("torch", count), []).append(_measure("torch", model, *common)["ms"])
            ms = {key: min(times) for key, times in found.items()}
            for count in threads:
                ours, peer = ms["graphc", count], ms["torch", count]
                efficiency = ms["graphc", 1] / (count * ours), ms["torch", 1] / (count * peer)
                rows.append(ScalingRow(model, count, ours, efficiency[0], peer, efficiency[1]))
                say(f"{model}, {count} threads: {ours:.2f} ms, efficiency {efficiency[0]:.2f}; PyTorch's {efficiency[1]:.2f}")
    return rows


def _exported(model: str, folder: str) -> str:
    """The ONNX file of a benchmark model."""
    path = str(Path(folder) / f"{model}.onnx")
    _python("-c", "import sys; from graphc.bench.models import export; export(*sys.argv[1:])", model, path)
    return path


def _one_worker(model: str, path: str, rounds: int, seconds: float, say: Report) -> list[BenchRow]:
    ours: list[dict[str, Any]] = []
    peer: list[dict[str, Any]] = []
    for _ in range(rounds):
        common = ["--threads", "2", "--seconds", str(seconds)]
        ours.append(_measure("graphc", model, "--file", path, *common))
        peer.append(_measure("torch", model, *common))
    rows = [_row(f"step {model}, 1 worker x 2 threads", ours, "PyTorch eager", peer, 1.1)]
    say(f"{rows[0].name}: {rows[0].ours_ms:.2f} ms, {rows[0].ratio:.2f}x")
    if model == "mlp":
        spent = statistics.median(r["python_ms"] for r in ours)
        rows.append(BenchRow("Python outside segments, mlp", spent, "budget of 100 us", 0.1, 0.1 / spent, 1.0))
    return rows


def _two_workers(model: str, path: str, rounds: int, seconds: float, say: Report) -> BenchRow:
    ours, peer = [], []
    for _ in range(rounds):
        common = ["--threads", "1", "--seconds", str(seconds)]
        ours.append(_launch_graphc([*_module(), "graphc", model, "--file", path, *common]))
        peer.append(_launch_torch([*_module(), "torch", model, *common]))
    row = _row(f"step {model}, 2 workers x 1 thread", ours, "PyTorch DDP (gloo)", peer, 1.2)
    say(f"{row.name}: {row.ours_ms:.2f} ms, {row.ratio:.2f}x")
    return row


def _bandwidth(seconds: float, say: Report) -> list[BenchRow]:
    """Measure AllReduces between two workers against MPI's own, by size."""
    found = _launch_graphc([sys.executable, "-m", "graphc.bench.bandwidth", "--seconds", str(seconds)])
    rows = []
    for size in found["rows"]:
        name = f"AllReduce of {size['mib']} MiB, 2 workers"
        rows.append(BenchRow(name, size["ours_ms"], "MPI_Allreduce in place", size["mpi_ms"], size["ratio"], 0.95))
        say(f"{name}: {rows[-1].ours_ms:.3f} ms, {rows[-1].ratio:.2f}x")
    return rows


def _pipelines(rounds: int, seconds: float, say: Report) -> list[BenchRow]:
    """Measure a pipeline of two equal stages, one worker each, against one worker with the same micro-batches."""
    module = [sys.executable, "-m", "graphc.bench.pipeline"]
    schedules = ("1f1b", "zero-bubble")
    alone, ours = list[dict[str, Any]](), {name: list[dict[str, Any]]() for name in schedules}
    for _ in range(rounds):
        alone.append(_last_json(_run([*module, "--seconds", str(seconds)], dict(os.environ))))
        for name in schedules:
            ours[name].append(_launch_graphc([*module, name, "--seconds", str(seconds)]))
    rows = []
    for name in schedules:
        rows.append(_row(f"pipeline of 2 stages, {name}", ours[name], "one worker x 1 thread", alone, 1.6))
        say(f"{rows[-1].name}: {rows[-1].ours_ms:.2f} ms, {rows[-1].ratio:.2f}x")
    return rows


def _zoo_compile(say: Report) -> list[BenchRow]:
    """Measure compile times of the ONNX package's nine models against the limit of three seconds."""
    import onnx

    import graphc

    rows = []
    for path in sorted(Path(onnx.__file__).parent.glob("backend/test/data/light/*.onnx")):
        start = time.perf_counter()
        graphc.compile(
            path,
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.SGD(lr=0.01),
            batch=2,
            initialize="he",
        )
        spent = (time.perf_counter() - start) * 1e3
        rows.append(BenchRow(f"compile {path.stem.removeprefix('light_')}", spent, "limit of 3 s", 3000.0, 3000.0 / spent, 1.0))
        say(f"{rows[-1].name}: {spent:.0f} ms")
    return rows


def _row(name: str, ours: list[dict[str, Any]], peer_name: str, peer: list[dict[str, Any]], goal: float) -> BenchRow:
    mine = statistics.median(r["ms"] for r in ours)
    theirs = statistics.median(r["ms"] for r in peer)
    return BenchRow(name, mine, peer_name, theirs, theirs / mine, goal)


def _module() -> list[str]:
    return [sys.executable, "-m", "graphc.bench.measure"]


def _measure(*arguments: str) -> dict[str, Any]:
    return _last_json(_run([*_module(), *arguments], dict(os.environ)))


def _python(*arguments: str) -> None:
    _run([sys.executable, *arguments], dict(os.environ))


def _launch_graphc(command: list[str]) -> dict[str, Any]:
    return _last_json(_run([sys.executable, "-m", "graphc", "launch", "-n", "2", *command[1:]], dict(os.environ)))


def _launch_torch(command: list[str]) -> dict[str, Any]:
    """Run two processes with PyTorch's environment variables; return rank 0's result.

    It counts however they end: it is printed before they leave the process group, where gloo sometimes aborts one of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [p.communicate(timeout=600)[0] for p in processes]
    if not all(_results(text) for text in outputs):
        raise GraphcError(f"the peer's measurement failed: {' '.join(command)}")
    return _last_json(outputs[0])


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise GraphcError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _last_json(text: str) -> dict[str, Any]:
    return next(row for row in _results(text) if row.get("rank", 0) == 0)


def _results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
