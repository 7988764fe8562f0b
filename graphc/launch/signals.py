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
def signals_noted() -> Iterator[list[int]]:
    """Note the signals that end a run in the list, and interrupt nothing; ignored ones (``nohup``) stay so.

    A handler that raises may do so anywhere, also where a library has just taken a lock that nobody would give back: an
    interrupted ``subprocess.Popen.poll`` can let every later ``wait`` hang. A loop that looks at the list has no such place.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, frame: noted.append(number)) for number in heard}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interruption(error: KeyboardInterrupt) -> tuple[str, int]:
    """What interrupted the run, in words, and the exit code."""
    return ending(error.args[0] if error.args else signal.SIGINT)


def ending(number: int) -> tuple[str, int]:
    """A signal that ended the run, in words, and the exit code."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, int(128 + number)
