"""Stores of two ranks, and calls at the same time, for tests of the TCP store."""

from __future__ import annotations

import threading
from typing import Any

from graphc.distributed.tcp_store.client import Store
from graphc.errors import WorldError
from graphc.launch.spawn import free_port

OPEN = """
import os, sys, time
import numpy as np
from graphc.distributed.choose import open_communicator
comm = open_communicator()
"""

SECRET = b"only the ranks know this"


def pair() -> tuple[Store, Store]:
    place = ("127.0.0.1", free_port())
    return Store(0, 2, place, SECRET, 5.0), Store(1, 2, place, SECRET, 5.0)


def both(first: Any, second: Any) -> list[Any]:
    """Results or errors of two calls at the same time."""
    found: list[Any] = [None, None]

    def run(index: int, call: Any) -> None:
        try:
            found[index] = call()
        except WorldError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found
