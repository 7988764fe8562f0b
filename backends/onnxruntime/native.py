"""Native calls: compiled functions over fixed arguments, bound once and run by a team of threads without Python.

A function that Numba compiled takes its arguments flattened into machine words. An adapter reads them from memory and makes
``f(words, start, stop)`` of it, the form of kernels that :mod:`graphc.backends.host` compiles. The machine code of both is kept
for later starts (:mod:`graphc.backends.onnxruntime.machine_code`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphc.backends.host.calls import loaded
from graphc.backends.host.compiler import compiler
from graphc.backends.onnxruntime import machine_code
from graphc.backends.onnxruntime.kernels.common.jit import NumbaFunction
from graphc.errors import InternalError

TEAM = f"""
define void @{{name}}.part(ptr %call) {{{{
  {loaded("call", "ptr code", "ptr words", "i64 total", "i64 parts", "", "", "ptr member.of", "ptr size.of")}
  %member = call i32 %member.of()
  %size = call i32 %size.of()
  %first = sext i32 %member to i64
  %step = sext i32 %size to i64
  br label %test
test:
  %part = phi i64 [ %first, %0 ], [ %next, %work ]
  %more = icmp slt i64 %part, %parts
  br i1 %more, label %work, label %end
work:
  %low = mul i64 %total, %part
  %start = sdiv i64 %low, %parts
  %after = add i64 %part, 1
  %high = mul i64 %total, %after
  %stop = sdiv i64 %high, %parts
  call void %code(ptr %words, i64 %start, i64 %stop)
  %next = add i64 %part, %step
  br label %test
end:
  ret void
}}}}

define void @{{name}}(ptr %call) {{{{
  {loaded("call", "", "", "", "", "i32 threads", "ptr parallel")}
  call void %parallel(ptr @{{name}}.part, ptr %call, i32 %threads, i32 0)
  ret void
}}}}
"""
"""Runs a call, seven words and one: code, words, total, parts, threads, then what starts a region of OpenMP, the number of the
calling thread in it, and the number of its threads. Parts are fixed, whoever computes them: results do not depend on that."""

Code = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """A compiled function with all arguments but the range.

    Attributes:
        code: address of ``void f(words, start, stop)``.
        words: address of its arguments.
        failed: a number that the function changes when it fails.
        held: what must live as long as this.
    """

    code: int
    words: int
    failed: np.ndarray[Any, Any]
    held: tuple[Any, ...]

    def check(self) -> None:
        """Check whether the last run failed.

        Raises:
            InternalError: it did.
        """
        if self.failed[0]:
            self.failed[0] = 0
            raise InternalError("a native kernel failed: compiled code raised an exception")


@functools.cache
def team_runner() -> int:
    """The address of the compiled ``run(call)`` of :data:`TEAM`."""
    return compiler().address_of("team", lambda name: TEAM.format(name=name))


def bind_code(address: int, words: int, *held: Any) -> Bound:
    """A function that has the form ``f(words, start, stop)`` already."""
    return Bound(address, words, np.zeros(1, dtype=np.int64), held)


_CODES = {"p": "q", "i": "q", "f": "f4x", "d": "d"}


def bind_numba(function: Any, arguments: Sequence[Any]) -> Bound | None:
    """Bind the first arguments of a function that Numba compiles; None: an argument's type has no words here."""
    arguments = [int(a) if isinstance(a, (bool, np.bool_)) else a for a in arguments]
    kinds = [kind for a in arguments if (kind := machine_code.kind_of(a)) is not None]
    if len(kinds) < len(arguments):
        if isinstance(function, NumbaFunction):
            raise InternalError(f"the kernel {function.py_func.__qualname__} takes an argument of a type without machine words")
        return None
    code, inner, held = machine_code.of(function, arguments, kinds)
    failed = np.zeros(1, dtype=np.int64)
    codes = "".join(_CODES[letter] for letter in machine_code.letters_of(kinds))
    data = struct.pack(f"=qq{codes}", inner, failed.ctypes.data, *(word for a in arguments for word in _words(a)))
    memory = ctypes.create_string_buffer(data, len(data))
    return Bound(code, ctypes.addressof(memory), failed, (memory, *arguments, held))


def _words(value: Any) -> Sequence[Any]:
    """An argument as Numba passes it."""
    if isinstance(value, np.ndarray):  # owned by nobody whom it would count
        return (0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
    return value if isinstance(value, tuple) else (value,)
