"""Whole trainers on a device whose memory is closed to the host, against onnxruntime: nothing reaches around the memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.backends.cupy import CupyBackend
from graphc.bench.specs import SPECS
from tests.backends.host_kernels import HostDevice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

DEVICE = "pretended"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEVICE not in BACKENDS
    monkeypatch.setitem(BACKENDS._items, DEVICE, lambda **_: CupyBackend(device=HostDevice()))


def compiled(path: str, optimizer: str, backend: str, **options: Any) -> graphc.Program:
    loss = graphc.losses.SoftmaxCrossEntropy()
    return graphc.compile(path, loss=loss, optimizer=graphc.optim.parse(optimizer), backend=backend, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("mlp", "sgd:lr=0.05,momentum=0.9"),
        ("lenet", "sgd:lr=0.05,momentum=0.9"),
        ("transformer-small", "adamw:lr=1e-3,eps=1e-4"),
    ],
)
def test_training_follows_onnxruntime(name: str, optimizer: str, exported: Callable[[str], str]) -> None:
    x, y = SPECS[name].batch(4)
    losses, states = {}, {}
    for backend in ("onnxruntime", DEVICE):
        with graphc.Trainer(compiled(exported(name), optimizer, backend), threads=1) as trainer:
            losses[backend] = [trainer.step({"input": x, "label": y})["loss"] for _ in range(4)]
            states[backend] = trainer.state.snapshot()
    assert losses["onnxruntime"][3] < losses["onnxruntime"][0]
    np.testing.assert_allclose(losses[DEVICE], losses["onnxruntime"], rtol=1e-5)
    for key, value in states["onnxruntime"].items():
        np.testing.assert_allclose(states[DEVICE][key], value, rtol=0, atol=1e-5 * max(1.0, np.abs(value).max()), err_msg=key)
