"""Kernels compiled for the host, many to a library, and kept on disk by the hash that is their name."""

from __future__ import annotations

import ctypes
import functools
import getpass
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """#include <math.h>
#include <string.h>
#include <utility>
template <class... A, std::size_t... I>
static void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f((A)a[I]...); }
"""
COMMAND = ("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC")
MOST = 150
"""Kernels of one library."""

_LOADED: dict[str, Any] = {}


@functools.cache
def folder() -> Path:
    """Where libraries are kept: of this user and machine, and as long as the machine keeps its temporary files."""
    made = Path(tempfile.gettempdir()) / f"graphc-host-kernels-{getpass.getuser()}"
    made.mkdir(mode=0o700, exist_ok=True)
    return made


def compile_kernels(texts: Mapping[str, str]) -> dict[str, Any]:
    """Each kernel as a function (array of pointers, number of blocks)."""
    for name in texts:
        if name not in _LOADED:
            index = folder() / f"{name}.in"
            if index.exists():
                _load(name, folder() / index.read_text())
    missing = [name for name in texts if name not in _LOADED]
    for start in range(0, len(missing), MOST):
        part = missing[start : start + MOST]
        library = _compile({name: texts[name] for name in part})
        for name in part:
            _load(name, library)
            _write(folder() / f"{name}.in", library.name)
    return {name: _LOADED[name] for name in texts}


def _load(name: str, library: Path) -> None:
    if library.exists():
        _LOADED[name] = getattr(_library(library), f"run_{name}")


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _compile(texts: Mapping[str, str]) -> Path:
    parts = [HEAD]
    for name, text in texts.items():
        body = text.replace("#include <math.h>", "").replace("#include <string.h>", "")
        head = text[text.rindex("KERNEL ") :]
        count = head[: head.index("{")].count(",") + 1
        loop = "for (BLOCK = 0; BLOCK < blocks; ++BLOCK)"
        start = f'extern "C" void run_{name}(void** a, long long blocks)'
        parts.append(
            f"namespace in_{name} {{\n{body}\n{start} {{ {loop} call({name}, a, std::make_index_sequence<{count}>()); }}\n}}"
        )
        parts += [f"#undef {word}" for word in _macros(text)]
    text = "\n".join(parts)
    library = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        source, made = Path(work) / "kernels.cc", Path(work) / "kernels.so"
        source.write_text(text)
        done = subprocess.run([*COMMAND, "-o", str(made), str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        made.rename(library)
    return library


def _macros(text: str) -> Sequence[str]:
    return [line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("#define")]


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)
