"""Matrix products inside compiled kernels, over parts of larger arrays."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from graphc.backends.host.compiler import compiler
from graphc.backends.onnxruntime.kernels.jit import inlined, numba_package, single_threaded_blas
from graphc.backends.onnxruntime.vectors.deferred import Deferred

_PLAIN, _TRANSPOSED = np.int8(ord("n")), np.int8(ord("t"))

_NAME = "graphc_sgemm"
"""By which compiled code knows the product."""

_TEXT = """
declare void @graphc_blas_sgemm(ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr)

define void @{name}(i8 %ta, i8 %tb, i64 %m, i64 %n, i64 %k, ptr %alpha, ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %beta, ptr %c,
                    i64 %ldc) {{
  %of.ta = alloca i8
  %of.tb = alloca i8
  store i8 %ta, ptr %of.ta
  store i8 %tb, ptr %of.tb
{numbers}
  call void @graphc_blas_sgemm(ptr %of.ta, ptr %of.tb, ptr %of.m, ptr %of.n, ptr %of.k, ptr %alpha, ptr %a, ptr %of.lda, ptr %b,
                               ptr %of.ldb, ptr %beta, ptr %c, ptr %of.ldc)
  ret void
}}
"""
"""BLAS takes letters and 32-bit numbers by address."""


@functools.cache
def open_blas() -> None:
    """Let compiled code find the product: SciPy's BLAS, limited to one thread, since the pool's threads call it in parallel."""
    llvm.add_symbol("graphc_blas_sgemm", _address())
    numbers = "\n".join(
        f"  %of.{n} = alloca i32\n  %short.{n} = trunc i64 %{n} to i32\n  store i32 %short.{n}, ptr %of.{n}"
        for n in ("m", "n", "k", "lda", "ldb", "ldc")
    )
    llvm.add_symbol(_NAME, compiler().address_of("sgemm", lambda name: _TEXT.format(name=name, numbers=numbers)))
    single_threaded_blas()


def _address() -> int:
    """The address of sgemm in the BLAS of SciPy, which takes a quarter of a second to import: its wheels hold a library."""
    spec = importlib.util.find_spec("scipy")
    if spec is not None and spec.origin is not None:
        for path in sorted((Path(spec.origin).parents[1] / "scipy.libs").glob("libscipy_openblas-*.so")):
            function = getattr(ctypes.CDLL(str(path)), "scipy_sgemm_", None)
            if function is not None:
                return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
    capsule = importlib.import_module("scipy.linalg.cython_blas").__pyx_capi__["sgemm"]
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, name(capsule)))


def external_function() -> Any:
    """The product for Numba."""
    types = numba_package().types
    sizes, address = (types.intp,) * 3, types.uintp
    of_a_and_b = (address, address, types.intp, address, types.intp)
    return types.ExternalFunction(_NAME, types.void(types.int8, types.int8, *sizes, *of_a_and_b, address, address, types.intp))


_sgemm: Any = Deferred(__name__, "external_function")


@inlined
def product(transpose_a, transpose_b, m, n, k, alpha, a, step_a, b, step_b, beta, c, step_c):
    """c = alpha·a'·b' + beta·c over float32 matrices in row-major order; :func:`open_blas` comes first.

    ``a'`` is m × k, ``b'`` k × n, ``c`` m × n; ``a``, ``b``, ``c``, ``alpha`` and ``beta`` are addresses, strides go from row
    to row. BLAS is column-major, so it computes the transpose, cᵀ = b'ᵀ·a'ᵀ.
    """
    first, second = _TRANSPOSED if transpose_b else _PLAIN, _TRANSPOSED if transpose_a else _PLAIN
    _sgemm(first, second, n, m, k, alpha, b, step_b, a, step_a, beta, c, step_c)
