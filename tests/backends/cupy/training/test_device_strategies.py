"""Every strategy on two workers with a device each, whose memory is closed to the host, against the same on onnxruntime."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError
from tests.backends.cupy.training.strategy_cases import (
    ADAM,
    DEVICE,
    HALVES,
    PROGRAMS,
    check_checkpoint,
    check_low_precision,
    check_nan,
    check_offloaded,
    check_servers,
    check_strategy,
    held,
    train,
)
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.training import small

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::graphc.distributed.nccl.device_transport.StagedWarning"),
    pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning"),  # where the pretended device meets a NaN
]


@pytest.fixture(autouse=True)
def device(register_backend: Callable[..., None]) -> None:
    assert DEVICE not in BACKENDS
    register_backend(DEVICE, lambda **_: cupy_on(HostDevice()))


def sweep(names: Iterable[str], *always: str) -> list[Any]:
    """``names`` as parameters of a test, of which only ``always`` are not in the large tier."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.large) for name in names]


@pytest.mark.parametrize("name", sweep(PROGRAMS, "mirrored", "accumulate, clip"))
def test_two_devices_follow_two_hosts(name: str) -> None:
    check_strategy(name, 1e-5)


@pytest.mark.parametrize("name", sweep(HALVES, "bf16, zero 3, offload"))
def test_two_devices_follow_two_hosts_in_low_precision(name: str) -> None:
    check_low_precision(name)


@pytest.mark.parametrize("strategy", ["zero:stage=2,offload=true", "central_storage"])
def test_offloaded_state_lies_on_the_host_and_changes_no_result(strategy: str) -> None:
    check_offloaded(strategy)


def test_offloading_frees_the_memory_of_the_device() -> None:
    programs = [small.compiled(ADAM, backend=DEVICE, strategy=f"zero:stage=1,offload={flag}") for flag in ("false", "true")]
    kept, freed = (run_threads(2, lambda comm, program=program: train(comm, program)) for program in programs)
    moments = 2 * 4 * sum(int(np.prod(shape)) for shape in small.SHAPES.values())
    for rank in range(2):
        assert kept[rank]["bytes"] - freed[rank]["bytes"] >= moments / 2, "each rank has half of them"


def test_a_step_with_a_nan_leaves_the_state_of_the_last_good_one() -> None:
    check_nan()


def test_what_went_wrong_is_found_on_the_host_where_the_device_is_full() -> None:
    x, y = small.batch(8, 0)
    with graphc.Trainer(small.compiled(ADAM, backend=DEVICE), threads=1) as trainer:
        trainer.step({"input": x, "label": y})
        trainer.state.load({"w1": np.full(small.SHAPES["w1"], 3e38, np.float32)})
        assert isinstance(trainer.backend.memory, HostDevice)
        trainer.backend.memory.limit = held(trainer) + 64
        with pytest.raises(NonFiniteError, match=r"step 1, first in tensor 'm1'"):
            trainer.step({"input": x, "label": y})


def test_what_a_device_saves_a_host_restores_exports_and_evaluates(tmp_path: Path) -> None:
    check_checkpoint(tmp_path)


def test_workers_on_devices_push_to_servers_on_hosts() -> None:
    check_servers()
