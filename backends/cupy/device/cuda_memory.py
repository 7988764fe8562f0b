"""The memory of one GPU, and the streams on which a worker's work is queued.

    compute         segments, updates and copies between buffers, in order; what is recorded as a graph
    copies          feeds, from pinned memory, while the compute stream is busy with the step before
    communication   collectives; the communicator makes it wait for the compute stream and the other way round

A copy from pinned memory only queues; one from the host's ordinary memory returns when the driver has taken the bytes over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from graphc.device import LEAST_DRIVER, Array, Event, Run
from graphc.distributed.world import device_index
from graphc.errors import DeviceError, DeviceMemoryError, GraphcError, MissingExtraError

ALIGNMENT = 256
"""Bytes to which values are aligned, as CUDA aligns what it allocates: no library and no vector load asks for more."""

UNIT = 512
"""Bytes to which CuPy's pool rounds every allocation."""

DLPACK_CUDA = (2, 13)
"""``kDLCUDA`` and ``kDLCUDAManaged`` of dlpack.h."""

STAGED = 64 << 10
"""Bytes of the host's ordinary memory that the driver takes over without a wait for the stream."""


def import_cupy(backend: str = "cupy", extra: str = "gpu") -> Any:
    """CuPy with a usable GPU.

    Args:
        backend, extra: who asks, and the extra of graphc that brings what it needs, for the messages.

    Raises:
        MissingExtraError: CuPy is not installed, or for another CUDA than the driver's.
        GraphcError: no driver, or no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingExtraError(f"the {backend} backend needs CuPy ({error}); run: pip install 'graphc[{extra}]'") from error
    runtime = cupy.cuda.runtime
    check_versions(runtime.driverGetVersion() // 1000, runtime.runtimeGetVersion() // 1000, backend)
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise GraphcError(f"the {backend} backend finds no GPU that it can use ({error}); {ELSEWHERE}") from error
    if count == 0:
        raise GraphcError(f"the {backend} backend finds no GPU; {ELSEWHERE}")
    return cupy


ELSEWHERE = "'graphc doctor' says what is there; backend='onnxruntime' runs on CPUs"


def check_versions(driver: int, built: int, backend: str) -> None:
    """See to it that the driver runs programs for CUDA ``built``; ``driver`` is the newest that it runs, 0 where there is none.

    Raises:
        GraphcError: there is no driver.
        MissingExtraError: CuPy is for a newer CUDA.
    """
    wanted = f"driver {LEAST_DRIVER.get(built, 'for CUDA ' + str(built))} or newer"
    if driver == 0:
        raise GraphcError(f"the {backend} backend finds no NVIDIA driver; it needs {wanted}. {ELSEWHERE}")
    if driver < built:
        other = f"run: pip uninstall -y cupy-cuda{built}x && pip install cupy-cuda{driver}x, or "
        advice = other if driver in LEAST_DRIVER else ""
        raise MissingExtraError(f"this CuPy is for CUDA {built}, the driver runs CUDA {driver}: {advice}install {wanted}")


def address(array: Any) -> int:
    """Where an array of a device, or of the host, begins."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def explain(error: BaseException) -> DeviceError:
    """An error of CUDA or of a library over it, with what it means and what to do.

    Most errors of a kernel are final: every later call of the process returns them again.
    """
    text = f"{type(error).__name__}: {error}"
    names = text.replace("_", "").lower()  # the runtime's and the driver's names of one error differ in these
    for name, (meaning, advice) in CAUSES.items():
        if f"error{name}" in names:
            return DeviceError(f"{meaning} ({text}); {advice}")
    return DeviceError(f"the GPU reported an error ({text}); {RESTART}")


RESTART = "this process cannot use it any more: start again from the last checkpoint"

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
"""Beginning of an error's name → what it means, and what to do."""


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
        index: of the GPU; None: that of this worker, by its local rank.
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
        """With this GPU and its compute stream current, which are another memory's, or another thread's, otherwise.

        CuPy's own context would forget afterwards which stream was to be used.
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
        """Bytes that can still be allocated: free on the device (or up to the pool's limit), and free in CuPy's pool."""
        pool = self.cupy.get_default_memory_pool()
        free, limit = int(self._runtime.memGetInfo()[0]), int(pool.get_limit())
        if limit:
            free = min(free, limit - int(pool.total_bytes()))
        return free + int(pool.free_bytes())

    def trim(self) -> None:
        """Give back what CuPy's pool holds and nobody uses: a graph needs memory that is not the pool's.

        The pool keeps apart what each stream has freed, so that what an earlier worker of this process left is of no use.
        """
        self.cupy.get_default_memory_pool().free_all_blocks()

    def adopt(self, array: Any) -> Array | None:
        cupy = self.cupy
        if isinstance(array, np.ndarray):
            return None
        with self._current():  # DLPack lets the stream that is current wait for the giver's
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
            raise ValueError(f"it lies on GPU {found.device.id}, this worker computes on GPU {self.device.id}")
        return found  # type: ignore[no-any-return]

    def copy(self, target: Any, source: Any) -> None:
        with device_errors():
            pinned = isinstance(source, np.ndarray) and self._is_pinned(source)
            if pinned and source.nbytes <= STAGED:
                source, pinned = source.copy(), False
            self._bind(target, source)()
            if pinned:
                self.stream.synchronize()  # the caller may use it again at once

    def fetch(self, array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        with device_errors():
            return array.get(stream=self.stream)  # type: ignore[no-any-return]

    def bind_copy(self, target: Any, source: Any) -> Run:
        return self._bind(target, source)

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
        """A copy on the compute stream; of pinned memory and the device's it can be captured."""
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"{source.dtype}{list(source.shape)} cannot be copied to {target.dtype}{list(target.shape)}")
        if isinstance(source, np.ndarray):
            source = np.ascontiguousarray(source).reshape(source.shape)
        copy, stream = self._runtime.memcpyAsync, self.stream.ptr
        to, kind_to = self._place(target)
        since, kind_since = self._place(source)
        kind = getattr(self._runtime, f"memcpy{kind_since}To{kind_to}")
        held, nbytes = (target, source), target.nbytes  # whoever holds the closure holds the memory

        def run() -> None:
            if held:
                copy(to, since, nbytes, kind, stream)

        return run

    def _place(self, array: Any) -> tuple[int, str]:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {list(array.shape)} does not lie in one piece")
        return (array.ctypes.data, "Host") if isinstance(array, np.ndarray) else (address(array), "Device")

    def _is_pinned(self, array: Array) -> bool:
        start = array.ctypes.data
        return any(low <= start < high for low, high in list(self._pinned.items()))


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise what CUDA reports as an error of graphc.

    Raises:
        DeviceError: with the cause.
    """
    try:
        yield
    except GraphcError:
        raise
    except RuntimeError as error:
        raise explain(error) from error
