"""Native calls: compiled functions over fixed arguments, bound once and run by a team of threads without Python.

A function that Numba compiled takes its arguments flattened into machine words. An adapter, one for each signature, reads them
from memory and makes ``f(words, start, stop)`` of it, the form of kernels that :mod:`graphc.backends.host` compiles.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import types

from graphc.backends.host.compiler import compiler
from graphc.errors import InternalError

TEAM = """
define void @{name}.part(ptr %call) {{
  %place.member = getelementptr i64, ptr %call, i64 6
  %member.of = load ptr, ptr %place.member
  %place.size = getelementptr i64, ptr %call, i64 7
  %size.of = load ptr, ptr %place.size
  %member = call i32 %member.of()
  %size = call i32 %size.of()
  %first = sext i32 %member to i64
  %step = sext i32 %size to i64
  %code = load ptr, ptr %call
  %place.words = getelementptr i64, ptr %call, i64 1
  %words = load ptr, ptr %place.words
  %place.total = getelementptr i64, ptr %call, i64 2
  %total = load i64, ptr %place.total
  %place.parts = getelementptr i64, ptr %call, i64 3
  %parts = load i64, ptr %place.parts
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
}}

define void @{name}(ptr %call) {{
  %place.parallel = getelementptr i64, ptr %call, i64 5
  %parallel = load ptr, ptr %place.parallel
  %place.threads = getelementptr i64, ptr %call, i64 4
  %threads = load i32, ptr %place.threads
  call void %parallel(ptr @{name}.part, ptr %call, i32 %threads, i32 0)
  ret void
}}
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
def team_runner() -> Callable[[int], None]:
    """The compiled ``run(call)`` of :data:`TEAM`."""
    address = compiler().address_of("team", lambda name: TEAM.format(name=name))
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def bind_code(address: int, words: int, *held: Any) -> Bound:
    """A function that has the form ``f(words, start, stop)`` already."""
    return Bound(address, words, np.zeros(1, dtype=np.int64), held)


_COMPILING = threading.RLock()


def bind_numba(function: Any, arguments: Sequence[Any]) -> Bound | None:
    """Bind the first arguments of a function that Numba compiles; None: an argument's type has no words here."""
    arguments = [int(a) if isinstance(a, (bool, np.bool_)) else a for a in arguments]
    kinds = tuple(numba.typeof(a) for a in arguments)  # type: ignore[no-untyped-call]
    if not all(_has_words(kind) for kind in kinds):
        return None
    with _COMPILING:
        function.compile((*kinds, types.int64, types.int64))
        compiled = function.overloads[*kinds, types.int64, types.int64]
        if compiled.fndesc.restype != types.none:
            return None
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    failed = np.zeros(1, dtype=np.int64)
    flat = [word for kind, a in zip(kinds, arguments, strict=True) for word in _words(kind, a)]
    text = "".join(letter for letter, _ in flat)
    data = struct.pack(f"=qq{''.join(_CODES[letter] for letter in text)}", address, failed.ctypes.data, *(v for _, v in flat))
    memory = ctypes.create_string_buffer(data, len(data))
    return Bound(_adapter(text), ctypes.addressof(memory), failed, (memory, *arguments, compiled))


_CODES = {"p": "q", "i": "q", "f": "f4x", "d": "d"}
_LETTERS = {types.float32: "f", types.float64: "d", types.int64: "i", types.intp: "i"}


def _has_words(kind: types.Type) -> bool:
    return kind in _LETTERS or isinstance(kind, types.Array) or (isinstance(kind, types.UniTuple) and kind.dtype in _LETTERS)


def _words(kind: types.Type, value: Any) -> list[tuple[str, Any]]:
    """An argument as Numba passes it: (type letter, value) of every word."""
    if isinstance(kind, types.Array):
        numbers = [("i", n) for n in (value.size, value.itemsize)]
        sides = [("i", n) for n in (*value.shape, *value.strides)]
        return [("p", 0), ("p", 0), *numbers, ("p", value.ctypes.data), *sides]  # owned by nobody whom it would count
    if isinstance(kind, types.UniTuple):
        return [(_LETTERS[kind.dtype], v) for v in value]
    return [(_LETTERS[kind], value)]


_TYPES = {"p": "ptr", "i": "i64", "f": "float", "d": "double"}


@functools.cache
def _adapter(text: str) -> int:
    """The address of ``f(words, start, stop)`` for a signature, a letter for each word."""
    loads, given = [], []
    for k, letter in enumerate(f"pp{text}"):
        kind = _TYPES[letter]
        loads.append(f"  %place{k} = getelementptr i64, ptr %words, i64 {k}")
        loads.append(f"  %word{k} = load {kind}, ptr %place{k}")
        given.append(f"{kind} %word{k}")
    arguments = ", ".join(["ptr %result", "ptr %error", *given[2:], "i64 %start", "i64 %stop"])

    def module(name: str) -> str:
        lines = [
            f"define void @{name}(ptr %words, i64 %start, i64 %stop) {{",
            "  %result = alloca ptr",
            "  %error = alloca ptr",
            *loads,
            f"  %status = call i32 %word0({arguments})",
            "  %fine = icmp eq i32 %status, 0",
            "  br i1 %fine, label %end, label %failure",
            "failure:",
            "  store i64 1, ptr %word1",
            "  br label %end",
            "end:",
            "  ret void",
            "}",
        ]
        return "\n".join(lines)

    return compiler().address_of(f"adapter {text}", module)
