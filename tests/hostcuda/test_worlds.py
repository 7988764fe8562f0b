"""Every strategy on two workers with the GPU backend: over NCCL, and through host memory on a shared GPU.

The GPUs are emulated on the host; over NCCL each worker has its own. The reference is two workers with onnxruntime.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.data import share
from graphc.device import Variants
from graphc.distributed.communicator import Communicator
from graphc.distributed.threads import run_threads
from tests.backends.cupy.training import strategy_cases as strategies
from tests.conftest import emulated
from tests.runtime.mpi_run import map_ranks
from tests.training import batchnorm_cases as batchnorm
from tests.training import small, torch_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi,
    pytest.mark.skipif(not emulated(), reason="says how many GPUs there are"),
]

SIZES = (12, 11, 12, 12, 11, 12)

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    **strategies.PROGRAMS,
    "zero 1, offload": (strategies.ADAM, {"strategy": "zero:stage=1,offload=true"}),
    "local sgd, start": (strategies.MOMENTUM, {"strategy": "local_sgd:every=3,start=1"}),
    "powersgd, start": (strategies.MOMENTUM, {"compress": "powersgd:rank=2,start=2"}),
    "bf16 gradients": (strategies.MOMENTUM, {"compress": "bf16"}),
    **{name: (optimizer, options) for name, (optimizer, options, _) in strategies.HALVES.items()},
}

TOLERANCES = {"bf16": 2**-9, "bf16, zero 3, offload": 2**-9, "bf16 gradients": 1e-4, "fp16": 2**-11}
"""Where products are 16-bit, the rounding of one 16-bit number: a sum in another order rounds to a neighbour."""

OUTSIDE: dict[str, int] = {"local sgd": 1, "local sgd, start": 1, "powersgd, start": 1, "fp16": 1}
"""Strategy → how many runs of a step over NCCL are not captured, since they read the step number or the loss scale."""

HOST = {"zero 1, offload", "bf16, zero 3, offload", "central storage", "topk", "adasum", "any world"}
"""Strategies in which the host takes part in the middle of a step."""


def sizes_of(name: str) -> tuple[int, ...]:
    return (12, 12, 12) if name == "any world" else SIZES


def on_gpus(comm: Communicator, names: list[str], transport: str) -> dict[str, Any]:
    """Train each strategy on this rank; returns its results, how its collectives travel, and which runs are not replayed."""
    comm.close = lambda: None  # type: ignore[method-assign]  # one world for all of them
    found: dict[str, Any] = {}
    for name in names:
        optimizer, options = PROGRAMS[name]
        program = small.compiled(optimizer, backend="cupy", **options)
        made = functools.partial(graphc.Trainer, transport=transport)
        with made(program, comm=comm, threads=1) as trainer:
            losses = []
            for k, size in enumerate(sizes_of(name)):
                feeds = dict(zip(("input", "label"), small.batch(size, k), strict=True))
                mine = share(size, comm.rank, comm.size)
                losses.append(trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start)["loss"])
            losses.append(trainer.evaluate([{n: a[mine] for n, a in feeds.items()}])["loss"])
            (executor, *_) = trainer.plans.training.values()
            called = [run for run in executor.runs if not isinstance(run, Recording | Variants)]
            refused = [run.refusal for run in executor.runs if isinstance(run, Recording) and run.refusal]
            found[name] = {
                "losses": losses,
                "state": trainer.state.snapshot(trainer.comm),
                "hash": trainer.state_sha256(),
                "travels": type(trainer.comm).__name__,
                "called": len(called),
                "rows": len(executor.runs),
                "refused": refused,
            }
    return found


@functools.cache
def on_hosts(name: str) -> list[dict[str, Any]]:
    optimizer, options = PROGRAMS[name]
    program = small.compiled(optimizer, backend="onnxruntime", **options)
    return run_threads(2, lambda comm: strategies.train(comm, program, sizes_of(name)))


@pytest.mark.parametrize(("devices", "transport"), [(2, "nccl"), (1, "mpi")], ids=["a GPU each", "a shared GPU"])
def test_every_strategy(devices: int, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCUDA_DEVICES", str(devices))
    ranks = map_ranks(2, on_gpus, list(PROGRAMS), transport, timeout=1500)
    wrong = []
    for name in PROGRAMS:
        found = [rank[name] for rank in ranks]
        print(f"{name:24} {found[0]['travels']} rows {found[0]['rows']} called {found[0]['called']} {found[0]['refused']}")
        try:
            assert found[0]["hash"] == found[1]["hash"]
            assert found[0]["travels"] == ("NcclCommunicator" if devices == 2 else "StagedCommunicator")
            assert not found[0]["refused"]
            if devices == 2 and name not in HOST:
                assert found[0]["called"] == OUTSIDE.get(name, 0)
            for rank in range(2):
                strategies.follow(found[rank], on_hosts(name)[rank], TOLERANCES.get(name, 1e-4))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def with_batchnorm(comm: Communicator, path: str) -> dict[str, Any]:
    comm.close = lambda: None  # type: ignore[method-assign]
    options = {"backend": "cupy", "transport": "nccl"}
    return {k: batchnorm.train(comm, path, "cnn", 6, 0.05, 16, **options, sync_batchnorm=k) for k in (True, False)}


def test_batchnorm_over_all_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = torch_models.Cnn
    path = torch_models.save(torch_models.make(kind), tmp_path / "cnn.onnx", torch.randn(4, *torch_models.SHAPES[kind]))
    ranks = map_ranks(2, with_batchnorm, path, timeout=600)
    for sync in (True, False):
        hosts = run_threads(2, lambda comm, k=sync: batchnorm.train(comm, path, "cnn", 6, 0.05, 16, sync_batchnorm=k))
        batchnorm.follows(hosts[0], [rank[sync] for rank in ranks], 1e-4)
    assert ranks[0][True]["losses"][-1] != ranks[0][False]["losses"][-1]


def served(comm: Communicator, backend: str) -> dict[str, Any]:
    """Train with a server and two workers."""
    losses = []
    program = small.compiled(strategies.ADAM, backend=backend, strategy="parameter_server:servers=1,staleness=0")
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        if comm.rank == 0:
            trainer.serve()
        for k in range(4 if comm.rank else 0):
            x, y = small.batch(8, k)
            mine = share(8, comm.rank - 1, 2)
            losses.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["loss"])
        if comm.rank:
            trainer.finish()
        return {"losses": losses, "hash": trainer.state_sha256(), "backend": trainer.backend.name}


def test_parameter_servers() -> None:
    ranks = map_ranks(3, served, "cupy", timeout=600)
    hosts = run_threads(3, lambda comm: served(comm, "onnxruntime"))
    assert len({rank["hash"] for rank in ranks}) == 1
    for found, expected in zip(ranks, hosts, strict=True):
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)


def twenty(comm: Communicator, precision: str | None) -> dict[str, Any]:
    """Train twenty steps on a GPU that both ranks share; returns losses and the bits of each state."""
    program = small.compiled(strategies.MOMENTUM, backend="cupy", precision=precision)
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        losses = []
        for k in range(20):
            x, y = small.batch(16, k)
            mine = share(16, comm.rank, 2)
            losses.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["loss"])
        state = {name: trainer.state.fetch(name).tobytes() for name in sorted(trainer.state.replicated())}
        return {"losses": losses, "state": state, "travels": type(trainer.comm).__name__}


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_replicas_on_a_shared_gpu_have_the_same_bits_after_twenty_steps(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTCUDA_DEVICES", "1")
    first, second = map_ranks(2, twenty, precision, timeout=600)
    assert first["travels"] == second["travels"] == "StagedCommunicator"
    assert first == second
    assert len(first["state"]) >= 8
    hosts = small.compiled(strategies.MOMENTUM, backend="onnxruntime", precision=precision)
    expected = run_threads(2, lambda comm: small.train(comm, hosts, 20))[0]["metrics"]
    tolerance = 1e-4 if precision is None else 2e-2
    np.testing.assert_allclose(first["losses"], [metrics["loss"] for metrics in expected], rtol=tolerance)
