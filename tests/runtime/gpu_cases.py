"""What is asked of collectives on a GPU: run on real ones where there are some, and on pretended ones everywhere."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphc.distributed.communicator import Communicator
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.nccl.communicator import NcclCommunicator
from graphc.distributed.nccl.device_transport import for_memory
from tests.runtime.collective_cases import everything
from tests.runtime.on_device import OnDevice

Record = Callable[[Sequence[Callable[[], None]]], Callable[[], None]]


def one_rank(memory: Any, library: Any, record: Record) -> None:
    """A world of one: every collective is the identity, queued between kernels, replayed, counted and timed."""
    comm = NcclCommunicator(NullCommunicator(), memory, library)
    floats = np.arange(4099, dtype=np.float32)
    for kind, op in (("allreduce", "sum"), ("allreduce", "mean"), ("reduce_scatter", "max"), ("all_gather", "sum")):
        for parts in (None, [(0, 4099)], [(5, 90)], [(3, 3)]):
            array = memory.zeros(floats.nbytes).view(floats.dtype)
            memory.copy(array, floats)
            comm.wait(comm.start(array, op, "one", kind=kind, parts=parts))  # type: ignore[arg-type]
            np.testing.assert_array_equal(memory.fetch(array), floats)
    array, result = (memory.zeros(floats.nbytes).view(floats.dtype) for _ in range(2))
    handle = comm.prepare(array, "sum", "replayed")
    assert handle.queued
    begin, wait = lambda: comm.begin(handle), lambda: comm.wait(handle)
    step = record([memory.bind_fill(array, 1), begin, memory.bind_fill(result, 3), wait, memory.bind_copy(result, array)])
    before = int(comm._counters.seen[1])
    for times in range(1, 6):  # walked through, captured, replayed
        step()
        memory.synchronize()
        comm.check()
        assert (memory.fetch(result) == 1).all()
        assert int(comm._counters.seen[1]) == before + times
    first, second = record([memory.bind_fill(array, 2), begin]), record([wait, memory.bind_copy(result, array)])
    with warnings.catch_warnings(action="ignore"):  # a capture cannot end between the two
        for times in range(6, 10):
            first()
            second()
            assert (memory.fetch(result) == 2).all()
            assert int(comm._counters.seen[1]) == before + times, "what follows did not wait"
    time.sleep(0.3)
    assert comm.recorder.entries()[-1].tag == "replayed"
    assert comm.recorder.entries()[-1].end is not None
    seen: list[tuple[str, float, float]] = []
    comm.observer = lambda handle: seen.append((handle.tag, handle.since, handle.until))
    timed = comm.prepare(array, "sum", "timed")
    start = time.monotonic()
    comm.begin(timed)
    comm.wait(timed)
    comm.barrier()
    ((tag, since, until),) = [entry for entry in seen if entry[0]]
    assert tag == "timed"
    assert start - 0.01 < since <= until < time.monotonic() + 0.01
    comm.observer = None
    comm.close()


def collectives(comm: Communicator, memory: Any, transport: str | None = None) -> Any:
    """How arrays of ``memory`` travel, and every collective on them and on the host."""
    found = for_memory(comm, memory, transport=transport)
    result = type(found).__name__, everything(OnDevice(found, memory)), everything(comm)  # type: ignore[arg-type]
    if isinstance(found, NcclCommunicator):
        found.close()
    return result
