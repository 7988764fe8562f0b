"""Training with BatchNormalization on uneven shares."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphc
from graphc.bench.specs import SPECS
from graphc.data import share
from tests.training.compile_once import compile_once
from tests.training.random_samples import batch

SHAPES = {"cnn": (3, 8, 8), "mlp": (20,)}
"""Model → shape of a sample."""


def feeds(name: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if name == "resnet":
        return SPECS["resnet18-small"].batch(count, seed)
    return batch(SHAPES[name], count, seed)


def train(
    comm: Any, path: str, name: str, steps: int, lr: float, size: int, edges: list[int] | None = None, **options: Any
) -> dict[str, Any]:
    """Losses and final state of one rank; ``edges`` are the borders of uneven shares."""
    transport = options.pop("transport", None)
    options = {"sync_batchnorm": True, **options}
    program = compile_once(
        path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=lr, momentum=0.9), **options
    )
    losses = []
    with graphc.Trainer(program, comm=comm, threads=1, transport=transport) as trainer:
        for step in range(steps):
            x, y = feeds(name, size, step)
            mine = slice(*edges[comm.rank : comm.rank + 2]) if edges else share(size, comm.rank, comm.size)
            losses.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["loss"])
        return {"losses": np.array(losses), "hash": trainer.state_sha256(), "state": trainer.state.snapshot()}


def follows(one: dict[str, Any], many: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    assert len({result["hash"] for result in many}) == 1
    np.testing.assert_allclose(many[0]["losses"], one["losses"], rtol=tolerance)
    for key, value in one["state"].items():
        if value.dtype.kind == "f" and "::" not in key:
            np.testing.assert_allclose(
                many[0]["state"][key], value, rtol=0, atol=tolerance * np.abs(value).max() + 1e-6, err_msg=key
            )
