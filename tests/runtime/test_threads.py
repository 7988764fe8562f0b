"""Collectives between worker threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from graphc.distributed import threads
from graphc.distributed.choose import open_communicator
from graphc.distributed.consistency import agree
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.distributed.world import World, find_world
from graphc.errors import UsageError, WorldError
from tests.runtime.collective_cases import everything


def share(rank: int, size: int, dtype: str) -> Any:
    values = np.random.default_rng(rank).normal(scale=3, size=size)
    return values.astype(dtype)


@pytest.mark.full
def test_every_collective() -> None:
    results = run_threads(3, everything)
    for case, (error, digest) in results[0].items():
        assert error <= 1, case
        assert all(other[case][1] == digest for other in results[1:]), f"{case}: ranks differ in bits"


def test_two_runs_give_the_same_bits() -> None:
    def work(comm: ThreadCommunicator) -> bytes:
        array = share(comm.rank, 10_001, "float32")
        comm.allreduce(array, "mean")
        return bytes(array)

    assert len({*run_threads(4, work), *run_threads(4, work)}) == 1


def test_started_collectives_run_in_order_and_end_in_any_order() -> None:
    def work(comm: ThreadCommunicator) -> list[float]:
        arrays = [np.full(100, comm.rank + k, np.float32) for k in range(8)]
        handles = [comm.start(array, "sum", f"b{k}") for k, array in enumerate(arrays)]
        for handle in reversed(handles):
            comm.wait(handle)
        return [float(array[0]) for array in arrays]

    for result in run_threads(2, work):
        assert result == [2 * k + 1 for k in range(8)]


def test_broadcast_gather_and_barrier() -> None:
    def work(comm: ThreadCommunicator) -> Any:
        array = np.full(4, comm.rank, np.int32)
        comm.broadcast(array, root=2)
        comm.barrier()
        return array.tolist(), comm.allgather_object({"rank": comm.rank})

    for array, items in run_threads(3, work):
        assert array == [2] * 4
        assert items == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_a_worker_thread_knows_its_world() -> None:
    def work(comm: ThreadCommunicator) -> World:
        assert open_communicator() is comm
        return find_world()

    assert run_threads(2, work) == [World(0, 2, 0, 2, "threads"), World(1, 2, 1, 2, "threads")]
    assert find_world(environment={}) == World()


def test_a_rank_that_raises_sets_the_others_free() -> None:
    seen: list[str] = []

    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            raise ValueError("bad sample")
        try:
            comm.allreduce(np.ones(3), tag="b0")
        except WorldError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="bad sample"):
        run_threads(3, work, deadline=1e6)
    assert len(seen) == 2
    assert all("rank 1 failed: ValueError: bad sample" in text for text in seen)


def test_a_rank_that_leaves_early_is_named() -> None:
    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 0:
            comm.wait(comm.start(np.ones(3), tag="b7"))

    with pytest.raises(WorldError, match="rank 1 ended its program while rank 0 waits for it in 'allreduce b7"):
        run_threads(2, work)


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named() -> None:
    def work(comm: ThreadCommunicator) -> None:
        comm.allreduce(np.ones(5), "sum", "w")
        comm.step = 3
        if comm.rank == 1:
            time.sleep(1)
        else:
            comm.allreduce(np.ones(6), "mean", "b0")

    message = (
        r"rank 1 did not come to allreduce\(mean\) 'b0' of step 3 \(48 bytes\) within 0.2 s: rank 1 is busy with something "
        r"else; its last was allreduce\(sum\) 'w' before the first step \(40 bytes\), which ended 0.2 s ago; flight logs: "
    )
    with pytest.raises(WorldError, match=message):
        run_threads(3, work, deadline=0.2)


def test_abort_names_the_rank_and_the_reason() -> None:
    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            comm.abort("the disk is full")
        else:
            comm.barrier()

    with pytest.raises(WorldError, match="rank 1 stopped: the disk is full"):
        run_threads(2, work)


@pytest.mark.parametrize(
    ("array", "op", "message"),
    [
        (np.ones(3, np.int8), "sum", "int8"),
        (np.ones((2, 2)), "sum", "one-dimensional"),
        (np.ones(6)[::2], "sum", "contiguous"),
        (np.ones(3, np.int64), "mean", "needs a floating-point dtype, got int64"),
        (np.ones(3), "summ", "did you mean 'sum'"),
    ],
)
def test_what_cannot_be_reduced(array: Any, op: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        NullCommunicator().allreduce(array, op)


def test_ranks_that_call_different_collectives() -> None:
    def work(comm: ThreadCommunicator) -> None:
        comm.allreduce(np.ones(3 + comm.rank), tag="w")

    with pytest.raises(WorldError, match=r"rank 0 is in 'allreduce w .*\[3\].* and rank 1 in 'allreduce w .*\[4\]"):
        run_threads(2, work)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["a", "b"], ["a", "c"]), "collectives: entry 1 is 'b' on rank 0 and 'c' on rank 1"),
        ((["a"], ["a", "c"]), "entry 1 is nothing on rank 0 and 'c' on rank 1"),
        ((["a", "b"], ["a", "b"]), ""),
    ],
)
def test_agree(lists: tuple[list[str], list[str]], message: str) -> None:
    def work(comm: ThreadCommunicator) -> str:
        try:
            agree(comm, lists[comm.rank], "collectives")
        except WorldError as error:
            return str(error)
        return ""

    for text in run_threads(2, work):
        assert text.endswith(message)
        assert bool(text) == bool(message)


def test_alone_everything_is_the_identity() -> None:
    comm = open_communicator(World())
    array = np.arange(4.0)
    comm.allreduce(array, "mean")
    comm.wait(comm.start(array, "sum", "b"))
    comm.broadcast(array)
    comm.barrier()
    agree(comm, ["a"], "collectives")
    np.testing.assert_array_equal(array, np.arange(4.0))
    assert comm.allgather_object(5) == [5]
    comm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "all_gathr"}, "did you mean 'all_gather'"),
        ({"kind": "reduce_scatter", "parts": [(0, 3), (2, 4)]}, "not in order, disjoint"),
        ({"kind": "all_gather", "parts": [(0, 4)]}, "1 parts for 2 ranks"),
        ({"kind": "all_gather", "parts": [(0, 2), (2, 5)]}, "within 4 elements"),
        ({"kind": "broadcast", "root": 2}, "rank 2: the ranks are 0 … 1"),
        ({"op": "adasum", "lengths": [1, 2]}, "3 elements in all cannot make up an array of 4"),
    ],
)
def test_what_cannot_be_started(options: dict[str, Any], message: str) -> None:
    def work(comm: ThreadCommunicator) -> None:
        comm.start(np.ones(4), tag="w", **options)

    with pytest.raises(UsageError, match=message):
        run_threads(2, work)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prepared_collective_is_begun_again_and_again(overlap: bool) -> None:
    def work(comm: ThreadCommunicator) -> list[list[float]]:
        arrays = [np.full(5, comm.rank + k, np.float32) for k in range(3)]
        handles = [comm.prepare(array, "sum", f"b{k}", overlap=overlap) for k, array in enumerate(arrays)]
        for _ in range(50):
            for handle in handles:
                comm.begin(handle)
            for handle in handles:
                comm.wait(handle)
            for array in arrays:
                array /= 2
        comm.begin(handles[0])
        with pytest.raises(UsageError, match=r"allreduce b0 was begun a second time before it was waited"):
            comm.begin(handles[0])
        comm.wait(handles[0])
        return [array.tolist() for array in arrays]

    for result in run_threads(2, work):
        assert result == [[1.0] * 5, [1.5] * 5, [2.5] * 5]


def test_what_nobody_waits_for_is_done_at_the_end() -> None:
    arrays = [np.full(3, rank, np.float32) for rank in range(2)]

    def work(comm: ThreadCommunicator) -> None:
        comm.start(arrays[comm.rank], "sum", "b", overlap=False)
        comm.close()

    run_threads(2, work)
    assert [array.tolist() for array in arrays] == [[1.0] * 3] * 2


def test_an_interrupted_run_leaves_no_worker_behind() -> None:
    """A worker that went on in native code would abort the process as the interpreter ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored

    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            comm.barrier()

    try:
        with pytest.raises(KeyboardInterrupt):
            run_threads(3, work)
    finally:
        signal.signal(signal.SIGINT, before)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("graphc-worker")]
    for thread in left:  # on a busy machine it may not have had its turn yet
        thread.join(timeout=20)
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.mark.full
def test_a_worker_that_is_stuck_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LEAVING", 0.2)
    free = threading.Event()

    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            free.wait(60)
        comm.barrier()

    with pytest.raises(WorldError, match="rank 1 did not come to barrier"):
        run_threads(2, work, deadline=0.2)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("graphc-worker")] == ["graphc-worker-1"]
    free.set()


def test_the_cause_is_raised_and_not_what_follows_from_it() -> None:
    """The others learn of it before the rank itself has ended."""

    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            comm.abort("sample 7 is damaged")
            time.sleep(0.3)
            raise ValueError("sample 7 is damaged")
        comm.barrier()

    with pytest.raises(ValueError, match="sample 7"):
        run_threads(3, work)
