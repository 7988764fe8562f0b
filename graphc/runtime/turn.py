"""One thread at a time."""

from __future__ import annotations

import threading

from graphc.errors import UsageError


class ExclusiveUse:
    """A block that one thread at a time may be in; a second one is refused rather than kept waiting.

    The buffers of a plan belong to one run at a time: two threads in them would train on each other's batches.

    Args:
        what: it is that the threads use.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UsageError(f"another thread is using this {self._what}; give each thread its own")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
