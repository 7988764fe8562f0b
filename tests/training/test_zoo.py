"""All nine models inside the onnx package train on two workers: as shipped, from batch 1 and without weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphc
from graphc.distributed.threads import run_threads
from tests.frontends.zoo import LARGE, SMALL, path_of
from tests.tiers import params


@pytest.mark.full
@pytest.mark.parametrize("name", params((*SMALL, *LARGE), large=(*LARGE, "inception_v1", "shufflenet")))
def test_zoo_model_trains_on_two_workers(name: str) -> None:
    program = graphc.compile(
        path_of(name), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=1e-3), batch=2, initialize="he"
    )
    rng = np.random.default_rng(0)
    inputs = {v.name: v for v in program.model.graph.inputs}
    labels = inputs.pop("label")
    feeds = {n: 0.1 * rng.standard_normal(tuple(v.shape), dtype=np.float32) for n, v in inputs.items()}
    feeds["label"] = rng.integers(0, 1000, tuple(labels.shape))

    def work(comm: Any) -> tuple[list[float], str]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            return [trainer.step(feeds)["loss"] for _ in range(3)], trainer.state_sha256()

    first, second = run_threads(2, work)
    assert first == second
    losses = first[0]
    assert np.isfinite(losses).all()
    assert losses[0] > losses[1] > losses[2]
