"""Compiles what several ranks, or several tests, train alike only once.

Ranks in threads share one interpreter, where four equal compilations take four times as long as one. Ranks in processes
still compile each for itself, so tests of those show that they find the same program.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import graphc


def shared(make: Callable[..., graphc.Program]) -> Callable[..., graphc.Program]:
    """``make``, whose programs are kept by the text of the arguments; who changes a program must make its own."""
    kept: dict[str, graphc.Program] = {}
    lock = threading.Lock()

    @functools.wraps(make)
    def get(*arguments: Any, **options: Any) -> graphc.Program:
        key = repr((arguments, sorted(options.items())))
        if " at 0x" in key:  # of a thing without a text of its own, whose address another one can get later
            return make(*arguments, **options)
        with lock:
            if key not in kept:
                kept[key] = make(*arguments, **options)
            return kept[key]

    return get


compile_once = shared(graphc.compile)
"""``graphc.compile`` of a file that does not change."""
