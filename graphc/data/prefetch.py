"""Prefetches items of an iterator in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()
CLOSING = 1.0
"""Seconds to wait for a reader that is inside a sample; it is a daemon thread, so it cannot keep the process alive."""


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield ``items`` in order, while a thread reads up to ``depth`` of them ahead.

    An exception of ``items`` is raised at the position of the failed item. Closing or dropping the iterator ends the thread.
    """
    slots, ready = threading.Semaphore(depth), SimpleQueue[tuple[Any, BaseException | None]]()
    stopped = threading.Event()

    def work() -> None:
        try:
            slots.acquire()
            for item in items:
                ready.put((item, None))
                slots.acquire()
                if stopped.is_set():
                    break
        except BaseException as error:
            ready.put((_END, error))
        else:
            ready.put((_END, None))

    thread = threading.Thread(target=work, name="graphc-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            slots.release()
            yield item
    finally:
        stopped.set()
        slots.release()
        thread.join(CLOSING)
