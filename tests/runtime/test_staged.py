"""Collectives of device arrays through host memory: the same bits as the transport's own, and its errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphc.distributed.communicator import Communicator, Kind, check_collective
from graphc.distributed.host_staged import StagedCommunicator, transfers
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import UsageError, WorldError
from tests.backends.strict import StrictMemory
from tests.runtime.collective_cases import everything
from tests.runtime.mpi_run import map_ranks
from tests.runtime.on_device import OnDevice

pytestmark = pytest.mark.full


def both(comm: Communicator) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Every collective over the transport on host arrays, and on device arrays through it."""
    memory = StrictMemory()
    return everything(comm), everything(OnDevice(StagedCommunicator(comm, memory), memory))  # type: ignore[arg-type]


def test_every_collective_has_the_bits_of_the_transport() -> None:
    for host, device in run_threads(2, both):
        assert device == host


@pytest.mark.mpi
@pytest.mark.large  # over threads above; MPI moves only arrays of the host here, as in test_mpi.py
def test_every_collective_over_mpi() -> None:
    for host, device in map_ranks(2, both):
        assert device == host


def test_only_what_is_given_and_received_moves() -> None:
    moves: list[tuple[str, str, int]] = []

    class Counting(StrictMemory):
        def bind_copy(self, target: Any, source: Any) -> Callable[[], None]:
            moves.append((kind, "to the host" if isinstance(target, np.ndarray) else "to the device", target.size))
            return super().bind_copy(target, source)

    def work(comm: ThreadCommunicator) -> None:
        nonlocal kind
        memory = Counting() if comm.rank == 1 else StrictMemory()
        staged = StagedCommunicator(comm, memory)
        array = memory.zeros(48).view(np.dtype(np.float32))
        for name in ("allreduce", "reduce_scatter", "all_gather", "broadcast"):
            kind = name
            staged.wait(staged.start(array, kind=name, parts=[(0, 4), (4, 7), (7, 9)], tag="w", overlap=False))  # type: ignore[arg-type]
            comm.barrier()

    kind = ""
    run_threads(3, work)
    assert moves == [
        ("allreduce", "to the host", 12),
        ("allreduce", "to the device", 12),
        ("reduce_scatter", "to the host", 9),
        ("reduce_scatter", "to the device", 3),
        ("all_gather", "to the host", 3),
        ("all_gather", "to the device", 4),
        ("all_gather", "to the device", 2),
        ("broadcast", "to the device", 12),
    ]


def test_ranges_are_joined_and_empty_ones_left_out() -> None:
    def ranges(kind: Kind, rank: int) -> object:
        parts = [(0, 0), (0, 5), (5, 5), (5, 8)]
        return transfers(check_collective(np.zeros(10), 4, "sum", "", {"kind": kind, "parts": parts, "root": 3}), rank)

    assert ranges("reduce_scatter", 0) == ([(0, 8)], [])
    assert ranges("all_gather", 2) == ([], [(0, 8)])
    assert ranges("broadcast", 3) == ([(0, 10)], [])


def test_prepared_collectives_overlap_and_follow_what_is_queued() -> None:
    """What was queued before ``begin`` counts; the results are there for what is queued after ``wait``."""

    def work(comm: ThreadCommunicator) -> list[list[float]]:
        memory = StrictMemory()
        staged = StagedCommunicator(comm, memory)
        arrays = [memory.zeros(20).view(np.dtype(np.float32)) for _ in range(3)]
        results = [memory.zeros(20).view(np.dtype(np.float32)) for _ in range(3)]
        handles = [staged.prepare(array, "sum", f"b{k}") for k, array in enumerate(arrays)]
        fills = [memory.bind_fill(array, comm.rank + k) for k, array in enumerate(arrays)]
        copies = [memory.bind_copy(result, array) for result, array in zip(results, arrays, strict=True)]
        for _ in range(20):
            for fill, handle in zip(fills, handles, strict=True):
                fill()
                staged.begin(handle)
            for handle, copy in zip(reversed(handles), reversed(copies), strict=True):
                staged.wait(handle)
                copy()
        staged.begin(handles[0])
        with pytest.raises(UsageError, match=r"allreduce b0 was begun a second time before it was waited"):
            staged.begin(handles[0])
        staged.wait(handles[0])
        return [memory.fetch(result).tolist() for result in results]

    for found in run_threads(2, work):
        assert found == [[1.0] * 5, [3.0] * 5, [5.0] * 5]


def test_arrays_of_the_host_and_objects_go_straight_through() -> None:
    def work(comm: ThreadCommunicator) -> Any:
        staged = StagedCommunicator(comm, StrictMemory())
        total, received = np.full(3, comm.rank + 1.0), np.full(2, comm.rank)
        staged.allreduce(total)
        staged.broadcast(received, root=1)
        staged.wait(staged.start(total, "mean"))
        staged.barrier()
        return total.tolist(), received.tolist(), staged.allgather_object(comm.rank)

    assert run_threads(2, work) == [([3.0] * 3, [1, 1], [0, 1])] * 2


@pytest.mark.parametrize(
    ("shape", "op", "message"),
    [
        ((2, 2), "sum", "one-dimensional"),
        ((4,), "summ", "did you mean 'sum'"),
    ],
)
def test_what_cannot_be_reduced(shape: tuple[int, ...], op: str, message: str) -> None:
    def work(comm: ThreadCommunicator) -> None:
        memory = StrictMemory()
        StagedCommunicator(comm, memory).prepare(memory.zeros(16).view(np.dtype(np.float32)).reshape(shape), op)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=message):
        run_threads(2, work)


def test_a_late_rank_and_a_failing_one_are_named() -> None:
    def late(comm: ThreadCommunicator) -> None:
        memory = StrictMemory()
        staged = StagedCommunicator(comm, memory)
        staged.step, staged.deadline = 3, 0.2
        if comm.rank == 1:
            time.sleep(1)
        else:
            staged.allreduce(memory.zeros(48).view(np.dtype(np.float64)), "mean", "b0")  # type: ignore[arg-type]

    with pytest.raises(WorldError, match=r"rank 1 did not come to allreduce\(mean\) 'b0' of step 3 \(48 bytes\) within 0.2 s"):
        run_threads(2, late)

    def failing(comm: ThreadCommunicator) -> None:
        memory = StrictMemory()
        staged = StagedCommunicator(comm, memory)
        if comm.rank == 1:
            staged.abort("the disk is full")
        else:
            staged.wait(staged.start(memory.zeros(48), tag="w", kind="all_gather"))  # type: ignore[arg-type]

    with pytest.raises(WorldError, match="rank 1 stopped: the disk is full"):
        run_threads(2, failing)
