"""What work costs, as ratios within one run: other programs slow both sides of a ratio down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def processor_time(prepare: Callable[[], T], work: Callable[[T], object], repeats: int = 3) -> float:
    """The least processor time of ``work`` over fresh things, in seconds.

    Without the garbage collector, whose share grows with what other tests of the process have left alive.
    """
    found = []
    for _ in range(repeats):
        thing = prepare()
        gc.collect()
        gc.disable()
        try:
            start = time.process_time()
            work(thing)
            found.append(time.process_time() - start)
        finally:
            gc.enable()
    return min(found)


def growth(prepare: Callable[[int], T], work: Callable[[T], object], size: int) -> float:
    """How many times the processor time of ``size`` twice the size takes: 2 for proportional effort, 4 for its square."""
    work(prepare(size))  # fills caches of schemas and inference
    single = processor_time(lambda: prepare(size), work)
    return processor_time(lambda: prepare(2 * size), work) / single
