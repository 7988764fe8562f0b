"""Worlds in which one worker has a device and the other has none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from graphc.distributed.threads import run_threads
from graphc.errors import WorldError
from tests.backends.cupy.training.strategy_cases import ADAM, DEVICE, follow, train
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.training import small

pytestmark = [
    pytest.mark.large,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::graphc.distributed.nccl.device_transport.StagedWarning"),
]

WORLDS = [(DEVICE, "onnxruntime"), ("onnxruntime", DEVICE)]


@pytest.fixture(autouse=True)
def device(register_backend: Callable[..., None]) -> None:
    register_backend(DEVICE, lambda **_: cupy_on(HostDevice()))


def mixed(backends: tuple[str, ...], **options: Any) -> list[dict[str, Any]]:
    programs = [small.compiled(ADAM, backend=backend, **options) for backend in backends]
    return run_threads(2, lambda comm: train(comm, programs[comm.rank]))


@pytest.mark.parametrize("backends", WORLDS, ids=str)
def test_replicas_that_would_drift_apart_are_refused(backends: tuple[str, ...]) -> None:
    with pytest.raises(WorldError, match=r"rank 0 computes on '\w+' and rank 1 on '\w+'.*copies of 'w1'.*'zero:stage=1'"):
        mixed(backends)


@pytest.mark.parametrize("backends", WORLDS, ids=str)
def test_state_of_low_precision_that_differs_is_refused(backends: tuple[str, ...]) -> None:
    with pytest.raises(
        WorldError, match=r"rank 0 computes on '\w+' and rank 1 .*, and these backends keep different state .*low-precision"
    ):
        mixed(backends, precision="bf16")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("zero:stage=1", None), ("zero:stage=2", "bf16"), ("zero:stage=3", None), ("central_storage", None), ("local_sgd", None)],
)
def test_what_one_worker_updates_for_all_stays_equal(strategy: str, precision: str | None) -> None:
    options: dict[str, Any] = {"strategy": strategy, "precision": precision}
    hosts = run_threads(2, lambda comm: train(comm, small.compiled(ADAM, backend="onnxruntime", **options)))
    found = mixed(WORLDS[0], **options)
    assert found[0]["hash"] == found[1]["hash"]
    for rank in range(2):
        follow(found[rank], hosts[rank], 1e-5 if precision is None else 2e-3)
