"""Copies of lines of an image for compiled kernels, with the padding at their ends.

Vectors are written by hand: where the index of an array might be negative Numba tests it, and such a loop is not vectorised.
"""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.vectors.functions import array_of, floats_at
from graphc.backends.onnxruntime.vectors.windows import padded_line

line1, line2, line4 = padded_line(1), padded_line(2), padded_line(4)


@jit
def filled(size, step, shift, count):
    """The first v, and the one behind the last, for which v · step + shift is below ``size`` and not negative, of ``count``."""
    first = min(count, max(0, -(shift // step)))
    return first, max(first, min(count, (size - 1 - shift) // step + 1))


@jit
def copy_padded_line(x, first, last, step, target, count):
    """target[v] = x[v · step] for v from ``first`` to below ``last``, else 0, for ``count`` floats.

    x and target are addresses. Up to a whole vector, zeros are written behind the last.
    """
    if step == 1:
        line1(x, first, last, target, count)
    elif step == 2:
        line2(x, first, last, target, count)
    elif step == 4:
        line4(x, first, last, target, count)
    else:
        line1(x, 0, 0, target, count)
        for v in range(first, last):
            array_of(floats_at(target + 4 * v), (1,))[0] = array_of(floats_at(x + 4 * v * step), (1,))[0]
