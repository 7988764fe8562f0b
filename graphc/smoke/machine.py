"""Stages about the machine: packages, driver, bandwidth, and NCCL between its GPUs."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from graphc.backend import make_backend
from graphc.distributed.choose import open_communicator
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.nccl.bindings import load_nccl
from graphc.distributed.nccl.communicator import NcclCommunicator
from graphc.distributed.nccl.device_transport import for_memory
from graphc.errors import MissingExtraError
from graphc.smoke.process import SkippedError

Note = Callable[[str], None]

MODULES = {
    "numpy": "numpy", "onnx": "onnx", "onnx_ir": "onnx-ir", "ml_dtypes": "ml_dtypes",
    "cupy": "cupy-cuda13x", "cuda.pathfinder": "cuda-pathfinder", "cuda.bindings.runtime": "cuda-bindings",
    "cuda.core": "cuda-core", "nvmath.bindings.cublasLt": "nvmath-python", "cudnn": "nvidia-cudnn-frontend",
    "nccl.bindings": "nccl4py", "nccl.core": "nccl4py",
}  # fmt: skip
"""Module → the package that brings it, in an order in which none needs a later one."""

BUFFER = 64 << 20
"""Bytes of a buffer that is copied."""

REDUCED, ROUNDS = 16 << 20, 5
"""Bytes of a buffer that all GPUs reduce, and how often."""


def imports(note: Note) -> dict[str, Any]:
    """Import everything that the cupy backend needs, and list the versions."""
    versions, missing = {}, []
    for module, package in MODULES.items():
        note(f"import {module}")
        try:
            importlib.import_module(module)
        except Exception as error:  # libraries that do not load raise whatever they like
            missing.append(f"{module} ({package}): {type(error).__name__}: {error}")
        else:
            versions[package] = version_of(package)
    if missing:
        raise MissingExtraError("; ".join(missing))
    return {"versions": versions, "detail": ", ".join(f"{name} {version}" for name, version in versions.items())}


def version_of(package: str) -> str:
    """The installed version; CuPy's package has CUDA's version in its name."""
    for name in (package, "cupy-cuda12x", "cupy") if package.startswith("cupy") else (package,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def driver(note: Note) -> dict[str, Any]:
    """Make a CUDA context on every GPU."""
    note("import cupy")
    from cupy.cuda import runtime

    note("cudaGetDeviceCount")
    version, own = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not version:
        raise MissingExtraError("there is no NVIDIA driver")
    gpus = []
    for index in range(runtime.getDeviceCount()):
        note(f"context of GPU {index}")
        runtime.setDevice(index)
        runtime.deviceSynchronize()
        free, total = runtime.memGetInfo()
        found = runtime.getDeviceProperties(index)
        capability = f"{found['major']}.{found['minor']}"
        gpus.append({"name": found["name"].decode(), "capability": capability, "bytes": int(total), "free": int(free)})
    if not gpus:
        raise MissingExtraError("the driver finds no GPU")
    names = ", ".join(f"{gpu['name']} ({gpu['capability']}, {gpu['bytes'] / 1e9:.0f} GB)" for gpu in gpus)
    number = f"driver for CUDA {version // 1000}.{version % 1000 // 10}, CuPy's CUDA {own // 1000}.{own % 1000 // 10}"
    return {"gpus": gpus, "driver_cuda": version, "runtime_cuda": own, "detail": f"{names}; {number}"}


def bandwidth(note: Note) -> dict[str, Any]:
    """Copy within the GPU, to and from pinned host memory, and between GPUs that reach each other."""
    memory: Any = make_backend("cupy", threads=1).memory
    runtime = memory.cupy.cuda.runtime
    here, there, host = memory.zeros(BUFFER), memory.zeros(BUFFER), memory.pinned(BUFFER)
    host[:] = np.arange(BUFFER, dtype=np.uint8)
    found: dict[str, Any] = {}
    for name, target, source, passes in (
        ("host to GPU", here, host, 1), ("on the GPU", there, here, 2), ("GPU to host", host, there, 1),
    ):  # fmt: skip
        note(name)
        found[f"{name}, GB/s"] = _rate(memory, memory.bind_copy(target, source), passes)
    assert (host == np.arange(BUFFER, dtype=np.uint8)).all(), "the bytes that came back are not those that were sent"
    first = memory.device.id
    for other in range(runtime.getDeviceCount()):
        if other != first and runtime.deviceCanAccessPeer(first, other):
            note(f"GPU {first} to GPU {other}")
            with memory.cupy.cuda.Device(other):
                far = memory.cupy.cuda.alloc(BUFFER)
            copy = memory.cupy.cuda.runtime.memcpyPeerAsync

            def run(far: Any = far, other: int = other, copy: Any = copy) -> None:
                copy(far.ptr, other, here.data.ptr, first, BUFFER, memory.stream.ptr)

            found[f"GPU {first} to GPU {other}, GB/s"] = _rate(memory, run, 1)
    return {**found, "detail": ", ".join(f"{name.removesuffix(', GB/s')} {rate} GB/s" for name, rate in found.items())}


def _rate(memory: Any, copy: Callable[[], None], passes: int) -> float:
    """GB/s of a copy of :data:`BUFFER`, counting bytes read and written on the device."""
    begin, end = memory.cupy.cuda.Event(), memory.cupy.cuda.Event()
    copy()
    begin.record(memory.stream)
    for _ in range(8):
        copy()
    end.record(memory.stream)
    end.synchronize()
    milliseconds = memory.cupy.cuda.get_elapsed_time(begin, end)
    return float(f"{8 * passes * BUFFER / max(milliseconds, 1e-6) / 1e6:.4g}")


def nccl_alone(note: Note) -> dict[str, Any]:
    """A world of one GPU: an AllReduce is queued, captured and replayed."""
    library = load_nccl()
    if library is None:
        raise MissingExtraError("nccl4py or libnccl is not installed, or does not load")
    memory: Any = make_backend("cupy", threads=1).memory
    note("a communicator of one rank")
    comm = NcclCommunicator(NullCommunicator(), memory, library)
    values = np.arange(4099, dtype=np.float32)
    array = memory.zeros(values.nbytes).view(values.dtype)
    handle = comm.prepare(array, "sum", "smoke")
    step = memory.record([lambda: comm.begin(handle), lambda: comm.wait(handle)])
    for times, what in enumerate(("queued", "captured", "replayed")):
        note(f"an AllReduce, {what}")
        memory.copy(array, values + times)
        step()
        memory.synchronize()
        comm.check()
        assert (memory.fetch(array) == values + times).all(), f"the sum over one rank changed its operand ({what})"
    assert not step.refusal, f"an AllReduce is not captured: {step.refusal}"
    comm.close()
    return {"detail": "an AllReduce of one rank, queued, captured and replayed"}


def nccl_together(note: Note) -> dict[str, Any]:
    """A process for each GPU of this machine, which meet over TCP and reduce over NCCL."""
    from cupy.cuda import runtime

    size = runtime.getDeviceCount()
    if size < 2:
        raise SkippedError("one GPU")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    note(f"{size} processes join")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import worker; worker()"],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GRAPHC_TRANSPORT": "nccl"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said = [worker.communicate()[0] for worker in workers]
    for rank, (worker_process, text) in enumerate(zip(workers, said, strict=True)):
        assert worker_process.returncode == 0, f"rank {rank} ended with status {worker_process.returncode}: {text[-400:]}"
    found = json.loads(next(line for line in said[0].splitlines() if line.startswith("{")))
    reduced = f"an AllReduce of {REDUCED >> 20} MiB at {found['bus_gb_s']} GB/s of bus bandwidth"
    return {**found, "detail": f"{size} GPUs, {reduced}"}


def worker() -> None:
    """One rank of :func:`nccl_together`."""
    comm = open_communicator()
    memory: Any = make_backend("cupy", threads=1).memory
    joined = for_memory(comm, memory, transport="nccl")
    values = np.full(4099, comm.rank + 1, np.float32)
    array = memory.zeros(values.nbytes).view(values.dtype)
    memory.copy(array, values)
    joined.wait(joined.start(array, "sum", "smoke", kind="allreduce"))
    total = comm.size * (comm.size + 1) // 2
    assert (memory.fetch(array) == total).all(), f"the sum over {comm.size} ranks is not {total}"
    large = memory.zeros(REDUCED)
    handle = joined.prepare(large.view(np.dtype(np.float32)), "sum", "smoke bandwidth")
    seconds = []
    for _ in range(ROUNDS):
        memory.synchronize()
        joined.barrier()
        start = time.perf_counter()
        joined.begin(handle)
        joined.wait(handle)
        memory.synchronize()
        seconds.append(time.perf_counter() - start)
    if comm.rank == 0:
        rate = 2 * (comm.size - 1) / comm.size * REDUCED / min(seconds) / 1e9
        print(json.dumps({"ranks": comm.size, "bus_gb_s": float(f"{rate:.4g}")}), flush=True)
    joined.close()
