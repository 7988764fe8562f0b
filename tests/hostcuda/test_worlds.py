"""Every strategy on two workers with the GPU backend: over NCCL with a GPU each, through host memory on one that they share.

Both are made up on the host, and so is what they are compared with: the same on two workers with onnxruntime.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

import graphc
from graphc.backends.cupy.capture import Recording
from graphc.data import share
from graphc.device import Variants
from graphc.runtime.communicator import Communicator
from graphc.runtime.threads import run_threads
from tests.backends import test_device_strategies as strategies
from tests.conftest import emulated
from tests.runtime.mpi_run import map_ranks
from tests.training import small

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

TOLERANCES = {"bf16": 2e-3, "bf16, zero 3, offload": 2e-3, "bf16 gradients": 1e-4, "fp16": 3e-4}

OUTSIDE: dict[str, int] = {"local sgd": 1, "local sgd, start": 1, "powersgd, start": 1}
"""Strategy → what of a step over NCCL is not captured: a look at the step's number."""

HOST = {"zero 1, offload", "bf16, zero 3, offload", "central storage", "topk", "adasum", "fp16", "any world"}
"""Where the host takes part in the middle of a step."""


def sizes_of(name: str) -> tuple[int, ...]:
    return (12, 12, 12) if name == "any world" else SIZES


def on_gpus(comm: Communicator, names: list[str], transport: str) -> dict[str, Any]:
    """What each strategy gives on this rank; how its collectives travel, and what of a step is called, not replayed."""
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
