"""A device that only keeps time: calls add to its clock what they would take on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from graphc.backends.cupy.device.device_timer import DeviceTimer
from graphc.backends.cupy.device.protocol import CudaOptions
from graphc.errors import DeviceError


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA."""


class Block:
    """A part of the device's memory."""

    def __init__(self, nbytes: int, at: int = 1 << 20) -> None:
        self.nbytes, self.data = nbytes, SimpleNamespace(ptr=at)

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Block:
        start, stop, _ = part.indices(self.nbytes)
        return Block(stop - start, self.data.ptr + start)


class TimedDevice:
    """Stands in for a :class:`graphc.backends.cupy.device.cuda_device.CudaDevice` while candidates are timed.

    Attributes:
        now: milliseconds that the device has worked.
        fault: raised by the next wait; ``lost`` stays.
        late: how many measurements the host is too late for.
    """

    def __init__(self, **options: bool) -> None:
        self.options, self.name = CudaOptions(**options), "H200"
        self.stream, self.device = SimpleNamespace(ptr=0), SimpleNamespace(id=0)
        self.now, self.holds, self.late = 0.0, 0, 0
        self.fault: Exception | None = None
        self.lost = ""
        self._libraries: dict[Any, Any] = {}
        device = self

        class Event:
            def record(self, stream: Any) -> None:
                self.at = device.now

            @property
            def done(self) -> bool:
                device.late -= 1
                return device.late >= 0

            def synchronize(self) -> None:
                device.raise_fault()

        runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
        cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: end.at - begin.at, runtime=runtime)
        self.cupy = SimpleNamespace(cuda=cuda)

    def raise_fault(self) -> None:
        if self.lost:
            raise CUDARuntimeError(self.lost)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def synchronize(self) -> None:
        try:
            self.raise_fault()
        except CUDARuntimeError as error:
            raise DeviceError(str(error)) from error

    def compile(self, texts: dict[str, str]) -> dict[str, str]:
        return texts

    def launch(self, kernel: Any, arrays: Sequence[Any], shape: Any) -> Callable[[], None]:
        def hold() -> None:
            self.holds += 1

        return hold

    def zeros(self, nbytes: int) -> Block:
        return Block(nbytes)

    def copy(self, target: Any, source: Any) -> None:
        assert target.nbytes == source.nbytes

    def trim(self) -> None:
        """There is nothing to give back."""

    def library(self, kind: Any) -> Any:
        if kind not in self._libraries:
            self._libraries[kind] = kind(self)
        return self._libraries[kind]

    @property
    def timer(self) -> DeviceTimer:
        found: DeviceTimer = self.library(DeviceTimer)
        return found
