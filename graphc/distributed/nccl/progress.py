"""Tracks from the host which collectives a GPU has begun and ended.

Before and after each collective the communication stream runs a kernel of one thread that counts in pinned memory, also in a
captured graph. So the collective that hangs is known even in the replay of a whole step, in which no Python runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphc.device import Array, Memory, Run
from graphc.distributed.communicator import Handle
from graphc.distributed.health.flight_recorder import FlightRecorder
from graphc.errors import UsageError

SHIFT = 16  # bits for the number of a collective; the other bits count
COUNTERS = """
extern "C" __global__ void collective_begins(unsigned long long* count, volatile unsigned long long* seen, long long which) {
  seen[0] = ++*count << 16 | which;
  __threadfence_system();
}
extern "C" __global__ void collective_ends(unsigned long long* count, volatile unsigned long long* seen) {
  seen[1] = *count;
  __threadfence_system();
}
"""
"""``count`` is in device memory. ``seen`` is in pinned memory: count and number of the collective that began last; the
count that ended last."""


class Counters:
    """The counting kernels of one GPU.

    Args:
        memory: that of the GPU.
        cupy: the package.
        stream: that of the collectives.

    Attributes:
        seen: two words in pinned memory; see :data:`COUNTERS`.
    """

    def __init__(self, memory: Memory, cupy: Any, stream: Any) -> None:
        self.seen: Array = memory.pinned(16).view(np.uint64)
        self.seen[:] = 0
        self._count = memory.zeros(8)
        module = cupy.RawModule(code=COUNTERS)
        self._begins, self._ends = (module.get_function(f"collective_{name}").kernel for name in ("begins", "ends"))
        self._stream = stream

    def around(self, which: int) -> tuple[Run, Run]:
        """What queues the kernels before and after the collective with number ``which``."""
        begins, ends, stream = self._begins, self._ends, self._stream
        count, seen = int(self._count.data.ptr), self.seen.ctypes.data  # type: ignore[attr-defined]
        one = (1, 1, 1)
        return (
            lambda: begins(one, one, (count, seen, which), stream=stream),
            lambda: ends(one, one, (count, seen), stream=stream),
        )


class NcclProgress:
    """Writes the collectives that have begun and ended to the flight recorder.

    Many can pass between two polls; the newest is recorded. Its sequence number is the GPU's own count, so it is the same on
    all ranks.

    Args:
        seen: see :class:`Counters`.
        recorder: the flight recorder.
        number: of the communicator in it.
    """

    def __init__(self, seen: Array, recorder: FlightRecorder, number: int) -> None:
        self._seen = seen
        self._recorder, self._number = recorder, number
        self._handles: list[Handle] = []
        self._numbers: dict[tuple[str, str, str, int], int] = {}
        self._recorded, self._place, self._open = 0, 0, False

    def number_of(self, handle: Handle) -> int:
        """The number of ``handle`` on the GPU; equal collectives share one.

        Raises:
            UsageError: there are 65,536 already.
        """
        key = handle.kind, handle.op, handle.tag, handle.nbytes
        if key not in self._numbers:
            if len(self._handles) == 1 << SHIFT:
                raise UsageError(f"there are {1 << SHIFT} different collectives already; name them by fewer tags")
            self._numbers[key] = len(self._handles)
            self._handles.append(handle)
        return self._numbers[key]

    def poll(self, step: int, now: float) -> Handle | None:
        """Record what is new at time ``now``; returns the collective under way."""
        ended = int(self._seen[1])  # read before ``begun``, so that it is never ahead of it
        begun, which = divmod(int(self._seen[0]), 1 << SHIFT)
        if not begun:
            return None
        handle = self._handles[which]
        if begun != self._recorded:
            if self._open:
                self._recorder.end(self._place, now)
            self._place = self._recorder.begin(self._number, begun, step, handle, now)
            self._recorded, self._open, handle.since = begun, True, now
        if ended >= begun and self._open:
            self._recorder.end(self._place, now)
            self._open = False
        return handle if self._open else None
