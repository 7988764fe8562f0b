"""Every strategy on two workers with a device each, whose memory is closed to the host, against the same on onnxruntime."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError
from tests.backends.cupy.training.strategy_cases import (
    ADAM,
    DEVICE,
    HALVES,
    PROGRAMS,
    both,
    check_strategy,
    follow,
    held,
    train,
)
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.training import small

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::graphc.distributed.choose.StagedWarning"),
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
    optimizer, options, tolerance = HALVES[name]
    devices, hosts = both(optimizer, options)
    assert devices[0]["hash"] == devices[1]["hash"]
    follow(devices[0], hosts[0], tolerance)


@pytest.mark.parametrize("strategy", ["zero:stage=2,offload=true", "central_storage"])
def test_offloaded_state_lies_on_the_host_and_changes_no_result(strategy: str) -> None:
    """Two devices do what one host does; nothing of the optimizer's state is in their memory."""
    offloaded = small.compiled(ADAM, backend=DEVICE, strategy=strategy)
    found = run_threads(2, lambda comm: train(comm, offloaded))
    (one,) = run_threads(1, lambda comm: train(comm, small.compiled(ADAM, backend="onnxruntime")))
    assert found[0]["hash"] == found[1]["hash"]
    follow(found[0], one)
    moments = {name for name in one["state"] if "::" in name}
    assert all(rank["on host"] == moments for rank in found)


def test_offloading_frees_the_memory_of_the_device() -> None:
    programs = [small.compiled(ADAM, backend=DEVICE, strategy=f"zero:stage=1,offload={flag}") for flag in ("false", "true")]
    kept, freed = (run_threads(2, lambda comm, program=program: train(comm, program)) for program in programs)
    moments = 2 * 4 * sum(int(np.prod(shape)) for shape in small.SHAPES.values())
    for rank in range(2):
        assert kept[rank]["bytes"] - freed[rank]["bytes"] >= moments / 2, "each rank has half of them"


def test_a_step_with_a_nan_leaves_the_state_of_the_last_good_one() -> None:
    """Of one rank's feeds, so that the other has to hear of it; the tensor and the rank are named."""

    def spoiled(comm: Any, program: graphc.Program) -> dict[str, Any]:
        x, y = small.batch(8, 0)
        mine = share(8, comm.rank, comm.size)
        feeds = {"input": x[mine], "label": y[mine]}
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.step(feeds)
            before = trainer.state_sha256()
            bad = dict(feeds)
            if comm.rank == 1:
                bad["input"] = feeds["input"].copy()
                bad["input"][0, 3] = np.inf
            with pytest.raises(NonFiniteError) as error:
                trainer.step(bad)
            after = trainer.state_sha256()
            return {"same": before == after, "message": str(error.value), "loss": trainer.step(feeds)["loss"]}

    for strategy in ("mirrored", "zero:stage=2"):
        program = small.compiled(ADAM, backend=DEVICE, strategy=strategy)
        for found in run_threads(2, lambda comm, program=program: spoiled(comm, program)):
            assert found["same"]
            assert "step 1, first in tensor 'input' on rank 1" in found["message"]
            assert np.isfinite(found["loss"])


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
    batches = [dict(zip(("input", "label"), small.batch(8, seed), strict=True)) for seed in range(3)]
    digests, losses, outputs = {}, {}, {}
    with graphc.Trainer(small.compiled(ADAM, backend=DEVICE), threads=1) as trainer:
        trainer.fit(batches)
        trainer.learning_rate = 0.01
        trainer.save(tmp_path / "saved")
        digests["saved"] = trainer.state_sha256()
    for backend in (DEVICE, "onnxruntime"):
        with graphc.Trainer(small.compiled(ADAM, backend=backend), threads=1) as trainer:
            trainer.step(batches[0])
            trainer.restore(tmp_path / "saved")
            digests[backend] = trainer.state_sha256()
            assert trainer.steps_done == 3
            losses[backend] = trainer.evaluate(batches)["loss"], trainer.step(batches[1])["loss"]
            trainer.export(tmp_path / f"{backend}.onnx")
        session = ort.InferenceSession(str(tmp_path / f"{backend}.onnx"), providers=["CPUExecutionProvider"])
        outputs[backend] = session.run(None, {"input": batches[0]["input"]})[0]
    assert len(set(digests.values())) == 1
    np.testing.assert_allclose(losses[DEVICE], losses["onnxruntime"], rtol=1e-5)
    np.testing.assert_allclose(outputs[DEVICE], outputs["onnxruntime"], rtol=1e-4, atol=1e-5)


def test_workers_on_devices_push_to_servers_on_hosts() -> None:
    def served(comm: Any, program: graphc.Program) -> dict[str, Any]:
        losses = []
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            if comm.rank == 0:
                trainer.serve()
            for k in range(3 if comm.rank else 0):
                x, y = small.batch(8, k)
                mine = share(8, comm.rank - 1, 2)
                losses.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["loss"])
            if comm.rank:
                trainer.finish()
            digest = trainer.state_sha256()
            evaluated = trainer.evaluate([dict(zip(("input", "label"), small.batch(8, 9), strict=True))])["loss"]
            return {"losses": losses, "hash": digest, "evaluated": evaluated}

    found = {}
    for backend in (DEVICE, "onnxruntime"):
        program = small.compiled(ADAM, backend=backend, strategy="parameter_server:servers=1,staleness=0")
        found[backend] = run_threads(3, lambda comm, program=program: served(comm, program))
    for device, host in zip(found[DEVICE], found["onnxruntime"], strict=True):
        np.testing.assert_allclose(device["losses"], host["losses"], rtol=1e-5)
        np.testing.assert_allclose(device["evaluated"], host["evaluated"], rtol=1e-5)
    assert len({rank["hash"] for rank in found[DEVICE]}) == 1
