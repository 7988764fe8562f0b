"""Every strategy on two workers with a device each, whose memory is closed to the host, against the same on onnxruntime."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.backends.cupy import CupyBackend
from graphc.data import share
from graphc.errors import NonFiniteError
from graphc.runtime.threads import run_threads
from tests.backends.host_kernels import HostDevice
from tests.training import small

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

DEVICE = "pretended"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEVICE not in BACKENDS
    monkeypatch.setitem(BACKENDS._items, DEVICE, lambda **_: CupyBackend(device=HostDevice()))


def batches(steps: int) -> list[dict[str, Any]]:
    return [dict(zip(("input", "label"), small.batch(12 - k % 2, k), strict=True)) for k in range(steps)]


def train(comm: Any, program: graphc.Program, steps: int = 3) -> dict[str, Any]:
    """Losses, whole state and its hash of one rank, and the trainer's bytes on the device."""
    losses = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for feeds in batches(steps):
            mine = share(len(feeds["input"]), comm.rank, comm.size)
            losses.append(trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start)["loss"])
        state, digest = trainer.state.snapshot(trainer.comm), trainer.state_sha256()
        return {"losses": losses, "state": state, "hash": digest}


def follow(device: dict[str, Any], host: dict[str, Any], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(device["losses"], host["losses"], rtol=tolerance)
    assert device["state"].keys() == host["state"].keys()
    for name, value in host["state"].items():
        scale = max(1.0, float(np.abs(value.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(
            device["state"][name].astype(np.float64), value.astype(np.float64), rtol=0, atol=tolerance * scale, err_msg=name
        )


ADAM = "adam:lr=0.002,eps=1e-4"

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mirrored": (ADAM, {}),
    "zero 1": (ADAM, {"strategy": "zero:stage=1"}),
    "zero 2, clip": (ADAM, {"strategy": "zero:stage=2", "clip_norm": 0.5}),
    "zero 3": (ADAM, {"strategy": "zero:stage=3"}),
    "zero 1, offload": (ADAM, {"strategy": "zero:stage=1,offload=true"}),
    "central storage": (ADAM, {"strategy": "central_storage"}),
    "accumulate, clip": ("sgd:lr=0.1,momentum=0.9", {"accumulate": 3, "clip_norm": 0.5}),
    "local sgd": ("sgd:lr=0.1,momentum=0.9", {"strategy": "local_sgd:every=2"}),
    "powersgd": ("sgd:lr=0.1,momentum=0.9", {"compress": "powersgd:rank=2"}),
    "topk": ("sgd:lr=0.1,momentum=0.9", {"compress": "topk:ratio=0.05"}),
    "fp16 gradients": ("sgd:lr=0.1", {"compress": "fp16"}),
    "adasum": ("sgd:lr=0.1", {"strategy": "adasum"}),
    "bf16": (ADAM, {"precision": "bf16"}),
    "bf16, zero 3, offload": (ADAM, {"precision": "bf16", "strategy": "zero:stage=3,offload=true"}),
    "fp16": (ADAM, {"precision": "fp16"}),
    "skip": (ADAM, {"nonfinite": "skip"}),
    "any world": ("sgd:lr=0.1", {"deterministic": "any-world"}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_devices_follow_two_hosts(name: str) -> None:
    optimizer, options = PROGRAMS[name]
    found = {}
    for backend in ("onnxruntime", DEVICE):
        program = small.compiled(optimizer, backend=backend, **options)
        found[backend] = run_threads(2, lambda comm, program=program: train(comm, program))
    assert len({rank["hash"] for rank in found[DEVICE]}) == 1
    follow(found[DEVICE][0], found["onnxruntime"][0])
