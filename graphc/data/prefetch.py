"""Reading ahead in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()
CLOSING = 1.0
"""Seconds that a reader in the middle of a sample gets to end; it is a daemon thread and cannot keep a process alive."""


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """``items``, up to ``depth`` of them read ahead by a thread, in the same order.

    An exception of ``items`` is raised where the item it stands for would have come. Closing the iterator, or dropping it,
    ends the thread.
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
