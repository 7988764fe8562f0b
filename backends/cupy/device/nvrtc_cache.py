"""Caches compiled kernels on disk, by architecture, CUDA version and compiler options.

A kernel's name is a digest of its text, so a file found by name is up to date. Threads compile in parallel: NVRTC spends most
of its time in the optimiser and assembler, which run concurrently; only the front end, a fifth of the time, is serial.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graphc.errors import GraphcError

OPTIONS = ("--std=c++17", "--diag-suppress=177,128")


class Cubins:
    """The compiled kernels of one folder.

    Args:
        folder: created on first use.
        compile: (name, text) → the compiled kernel; called from several threads.
    """

    def __init__(self, folder: Path, compile: Callable[[str, str], bytes]) -> None:
        self.folder = folder
        self._compile = compile

    def of(self, texts: Mapping[str, str]) -> dict[str, bytes]:
        """Return compiled kernels by name, compiling the missing ones; warns when the disk refuses to store them."""
        found = {name: self._read(name) for name in texts}
        missing = [name for name, held in found.items() if held is None]
        if missing:
            with ThreadPoolExecutor(min(len(missing), len(os.sched_getaffinity(0)))) as pool:
                found |= zip(missing, pool.map(lambda name: self._compile(name, texts[name]), missing), strict=True)
            self._keep({name: found[name] or b"" for name in missing})
        return {name: held for name, held in found.items() if held is not None}

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.folder / f"{name}.cubin").read_bytes() or None
        except OSError:
            return None

    def _keep(self, cubins: Mapping[str, bytes]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, cubin in cubins.items():
                partial = self.folder / f"{name}.{os.getpid()}.{time.monotonic_ns()}.tmp"
                partial.write_bytes(cubin)
                partial.replace(self.folder / f"{name}.cubin")
        except OSError as error:
            warnings.warn(f"compiled kernels are not kept in {self.folder}: {error}", RuntimeWarning, stacklevel=2)


def folder_name(architecture: str, version: int) -> str:
    """The folder for this architecture, CUDA version and set of options."""
    return f"kernels-{architecture}-cuda{version}-{hashlib.sha256(' '.join(OPTIONS).encode()).hexdigest()[:8]}"


def architecture(capability: int, known: Sequence[int]) -> str:
    """The architecture to compile for.

    A GPU runs binaries of its own generation up to its own version, and translates PTX of older ones.

    Args:
        capability: the GPU's, 90 for 9.0.
        known: the capabilities that the compiler supports.

    Raises:
        GraphcError: the GPU is older than all of them.
    """
    own = [k for k in known if k // 10 == capability // 10 and k <= capability]
    if own:
        return f"sm_{max(own)}"
    older = [k for k in known if k < capability]
    if older:
        return f"compute_{max(older)}"
    least = min(known) / 10
    raise GraphcError(
        f"this GPU has compute capability {capability / 10}, the installed NVRTC compiles for {least} and later; "
        "install CuPy for an older CUDA (pip install cupy-cuda12x), or use backend='onnxruntime-cuda'"
    )


def nvrtc_compiler(nvrtc: Any, architecture: str) -> Callable[[str, str], bytes]:
    """A compiler that uses CuPy's NVRTC binding, which releases the interpreter lock while it compiles.

    Raises:
        GraphcError: the text does not compile.
    """

    def compile(name: str, text: str) -> bytes:
        program = nvrtc.createProgram(text, f"{name}.cu", (), ())
        try:
            nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *OPTIONS))
            if architecture.startswith("sm_"):
                return whole_cubin(bytes(nvrtc.getCUBIN(program)))
            return bytes(nvrtc.getPTX(program))
        except nvrtc.NVRTCError as error:
            raise GraphcError(f"a generated kernel does not compile: {nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)

    return compile


def whole_cubin(found: bytes) -> bytes:
    """The cubin up to the end of its tables: CuPy drops the last byte as if it ended a text, and ``cuobjdump`` refuses that."""
    if found[:5] != b"\x7fELF\x02" or len(found) < 64:
        return found
    programs, sections = struct.unpack_from("<QQ", found, 32)
    program, count, section, number = struct.unpack_from("<HHHH", found, 54)
    return found.ljust(max(programs + program * count, sections + section * number), b"\0")
