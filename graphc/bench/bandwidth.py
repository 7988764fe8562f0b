"""Compares the bandwidth of graphc's AllReduce with MPI's and NCCL's.

``graphc launch -n 2 -m graphc.bench.bandwidth`` prints one JSON line for each worker.

Both reduce the same float32 buffer in place, in turn, in one run: graphc by ``begin`` and ``wait``, like a training step
without other work; MPI by one ``MPI_Allreduce(MPI_IN_PLACE)`` over the whole buffer.

With ``--backend cupy`` the buffers are on GPUs, up to 256 MiB. If NCCL reduces them, graphc is compared with plain NCCL calls
on the same stream, without events and counters. ``bus_gb_s`` is the traffic of the slowest link: 2 (N - 1) / N of the bytes,
divided by the time.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphc.backend import make_backend
from graphc.device import Memory, Run
from graphc.distributed.choose import open_communicator
from graphc.distributed.communicator import Communicator, Handle
from graphc.distributed.nccl.calls import plan_calls
from graphc.distributed.nccl.communicator import NcclCommunicator
from graphc.distributed.nccl.device_transport import for_memory

SIZES = (1, 2, 4, 8, 16, 32, 64)
DEVICE_SIZES = (*SIZES, 128, 256)
"""Sizes of the buffers in MiB."""

LAUNCHES = 20
"""AllReduces queued on a GPU between two waits, as in a training step."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each size")
    parser.add_argument("--backend", help="whose memory holds the buffers; default: the host's")
    arguments = parser.parse_args()
    comm = open_communicator()
    if arguments.backend is None:
        rows = _on_host(comm, arguments.seconds)
    else:
        memory = make_backend(arguments.backend, threads=1).memory
        comm = for_memory(comm, memory)
        rows = on_device(comm, memory, DEVICE_SIZES, arguments.seconds)
    print(json.dumps({"rank": comm.rank, "transport": comm.transport, "rows": rows}), flush=True)
    comm.close()


def _on_host(comm: Communicator, seconds: float) -> list[dict[str, float]]:
    from mpi4py import MPI

    plain = MPI.COMM_WORLD.Dup()
    rows = []
    for size in SIZES:
        buffer = np.zeros(size << 18, np.float32)

        handle = comm.prepare(buffer, "sum", "bandwidth", overlap=False)

        def ours(handle: Handle = handle) -> None:
            comm.begin(handle)
            comm.wait(handle)

        def mpi(buffer: Any = buffer) -> None:
            plain.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)

        (median, best), (mpi_median, mpi_best) = _in_turn((ours, mpi), seconds, comm)
        row = {"mib": size, "ours_ms": median * 1e3, "mpi_ms": mpi_median * 1e3, "ratio": mpi_median / median}
        rows.append(row | {"ours_best_ms": best * 1e3, "mpi_best_ms": mpi_best * 1e3, "ratio_of_best": mpi_best / best})
    return rows


def on_device(comm: Communicator, memory: Memory, sizes: Sequence[int], seconds: float) -> list[dict[str, float]]:
    """Measure float32 buffers of ``sizes`` (MiB) in ``memory``; one row for each size."""
    rows = []
    for size in sizes:
        buffer = memory.zeros(size << 20).view(np.dtype(np.float32))
        handle = comm.prepare(buffer, "sum", "bandwidth", overlap=False)

        launches = LAUNCHES if handle.queued else 1
        calls: list[Run] = [functools.partial(_launches, comm, memory, handle, launches)]
        if isinstance(comm, NcclCommunicator):
            calls.append(_plain_nccl(comm, buffer))
        times = _in_turn(calls, seconds, comm)
        median = times[0][0] / launches
        row = {"mib": size, "ours_ms": median * 1e3, "ours_best_ms": times[0][1] / launches * 1e3}
        row["bus_gb_s"] = 2 * (comm.size - 1) / comm.size * buffer.nbytes / median / 1e9
        if len(times) > 1:
            row |= {"nccl_ms": times[1][0] / launches * 1e3, "ratio": times[1][0] / times[0][0]}
        rows.append(row)
    return rows


def _launches(comm: Communicator, memory: Memory, handle: Handle, launches: int) -> None:
    for _ in range(launches):
        comm.begin(handle)
        comm.wait(handle)
    memory.synchronize()
    comm.check()


def _plain_nccl(comm: NcclCommunicator, buffer: Any) -> Callable[[], None]:
    """Return a closure that reduces ``buffer`` :data:`LAUNCHES` times by plain NCCL calls."""
    stream = comm.gpu.communication
    calls = plan_calls("allreduce", "sum", buffer.dtype, buffer.size, (), 0, comm.rank)
    reduce = comm.nccl.bind(calls, int(buffer.data.ptr), int(stream.ptr))

    def plain() -> None:
        for _ in range(LAUNCHES):
            reduce()
        stream.synchronize()

    return plain


def _in_turn(calls: Sequence[Callable[[], None]], seconds: float, comm: Communicator) -> list[tuple[float, float]]:
    """Return median and minimum seconds of each call. All workers start together; worker 0 chooses the number of rounds."""
    for call in (*calls, *calls, *calls):
        call()
    start = time.perf_counter()
    for call in calls:
        call()
    rounds = comm.allgather_object(max(10, min(2000, int(seconds / (time.perf_counter() - start)))))[0]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            comm.barrier()
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [(statistics.median(own), min(own)) for own in times]


if __name__ == "__main__":
    main()
