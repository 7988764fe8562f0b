"""A GPU with streams and NCCL that exist in this process only: its streams are threads, which run what is queued in order.

What :mod:`graphc.distributed.nccl.communicator` asks of CuPy and of NCCL is here as CUDA and NCCL define it, so that order,
errors and deadlines of its collectives can be tested; whether the real libraries are called rightly only a GPU can tell.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from graphc.distributed.nccl.calls import NcclCall
from tests.backends.strict import DeviceArray, host_of

# The numbers of nccl.h, and what NCCL does with them.
DTYPES = {1: np.uint8, 4: np.int64, 6: np.float16, 7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16}
REDUCTIONS: dict[int, Callable[[Any], Any]] = {
    0: lambda rows: rows.sum(0),
    1: lambda rows: rows.prod(0),
    2: lambda rows: rows.max(0),
    3: lambda rows: rows.min(0),
    4: lambda rows: rows.mean(0),
}


def perform(arrays: Sequence[Any], calls: Sequence[Sequence[NcclCall]]) -> None:
    """What NCCL makes of the arrays of all ranks when each rank makes its calls; in place."""
    memory = [array.view(np.uint8) for array in arrays]
    if any(call.function in ("send", "recv") for own in calls for call in own):
        deliver(memory, memory, calls)
        return
    for together in zip(*calls, strict=True):
        first = together[0]
        same = {(c.function, c.count, c.datatype, c.operation, c.root) for c in together}
        assert len(same) == 1, "NCCL wants the same call on all ranks"
        dtype = np.dtype(DTYPES[first.datatype])
        length, ranks = first.count * dtype.itemsize, len(together)
        whole = length * (ranks if first.function == "reduce_scatter" else 1)
        sent = [m[c.send : c.send + whole].copy().view(dtype) for m, c in zip(memory, together, strict=True)]
        assert all(s.size == whole // dtype.itemsize for s in sent), "beyond the end of the array"
        if first.operation >= 0:
            wide = np.stack([s.astype(np.int64 if dtype == np.int64 else np.float64) for s in sent])
            result = REDUCTIONS[first.operation](wide).astype(dtype).view(np.uint8)
        for rank, (m, call) in enumerate(zip(memory, together, strict=True)):
            target = m[call.receive :]
            if call.function == "all_reduce" or (call.function == "reduce" and rank == call.root):
                target[:length] = result
            elif call.function == "reduce_scatter":
                assert call.receive == call.send + rank * length, "in place is at the rank's own block"
                target[:length] = result[rank * length : (rank + 1) * length]
            elif call.function == "broadcast":
                target[:length] = sent[call.root].view(np.uint8)
            elif call.function == "all_gather":
                assert call.send == call.receive + rank * length, "in place is at the rank's own block"
                target[: ranks * length] = np.concatenate(sent).view(np.uint8)


def deliver(memory: Sequence[Any], copies: Sequence[Any], calls: Sequence[Sequence[NcclCall]]) -> None:
    """What NCCL makes of a group of sends and receives; a ``copied`` call reads ``copies``."""
    sent: dict[tuple[int, int], list[Any]] = {}
    for rank, own in enumerate(calls):
        for call in own:
            if call.function == "send":
                length = call.count * np.dtype(DTYPES[call.datatype]).itemsize
                source = (copies if call.copied else memory)[rank]
                sent.setdefault((rank, call.root), []).append(source[call.send : call.send + length].copy())
    for rank, own in enumerate(calls):
        for call in own:
            if call.function == "recv":
                piece = sent[call.root, rank].pop(0)
                assert piece.size == call.count * np.dtype(DTYPES[call.datatype]).itemsize, "the two ends differ in size"
                memory[rank][call.receive : call.receive + piece.size] = piece
    assert not any(sent.values()), "something was sent that nobody receives"


NUMBERS = itertools.count(1)
STREAMS: dict[int, Stream] = {}
"""By the pointers that stand for them."""


class Stream:
    """A thread that runs what is queued.

    Attributes:
        noted: while the stream is captured, what was queued instead of run.
    """

    def __init__(self, non_blocking: bool = True) -> None:
        self.ptr = next(NUMBERS)
        STREAMS[self.ptr] = self
        self.noted: list[Callable[[], None]] | None = None
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def queue(self, run: Callable[[], None]) -> None:
        if self.noted is not None:
            self.noted.append(lambda: self.queue(run))
            return
        self._queue.put(run)

    def wait_event(self, event: Event) -> None:
        if self.noted is not None:
            self.noted.append(lambda: self.wait_event(event))
            return
        passed = event.passed  # what is recorded later does not matter
        self.queue(lambda: passed.wait() and None)

    def is_capturing(self) -> bool:
        return self.noted is not None

    def synchronize(self) -> None:
        assert self.noted is None, "a stream that is captured cannot be waited for"
        Event().record(self).synchronize()


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.passed = threading.Event()
        self.passed.set()
        self.time = 0.0

    def record(self, stream: Stream) -> Event:
        if stream.noted is not None:
            stream.noted.append(lambda: self.record(stream) and None)
            return self
        passed = self.passed = threading.Event()

        def pass_by() -> None:
            self.time = time.monotonic()
            passed.set()

        stream.queue(pass_by)
        return self

    def synchronize(self) -> None:
        assert self.passed.wait(60)

    @property
    def done(self) -> bool:
        return self.passed.is_set()


class RawModule:
    """The counting kernels, by hand."""

    def __init__(self, code: str) -> None:
        assert "collective_begins" in code

    def get_function(self, name: str) -> Any:
        return type("RawKernel", (), {"kernel": staticmethod(BEGINS if name == "collective_begins" else ENDS)})


def _word(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)


def BEGINS(grid: Any, block: Any, arguments: tuple[int, int, int], stream: Stream) -> None:  # noqa: N802
    count, seen, which = arguments

    def run() -> None:
        _word(count).value += 1
        _word(seen).value = _word(count).value << 16 | which

    stream.queue(run)


def ENDS(grid: Any, block: Any, arguments: tuple[int, int], stream: Stream) -> None:  # noqa: N802
    count, seen = arguments

    def run() -> None:
        _word(seen + 8).value = _word(count).value

    stream.queue(run)


class Cupy:
    """What is used of the package."""

    RawModule = RawModule

    class cuda:  # noqa: N801
        Event = Event
        Stream = Stream

        @staticmethod
        def get_elapsed_time(start: Event, stop: Event) -> float:
            assert start.done
            assert stop.done
            return (stop.time - start.time) * 1e3

        class runtime:  # noqa: N801
            @staticmethod
            def getDeviceProperties(device: int) -> dict[str, bytes]:  # noqa: N802
                return {"uuid": bytes([device] * 16)}


class Device:
    def __init__(self, index: int) -> None:
        self.id = index
        self.pci_bus_id = f"0000:{index:02x}:00.0"

    def use(self) -> None:
        pass


class PretendMemory:
    """Memory of GPU ``index``."""

    on_host = False

    def __init__(self, index: int) -> None:
        self.cupy: Any = Cupy
        self.device = Device(index)
        self.stream, self.communication = Stream(), Stream()

    def zeros(self, nbytes: int) -> Any:
        return DeviceArray(np.zeros(nbytes, np.uint8))

    def pinned(self, nbytes: int) -> Any:
        return np.full(nbytes, 0xCD, np.uint8)

    def copy(self, target: Any, source: Any) -> None:
        to, since = host_of(target), host_of(source)
        since = since if isinstance(source, DeviceArray) or isinstance(target, np.ndarray) else since.copy()
        self.stream.queue(lambda: np.copyto(to, since))

    def fetch(self, array: Any) -> Any:
        self.synchronize()
        return host_of(array).copy()

    def bind_copy(self, target: Any, source: Any) -> Callable[[], None]:
        to, since = host_of(target), host_of(source)
        return lambda: self.stream.queue(lambda: np.copyto(to, since))

    def bind_fill(self, target: Any, value: float) -> Callable[[], None]:
        held = host_of(target)
        return lambda: self.stream.queue(lambda: held.fill(value))

    def bind_work(self, run: Callable[[], None], seconds: float = 0.0) -> Callable[[], None]:
        """A kernel that takes its time."""

        def kernel() -> None:
            time.sleep(seconds)
            run()

        return lambda: self.stream.queue(kernel)

    def synchronize(self) -> None:
        self.stream.synchronize()


def capture(streams: Sequence[Stream], runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """What queues again, in the order in which they did, all that ``runs`` queue on ``streams``; it is not run now."""
    noted: list[Callable[[], None]] = []
    for stream in streams:
        stream.noted = noted
    try:
        for run in runs:
            run()
    finally:
        for stream in streams:
            stream.noted = None

    def replay() -> None:
        for one in noted:
            one()

    return replay


class PretendNccl:
    """NCCL between the threads of this process that share this object; ranks of other processes never come."""

    def __init__(self, size: int, *, apart: bool = False) -> None:
        self.size = size
        self.comms: list[PretendComm] = []
        self.changed = threading.Condition()
        self.apart = apart
        self.subgroups: dict[bytes, PretendNccl] = {}

    def unique_id(self) -> bytes:
        with self.changed:
            if self.apart or not self.comms:
                return b"pretended"
            return f"subgroup {next(NUMBERS)}".encode()

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> PretendComm:
        if unique_id != b"pretended":
            with self.changed:
                subgroup = self.subgroups.setdefault(unique_id, PretendNccl(size))
            return subgroup.init_rank(size, b"pretended", rank)
        assert size == self.size
        comm = PretendComm(self, rank)
        with self.changed:
            self.comms.append(comm)
            self.changed.notify_all()
            if not self.apart:
                assert self.changed.wait_for(lambda: len(self.comms) == size, 30)
        return comm


class PretendComm:
    """One rank's end.

    Attributes:
        fault: what NCCL has met behind the back of its callers.
        misused: whether it was asked for that when it was no more.
    """

    def __init__(self, nccl: PretendNccl, rank: int) -> None:
        self.nccl, self.rank = nccl, rank
        self.fault, self.aborted, self.misused = "", False, False
        self.waiting: tuple[Sequence[NcclCall], Any, Any] | None = None

    def bind(self, calls: Sequence[NcclCall], address: int, stream: int, copy: int = 0) -> Callable[[], None]:
        ends = [max(c.send, c.receive) + c.count * np.dtype(DTYPES[c.datatype]).itemsize * self._blocks(c) for c in calls]
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * max(ends, default=0)).from_address(address))
        copied = np.ctypeslib.as_array((ctypes.c_uint8 * memory.size).from_address(copy)) if copy else memory
        return lambda: STREAMS[stream].queue(lambda: self._meet(calls, memory, copied))

    def _blocks(self, call: NcclCall) -> int:
        if call.function == "reduce_scatter":
            return self.nccl.size if call.send >= call.receive else self.nccl.size - self.rank
        if call.function == "all_gather":
            return self.nccl.size if call.receive >= call.send else self.nccl.size - self.rank
        return 1

    def _meet(self, calls: Sequence[NcclCall], memory: Any, copied: Any) -> None:
        if not calls:
            return
        nccl = self.nccl
        with nccl.changed:
            self.waiting = calls, memory, copied
            comms = sorted(nccl.comms, key=lambda comm: comm.rank)
            if len(comms) == nccl.size and all(comm.waiting for comm in comms):
                brought = [comm.waiting for comm in comms if comm.waiting]
                own = [calls for calls, _, _ in brought]
                if own[0][0].function in ("send", "recv"):
                    deliver([memory for _, memory, _ in brought], [copied for _, _, copied in brought], own)
                else:
                    perform([memory for _, memory, _ in brought], own)
                for comm in comms:
                    comm.waiting = None
                nccl.changed.notify_all()
            while self.waiting is not None and not self.aborted:
                nccl.changed.wait()

    def error(self) -> str:
        self.misused = self.misused or self.aborted
        return self.fault

    def abort(self) -> None:
        with self.nccl.changed:
            self.aborted = True
            self.nccl.changed.notify_all()

    def close(self) -> None:
        assert self.waiting is None
