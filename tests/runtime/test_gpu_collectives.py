"""Collectives on real GPUs: alone over NCCL, two workers that share one, and one each where there are several."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphc.bench.specs import SPECS
from graphc.distributed.communicator import Communicator
from graphc.distributed.nccl.bindings import load_nccl
from graphc.errors import UsageError
from tests.conftest import gpus
from tests.runtime.gpu_cases import collectives, one_rank
from tests.runtime.mpi_run import map_ranks, run_mpi
from tests.runtime.tcp_run import map_tcp

pytestmark = pytest.mark.gpu

several = pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")


def memory_of(index: int | None = None) -> Any:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    return CudaDevice(index)


def test_one_rank() -> None:
    library = load_nccl()
    if library is None:
        pytest.skip("nccl4py or libnccl is not installed")
    memory = memory_of()
    one_rank(memory, library, memory.record)


def on_one_gpu(comm: Communicator) -> Any:
    memory = memory_of(0)
    with pytest.raises(UsageError, match="ranks 0, 1 share a GPU"):
        collectives(comm, memory, "nccl")
    return collectives(comm, memory)


@pytest.mark.parametrize("start", [pytest.param(map_ranks, marks=pytest.mark.mpi), map_tcp])
def test_two_workers_on_one_gpu(start: Any) -> None:
    for name, device, host in start(2, on_one_gpu, timeout=200):
        assert name == "StagedCommunicator"
        assert device == host


def each_its_own(comm: Communicator) -> Any:
    return collectives(comm, memory_of(), "nccl")  # who starts the ranks may have said which transport the host takes


@several
@pytest.mark.parametrize("start", [pytest.param(map_ranks, marks=pytest.mark.mpi), map_tcp])
def test_a_gpu_each(start: Any) -> None:
    results = start(2, each_its_own, timeout=200)
    for name, device, _ in results:
        assert name == "NcclCommunicator"
        for case, (error, digest) in device.items():
            low = case[2] in ("bfloat16", "float16")
            assert error <= (2 if low else 1), case  # of two numbers: rounded once, as the sum is
            assert digest == results[0][1][case][1], f"{case}: ranks differ in bits"


FAULT = """
import os, sys, time
from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.distributed.choose import open_communicator
from graphc.distributed.nccl.device_transport import for_memory
import numpy as np
comm, memory = open_communicator(), CudaDevice()
gpu = for_memory(comm, memory, transport="nccl")
array = memory.zeros(1 << 20).view(np.dtype(np.float32))
handle = gpu.prepare(array, "sum", "b3")
step = memory.record([lambda: gpu.begin(handle), lambda: gpu.wait(handle)])
for gpu.step in range(5):
    step(); memory.synchronize(); gpu.check()
gpu.deadline, gpu.step = 3.0, 5
if gpu.rank == 1:
    {fault}
step(); memory.synchronize(); gpu.check()
"""


@several
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("time.sleep(60)", "did not come to allreduce(sum) 'b3' of step 5"),
        ("os.kill(os.getpid(), 19)", "is stopped (SIGSTOP)"),
        ("os.kill(os.getpid(), 9)", "rank 1"),
        ("raise ValueError('bad sample')", "bad sample"),
    ],
)
def test_nobody_hangs_inside_a_replay(fault: str, message: str) -> None:
    done = run_mpi(2, FAULT.format(fault=fault), timeout=60)
    assert done.code != 0
    assert message in done.err, done.text


@pytest.mark.mpi
def test_training_on_shared_gpus_follows_one_worker(tmp_path: Path, exported: Callable[[str], str]) -> None:
    """Over NCCL where there are two GPUs, else through host memory."""
    x, y = SPECS["mlp"].batch(64)
    np.savez(tmp_path / "data.npz", input=x, label=y)
    losses = {}
    for backend, workers in (("onnxruntime", 1), ("cupy", 2)):
        command = [sys.executable, "-m", "graphc", "train", exported("mlp"), "--format", "json"]
        command += ["--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.05", "--batch-size", "16", "--epochs", "2"]
        command += ["--data", str(tmp_path / "data.npz"), "--no-shuffle", "-n", str(workers), "--backend", backend]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        losses[backend] = [event["loss"] for event in events if event["event"] == "epoch"]
    np.testing.assert_allclose(losses["cupy"], losses["onnxruntime"], rtol=1e-3)
