"""Elementary float32 functions that compile to vector instructions."""

from __future__ import annotations

import numpy as np

from graphc.backends.onnxruntime.kernels.common.jit import inlined, jit

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that n · _LN2_HIGH is exact
_LN2_LOW = np.float32(-2.12194440e-4)


@inlined
def exp(x):
    """eˣ of a float32 to about one unit in the last place; 0 below -87.3 and e⁸⁸ above 88; NaN stays NaN.

    x = n·ln 2 + r, then a polynomial in r (Cephes' expf, S. Moshier) and 2ⁿ by its bit pattern.
    """
    bounded = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.floor(bounded * _LOG2E + np.float32(0.5))
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    exponent = np.int32(n) + np.int32(127)
    power = np.int32(exponent << np.int32(23)).view(np.float32)
    return np.float32(0.0) if bounded < np.float32(-87.3) else p * power


@inlined
def log(x):
    """Logarithm of a float32 that is at least 1 (or NaN) to about one unit in the last place (Cephes' logf, S. Moshier)."""
    shifted = np.float32(x).view(np.int32) - np.int32(0x3F3504F3)
    e = np.float32(shifted >> np.int32(23))
    m = np.int32((shifted & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - np.float32(1.0)
    z = m * m
    p = np.float32(7.0376836292e-2)
    p = p * m - np.float32(1.1514610310e-1)
    p = p * m + np.float32(1.1676998740e-1)
    p = p * m - np.float32(1.2420140846e-1)
    p = p * m + np.float32(1.4249322787e-1)
    p = p * m - np.float32(1.6668057665e-1)
    p = p * m + np.float32(2.0000714765e-1)
    p = p * m - np.float32(2.4999993993e-1)
    p = p * m + np.float32(3.3333331174e-1)
    y = p * m * z + e * _LN2_LOW - np.float32(0.5) * z
    result = m + y + e * _LN2_HIGH
    return result if x < np.float32(np.inf) else x


@jit
def highest_of(row):
    """Maximum of two floats by comparing their bit patterns as integers, which vectorises."""
    rest = np.int32(0x7FFFFFFF)
    best = np.int32(-0x80000000)
    for c in range(row.size):
        bits = np.float32(row[c]).view(np.int32)
        best = max(best, bits ^ ((bits >> np.int32(31)) & rest))
    return np.int32(best ^ ((best >> np.int32(31)) & rest)).view(np.float32)
