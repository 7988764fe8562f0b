"""Collectives between GPUs over NCCL, in place on device arrays.

    compute stream         … gradients ─┬─ more of the backward pass ─┬─ update …
                                  begin │                        wait │
    communication stream                └─► AllReduce ────────────────┘

``begin`` and ``wait`` only queue: an event, the calls of NCCL that were settled when the collective was prepared, an event.
They can be captured in a CUDA graph with the rest of a step. What NCCL cannot do (``tree``, ``adasum``) goes through host
memory (:mod:`~graphc.distributed.host_staged`), arrays of the host and objects over the transport of the host, and sparse sums
too.

Differences from other transports: bfloat16 and float16 are added in float32 but rounded after every addition, as NCCL passes
them on from GPU to GPU in their own type; ``mean`` divides before it adds. The results are bit-identical on all ranks.

A thread looks after what is under way: past its deadline, a collective ends the work with the names of the ranks that have not
come; an error of NCCL is raised by the next call, and ends the process where nobody makes one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, Unpack

from graphc.device import Array, Memory, in_order
from graphc.distributed.communicator import Communicator, CommunicatorOptions, Handle, check_collective, check_device_layout
from graphc.distributed.health.flight_recorder import Ring, dump
from graphc.distributed.host_staged import StagedCommunicator, lies_on_host
from graphc.distributed.nccl.bindings import NcclComm, NcclLibrary
from graphc.distributed.nccl.calls import plan_calls, supports
from graphc.distributed.nccl.progress import Counters, NcclProgress
from graphc.distributed.nccl.timeline import Timeline
from graphc.errors import WorldError

LOOK = 0.1  # seconds between looks at what is under way
TAKE_UP = 10.0  # seconds in which the program has to take up an error before the process ends


class GpuMemory(Memory, Protocol):
    """The memory of a GPU of NVIDIA's, with CuPy's streams.

    Attributes:
        cupy: the package.
        device: the GPU.
        stream, communication: those of computation and of collectives.
    """

    cupy: Any
    device: Any
    stream: Any
    communication: Any


def on_gpu(memory: Memory) -> TypeGuard[GpuMemory]:
    """Whether ``memory`` is that of a GPU of NVIDIA's."""
    return all(hasattr(memory, name) for name in ("cupy", "device", "stream", "communication"))


class NcclHandle(Handle):
    """A prepared collective of NCCL: ``start`` and ``join`` queue its beginning, and that the compute stream waits for it."""

    __slots__ = ("join", "start")

    start: Callable[[], None]
    join: Callable[[], None]


class NcclCommunicator(StagedCommunicator):
    """One rank of those that each have a GPU of their own.

    Args:
        inner: the transport of the host, over which the ranks find each other.
        memory: of this rank's GPU, which is the current one.
        library: the same on all ranks.

    Attributes:
        gpu: the memory and streams of this rank's GPU.
        nccl: NCCL's own communicator.

    Raises:
        WorldError: the GPUs do not reach each other.
    """

    def __init__(self, inner: Communicator, memory: GpuMemory, library: NcclLibrary) -> None:
        super().__init__(inner, memory)
        self.gpu = memory
        self.ring, self.number = Ring(), 1
        self.current: Handle | None = None
        self.failure = ""
        self._told = threading.Event()
        self._captured = self._aborted = False
        self._asking = threading.Lock()
        watch = getattr(inner, "watch", None)
        if watch is not None:
            watch.add(self)
        self.nccl = self._join(library)
        counters = Counters(memory, memory.cupy, memory.communication)
        self._counters, self._progress = counters, NcclProgress(counters.seen, self.ring, self.number)
        self._timeline = Timeline(memory.cupy, memory.communication)
        self._done = threading.Event()
        self._guard = threading.Thread(target=self._look_after, name=f"graphc-nccl-{self.rank}", daemon=True)
        self._guard.start()

    @property
    def transport(self) -> str:
        return "nccl"

    def _join(self, library: NcclLibrary) -> NcclComm:
        handle = Handle(lambda: None, "join", tag="nccl")
        try:
            unique_id = self.inner.allgather_object(library.unique_id() if self.rank == 0 else b"")[0]
            handle.since = time.monotonic()
            place = self.ring.begin(self.number, 0, -1, "join", "", "nccl", 0, handle.since)
            self.current = handle
            comm = library.init_rank(self.size, unique_id, self.rank)
            self.ring.end(place, time.monotonic())
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
        asked = check_collective(array, self.size, op, options)
        if lies_on_host(array) or not supports(asked.kind, op):
            return super().prepare(array, op, tag, **options)
        check_device_layout(array)
        handle = NcclHandle(lambda: None, asked.kind, asked.reduction, tag, array.nbytes, overlap=asked.overlap)
        calls = plan_calls(asked.kind, op, array.dtype, array.size, asked.parts, asked.root, self.rank)
        self._bind(handle, self.nccl.bind(calls, int(array.data.ptr), int(self.gpu.communication.ptr)))  # type: ignore[attr-defined]
        return handle

    def _bind(self, handle: NcclHandle, run: Callable[[], None]) -> None:
        gpu, event = self.gpu, self.gpu.cupy.cuda.Event
        ready, done = event(disable_timing=True), event(disable_timing=True)
        begins, ends = self._counters.around(self._progress.number_of(handle))
        compute, communication = gpu.stream, gpu.communication
        work = [begins, run, ends]
        handle.queued = self.observer is None
        if not handle.queued:  # events of a timeline cannot be captured
            timeline = self._timeline
            work = [lambda: timeline.begin(handle), *work, timeline.end]
        fork = [lambda: ready.record(compute), lambda: communication.wait_event(ready)]
        handle.start = in_order([*fork, *work, lambda: done.record(communication)])
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
            handle.start()
        except Exception as error:
            if type(error).__name__.startswith("CUDA"):  # the GPU's own, and none of the collective's
                raise
            raise WorldError(f"{handle.what} failed on rank {self.rank}: {error}") from error
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
        """Whether work is only noted for a graph: then nothing begins or ends now, and the graph may yet be refused."""
        captured = bool(self.gpu.stream.is_capturing())
        self._captured = self._captured or captured
        return captured

    def check(self) -> None:
        self._raise_failure()
        if self.observer is not None:
            self._timeline.report(self.observer)
        self.inner.check()

    def under_way(self) -> str:
        found = self._progress.look(self.step, time.monotonic())
        return found.what if found is not None else ""

    def barrier(self) -> None:
        self.gpu.communication.synchronize()
        self.check()
        self.inner.barrier()

    def abort(self, reason: str) -> None:
        self._told.set()
        self.inner.abort(reason)
        self._set_free()

    def close(self) -> None:
        if not self._done.is_set():
            self._done.set()
            self._told.set()
            self._guard.join()
            if not self._aborted:
                self.gpu.communication.synchronize()
                if not self._captured:  # NCCL would wait for the last graph that holds one of its calls
                    self.nccl.close()
        self.inner.close()

    def _raise_failure(self) -> None:
        if self.failure:
            self._told.set()
            raise WorldError(self.failure)

    def _look_after(self) -> None:
        self.gpu.device.use()
        while not self._done.wait(LOOK):
            self.current = self._progress.look(self.step, time.monotonic())
            error = self._async_error()
            if error:
                self._fail(error)
                return

    def _async_error(self) -> str:
        """What NCCL has met meanwhile; it is not asked about a link that it has begun to take apart."""
        with self._asking:
            try:
                return "" if self._aborted else self.nccl.error()
            except Exception as raised:  # NCCL cannot even say what is wrong
                return str(raised)

    def _fail(self, error: str) -> None:
        """NCCL has met an error: set the GPU free, so that the program comes to a call that raises it, or end the process."""
        what = f" in {self.current.what!r}" if self.current is not None else ""
        when = f"step {self.step}" if self.step >= 0 else "before the first step"
        message = f"NCCL failed{what} ({when}) on rank {self.rank}: {error}"
        logs = dump({self.rank: self.ring.entries()}, self.size, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", message)
        self.failure = f"{message}; {logs}" if logs else message
        self.current = None
        self._set_free()
        if not self._told.wait(TAKE_UP):
            self.inner.abort(self.failure)
            os._exit(1)

    def _set_free(self) -> None:
        """Abort on another thread: kernels end at once, but NCCL returns only when no captured graph refers to it any more."""
        with self._asking:
            self._aborted = True
        threading.Thread(target=self.nccl.abort, name=f"graphc-nccl-abort-{self.rank}", daemon=True).start()
