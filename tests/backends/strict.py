"""A pretended GPU memory: bytes of the host that the host cannot access directly.

A :class:`DeviceArray` has what ``cupy.ndarray`` shares with numpy, and raises on any direct host access to its elements.
Work is queued and runs when somebody waits. So reading a result too early, or changing host memory too early, gives wrong
numbers here as on a device.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from graphc.errors import DeviceMemoryError

GARBAGE = 0xCD
"""Fills fresh memory that is not promised to be zero."""


class DeviceArray:
    """A view of device memory; ``host_of`` is the only way to its elements."""

    __slots__ = ("_held",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self._held = held

    shape = property(lambda self: self._held.shape)
    dtype = property(lambda self: self._held.dtype)
    size = property(lambda self: self._held.size)
    nbytes = property(lambda self: self._held.nbytes)
    ndim = property(lambda self: self._held.ndim)
    itemsize = property(lambda self: self._held.itemsize)
    strides = property(lambda self: self._held.strides)
    data = property(lambda self: _Pointer(self._held.ctypes.data))
    flags = property(lambda self: _Flags(self._held.flags.c_contiguous))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._held.view(dtype))

    def reshape(self, *shape: Any) -> DeviceArray:
        found = self._held.reshape(*shape)
        assert np.shares_memory(found, self._held) or not found.size, "a reshape that copies"
        return DeviceArray(found)

    def __getitem__(self, index: Any) -> DeviceArray:
        for part in index if isinstance(index, tuple) else (index,):
            if not (part is Ellipsis or part is None or isinstance(part, slice)):
                operator.index(part)  # other indices would copy
        found = self._held[index]
        return DeviceArray(found if isinstance(found, np.ndarray) else self._held[(*np.atleast_1d(index), ...)])

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"implicit conversion of {self!r} to an array of the host is not allowed: go through the memory")

    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __float__ = __int__ = __index__ = __bool__ = __complex__ = __iter__ = __setitem__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _refuse
    __truediv__ = __rtruediv__ = __itruediv__ = __matmul__ = __rmatmul__ = __mod__ = __pow__ = __invert__ = _refuse


class _Pointer:
    def __init__(self, address: int) -> None:
        self.ptr = address


class _Flags:
    def __init__(self, contiguous: bool) -> None:
        self.c_contiguous = contiguous


def host_of(array: Any) -> Any:
    """The elements of a device array, for code that plays the device; any other array unchanged."""
    return array._held if isinstance(array, DeviceArray) else array


class Event:
    """A point in queued work; the first wait runs the work before it."""

    before: Callable[[], None] | None = None

    def wait(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()


class StrictMemory:
    """Memory of the pretended device (see :class:`graphc.device.Memory`).

    Attributes:
        allocations: the allocated arrays, oldest first.
        limit: bytes of the device.
        lost: the error that every wait raises, to play a lost device.
        early: whether data of :meth:`send` arrives as early as possible instead of as late as possible.
    """

    on_host = False

    def __init__(self) -> None:
        self.allocations: list[DeviceArray] = []
        self.early = False
        self._pinned: list[np.ndarray[Any, Any]] = []
        self.limit = 1 << 40
        self.lost: Exception | None = None
        self._capturing = False
        self._queue: collections.deque[Callable[[], None]] = collections.deque()

    def queued(self, run: Callable[[], None]) -> Callable[[], None]:
        """A closure that queues ``run``."""
        return lambda: self._queue.append(run)

    def empty(self, nbytes: int) -> DeviceArray:
        """Allocate bytes that hold garbage."""
        return self._new(nbytes, GARBAGE)

    def zeros(self, nbytes: int) -> DeviceArray:
        """Allocate bytes that become zero when the queue reaches them; code that does not wait sees garbage."""
        self._not_captured()
        array = self._new(nbytes, GARBAGE)
        held = host_of(array)
        self._queue.append(lambda: held.fill(0))
        return array

    def _new(self, nbytes: int, value: int) -> DeviceArray:
        if nbytes > self.available():
            raise DeviceMemoryError(nbytes, self.available())
        raw = np.full(nbytes + 256, value, dtype=np.uint8)
        start = -raw.ctypes.data % 256
        array = DeviceArray(raw[start : start + nbytes])
        self.allocations.append(array)
        return array

    def pinned(self, nbytes: int) -> np.ndarray[Any, Any]:
        self._pinned.append(np.full(nbytes, GARBAGE, dtype=np.uint8))
        return self._pinned[-1]

    def adopt(self, array: Any) -> DeviceArray | None:
        if not isinstance(array, DeviceArray) and hasattr(array, "__dlpack_device__") and not isinstance(array, np.ndarray):
            array = array.__dlpack__() if array.__dlpack_device__() == (2, 0) else None
        return array if isinstance(array, DeviceArray) else None

    def copy(self, target: Any, source: Any) -> None:
        self._not_captured()
        assert target.shape == source.shape, f"a copy of {source.shape} to {target.shape}"
        assert target.dtype == source.dtype, f"a copy of {source.dtype} to {target.dtype}"
        to, held = host_of(target), host_of(source) if isinstance(source, DeviceArray) else np.array(source)
        self._queue.append(lambda: np.copyto(to, held))

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        self.synchronize()
        return host_of(array).copy() if isinstance(array, DeviceArray) else array

    def bind_copy(self, target: Any, source: Any) -> Callable[[], None]:
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        for array in (target, source):
            if array.size and not isinstance(array, DeviceArray):
                assert any(np.shares_memory(array, held) for held in self._pinned), "not pinned"
        to, held = host_of(target), host_of(source)
        return self.queued(lambda: np.copyto(to, held))

    def bind_fill(self, target: DeviceArray, value: float) -> Callable[[], None]:
        held = host_of(target)
        return self.queued(lambda: held.fill(value))

    def send(self, target: DeviceArray, source: np.ndarray[Any, Any], after: Event | None = None) -> Event:
        """Copy as late as possible, when somebody waits, reading what ``source`` holds then."""
        to, event = host_of(target), Event()
        assert (to.shape, to.dtype) == (source.shape, source.dtype)

        def run() -> None:
            if after is not None:
                after.wait()
            np.copyto(to, source)

        event.before = run
        if self.early:
            event.wait()
        return event

    def after(self, event: Event) -> None:
        self._not_captured()
        self._queue.append(event.wait)

    def mark(self) -> Event:
        event = Event()
        self._queue.append(event.wait)
        event.before = lambda: self._run_until(event.wait)
        return event

    def _run_until(self, last: Callable[[], None]) -> None:
        if self.lost is not None:
            raise self.lost
        while self._queue and last in self._queue:
            run = self._queue.popleft()
            if run == last:
                return
            run()

    def available(self) -> int:
        return self.limit - sum(array.nbytes for array in self.allocations)

    def capture(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """Record what ``runs`` queue, and replay it without them; the host may not take part."""
        queue, self._queue = self._queue, collections.deque()
        self._capturing = True
        try:
            for run in runs:
                run()
            noted = tuple(self._queue)
        finally:
            self._queue, self._capturing = queue, False
        return lambda: self._queue.extend(noted)

    def _not_captured(self) -> None:
        if self._capturing:
            pytest.fail("the host takes part in work that is captured")

    def synchronize(self) -> None:
        self._not_captured()
        if self.lost is not None:
            raise self.lost
        while self._queue:
            self._queue.popleft()()
