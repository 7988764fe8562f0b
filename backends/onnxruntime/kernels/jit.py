"""Compiles native kernels with Numba: without the GIL, cached on disk, keeping NaN and infinity.

``fastmath`` may reorder sums, fuse multiply-add and turn division by a constant into a product; it may not assume that
values are finite, since a diverging run must be detected.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import threadpoolctl

from graphc.cache_folder import cache_folder

F = TypeVar("F", bound="Callable[..., Any]")

_FASTMATH = {"contract", "reassoc", "arcp", "nsz"}


def sources_digest(folder: Path) -> str:
    """A digest of all Python sources below a folder.

    Numba compares the file of a cached kernel alone. The machine code holds functions of other files too, and would outlive a
    change of theirs.
    """
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(str(f.relative_to(folder)).encode() + f.read_bytes() for f in files)).hexdigest()[:16]


if not os.environ.get("NUMBA_CACHE_DIR"):
    # Numba's own choice, a folder beside this file or among the temporary ones, may belong to somebody else.
    numba.config.CACHE_DIR = str(cache_folder() / "numba" / sources_digest(Path(__file__).parents[1]))  # type: ignore[attr-defined]


def jit(function: F) -> F:
    """Compile on first call for the argument types of that call."""
    return numba.njit(function, nogil=True, cache=True, fastmath=_FASTMATH, boundscheck=False, error_model="numpy")  # type: ignore[no-any-return]


def exact(function: F) -> F:
    """Compile as :func:`jit` does, but round every operation as written."""
    # a function without a fastmath of its own takes that of its caller
    return numba.njit(function, nogil=True, cache=True, fastmath=False, boundscheck=False, error_model="numpy")  # type: ignore[no-any-return]


def single_threaded_blas() -> None:
    """Limit the BLAS behind ``np.dot`` in compiled code (SciPy's) to one thread: the pool's threads call it in parallel."""
    import scipy.linalg.cython_blas  # noqa: F401 - loads the library that is limited below

    for controller in threadpoolctl.ThreadpoolController().lib_controllers:
        if controller.user_api == "blas" and "scipy" in controller.filepath.replace(os.sep, "/"):
            controller.set_num_threads(1)
