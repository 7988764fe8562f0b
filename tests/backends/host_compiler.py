"""Compiles kernels for the host, many per library, and caches them on disk by hash.

Two ways: kernels generated for the host, where one thread plays every role; and CUDA C itself, on an emulation of threads,
barriers and shuffles (``cuda_emulator.h``).
"""

from __future__ import annotations

import ctypes
import functools
import getpass
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """#include <math.h>
#include <string.h>
#include <utility>
template <class... A, std::size_t... I>
static void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f((A)a[I]...); }
"""
COMMAND = ("g++", "-std=c++17", "-O0", "-ffp-contract=off", "-w", "-fPIC")
CHECKS = ("-fsanitize=alignment,bounds", "-fno-strict-aliasing")
"""Flags for emulated CUDA, whose vector loads need alignment that the host does not require."""

EMULATOR = Path(__file__).with_name("cuda_emulator.h")
CHECKER = Path(__file__).with_name("access_checker.cpp")
WATCHED = ("-fsanitize=thread", "-DWATCHED")
"""Flags that check every memory access."""

CONVERSIONS = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));': "_Float16 h; memcpy(&h, &x, 2); y = (float)h;",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));': "_Float16 h = (_Float16)x; memcpy(&y, &h, 2);",
}
"""PTX in the prelude → C++."""

MOST = 150
"""Most kernels per library."""

_LOADED: dict[str, Any] = {}
_LOCK = threading.Lock()


@functools.cache
def folder() -> Path:
    """The folder of libraries, per user, in the machine's temporary files."""
    made = Path(tempfile.gettempdir()) / f"graphc-host-kernels-{getpass.getuser()}"
    made.mkdir(mode=0o700, exist_ok=True)
    return made


def compile_kernels(texts: Mapping[str, str], *, emulate: bool = False, watch: bool = False) -> dict[str, Any]:
    """Compile each kernel to a function.

    Args:
        emulate: the texts are CUDA C. The functions take (pointers, blocks, threads of a block, thread order) and return None
            or an error as bytes. Otherwise they take (pointers, blocks).
        watch: emulated kernels also take (…, ranges, count): the memory that they may touch (``access_checker.cpp``).
    """
    with _LOCK:
        return _compiled(texts, emulate, watch)


def _compiled(texts: Mapping[str, str], emulate: bool, watch: bool) -> dict[str, Any]:
    start = EMULATOR.read_text() if emulate else HEAD
    start += f"// {CHECKER.read_text()!r}\n" if watch else ""
    keys = {name: hashlib.sha256((start + text).encode()).hexdigest()[:20] for name, text in texts.items()}
    for name, key in keys.items():
        if key not in _LOADED:
            index = folder() / key
            if index.exists():
                _load(name, key, folder() / index.read_text())
    missing = [name for name in texts if keys[name] not in _LOADED]
    for first in range(0, len(missing), MOST):
        part = missing[first : first + MOST]
        library = _compile(start, {name: texts[name] for name in part}, emulate, watch)
        for name in part:
            _load(name, keys[name], library)
            _write(folder() / keys[name], library.name)
    return {name: _LOADED[key] for name, key in keys.items()}


def _load(name: str, key: str, library: Path) -> None:
    if library.exists():
        _LOADED[key] = found = getattr(_library(library), f"run_{name}")
        found.restype = ctypes.c_char_p


@functools.cache
def _library(path: Path) -> ctypes.PyDLL:
    return ctypes.PyDLL(str(path))  # kernels keep their position in global variables of the library, so one thread at a time


def _compile(start: str, texts: Mapping[str, str], emulate: bool, watch: bool) -> Path:
    flags = (*COMMAND, *(CHECKS if emulate else ()), *(WATCHED if watch else ()))
    parts = [f'#include "{_header(start, flags)}"']
    for name, text in texts.items():
        parts += _emulated(name, text, watch) if emulate else _for_host(name, text)
        parts += [f"#undef {word}" for word in _macros(text)]
    text = "\n".join(parts)
    library = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        source, made = Path(work) / "kernels.cc", Path(work) / "kernels.so"
        source.write_text(text)
        if watch:  # the checker replaces the runtime that the flags would link
            _run(*flags, "-c", "-o", f"{work}/kernels.o", str(source))
            _run("g++", "-shared", "-o", str(made), f"{work}/kernels.o", str(_checker()))
        else:
            _run(*flags, "-shared", "-o", str(made), str(source))
        made.rename(library)
    return library


@functools.cache
def _header(text: str, flags: tuple[str, ...]) -> Path:
    """The precompiled header of all libraries; parsing it takes most of a small library's compile time."""
    header = folder() / f"{hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:20]}.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        _write(header, text)
        partial = compiled.with_suffix(f".{os.getpid()}")
        _run(*flags, "-x", "c++-header", "-o", str(partial), str(header))
        partial.rename(compiled)
    return header


@functools.cache
def _checker() -> Path:
    """The access checker, compiled once."""
    made = folder() / f"{hashlib.sha256(CHECKER.read_bytes()).hexdigest()[:24]}.o"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}")
        _run("g++", "-std=c++17", "-O2", "-fPIC", "-c", "-o", str(partial), str(CHECKER))
        partial.rename(made)
    return made


def refused_by_cuda(texts: Mapping[str, str]) -> str:
    """Errors of CUDA's own compiler for the kernels, on the H200's architecture; empty if it accepts all."""
    parts: list[str] = []
    for name, text in texts.items():
        parts += [f"namespace in_{name} {{", text, "}", *(f"#undef {word}" for word in _macros(text))]
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        source = Path(work) / "kernels.cu"
        source.write_text("\n".join(parts))
        command = ["nvcc", "-arch=sm_90", "-std=c++17", "-ptx", "-o", f"{work}/kernels.ptx", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stderr[:3000] if done.returncode else ""  # warnings are ignored


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def _for_host(name: str, text: str) -> list[str]:
    body = text.replace("#include <math.h>", "").replace("#include <string.h>", "")
    return [
        f"namespace in_{name} {{",
        body,
        f'extern "C" const char* run_{name}(void** a, long long blocks) {{',
        f"for (BLOCK = 0; BLOCK < blocks; ++BLOCK) call({name}, a, std::make_index_sequence<{_operands(text)}>());",
        "return 0; } }",
    ]


def _emulated(name: str, text: str, watch: bool) -> list[str]:
    more, look = "", ""
    if watch:
        more = ", const void* ranges, int count"
        look = "watch(ranges, count, __bss_start, _end, emulated::message, sizeof emulated::message);"
    for assembly, plain in CONVERSIONS.items():
        text = text.replace(assembly, plain)
    return [
        f"namespace in_{name} {{",
        text,
        "static void body(void** a) {",
        f"emulated::call({name}, a, std::make_index_sequence<{_operands(text)}>()); }}",
        f'extern "C" QUIET const char* run_{name}(void** a, long long blocks, int threads, int order{more}) {{',
        f"{look} return emulated::run(body, a, blocks, threads, order); }} }}",
    ]


def _operands(text: str) -> int:
    head = text[text.rindex("KERNEL ") :]
    return head[: head.index("{")].count(",") + 1


def _macros(text: str) -> Sequence[str]:
    return [line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("#define")]


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)
