"""Whole trainers that reduce by NCCL, on GPUs that only look like it: collectives are queued between kernels and updates."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.bench.specs import SPECS
from graphc.device import Variants
from graphc.distributed.nccl.communicator import NcclCommunicator
from graphc.distributed.threads import ThreadCommunicator, run_threads
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.runtime.pretend_gpu import Cupy, Device, Event, PretendNccl, Stream, capture
from tests.tiers import params

pytestmark = [pytest.mark.full, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")]

OWN = threading.local()
CAPTURED: list[int] = []
"""Runs in each of the captured parts of steps."""


class _OnStream:
    """The queue of the compute stream."""

    def __init__(self, stream: Stream) -> None:
        self.append = stream.queue


class _Mark:
    def __init__(self, stream: Stream) -> None:
        self.wait = Event().record(stream).synchronize


class StreamDevice(HostDevice):
    """The pretended device of the kernels, whose work runs on a stream beside that of collectives."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.cupy: Any = Cupy
        self.device = Device(index)
        self.stream, self.communication = Stream(), Stream()
        self._queue: Any = _OnStream(self.stream)
        self.early = True

    def queued(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: self.stream.queue(run)

    def capture(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        CAPTURED.append(len(runs))
        return capture((self.stream, self.communication), runs)

    def mark(self) -> Any:
        return _Mark(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


@pytest.fixture
def pretended(register_backend: Callable[..., None]) -> str:
    register_backend("pretended", lambda **_: cupy_on(OWN.device))
    return "pretended"


STRATEGIES = ["mirrored", "zero:stage=2", "zero:stage=3", "adasum", "local_sgd:every=3,start=1"]


@pytest.mark.parametrize("strategy", params(STRATEGIES, large=["zero:stage=2"]))
def test_training_follows_onnxruntime(strategy: str, pretended: str, exported: Callable[[str], str]) -> None:
    """Averages of local SGD are in step 1 and in every third, so that both kinds of steps are captured, and replayed."""
    path = exported("mlp")
    x, y = SPECS["mlp"].batch(8)
    library = PretendNccl(2)

    def train(comm: ThreadCommunicator, backend: str, overlap: list[bool]) -> Any:
        program = graphc.compile(
            path,
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.parse("sgd:lr=0.05,momentum=0.9"),
            mesh=graphc.Mesh(data=2),
            backend=backend,
            strategy=strategy,
            bucket_mb=0.5,
        )
        found: Any = comm
        if backend == pretended:
            OWN.device = StreamDevice(comm.rank)
            found = NcclCommunicator(comm, OWN.device, library)
            prepare = found.prepare

            def watched(*arguments: Any, **options: Any) -> Any:
                handle = prepare(*arguments, **options)
                overlap.append(handle.queued)
                return handle

            found.prepare = watched
        part = slice(comm.rank * 4, comm.rank * 4 + 4)
        with graphc.Trainer(program, comm=found, threads=1) as trainer:
            losses = [
                trainer.step({"input": x[part], "label": y[part]})["loss"] for _ in range(9 if "local" in strategy else 4)
            ]
            if backend == pretended and strategy != "adasum":  # that passes through the host
                (executor,) = trainer.plans.training.values()
                called = [run for run in executor.runs if not isinstance(run, Recording | Variants)]
                assert len(called) == ("local" in strategy), "the whole step is captured, but for a look at the step's number"
            return losses, trainer.state.snapshot(trainer.comm)

    queued: list[bool] = []
    CAPTURED.clear()
    expected = run_threads(2, lambda comm: train(comm, "onnxruntime", []))
    results = run_threads(2, lambda comm: train(comm, pretended, queued))
    assert any(queued)
    assert len(CAPTURED) >= 2, "no step was captured"
    for (losses, state), (wanted, values) in zip(results, expected, strict=True):
        np.testing.assert_allclose(losses, wanted, rtol=1e-5, atol=1e-7)
        for key, value in values.items():
            np.testing.assert_allclose(state[key], value, rtol=0, atol=1e-5 * max(1.0, np.abs(value).max()), err_msg=key)
