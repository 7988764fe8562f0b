"""The memory of one GPU, and its streams.

    compute         segments, updates and copies between buffers, in order; recorded work is captured here
    copies          feeds from pinned memory, while the compute stream runs the step before
    communication   collectives; the communicator synchronises it with the compute stream in both directions

A copy from pinned memory only queues; a copy from pageable host memory returns once the driver has taken over the bytes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from graphc.device import LEAST_DRIVER, Array, Event, Run
from graphc.distributed.world import device_index
from graphc.errors import DeviceError, DeviceMemoryError, GraphcError, MissingExtraError

ALIGNMENT = 256
"""Alignment of values in bytes, that of CUDA's own allocations: no library and no vector load needs more."""

UNIT = 512
"""Bytes to which CuPy's pool rounds every allocation."""

DLPACK_CUDA = (2, 13)
"""``kDLCUDA`` and ``kDLCUDAManaged`` of dlpack.h."""

STAGED = 64 << 10
"""Most bytes of pageable host memory that the driver takes over without waiting for the stream."""


def import_cupy(backend: str = "cupy", extra: str = "gpu") -> Any:
    """Import CuPy and check that it has a usable GPU.

    Args:
        backend, extra: the backend's name and its extra of graphc, for the messages.

    Raises:
        MissingExtraError: CuPy is missing, or built for another CUDA than the driver's.
        GraphcError: no driver, or no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingExtraError(f"the {backend} backend needs CuPy ({error}); run: pip install 'graphc[{extra}]'") from error
    # Every stream needs a queue of the GPU's for itself: behind a transfer that waits for another rank, in the same queue, that
    # rank might be waited for by the work of another stream. A pipeline has two streams for each neighbour; the default is 8.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    runtime = cupy.cuda.runtime
    check_versions(runtime.driverGetVersion() // 1000, runtime.runtimeGetVersion() // 1000, backend)
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise GraphcError(f"the {backend} backend finds no GPU that it can use ({error}); {ELSEWHERE}") from error
    if count == 0:
        raise GraphcError(f"the {backend} backend finds no GPU; {ELSEWHERE}")
    return cupy


ELSEWHERE = "'graphc doctor' shows what is installed; backend='onnxruntime' runs on CPUs"


def check_versions(driver: int, built: int, backend: str) -> None:
    """Check that the driver runs programs for CUDA ``built``; ``driver`` is the newest CUDA it runs, 0 without a driver.

    Raises:
        GraphcError: there is no driver.
        MissingExtraError: CuPy is built for a newer CUDA.
    """
    wanted = f"driver {LEAST_DRIVER.get(built, 'for CUDA ' + str(built))} or newer"
    if driver == 0:
        raise GraphcError(f"the {backend} backend finds no NVIDIA driver; it needs {wanted}. {ELSEWHERE}")
    if driver < built:
        other = f"run: pip uninstall -y cupy-cuda{built}x && pip install cupy-cuda{driver}x, or "
        advice = other if driver in LEAST_DRIVER else ""
        raise MissingExtraError(f"this CuPy is for CUDA {built}, the driver runs CUDA {driver}: {advice}install {wanted}")


def address(array: Any) -> int:
    """The address at which a device or host array begins."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def explain(error: BaseException) -> DeviceError:
    """Turn an error of CUDA or a CUDA library into one that gives its meaning and the remedy.

    Most kernel errors are final: every later call of the process returns them again.
    """
    text = f"{type(error).__name__}: {error}"
    names = text.replace("_", "").lower()  # the runtime and the driver name one error differently here
    for name, (meaning, advice) in CAUSES.items():
        if f"error{name}" in names:
            return DeviceError(f"{meaning} ({text}); {advice}")
    return DeviceError(f"the GPU reported an error ({text}); {RESTART}")


RESTART = "this process can no longer use it: restart from the last checkpoint"

CAUSES = {
    "illegaladdress": ("a kernel read or wrote outside its memory", f"{RESTART}, and please report the model"),
    "misalignedaddress": ("a kernel met an address that is not aligned", f"{RESTART}, and please report the model"),
    "launchfail": ("a kernel ended with a hardware exception", f"{RESTART}; 'dmesg | grep Xid' may say more"),
    "ecc": ("the GPU's memory has an error that cannot be corrected", f"{RESTART}, on another GPU"),
    "nvlink": ("a link between GPUs failed", f"{RESTART}; 'nvidia-smi nvlink --status' shows the links"),
    "launchtimeout": ("a kernel ran into the watchdog of the display", f"{RESTART}, on a GPU without a display"),
    "device": (
        "the GPU is gone, or another process has it alone",
        f"{RESTART}; 'nvidia-smi' and 'dmesg | grep Xid' may say why",
    ),
    "nodevice": ("the GPU is gone", f"{RESTART}; 'dmesg | grep Xid' may say why"),
    "unknown": ("the GPU is gone, or its driver failed", f"{RESTART}; 'dmesg | grep Xid' may say why"),
}
"""Beginning of an error's name → its meaning, and the remedy."""


class CudaEvent:
    """A point on a stream."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        with device_errors():
            self.event.synchronize()


class CudaMemory:
    """Memory and streams of one GPU.

    Args:
        index: the GPU's index; None: this worker's GPU, by its local rank.
        backend, extra: see :func:`import_cupy`.

    Attributes:
        stream: the compute stream.
        copies: the stream of feeds.
        communication: the stream of collectives.
    """

    on_host = False

    def __init__(self, index: int | None = None, backend: str = "cupy", extra: str = "gpu") -> None:
        self.cupy = import_cupy(backend, extra)
        if index is None:
            index = device_index(self.cupy.cuda.runtime.getDeviceCount())
        self.device = self.cupy.cuda.Device(index)
        self.device.use()
        make = self.cupy.cuda.Stream
        self.stream = make(non_blocking=True)
        self.copies = make(non_blocking=True)
        self.communication = make(non_blocking=True)
        self.stream.use()
        self._runtime = self.cupy.cuda.runtime
        self._pinned: dict[int, int] = {}
        self.trim()

    def zeros(self, nbytes: int) -> Array:
        return self._allocate(self.cupy.zeros, nbytes)

    def empty(self, nbytes: int) -> Array:
        return self._allocate(self.cupy.empty, nbytes)

    def _allocate(self, make: Callable[..., Any], nbytes: int) -> Array:
        try:
            with self._current():
                return make(max(nbytes, 1), dtype=np.uint8)[:nbytes]  # type: ignore[no-any-return]
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise DeviceMemoryError(nbytes, self.available()) from error

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make this GPU and its compute stream current in this thread; another memory's may be.

        CuPy's own context manager would not restore the current stream afterwards.
        """
        with self.device:
            before = self.cupy.cuda.get_current_stream()
            self.stream.use()
            try:
                yield
            finally:
                before.use()

    def pinned(self, nbytes: int) -> Array:
        memory = self.cupy.cuda.PinnedMemory(max(nbytes, 1))
        start = int(memory.ptr)
        self._pinned[start] = start + max(nbytes, 1)
        weakref.finalize(memory, self._pinned.pop, start).atexit = False
        found = np.frombuffer(self.cupy.cuda.PinnedMemoryPointer(memory, 0), dtype=np.uint8, count=nbytes)
        found[:] = 0
        return found

    def available(self) -> int:
        """Bytes that can still be allocated: free on the device (or up to the pool's limit) plus free in CuPy's pool."""
        pool = self.cupy.get_default_memory_pool()
        free, limit = int(self._runtime.memGetInfo()[0]), int(pool.get_limit())
        if limit:
            free = min(free, limit - int(pool.total_bytes()))
        return free + int(pool.free_bytes())

    def trim(self) -> None:
        """Return unused bytes of CuPy's pool to the device: a CUDA graph allocates outside the pool.

        The pool keeps freed memory by stream, so this worker cannot reuse what an earlier worker of the process freed.
        """
        self.cupy.get_default_memory_pool().free_all_blocks()

    def adopt(self, array: Any) -> Array | None:
        cupy = self.cupy
        if isinstance(array, np.ndarray):
            return None
        with self._current():  # DLPack makes the current stream wait for the producer's
            if isinstance(array, cupy.ndarray):
                self.stream.wait_event(cupy.cuda.Stream.null.record())
                found = array
            elif hasattr(array, "__dlpack_device__"):
                if array.__dlpack_device__()[0] not in DLPACK_CUDA:
                    return None
                found = cupy.from_dlpack(array)
            elif hasattr(array, "__cuda_array_interface__"):
                found = cupy.asarray(array)
            else:
                return None
        if found.device.id != self.device.id:
            raise ValueError(f"it is on GPU {found.device.id}, but this worker uses GPU {self.device.id}")
        return found  # type: ignore[no-any-return]

    def copy(self, target: Any, source: Any) -> None:
        with device_errors():
            pinned = isinstance(source, np.ndarray) and self._is_pinned(source)
            if pinned and source.nbytes <= STAGED:
                source, pinned = source.copy(), False
            self._bind(target, source)()
            if pinned:
                self.stream.synchronize()  # the caller may reuse it as soon as this returns

    def fetch(self, array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        with device_errors():
            return array.get(stream=self.stream)  # type: ignore[no-any-return]

    def bind_copy(self, target: Any, source: Any) -> Run:
        return self._bind(target, source)

    def bind_feed(self, target: Any) -> Callable[[Array], None]:
        return partial(self.copy, target)

    def bind_fill(self, target: Any, value: float) -> Run:
        pattern = np.array([value], target.dtype).view(np.uint8)
        if not (pattern == pattern[0]).all():
            return self._bind_pattern(target, value)
        fill, byte, stream = self._runtime.memsetAsync, int(pattern[0]), self.stream.ptr

        def run() -> None:
            fill(target.data.ptr, byte, target.nbytes, stream)

        return run

    def _bind_pattern(self, target: Any, value: float) -> Run:
        def run() -> None:
            with self._current():
                target.fill(value)

        return run

    def send(self, target: Any, source: Any, after: Event | None = None) -> Event:
        with device_errors():
            if isinstance(after, CudaEvent):
                self.copies.wait_event(after.event)
            to, since = address(target), source.ctypes.data
            self._runtime.memcpyAsync(to, since, target.nbytes, self._runtime.memcpyHostToDevice, self.copies.ptr)
            return self._event(self.copies)

    def after(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        with device_errors():
            self.stream.wait_event(event.event)

    def mark(self) -> Event:
        with device_errors():
            return self._event(self.stream)

    def _event(self, stream: Any) -> CudaEvent:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return CudaEvent(event)

    def synchronize(self) -> None:
        with device_errors():
            self.stream.synchronize()

    def _bind(self, target: Any, source: Any) -> Run:
        """Bind a copy on the compute stream; it can be captured if the memory is pinned or on the device."""
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"{source.dtype}{list(source.shape)} cannot be copied to {target.dtype}{list(target.shape)}")
        if isinstance(source, np.ndarray):
            source = np.ascontiguousarray(source).reshape(source.shape)
        copy, stream = self._runtime.memcpyAsync, self.stream.ptr
        to, kind_to = self._place(target)
        since, kind_since = self._place(source)
        kind = getattr(self._runtime, f"memcpy{kind_since}To{kind_to}")
        held, nbytes = (target, source), target.nbytes  # the closure keeps the memory alive

        def run() -> None:
            if held:
                copy(to, since, nbytes, kind, stream)

        return run

    def _place(self, array: Any) -> tuple[int, str]:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {list(array.shape)} is not contiguous")
        return (array.ctypes.data, "Host") if isinstance(array, np.ndarray) else (address(array), "Device")

    def _is_pinned(self, array: Array) -> bool:
        start = array.ctypes.data
        return any(low <= start < high for low, high in list(self._pinned.items()))


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn errors of CUDA into errors of graphc.

    Raises:
        DeviceError: with the cause.
    """
    try:
        yield
    except GraphcError:
        raise
    except RuntimeError as error:
        raise explain(error) from error
