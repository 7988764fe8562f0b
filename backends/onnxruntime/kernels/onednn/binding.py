"""A small binding of oneDNN's C API (version 3).

The wheel ``onednn-cpu-gomp`` brings the library; without it :func:`library` is None and other kernels take over.

Source: oneAPI Deep Neural Network Library, developer guide and reference, https://uxlfoundation.github.io/oneDNN/.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from graphc.backends.host.processor import processor

Handle: TypeAlias = "ctypes.c_void_p"

# values of the C enumerations in dnnl_types.h
_CPU, _IN_ORDER = 1, 1
_OF_THE_CALLER = 1
_STRICT, _BFLOAT16 = 0, 1


class OneDnnError(RuntimeError):
    """oneDNN refused a call; the caller falls back to another kernel."""


class OneDNN:
    """The loaded library with its one CPU engine."""

    def __init__(self, path: Path) -> None:
        with _resting_threads():
            self._lib = ctypes.CDLL(str(path))
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        for name, result, arguments in (
            ("dnnl_primitive_desc_query_md", pointer, (pointer, integer, integer)),
            ("dnnl_memory_desc_get_size", size, (pointer,)),
            ("dnnl_memory_desc_equal", integer, (pointer, pointer)),
            ("dnnl_primitive_execute", integer, (pointer, pointer, integer, pointer)),
            ("dnnl_memory_set_data_handle", integer, (pointer, pointer)),
            ("dnnl_post_ops_append_binary", integer, (pointer, integer, pointer)),
            ("omp_set_num_threads", None, (integer,)),
            ("omp_get_max_threads", integer, ()),
        ):
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self.execute = self._lib.dnnl_primitive_execute
        self.use_threads = self._lib.omp_set_num_threads
        self.threads_in_use = self._lib.omp_get_max_threads
        self.query = self._lib.dnnl_primitive_desc_query_md
        self.size = self._lib.dnnl_memory_desc_get_size
        self.equal = self._lib.dnnl_memory_desc_equal
        self.move = self._lib.dnnl_memory_set_data_handle
        self.engine = self.create("dnnl_engine_create", _CPU, ctypes.c_size_t(0))
        # executions on the CPU are synchronous and a stream holds no state, so one serves all threads
        self.stream = self.create("dnnl_stream_create", self.engine, _IN_ORDER)
        self.region = self._region_functions()
        # By default primitives work in memory of the thread that made them: running or destroying one on another thread is a
        # use after free there. So the caller gives the memory.
        self.attributes = {low: self.create("dnnl_primitive_attr_create") for low in (False, True)}
        for low, attributes in self.attributes.items():
            self.set_modes(attributes, low=low)

    def set_modes(self, attributes: Handle, *, low: bool) -> None:
        """Let the caller give the scratchpad of primitives with these attributes; ``low``: products may be of bfloat16."""
        self._lib.dnnl_primitive_attr_set_scratchpad_mode(attributes, _OF_THE_CALLER)
        self._lib.dnnl_primitive_attr_set_fpmath_mode(attributes, _BFLOAT16 if low else _STRICT)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a C function that changes an object.

        Raises:
            OneDnnError: it failed.
        """
        status = getattr(self._lib, function)(*arguments)
        if status:
            raise OneDnnError(f"{function} failed with status {status}")

    def _region_functions(self) -> tuple[int, int, int] | None:
        """Addresses of OpenMP's functions: run a region, number of the calling thread in it, number of its threads."""
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        try:
            found = [ctypes.cast(getattr(self._lib, name), ctypes.c_void_p).value for name in names]
        except AttributeError:
            return None
        return (found[0] or 0, found[1] or 0, found[2] or 0)

    def create(self, function: str, *arguments: Any) -> Handle:
        """Call a C function that writes a new object to its first argument."""
        handle = ctypes.c_void_p()
        status = getattr(self._lib, function)(ctypes.byref(handle), *arguments)
        if status:
            raise OneDnnError(f"{function} failed with status {status}")
        return handle

    def destroy(self, objects: list[tuple[str, Handle]]) -> None:
        """Destroy (function, object) pairs, the newest first."""
        while objects:
            function, handle = objects.pop()
            getattr(self._lib, function)(handle)


_LOADING = threading.Lock()


def library() -> OneDNN | None:
    """The library, or None when it is not installed or does not load. ``GRAPHC_ONEDNN=0`` leaves it out."""
    with _LOADING:  # worker threads ask at the same time, and loading the library sets variables of the process
        return _loaded()


@functools.lru_cache(maxsize=1)
def _loaded() -> OneDNN | None:
    if os.environ.get("GRAPHC_ONEDNN") == "0":
        return None
    for path in _candidates():
        try:
            return OneDNN(path)
        except (OSError, AttributeError, OneDnnError):
            continue
    return None


def _candidates() -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("onednn-cpu-gomp") or ():
            if file.name == "libdnnl.so.3":
                yield Path(str(file.locate()))
    installed = Path(sys.prefix) / "lib" / "libdnnl.so.3"
    if installed.exists():
        yield installed


@contextlib.contextmanager
def _resting_threads() -> Iterator[None]:
    """Make OpenMP threads wait for about 50 µs and then sleep; the library reads these variables when it is loaded.

    By default they spin for milliseconds and take the core from the thread that runs the next kernel. Waking one takes 20 to
    50 µs. With 2.5 times as many pauses, ms of a step in two threads of Zen 5 cores, alone and beside a process that keeps one
    of them busy: LeNet 1.12 → 1.10 and 7.8 → 11, MLP 1.03 → 1.02 and 3.2 → 5.1, SqueezeNet 28 → 27 and 92 → 118.
    """
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    if any(name in os.environ for name in names):
        yield
        return
    pauses = 2000 if processor().name.startswith("znver") else 1000  # one takes 25 ns on AMD's cores, 50 on Intel's
    os.environ["GOMP_SPINCOUNT"] = str(pauses)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]
