"""Rows of native calls: what a step computes in machine code, one after another, as one call.

A row is a table of functions ``void f(ptr)``, their arguments and the flags that they set when they fail. One native loop walks
it, so that Python takes no part between kernels, and other threads may run.

A row holds back signals, and so do the threads that OpenMP starts in it. In products of oneDNN (3.2, ``x64:gemm:jit``) the
stack pointer points into a workspace on the heap: what the kernel saves there for a handler would overwrite memory of others.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphc.backends.host.compiler import compiler
from graphc.device import InOrder, Run

SLICE = 50_000_000
"""Nanoseconds after which a row returns to Python, where signals are handled, before it goes on."""

_ROW = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def loaded(source: str, *words: str) -> str:
    """LLVM's text that loads words of 8 bytes at the address ``%source``.

    Args:
        words: a type and a name for each in order, as ``"ptr code"`` for ``%code``; ``""`` leaves one out.
    """
    lines = []
    for k, (kind, name) in enumerate(word.split() if word else ("", "") for word in words):
        if name:
            lines += [f"%{name}.place = getelementptr i64, ptr %{source}, i64 {k}", f"%{name} = load {kind}, ptr %{name}.place"]
    return "\n  ".join(lines)


_ALONE = f"""
define void @{{name}}(ptr %call) {{{{
  {loaded("call", "ptr code", "ptr words", "i64 total")}
  call void %code(ptr %words, i64 0, i64 %total)
  ret void
}}}}
"""
"""Runs a call, three words: code, words, total."""

_LOOP = f"""
define i64 @{{name}}(ptr %row, i64 %first) {{{{
  {loaded("row", "i64 count", "ptr clock", "i32 which", "i64 slice", "ptr mask", "i32 replace", "ptr held.back")}
  %calls = getelementptr i64, ptr %row, i64 7
  %now = alloca [2 x i64]
  %before = alloca [16 x i64]
  %masked = call i32 %mask(i32 %replace, ptr %held.back, ptr %before)
  %place.part = getelementptr i64, ptr %now, i64 1
  %begun = call i32 %clock(i32 %which, ptr %now)
  %start.seconds = load i64, ptr %now
  %start.part = load i64, ptr %place.part
  br label %test
test:
  %i = phi i64 [ %first, %0 ], [ %next, %checked ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %work, label %end
work:
  %at = mul i64 %i, 3
  %call = getelementptr i64, ptr %calls, i64 %at
  {loaded("call", "ptr code", "ptr words", "ptr flag")}
  call void %code(ptr %words)
  %next = add i64 %i, 1
  %failed = load i64, ptr %flag
  %bad = icmp ne i64 %failed, 0
  br i1 %bad, label %stop, label %checked
checked:
  %asked = call i32 %clock(i32 %which, ptr %now)
  %seconds = load i64, ptr %now
  %part = load i64, ptr %place.part
  %whole = sub i64 %seconds, %start.seconds
  %fraction = sub i64 %part, %start.part
  %scaled = mul i64 %whole, 1000000000
  %passed = add i64 %scaled, %fraction
  %over = icmp sgt i64 %passed, %slice
  br i1 %over, label %end, label %test
stop:
  %minus = sub i64 0, %next
  br label %end
end:
  %reached = phi i64 [ %count, %test ], [ %next, %checked ], [ %minus, %stop ]
  %unmasked = call i32 %mask(i32 %replace, ptr %before, ptr null)
  ret i64 %reached
}}}}
"""
"""Walks a row, seven words and three for each call: count, clock_gettime, its clock, the time slice, pthread_sigmask, how it
replaces a set of signals, and the set to hold back; code, words, flag.

Returns the place of the next call, or minus that if the last one failed."""


class NativeCall:
    """Bound work that is one call of machine code, alone or in a row.

    Args:
        code, words: addresses of ``void f(ptr words)`` and of its argument.
        failed: int64, a number that is not 0 after the function failed.
        check: raises the error of a failure, and resets the number.
        prepare: called before the function.
        held: what must live as long as this.
    """

    __slots__ = ("_alone", "check", "code", "failed", "held", "prepare", "words")

    def __init__(
        self,
        code: int,
        words: int,
        failed: np.ndarray[Any, Any],
        check: Run,
        *held: object,
        prepare: Run | None = None,
    ) -> None:
        self.code, self.words, self.failed, self.check, self.prepare, self.held = code, words, failed, check, prepare, held
        self._alone: tuple[np.ndarray[Any, Any], int] | None = None

    def __call__(self) -> None:
        if self.prepare is not None:
            self.prepare()
        if self._alone is None:
            table = _row_of((self,))
            self._alone = table, table.ctypes.data
        if _row_runner()(self._alone[1], 0) < 0:
            self.check()


def with_check(run: Run, failed: np.ndarray[Any, Any], check: Run) -> Run:
    """Bound work that sets ``failed``, int64[1], to another number than 0, after which ``check`` is called."""
    if isinstance(run, NativeCall):
        return NativeCall(run.code, run.words, failed, check, run, prepare=run.prepare)
    return InOrder((run, check))


def native_calls(run: Run) -> list[NativeCall] | None:
    """The calls of machine code of which bound work consists; None: not of these alone."""
    if isinstance(run, NativeCall):
        return [run]
    if not isinstance(run, InOrder):
        return None
    found: list[NativeCall] = []
    for one in run.runs:
        calls = native_calls(one)
        if calls is None:
            return None
        found += calls
    return found


def in_a_row(calls: Sequence[NativeCall]) -> Run:
    """One closure that runs all calls, natively."""
    table = _row_of(calls)
    loop, address, count = _row_runner(), table.ctypes.data, len(calls)
    prepare = tuple(call.prepare for call in calls if call.prepare is not None)

    def run(held: object = (calls, table)) -> None:
        for one in prepare:
            one()
        reached = loop(address, 0)
        while reached != count:
            if reached < 0:
                calls[-reached - 1].check()
            reached = loop(address, abs(reached))

    return run


def _row_of(calls: Sequence[NativeCall]) -> np.ndarray[Any, Any]:
    """The table of a row, as :data:`_LOOP` reads it."""
    words = [word for call in calls for word in (call.code, call.words, call.failed.ctypes.data)]
    return np.array([len(calls), *_clock(), SLICE, *_signals(), *words], dtype=np.int64)


@functools.cache
def _clock() -> tuple[int, int]:
    """The address of ``clock_gettime`` and the number of a clock that only goes forward."""
    function = ctypes.CDLL(None).clock_gettime
    return ctypes.cast(function, ctypes.c_void_p).value or 0, time.CLOCK_MONOTONIC


_HELD_BACK = ctypes.create_string_buffer(128)
"""A ``sigset_t``."""

_OF_THE_CODE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT)
"""Signals that a thread raises itself, which cannot wait."""


@functools.cache
def _signals() -> tuple[int, int, int]:
    """The address of ``pthread_sigmask``, its number for replacing a set, and the address of the set of all that can wait."""
    library = ctypes.CDLL(None)
    library.sigfillset(_HELD_BACK)
    for one in _OF_THE_CODE:
        library.sigdelset(_HELD_BACK, int(one))
    mask = ctypes.cast(library.pthread_sigmask, ctypes.c_void_p).value or 0
    return mask, int(signal.SIG_SETMASK), ctypes.addressof(_HELD_BACK)


@functools.cache
def _row_runner() -> Callable[[int, int], int]:
    return _ROW(compiler().address_of("row", lambda name: _LOOP.format(name=name)))


@functools.cache
def alone_runner() -> int:
    """The address of the compiled ``run(call)`` of a function that runs in the calling thread."""
    return compiler().address_of("alone", lambda name: _ALONE.format(name=name))
