"""Compiles kernels without CuPy and without a GPU, by the NVRTC of the wheel ``nvidia-cuda-nvrtc``."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

from graphc.backends.cupy.device.nvrtc_cache import OPTIONS
from graphc.errors import GraphcError


def cubin_of(name: str, text: str, architecture: str = "sm_90") -> bytes:
    """Compile one kernel.

    Raises:
        GraphcError: NVRTC is not installed, or the text does not compile.
    """
    library, program = _library(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
        if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = _held(library, program, "ProgramLog").rstrip(b"\0").decode()
            raise GraphcError(f"a generated kernel does not compile: {log}")
        return _held(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _held(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, held)
    return held.raw


@functools.cache
def _library() -> Any:
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        libraries = Path(folder) / "cu13" / "lib"
        if (libraries / "libnvrtc.so.13").exists():
            for builtins in libraries.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # NVRTC loads it by name later, and finds it loaded
            return ctypes.CDLL(str(libraries / "libnvrtc.so.13"))
    raise GraphcError("NVRTC is not installed: pip install 'nvidia-cuda-nvrtc==13.*'")
