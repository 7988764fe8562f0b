"""Handwritten digits, two workers: what travels less, or less often, learns about as well as every gradient in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import graphc
from graphc import demo
from graphc.distributed.threads import run_threads

pytestmark = pytest.mark.full

EPOCHS = 5


@pytest.fixture(scope="module")
def digits() -> demo.Digits:
    pytest.importorskip("sklearn")
    return demo.load_digits()


def accuracy(digits: demo.Digits, target: Path, **options: Any) -> float:
    """On the test set, in plain onnxruntime, of the model that two workers trained; their replicas are equal in the end."""
    optimizer = graphc.optim.parse("sgd:lr=0.05,momentum=0.9")
    program = graphc.compile(demo.MODEL, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=optimizer, **options)

    def train(comm: Any) -> str:
        batches = graphc.data.shard(digits.train, global_batch=64, rank=comm.rank, size=comm.size, seed=0)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.fit(batches, epochs=EPOCHS)
            trainer.export(target)
            return trainer.state_sha256()

    assert len(set(run_threads(2, train))) == 1
    session = ort.InferenceSession(target, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": digits.test["image"]})
    return float(np.mean(np.argmax(logits, axis=1) == digits.test["label"]))


@pytest.fixture(scope="module")
def in_full(digits: demo.Digits, tmp_path_factory: pytest.TempPathFactory) -> float:
    found = accuracy(digits, tmp_path_factory.mktemp("full") / "m.onnx")
    assert found > 0.96
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"compress": "bf16"},
        {"compress": "powersgd:rank=2"},
        {"compress": "topk:ratio=0.02"},
        {"strategy": "local_sgd:every=4"},
        {"strategy": "adasum"},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_accuracy_is_close_to_that_of_every_gradient_in_full(
    options: dict[str, str], digits: demo.Digits, in_full: float, tmp_path: Path
) -> None:
    assert accuracy(digits, tmp_path / "m.onnx", **options) > in_full - 0.02
