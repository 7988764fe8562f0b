"""Times calls on the GPU, without the share of the host.

A kernel holds the device while the host queues the calls between two events. A call from Python takes 17 to 35 µs, longer than
many kernels, so events around calls that the device does not wait for would measure Python.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.device import Run
from graphc.errors import DeviceError

CYCLES = 4_000_000
"""Clock cycles of one hold kernel: 2 ms."""

HOLD = f"""
extern "C" __global__ void hold() {{
  const long long begin = clock64();
  while (clock64() - begin < {CYCLES}LL) {{}}
}}
"""

MOST_HOLDS = 16

CUTOFF = 3.0
"""A candidate that takes this many times as long as the best one is measured once only."""

MEASURED = 2e-3
"""Seconds of calls that one measurement averages over."""

FEWEST, MOST = 3, 20
"""Calls of one measurement."""


def hold_kernel(device: Any) -> Run:
    """A closure that queues a kernel of 2 ms."""
    run: Run = device.launch(device.compile({"hold": HOLD})["hold"], [], Shape(1, 1, 1, 1, 1))
    return run


class DeviceTimer:
    """Times calls on the compute stream of one device; made through ``device.library(DeviceTimer)``."""

    def __init__(self, device: Any) -> None:
        self._device, self._stream, self._cuda = weakref.proxy(device), device.stream, device.cupy.cuda  # it holds this object
        self._hold, self._holds = hold_kernel(device), 1
        self._nothing = 0.0
        self._nothing = self.seconds([])

    def seconds(self, calls: Sequence[Run]) -> float:
        """Seconds on the device of all ``calls``, one after another, less those of two events."""
        begin, end = self._cuda.Event(), self._cuda.Event()
        while True:
            for _ in range(self._holds):
                self._hold()
            begin.record(self._stream)
            for call in calls:
                call()
            end.record(self._stream)
            in_time = not begin.done
            end.synchronize()
            if in_time or self._holds >= MOST_HOLDS:
                return max(0.0, float(self._cuda.get_elapsed_time(begin, end)) * 1e-3 - self._nothing)
            self._holds *= 2

    def trial(self, what: str, calls: Sequence[Run], best: float = math.inf) -> float:
        """Mean seconds of one of ``calls``, which are the same on different memory.

        Args:
            what: the candidate, for messages.
            best: seconds of the best candidate so far.

        Returns:
            Infinity if the candidate fails on the device; the seconds of a single call if that is far beyond ``best``.

        Raises:
            DeviceError: the candidate has made the GPU useless to this process.
            Exception: whatever the call itself raises.
        """
        try:
            calls[0]()  # the first call loads the kernel
            self._device.synchronize()
            spent = self.seconds(calls[:1])
            if spent > CUTOFF * best:
                return spent
            count = int(min(MOST, max(FEWEST, MEASURED / max(spent, 1e-7))))
            return self.seconds([calls[k % len(calls)] for k in range(count)]) / count
        except (self._cuda.runtime.CUDARuntimeError, DeviceError) as error:
            try:
                self._device.synchronize()
            except DeviceError as lost:
                raise DeviceError(f"{what} failed while it was measured: {lost}") from error
            return math.inf
