"""Every strategy on workers with a device each, against the same on onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError
from tests.backends.host_kernels import HostDevice
from tests.training import small

DEVICE = "pretended"


def held(trainer: graphc.Trainer) -> int:
    """Bytes that a trainer's device has handed out."""
    device = trainer.backend.memory
    assert isinstance(device, HostDevice)
    return sum(array.nbytes for array in device.allocations)


def train(comm: Any, program: graphc.Program, sizes: tuple[int, ...] = (12, 11, 12)) -> dict[str, Any]:
    """Losses of training and of evaluation, whole state and its hash of one rank; ``sizes`` are those of the global batches."""
    losses = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for k, size in enumerate(sizes):
            feeds = dict(zip(("input", "label"), small.batch(size, k), strict=True))
            mine = share(len(feeds["input"]), comm.rank, comm.size)
            losses.append(trainer.step({n: a[mine] for n, a in feeds.items()}, offset=mine.start)["loss"])
        nbytes = held(trainer) if isinstance(trainer.backend.memory, HostDevice) else 0
        losses.append(trainer.evaluate([{"input": feeds["input"][mine], "label": feeds["label"][mine]}])["loss"])
        places = {**trainer.state.arrays, **{n: trainer.state.flat[s.buffer] for n, s in trainer.state.shards.items()}}
        on_host = {name for name, array in places.items() if isinstance(array, np.ndarray)}
        state, digest = trainer.state.snapshot(trainer.comm), trainer.state_sha256()
        return {"losses": losses, "state": state, "hash": digest, "bytes": nbytes, "on host": on_host}


def follow(device: dict[str, Any], host: dict[str, Any], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(device["losses"], host["losses"], rtol=tolerance)
    assert device["state"].keys() == host["state"].keys()
    for name, value in host["state"].items():
        scale = max(1.0, float(np.abs(value.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(
            device["state"][name].astype(np.float64), value.astype(np.float64), rtol=0, atol=tolerance * scale, err_msg=name
        )


ADAM = "adam:lr=0.002,eps=1e-4"
MOMENTUM = "sgd:lr=0.1,momentum=0.9"

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mirrored": (ADAM, {}),
    "zero 1": (ADAM, {"strategy": "zero:stage=1"}),
    "zero 2, clip": (ADAM, {"strategy": "zero:stage=2", "clip_norm": 0.5}),
    "zero 3": (ADAM, {"strategy": "zero:stage=3"}),
    "central storage": (ADAM, {"strategy": "central_storage"}),
    "accumulate, clip": (MOMENTUM, {"accumulate": 3, "clip_norm": 0.5}),
    "local sgd": (MOMENTUM, {"strategy": "local_sgd:every=2"}),
    "powersgd": (MOMENTUM, {"compress": "powersgd:rank=2"}),
    "topk": (MOMENTUM, {"compress": "topk:ratio=0.05"}),
    "adasum": (MOMENTUM, {"strategy": "adasum"}),
    "skip": (ADAM, {"nonfinite": "skip"}),
    "any world": (MOMENTUM, {"deterministic": "any-world"}),
}

HALVES: dict[str, tuple[str, dict[str, Any], float]] = {
    "bf16": (ADAM, {"precision": "bf16"}, 2e-3),
    "bf16, zero 3, offload": (ADAM, {"precision": "bf16", "strategy": "zero:stage=3,offload=true"}, 2e-3),
    "fp16": (ADAM, {"precision": "fp16"}, 3e-4),
    "fp16 gradients": (MOMENTUM, {"compress": "fp16"}, 1e-5),
}
"""With what the rounding of one value in the low type, which falls on either side, makes of a loss."""


def both(optimizer: str, options: dict[str, Any], workers: int = 2, **how: Any) -> list[list[dict[str, Any]]]:
    """What ``workers`` ranks got on devices, and on hosts."""
    programs = [small.compiled(optimizer, backend=backend, **options) for backend in (DEVICE, "onnxruntime")]
    return [run_threads(workers, lambda comm, program=program: train(comm, program, **how)) for program in programs]


def check_strategy(name: str, tolerance: float) -> None:
    """Two workers on devices do what two on hosts do."""
    devices, hosts = both(*PROGRAMS[name], sizes=(12, 12, 12) if name == "any world" else (12, 11, 12))
    assert devices[0]["hash"] == devices[1]["hash"]
    follow(devices[0], hosts[0], tolerance)


def check_low_precision(name: str) -> None:
    """Two workers on devices do in low precision what two on hosts do."""
    optimizer, options, tolerance = HALVES[name]
    devices, hosts = both(optimizer, options)
    assert devices[0]["hash"] == devices[1]["hash"]
    follow(devices[0], hosts[0], tolerance)


def check_offloaded(strategy: str) -> None:
    """Two devices do what one host does; nothing of the optimizer's state is in their memory."""
    offloaded = small.compiled(ADAM, backend=DEVICE, strategy=strategy)
    found = run_threads(2, lambda comm: train(comm, offloaded))
    (one,) = run_threads(1, lambda comm: train(comm, small.compiled(ADAM, backend="onnxruntime")))
    assert found[0]["hash"] == found[1]["hash"]
    follow(found[0], one)
    moments = {name for name in one["state"] if "::" in name}
    assert all(rank["on host"] == moments for rank in found)


def check_nan() -> None:
    """A NaN in the feeds of one rank stops both; the message names tensor and rank, and the state stays as it was."""

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


def check_checkpoint(folder: Path) -> None:
    """A checkpoint of a device is restored, exported and evaluated on a host."""
    batches = [dict(zip(("input", "label"), small.batch(8, seed), strict=True)) for seed in range(3)]
    digests, losses, outputs = {}, {}, {}
    with graphc.Trainer(small.compiled(ADAM, backend=DEVICE), threads=1) as trainer:
        trainer.fit(batches)
        trainer.learning_rate = 0.01
        trainer.save(folder / "saved")
        digests["saved"] = trainer.state_sha256()
    for backend in (DEVICE, "onnxruntime"):
        with graphc.Trainer(small.compiled(ADAM, backend=backend), threads=1) as trainer:
            trainer.step(batches[0])
            trainer.restore(folder / "saved")
            digests[backend] = trainer.state_sha256()
            assert trainer.steps_done == 3
            losses[backend] = trainer.evaluate(batches)["loss"], trainer.step(batches[1])["loss"]
            trainer.export(folder / f"{backend}.onnx")
        session = ort.InferenceSession(str(folder / f"{backend}.onnx"), providers=["CPUExecutionProvider"])
        outputs[backend] = session.run(None, {"input": batches[0]["input"]})[0]
    assert len(set(digests.values())) == 1
    np.testing.assert_allclose(losses[DEVICE], losses["onnxruntime"], rtol=1e-5)
    np.testing.assert_allclose(outputs[DEVICE], outputs["onnxruntime"], rtol=1e-4, atol=1e-5)


def check_servers() -> None:
    """Workers on devices push to servers on hosts."""

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
