"""Matrix products inside compiled kernels, over parts of larger arrays."""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.np import linalg

_SINGLE, _PLAIN, _TRANSPOSED = np.int8(ord("s")), np.int8(ord("n")), np.int8(ord("t"))

# the BLAS function of SciPy that Numba uses for np.dot, which takes contiguous arrays only
linalg.ensure_blas()
_sgemm = types.ExternalFunction(
    "numba_xxgemm",
    types.int32(
        *(types.int8, types.int8, types.int8, types.intp, types.intp, types.intp),
        *(types.uintp, types.uintp, types.intp, types.uintp, types.intp, types.uintp, types.uintp, types.intp),
    ),
)


@numba.njit(inline="always")
def product(transpose_a, transpose_b, m, n, k, alpha, a, step_a, b, step_b, beta, c, step_c):
    """c = alpha·a'·b' + beta·c over float32 matrices in row-major order.

    ``a'`` is m × k, ``b'`` k × n, ``c`` m × n; ``a``, ``b``, ``c``, ``alpha`` and ``beta`` are addresses, strides go from row
    to row. BLAS is column-major, so it computes the transpose, cᵀ = b'ᵀ·a'ᵀ.
    """
    first, second = _TRANSPOSED if transpose_b else _PLAIN, _TRANSPOSED if transpose_a else _PLAIN
    _sgemm(_SINGLE, first, second, n, m, k, alpha, b, step_b, a, step_a, beta, c, step_c)
