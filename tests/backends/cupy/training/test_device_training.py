"""Whole trainers on a device whose memory is closed to the host, against onnxruntime: nothing reaches around the memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.backend import BACKENDS
from graphc.bench.specs import SPECS
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.training import torch_models

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

DEVICE = "pretended"


@pytest.fixture(autouse=True)
def device(register_backend: Callable[..., None]) -> None:
    assert DEVICE not in BACKENDS
    register_backend(DEVICE, lambda **_: cupy_on(HostDevice()))


def compiled(path: str, optimizer: str, backend: str, **options: Any) -> graphc.Program:
    loss = graphc.losses.SoftmaxCrossEntropy()
    return graphc.compile(path, loss=loss, optimizer=graphc.optim.parse(optimizer), backend=backend, **options)


def both(path: str, optimizer: str, batches: list[dict[str, Any]], **options: Any) -> None:
    """Losses and state follow those of onnxruntime."""
    losses, states = {}, {}
    for backend in ("onnxruntime", DEVICE):
        with graphc.Trainer(compiled(path, optimizer, backend, **options), threads=1) as trainer:
            losses[backend] = [trainer.step(feeds)["loss"] for feeds in batches]
            losses[backend].append(trainer.evaluate(batches[:1])["loss"])
            states[backend] = trainer.state.snapshot()
    assert losses["onnxruntime"][3] < losses["onnxruntime"][0]
    np.testing.assert_allclose(losses[DEVICE], losses["onnxruntime"], rtol=1e-5)
    for key, value in states["onnxruntime"].items():
        np.testing.assert_allclose(states[DEVICE][key], value, rtol=0, atol=1e-5 * max(1.0, np.abs(value).max()), err_msg=key)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param("mlp", "sgd:lr=0.05,momentum=0.9", marks=pytest.mark.large),
        pytest.param("lenet", "sgd:lr=0.05,momentum=0.9", marks=pytest.mark.large),
        ("transformer-small", "adamw:lr=1e-3,eps=1e-4"),  # a bias of keys has no gradient but noise
    ],
)
def test_training_follows_onnxruntime(name: str, optimizer: str, exported: Callable[[str], str]) -> None:
    both(exported(name), optimizer, [dict(zip(("input", "label"), SPECS[name].batch(4), strict=True))] * 4)


@pytest.mark.full
def test_batch_statistics_and_dropout_follow_onnxruntime(tmp_path: Path) -> None:
    """Running statistics are state; a mask depends on seed, step and place only."""
    cnn = torch_models.save(torch_models.make(torch_models.Cnn), tmp_path / "cnn.onnx", torch.randn(4, 3, 8, 8))
    feeds = dict(zip(("input", "label"), torch_models.batch((3, 8, 8), 12, 0), strict=True))
    both(cnn, "sgd:lr=0.05,momentum=0.9", [feeds] * 4)
    mlp = torch_models.save(torch_models.make(lambda: torch_models.Mlp(0.3)), tmp_path / "mlp.onnx", torch.randn(4, 20))
    feeds = dict(zip(("input", "label"), torch_models.batch((20,), 12, 0), strict=True))
    both(mlp, "sgd:lr=0.1", [feeds] * 4, accumulate=2)
