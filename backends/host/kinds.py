"""C types of kernels, and LLVM values that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import ir as ll

I1, I8, I16, I32, I64 = (ll.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ll.FloatType(), ll.DoubleType()

KINDS: Mapping[str, tuple[ll.Type, int, bool]] = {
    "bool": (I1, 0, False),
    "char": (I8, 1, True),
    "signed char": (I8, 1, True),
    "unsigned char": (I8, 1, False),
    "short": (I16, 2, True),
    "unsigned short": (I16, 2, False),
    "half_bits": (I16, 2, False),
    "bfloat_bits": (I16, 2, False),
    "int": (I32, 3, True),
    "unsigned int": (I32, 4, False),
    "long long": (I64, 5, True),
    "INDEX": (I64, 5, True),
    "unsigned long long": (I64, 6, False),
    "float": (F32, 7, True),
    "double": (F64, 8, True),
}
"""C type → LLVM type, rank in C's conversions, signed."""


@dataclass(frozen=True, slots=True)
class Typed:
    """An LLVM value and its C type."""

    value: Any
    kind: str

    @property
    def rank(self) -> int:
        return KINDS[self.kind][1]

    @property
    def signed(self) -> bool:
        return KINDS[self.kind][2]

    @property
    def is_float(self) -> bool:
        return self.rank >= 7
