"""Kernels that Numba compiles: without the GIL, keeping NaN and infinity.

``fastmath`` may reorder sums, fuse multiply-add and turn division by a constant into a product; it may not assume that
values are finite, since a diverging run must be detected.

Numba takes half a second to import and more to compile, so it is imported when a kernel is needed whose machine code no
earlier start has left (:mod:`graphc.backends.onnxruntime.machine_code`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from graphc.backends.host.processor import processor

F = TypeVar("F", bound="Callable[..., Any]")

_FASTMATH = {"contract", "reassoc", "arcp", "nsz"}


@functools.cache
def numba_package() -> Any:
    """Numba, imported on first use."""
    import llvmlite.binding  # late: see the module's docstring
    import numba

    llvmlite.binding.initialize_native_asmparser()  # kernels on matrix tiles hold assembly text
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = processor().name, processor().features  # type: ignore[attr-defined]
    return numba


class NumbaFunction:
    """A function that Numba compiles when machine code of it is wanted. Other such functions may call it; Python cannot.

    Args:
        function: in the subset of Python that Numba compiles.
        options: of ``numba.njit``.

    Attributes:
        py_func, targetoptions: function and options, under the names by which Numba looks for a callee to inline.
        place: ``module:name``, or ``module:factory[1,2]`` for what a :func:`specialized` factory makes of 1 and 2.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.__doc__ = function.__doc__
        self.py_func, self.targetoptions = function, options
        self.place = f"{function.__module__}:{function.__qualname__}"

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's own object for the function."""
        return numba_package().njit(self.py_func, **self.targetoptions)

    @property
    def _numba_type_(self) -> Any:
        """The type by which Numba knows a callee."""
        return numba_package().types.Dispatcher(self.dispatcher)


def _decorated(function: F, **options: Any) -> F:
    # callers bind it with the parameters of the function
    return NumbaFunction(function, nogil=True, boundscheck=False, error_model="numpy", **options)  # type: ignore[return-value]


def jit(function: F) -> F:
    """Compile on first use for the types of the arguments that are bound. The function allocates no arrays."""
    return _decorated(function, fastmath=_FASTMATH, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def exact(function: F) -> F:
    """Compile as :func:`jit` does, but round every operation as written."""
    # a function without a fastmath of its own takes that of its caller
    return _decorated(function, fastmath=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: F) -> F:
    """Make a function that is put into its callers before they are compiled."""
    return _decorated(function, inline="always")


def specialized(factory: Callable[..., F]) -> Callable[..., F]:
    """Keep the kernels that a factory makes, one for each list of whole numbers."""

    @functools.lru_cache(maxsize=64)
    def kernel(*numbers: int) -> F:
        function = factory(*numbers)
        function.place = f"{factory.__module__}:{factory.__qualname__}[{','.join(map(str, numbers))}]"  # type: ignore[attr-defined]
        return function

    return kernel
