"""AllReduce through graphc beside MPI's own: ``graphc launch -n 2 -m graphc.bench.bandwidth`` prints a JSON line a worker.

Both reduce the same float32 buffer in place, in turn, in one run: graphc as a training step does it that has nothing to
compute meanwhile (``begin``, then ``wait``), MPI by one ``MPI_Allreduce(MPI_IN_PLACE)`` over the whole buffer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from graphc.runtime.communicator import Handle
from graphc.runtime.transport import open_communicator

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""MiB of the buffers."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each size")
    arguments = parser.parse_args()
    comm = open_communicator()
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

        (median, best), (mpi_median, mpi_best) = _in_turn((ours, mpi), arguments.seconds, plain)
        row = {"mib": size, "ours_ms": median * 1e3, "mpi_ms": mpi_median * 1e3, "ratio": mpi_median / median}
        rows.append(row | {"ours_best_ms": best * 1e3, "mpi_best_ms": mpi_best * 1e3, "ratio_of_best": mpi_best / best})
    print(json.dumps({"rank": comm.rank, "rows": rows}), flush=True)
    comm.close()


def _in_turn(calls: tuple[Callable[[], None], Callable[[], None]], seconds: float, world: Any) -> list[tuple[float, float]]:
    """Median and least seconds of each call, begun by all workers together; how often is settled by worker 0."""
    for call in calls * 3:
        call()
    start = time.perf_counter()
    for call in calls:
        call()
    rounds = world.bcast(max(10, min(2000, int(seconds / (time.perf_counter() - start)))))
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            world.Barrier()
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [(statistics.median(own), min(own)) for own in times]


if __name__ == "__main__":
    main()
