"""Training with divided state, for threads and for MPI processes, which need no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphc
from graphc.data import share
from tests.training import small

STRATEGIES = ["zero:stage=1", "zero:stage=2", "zero:stage=3", "central_storage"]
SIZES = (8, 7)  # global batches, in turn: shares are uneven


def run(
    comm: Any, program: graphc.Program, batches: list[dict[str, Any]], then: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Train on each worker's share of ``batches``; losses, state and its hash."""
    losses = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for feeds in batches:
            mine = share(len(next(iter(feeds.values()))), comm.rank, comm.size)
            losses.append(trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start)["loss"])
        extra = then(trainer) if then is not None else None
        state, digest = trainer.state.snapshot(comm), trainer.state_sha256()
        return {"losses": losses, "state": state, "hash": digest, "then": extra}


def digits(count: int, steps: int) -> list[dict[str, Any]]:
    return [dict(zip(("input", "label"), small.batch(SIZES[k % 2] * count, k), strict=True)) for k in range(steps)]


class Lent:
    """A communicator that outlives the trainer which closes it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def close(self) -> None:
        pass


def each_strategy(comm: Any) -> list[dict[str, Any]]:
    programs = [small.compiled("adam:lr=0.01", strategy=strategy) for strategy in STRATEGIES]
    return [run(Lent(comm), program, digits(1, 8)) for program in programs]
