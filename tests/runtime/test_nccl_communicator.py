"""The communicator over NCCL, on GPUs that only look like it: order, what may be captured, errors, deadlines, times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from graphc.bench import bandwidth
from graphc.distributed.communicator import Communicator, Handle
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.nccl import communicator
from graphc.distributed.nccl.communicator import NcclCommunicator, on_gpu
from graphc.distributed.nccl.device_transport import device_name
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import UsageError, WorldError
from tests.backends.strict import StrictMemory, host_of
from tests.runtime.collective_cases import everything
from tests.runtime.gpu_cases import one_rank
from tests.runtime.mpi_run import run_mpi
from tests.runtime.on_device import OnDevice
from tests.runtime.pretend_gpu import PretendComm, PretendMemory, PretendNccl, capture

pytestmark = pytest.mark.full


def on_gpus(ranks: int, work: Callable[[Any, Any], Any]) -> list[Any]:
    """``work(communicator, memory)`` on every rank."""
    library = PretendNccl(ranks)

    def run(comm: ThreadCommunicator) -> Any:
        memory = PretendMemory(comm.rank)
        found = NcclCommunicator(comm, memory, library)  # type: ignore[arg-type]
        try:
            return work(found, memory)
        finally:
            found.close()

    return run_threads(ranks, run)


def test_every_collective() -> None:
    """What NCCL does, and what goes through host memory, together."""

    def work(comm: Communicator, memory: Any) -> Any:
        return everything(OnDevice(comm, memory)), everything(comm)  # type: ignore[arg-type]

    results = on_gpus(3, work)
    for device, host in results:
        for case, (error, digest) in device.items():
            assert error <= 1, case
            assert digest == results[0][0][case][1], f"{case}: ranks differ in bits"
            if "tree" in case or "adasum" in case:
                assert (error, digest) == host[case]


def test_what_is_queued_keeps_its_order() -> None:
    """What was queued before ``begin`` counts, however long it takes; what is queued after ``wait`` sees the result."""

    def work(comm: Communicator, memory: Any) -> Any:
        array, result = (memory.zeros(4000).view(np.dtype(np.float32)) for _ in range(2))
        handle = comm.prepare(array, "sum", "b0")
        assert handle.queued
        copy = memory.bind_copy(result, array)
        start = time.monotonic()
        sums = []
        for k in range(5):
            memory.bind_work(lambda k=k: host_of(array).fill(comm.rank + k), 0.02 * comm.rank)()  # type: ignore[misc]
            comm.begin(handle)
            comm.wait(handle)
            copy()
        queued = time.monotonic() - start
        sums = memory.fetch(result)
        comm.check()
        return sums.min(), sums.max(), queued, time.monotonic() - start

    for low, high, queued, total in on_gpus(2, work):
        assert (low, high) == (9.0, 9.0)  # 0 + 4 and 1 + 4
        assert queued < total / 2, "the host was kept waiting"


def test_computation_runs_beside_a_collective() -> None:
    def work(comm: Communicator, memory: Any) -> Any:
        array = memory.zeros(400).view(np.dtype(np.float32))
        handle, beside = comm.prepare(array, "sum", "b0"), []
        if comm.rank == 1:
            memory.bind_work(lambda: None, 0.3)()  # rank 0 waits for this gradient
        comm.begin(handle)
        memory.bind_work(lambda: beside.append(time.monotonic()))()
        comm.wait(handle)
        after: list[float] = []
        memory.bind_work(lambda: after.append(time.monotonic()))()
        memory.synchronize()
        return after[0] - beside[0]

    assert on_gpus(2, work)[0] > 0.2


def test_errors_in_the_arguments() -> None:
    def work(comm: Communicator, memory: Any) -> None:
        array = memory.zeros(48).view(np.dtype(np.float32))
        handle = comm.prepare(array, "sum", "b0")
        comm.begin(handle)
        with pytest.raises(UsageError, match="allreduce b0 was begun a second time before it was waited"):
            comm.begin(handle)
        comm.wait(handle)
        for wrong, options, message in (
            (array.reshape(3, 4), {}, "one-dimensional"),
            (array, {"op": "summ"}, "did you mean 'sum'"),
            (array.view(np.dtype(np.int8)), {}, "int8"),
            (array, {"kind": "all_gather", "parts": [(0, 4)]}, "1 parts for 2 ranks"),
            (array, {"kind": "broadcast", "root": 2}, "rank 2"),
        ):
            with pytest.raises(UsageError, match=message):
                comm.prepare(wrong, **options)

    on_gpus(2, work)


def test_an_error_of_nccl_names_the_collective_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arrays are set free, so that the program gets to hear of it."""
    monkeypatch.setattr(PretendComm, "error", lambda comm: "remote process exited" if comm.waiting else "")

    def work(comm: Any, memory: Any) -> str:
        comm.step = 12
        array = memory.zeros(4096).view(np.dtype(np.float32))
        handle = comm.prepare(array, "sum", "b7")
        if comm.rank == 0:
            comm.begin(handle)
            comm.wait(handle)
            memory.synchronize()  # returns because of the abort
            with pytest.raises(WorldError) as raised:
                comm.check()
            with pytest.raises(WorldError, match="NCCL failed in"):
                comm.begin(handle)
            return str(raised.value)
        return ""

    text, _ = on_gpus(2, work)
    assert text.startswith("NCCL failed in 'allreduce b7' (step 12) on rank 0: remote process exited; flight logs: ")


def test_times_of_collectives() -> None:
    def work(comm: Any, memory: Any) -> Any:
        found: list[tuple[str, float, float]] = []
        comm.observer = lambda handle: found.append((handle.what, handle.since, handle.until))
        array = memory.zeros(4096).view(np.dtype(np.float32))
        handle = comm.prepare(array, "sum", "b0")
        assert not handle.queued  # the times of a captured collective could not be told
        start = time.monotonic()
        for _ in range(3):
            if comm.rank == 1:
                memory.bind_work(lambda: None, 0.05)()
            comm.begin(handle)
            comm.wait(handle)
        comm.barrier()
        comm.observer = None
        return found, start, time.monotonic()

    (found, start, end), _ = on_gpus(2, work)
    own = [(since, until) for what, since, until in found if what == "allreduce b0"]
    assert len(own) == 3
    clocks = 0.005  # seconds by which the comparison of the clocks may be wrong on a busy machine
    assert start - clocks <= own[0][0]
    assert own[-1][1] <= end + clocks
    assert all(0.03 < until - since < 0.5 for since, until in own)  # rank 0 waits for rank 1 inside the collective


HANG = """
import sys, time
from graphc.distributed.choose import open_communicator
from graphc.distributed.nccl.communicator import NcclCommunicator
from tests.runtime.pretend_gpu import PretendMemory, PretendNccl
import numpy as np
comm = open_communicator()
memory = PretendMemory(comm.rank)
gpu = NcclCommunicator(comm, memory, PretendNccl(2, apart=True))
gpu.deadline, gpu.step = 1.0, 5
array = memory.zeros(64).view(np.dtype(np.float32))
handle = gpu.prepare(array, "sum", "b3")
if gpu.rank == 0:
    gpu.begin(handle)
    gpu.wait(handle)
    memory.synchronize()
time.sleep(3600)
"""


@pytest.mark.mpi
def test_a_collective_past_its_deadline_names_who_is_late() -> None:
    """The host is blocked in the driver, as in a replayed graph: the count of the GPU says where it hangs."""
    done = run_mpi(2, HANG)
    assert done.code == 1, done.text
    assert "rank 1" in done.err
    assert "did not come to allreduce(sum) 'b3' of step 5 (64 bytes) within 1 s" in done.err


def test_a_gpu_is_told_by_its_memory() -> None:
    assert on_gpu(PretendMemory(0))  # type: ignore[arg-type]
    assert not on_gpu(StrictMemory())  # type: ignore[arg-type]
    assert device_name(PretendMemory(3)) == "03" * 16  # type: ignore[arg-type]


def test_the_guard_ends_a_program_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(communicator, "RAISE_LIMIT", 0.1)
    monkeypatch.setattr(communicator.os, "_exit", ended.append)

    def work(comm: Any, memory: Any) -> None:
        if comm.rank == 0:
            comm.nccl.fault = "unhandled system error"
            while not ended:
                time.sleep(0.01)
        else:
            comm.allgather_object(1)

    with pytest.raises(WorldError, match=r"rank 0 stopped: NCCL failed .before the first step. on rank 0: unhandled"):
        on_gpus(2, work)
    assert ended == [1]


def test_an_aborted_comm_is_not_asked_for_errors() -> None:
    """NCCL gives its memory back."""
    comm = NcclCommunicator(NullCommunicator(), PretendMemory(0), PretendNccl(1))  # type: ignore[arg-type]
    comm.abort("enough")
    time.sleep(3 * communicator.POLL)
    assert comm.nccl.aborted
    assert not comm.nccl.misused
    comm.close()


def test_one_rank() -> None:
    """The cases of the real GPU."""
    memory = PretendMemory(0)
    one_rank(memory, PretendNccl(1), lambda runs: capture((memory.stream, memory.communication), runs))


@pytest.mark.parametrize(("ranks", "bus_gb_s"), [(2, 1.048576), (4, 1.572864)])
def test_the_bandwidth_of_known_times(ranks: int, bus_gb_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 AllReduces of 1 MiB in 20 ms: over two ranks each byte crosses once, over four one and a half times."""

    def in_turn(calls: Sequence[Callable[[], None]], *_: object) -> list[tuple[float, float]]:
        for call in calls:
            call()
        return [(0.020, 0.016), (0.010, 0.008)]

    monkeypatch.setattr(bandwidth, "_in_turn", in_turn)
    ((row,), *_) = on_gpus(ranks, lambda comm, memory: bandwidth.on_device(comm, memory, [1], 0.01))
    expected = {"mib": 1, "ours_ms": 1.0, "ours_best_ms": 0.8, "bus_gb_s": bus_gb_s, "nccl_ms": 0.5, "ratio": 0.5}
    assert row == pytest.approx(expected)


def test_the_bandwidth_is_measured() -> None:
    ((row,), _) = on_gpus(2, lambda comm, memory: bandwidth.on_device(comm, memory, [1], 0.01))
    assert 0 < row["ours_best_ms"] <= row["ours_ms"]
    assert row["nccl_ms"] > 0


def test_handles_without_elements() -> None:
    def work(comm: Any, memory: Any) -> bool:
        handle: Handle = comm.prepare(memory.zeros(0).view(np.dtype(np.float32)), "sum", "empty")
        comm.begin(handle)
        comm.wait(handle)
        memory.synchronize()
        return handle.finished

    assert on_gpus(2, work) == [True, True]
