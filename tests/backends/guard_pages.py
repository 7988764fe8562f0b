"""Arrays that end right before a page that may not be touched, or begin right after one: an access beyond them is a SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Side = Literal["before", "behind"]

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(array: Array, side: Side) -> Array:
    """A copy of ``array`` with a closed page right ``before`` or right ``behind`` it, and another on its far side.

    The start of a copy with the page behind it has the alignment of its size; kernels must take any.
    """
    pages = max(1, -(-array.nbytes // _PAGE))
    held = mmap.mmap(-1, (pages + 2) * _PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(held))
    for place in (base, base + (pages + 1) * _PAGE):
        if _libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(_PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = _PAGE if side == "before" else (pages + 1) * _PAGE - array.nbytes
    copy = np.frombuffer(held, np.uint8, array.nbytes, offset).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
