"""Collectives between GPUs over NCCL, in place on device arrays.

    compute stream         … gradients ─┬─ more of the backward pass ─┬─ update …
                                  begin │                        wait │
    communication stream                └─► AllReduce ────────────────┘

``begin`` and ``wait`` only queue an event, the NCCL calls planned by ``prepare``, and another event, so they can be captured in
a CUDA graph with the rest of a step. Reductions that NCCL lacks (``tree``, ``adasum``) go through host memory
(:mod:`~graphc.distributed.host_staged`); arrays of the host, objects and sparse sums use the host's transport.

Differences from other transports: bfloat16 and float16 are added in float32 but rounded after every addition, since NCCL sends
them from GPU to GPU in their own type; ``mean`` divides before it adds. The results are bit-identical on all ranks.

A monitor thread tracks the collective under way for the watchdog, and polls NCCL's asynchronous error, which the next call
raises; the process ends if no call follows.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, Unpack

from graphc.device import Array, Memory, Run, in_order
from graphc.distributed.communicator import Communicator, CommunicatorOptions, Handle, check_collective, check_layout
from graphc.distributed.health.flight_recorder import FlightRecorder, dump
from graphc.distributed.host_queue import ProcessCommunicator
from graphc.distributed.host_staged import StagedCommunicator, lies_on_host
from graphc.distributed.nccl.bindings import NcclComm, NcclLibrary
from graphc.distributed.nccl.calls import plan_calls, supports
from graphc.distributed.nccl.progress import Counters, NcclProgress
from graphc.distributed.nccl.timeline import Timeline
from graphc.errors import WorldError

POLL = 0.1  # seconds between checks by the monitor
RAISE_LIMIT = 10.0  # seconds in which a call of the program must have raised an error, before the process ends


class GpuMemory(Memory, Protocol):
    """The memory of an NVIDIA GPU, with CuPy's streams.

    Attributes:
        cupy: the package.
        device: the GPU.
        stream, communication: the streams of computation and of collectives.
    """

    cupy: Any
    device: Any
    stream: Any
    communication: Any


def on_gpu(memory: Memory) -> TypeGuard[GpuMemory]:
    """Whether ``memory`` is that of an NVIDIA GPU."""
    return all(hasattr(memory, name) for name in ("cupy", "device", "stream", "communication"))


class NcclHandle(Handle):
    """A prepared NCCL collective: ``fork`` queues it, ``join`` makes the compute stream wait for it.

    Attributes:
        before: what the compute stream does first.
    """

    __slots__ = ("before", "fork", "join")

    before: list[Run]
    fork: Callable[[], None]
    join: Callable[[], None]


class NcclCommunicator(StagedCommunicator):
    """One rank of a world in which each rank has a GPU of its own.

    Args:
        inner: the transport of the host, over which the ranks exchange NCCL's unique id.
        memory: that of this rank's GPU, which is the current device.
        library: NCCL.
        number: of a subgroup, in the flight recorder. Its collectives have a stream of their own.

    Attributes:
        gpu: the memory and streams of this rank's GPU.
        nccl: NCCL's own communicator.

    Raises:
        WorldError: the GPUs do not reach each other.
    """

    def __init__(self, inner: Communicator, memory: GpuMemory, library: NcclLibrary, number: int | None = None) -> None:
        super().__init__(inner, memory)
        self.gpu, self._library = memory, library
        self._stream = memory.communication if number is None else memory.cupy.cuda.Stream(non_blocking=True)
        self.recorder, self.number = FlightRecorder(), 1 if number is None else number
        self.current: Handle | None = None
        self.failure = ""
        self._raised = threading.Event()
        self._captured = self._aborted = False
        self._abort_lock = threading.Lock()
        if isinstance(inner, ProcessCommunicator) and inner.watchdog is not None:
            inner.watchdog.add(self, number)
        self.nccl = self._join(library)
        counters = Counters(memory, memory.cupy, self._stream)
        self._counters, self._progress = counters, NcclProgress(counters.seen, self.recorder, self.number)
        self._timeline = Timeline(memory.cupy, self._stream)
        self._subgroups: list[Communicator] = []
        self._closed = threading.Event()
        self._monitor = threading.Thread(target=self._poll, name=f"graphc-nccl-{self.rank}", daemon=True)
        self._monitor.start()

    @property
    def transport(self) -> str:
        return "nccl"

    def _join(self, library: NcclLibrary) -> NcclComm:
        handle = Handle(lambda: None, "join", tag="nccl")
        try:
            unique_id = self.inner.allgather_object(library.unique_id() if self.rank == 0 else b"")[0]
            handle.since = time.monotonic()
            place = self.recorder.begin(self.number, 0, -1, handle, handle.since)
            self.current = handle
            comm = library.init_rank(self.size, unique_id, self.rank)
            self.recorder.end(place, time.monotonic())
            return comm
        except WorldError:
            raise
        except Exception as error:
            raise WorldError(
                f"the GPU of rank {self.rank} does not reach the others over NCCL: {error} (NCCL_DEBUG=INFO says more)"
            ) from error
        finally:
            self.current = None

    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        request = check_collective(array, self.size, op, tag, options)
        if lies_on_host(array) or options.get("staged") or not supports(request.kind, op):
            return super().prepare(array, op, tag, **options)
        check_layout(array)
        handle = NcclHandle(lambda: None, request.kind, request.reduction, tag, array.nbytes, overlap=request.overlap)
        handle.before = []
        calls = plan_calls(request.kind, op, array.dtype, array.size, request.parts, request.root, self.rank)
        copy = self.gpu.zeros(array.nbytes) if any(call.copied for call in calls) else None
        if copy is not None:
            handle.before.append(self.gpu.bind_copy(copy.view(array.dtype), array))
        source = int(copy.data.ptr) if copy is not None else 0  # type: ignore[attr-defined]
        self._bind(handle, self.nccl.bind(calls, int(array.data.ptr), int(self._stream.ptr), source))  # type: ignore[attr-defined]
        return handle

    def subgroup(self, members: Sequence[int], group: str, index: int) -> Communicator:
        inner = self.inner.subgroup(members, group, index)
        if inner.size == 1:
            return inner
        found = NcclCommunicator(inner, self.gpu, self._library, self.number << 32 | index)
        self._subgroups.append(found)
        return found

    def _bind(self, handle: NcclHandle, run: Callable[[], None]) -> None:
        gpu, event = self.gpu, self.gpu.cupy.cuda.Event
        ready, done = event(disable_timing=True), event(disable_timing=True)
        begins, ends = self._counters.around(self._progress.number_of(handle))
        compute, communication = gpu.stream, self._stream
        work = [begins, run, ends]
        handle.queued = self.observer is None
        if not handle.queued:  # events of a timeline cannot be captured
            timeline = self._timeline
            work = [lambda: timeline.begin(handle), *work, timeline.end]
        fork = [*handle.before, lambda: ready.record(compute), lambda: communication.wait_event(ready)]
        handle.fork = in_order([*fork, *work, lambda: done.record(communication)])
        handle.join = lambda: compute.wait_event(done)

    def begin(self, handle: Handle) -> None:
        if not isinstance(handle, NcclHandle):
            super().begin(handle)
            return
        self._raise_failure()
        captured = self._is_captured()
        if not captured:
            handle.check_idle()
        try:
            handle.fork()
        except Exception as error:
            if type(error).__name__.startswith("CUDA"):  # an error of the GPU, not of the collective
                raise
            raise WorldError(f"{handle.what} failed on rank {self.ranks[self.rank]}: {error}") from error
        handle.finished = handle.finished and captured

    def wait(self, handle: Handle) -> None:
        if not isinstance(handle, NcclHandle):
            super().wait(handle)
            return
        if self._is_captured():
            handle.join()
        elif not handle.finished:
            handle.finished = True
            handle.join()

    def _is_captured(self) -> bool:
        """Whether the stream is being captured: nothing runs now, and the capture may yet be refused."""
        captured = bool(self.gpu.stream.is_capturing())
        self._captured = self._captured or captured
        return captured

    def check(self) -> None:
        self._raise_failure()
        if self.observer is not None:
            self._timeline.report(self.observer)
        for subgroup in self._subgroups:
            subgroup.check()
        self.inner.check()

    def under_way(self) -> str:
        found = self._progress.poll(self.step, time.monotonic())
        return found.what if found is not None else ""

    def barrier(self) -> None:
        self._stream.synchronize()
        self.check()
        self.inner.barrier()

    def abort(self, reason: str) -> None:
        self._raised.set()
        self.inner.abort(reason)
        self._abort_nccl()

    def close(self) -> None:
        if not self._closed.is_set():
            for subgroup in self._subgroups:
                subgroup.close()
            self._closed.set()
            self._raised.set()
            self._monitor.join()
            if not self._aborted:
                self._stream.synchronize()
                if not self._captured:  # NCCL would wait for the last graph that contains one of its calls
                    self.nccl.close()
        self.inner.close()

    def _raise_failure(self) -> None:
        if self.failure:
            self._raised.set()
            raise WorldError(self.failure)

    def _poll(self) -> None:
        self.gpu.device.use()
        while not self._closed.wait(POLL):
            self.current = self._progress.poll(self.step, time.monotonic())
            error = self._async_error()
            if error:
                self._fail(error)
                return

    def _async_error(self) -> str:
        """NCCL's asynchronous error; an aborted communicator must not be asked."""
        with self._abort_lock:
            try:
                return "" if self._aborted else self.nccl.error()
            except Exception as raised:  # the query itself failed
                return str(raised)

    def _fail(self, error: str) -> None:
        """Unblock the GPU, so that a call of the program raises the error; end the process if none does."""
        what = f" in {self.current.what!r}" if self.current is not None else ""
        when = f"step {self.step}" if self.step >= 0 else "before the first step"
        message = f"NCCL failed{what} ({when}) on rank {self.ranks[self.rank]}: {error}"
        logs = dump({self.rank: self.recorder.entries()}, self.size, message)
        self.failure = f"{message}; {logs}" if logs else message
        self.current = None
        self._abort_nccl()
        if not self._raised.wait(RAISE_LIMIT):
            self.inner.abort(self.failure)
            os._exit(1)

    def _abort_nccl(self) -> None:
        """Abort on another thread: kernels end at once, but NCCL returns only when no captured graph refers to it."""
        with self._abort_lock:
            self._aborted = True
        threading.Thread(target=self.nccl.abort, name=f"graphc-nccl-abort-{self.rank}", daemon=True).start()
