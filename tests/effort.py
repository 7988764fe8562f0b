"""What work costs, as ratios within one run: other programs slow both sides of a ratio down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def processor_time(prepare: Callable[[], T], work: Callable[[T], object], repeats: int = 3) -> float:
    """The least processor time that ``work`` over fresh things takes on this thread, in seconds.

    Threads and objects that other tests of the process have left alive do not count: the garbage collector is off.
    """
    found = []
    for _ in range(repeats):
        thing = prepare()
        gc.collect()
        gc.disable()
        try:
            start = time.thread_time()
            work(thing)
            found.append(time.thread_time() - start)
        finally:
            gc.enable()
    return min(found)


def growth(prepare: Callable[[int], T], work: Callable[[T], object], size: int) -> float:
    """How many times the processor time of ``size`` four times the size takes: 4 for proportional effort, 16 for its square."""
    work(prepare(size))  # fills caches of schemas and inference
    single = processor_time(lambda: prepare(size), work)
    return processor_time(lambda: prepare(4 * size), work) / single
