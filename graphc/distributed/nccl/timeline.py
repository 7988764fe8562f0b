"""When collectives ran on the GPU, by events on the communication stream, on the clock of the host."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from graphc.distributed.communicator import Handle

TRIES = 5
"""Comparisons of the two clocks, of which the quickest counts."""


class Timeline:
    """Times of collectives, reported once the GPU has passed them.

    Args:
        cupy: the package.
        stream: on which they run.
    """

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cuda, self._stream = cupy.cuda, stream
        self._waiting: collections.deque[tuple[Handle, Any, Any]] = collections.deque()
        self._origin, self._zero = min((self._compare_clocks() for _ in range(TRIES)), key=lambda found: found[2])[:2]

    def begin(self, handle: Handle) -> None:
        """Note when the stream comes to ``handle``."""
        self._waiting.append((handle, self._event(), None))

    def end(self) -> None:
        """Note when the stream has passed the newest."""
        handle, start, _ = self._waiting.pop()
        self._waiting.append((handle, start, self._event()))

    def report(self, observer: Callable[[Handle], None]) -> None:
        """Call ``observer`` for what the stream has passed, oldest first, with its times filled in."""
        while self._waiting and self._waiting[0][2] is not None and self._waiting[0][2].done:
            handle, start, stop = self._waiting.popleft()
            handle.since, handle.until = self._time(start), self._time(stop)
            observer(handle)

    def _compare_clocks(self) -> tuple[Any, float, float]:
        """An event, when the GPU passed it by the host's clock, and by how much that may be wrong."""
        before = time.monotonic()
        event = self._event()
        event.synchronize()
        after = time.monotonic()
        return event, (before + after) / 2, after - before

    def _event(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def _time(self, event: Any) -> float:
        return self._zero + float(self._cuda.get_elapsed_time(self._origin, event)) / 1e3
