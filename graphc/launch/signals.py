"""Lets the signals that end a process end a run as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

TERMINATION = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ENDING = (signal.SIGINT, *TERMINATION)


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt with the signal's number at SIGTERM, SIGHUP or SIGQUIT, unless it is ignored (``nohup``).

    Only the main thread may set handlers.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in TERMINATION}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Let an end in order, which takes seconds at most, not be cut short by another signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interruption(error: KeyboardInterrupt) -> tuple[str, int]:
    """What interrupted the run, in words, and the exit code."""
    number = error.args[0] if error.args else signal.SIGINT
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, int(128 + number)
