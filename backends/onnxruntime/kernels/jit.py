"""Compiles native kernels with Numba: without the GIL, cached on disk, keeping NaN and infinity.

``fastmath`` may reorder sums, fuse multiply-add and turn division by a constant into a product; it may not assume that
values are finite, since a diverging run must be detected.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import threadpoolctl

F = TypeVar("F", bound="Callable[..., Any]")

_FASTMATH = {"contract", "reassoc", "arcp", "nsz"}


def _cache_is_usable() -> bool:
    """Whether Numba finds a cache directory: beside this file, else in the user's cache directory.

    When neither can be written, a directory among the temporary files is used; if that is not writable, caching is off.
    """
    if os.environ.get("NUMBA_CACHE_DIR"):
        return True
    if os.access(Path(__file__).parent, os.W_OK):
        return True
    home = Path(os.path.expanduser("~"))
    cache = Path(os.environ.get("XDG_CACHE_HOME", home / ".cache"))
    existing = next((p for p in (cache, *cache.parents) if p.exists()), home)
    if os.access(existing, os.W_OK):
        return True
    fallback = Path(tempfile.gettempdir()) / f"graphc-numba-{os.getuid() if hasattr(os, 'getuid') else 0}"
    try:
        fallback.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    if not os.access(fallback, os.W_OK):
        return False
    numba.config.CACHE_DIR = str(fallback)  # type: ignore[attr-defined]
    return True


_CACHE = _cache_is_usable()


def jit(function: F) -> F:
    """Compile on first call for the argument types of that call."""
    return numba.njit(function, nogil=True, cache=_CACHE, fastmath=_FASTMATH, boundscheck=False, error_model="numpy")  # type: ignore[no-any-return]


def exact(function: F) -> F:
    """Compile as :func:`jit` does, but round every operation as written."""
    return numba.njit(function, nogil=True, cache=_CACHE, boundscheck=False, error_model="numpy")  # type: ignore[no-any-return]


def single_threaded_blas() -> None:
    """Limit the BLAS behind ``np.dot`` in compiled code (SciPy's) to one thread: the pool's threads call it in parallel."""
    import scipy.linalg.cython_blas  # noqa: F401 - loads the library that is limited below

    for controller in threadpoolctl.ThreadpoolController().lib_controllers:
        if controller.user_api == "blas" and "scipy" in controller.filepath.replace(os.sep, "/"):
            controller.set_num_threads(1)
