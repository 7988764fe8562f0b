"""C types of the element types: storage, loads, stores, literals and casts.

Half precisions are stored as 16 bits and computed in float; a value is rounded when it is stored and at a Cast, not between the
ops of one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

STORAGE: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "half_bits",
    ir.DataType.BFLOAT16: "bfloat_bits",
    ir.DataType.INT8: "signed char",
    ir.DataType.INT16: "short",
    ir.DataType.INT32: "int",
    ir.DataType.INT64: "long long",
    ir.DataType.UINT8: "unsigned char",
    ir.DataType.UINT16: "unsigned short",
    ir.DataType.UINT32: "unsigned int",
    ir.DataType.UINT64: "unsigned long long",
    ir.DataType.BOOL: "unsigned char",
    ir.DataType.FLOAT8E4M3FN: "unsigned char",
    ir.DataType.FLOAT8E4M3FNUZ: "unsigned char",
    ir.DataType.FLOAT8E5M2: "unsigned char",
    ir.DataType.FLOAT8E5M2FNUZ: "unsigned char",
    ir.DataType.FLOAT8E8M0: "unsigned char",
    ir.DataType.FLOAT4E2M1: "unsigned char",
    ir.DataType.INT4: "signed char",
    ir.DataType.UINT4: "unsigned char",
    ir.DataType.INT2: "signed char",
    ir.DataType.UINT2: "unsigned char",
}
"""Element type → C type in memory."""

HALVES = {ir.DataType.FLOAT16: "half", ir.DataType.BFLOAT16: "bfloat"}

SMALL = {
    ir.DataType.FLOAT8E4M3FN: "e4m3fn", ir.DataType.FLOAT8E4M3FNUZ: "e4m3fnuz", ir.DataType.FLOAT8E5M2: "e5m2",
    ir.DataType.FLOAT8E5M2FNUZ: "e5m2fnuz", ir.DataType.FLOAT8E8M0: "e8m0", ir.DataType.FLOAT4E2M1: "e2m1",
}  # fmt: skip
"""Floats of a byte or less, computed in float (``codegen/device_functions``)."""

BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT2: 2, ir.DataType.UINT2: 2}
"""Integers of less than a byte; each takes one byte, as in numpy."""


NARROW = dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16), "int")
NARROW[ir.DataType.UINT32] = "long long"
"""Integer types that a float reaches through a wider integer, so that overflow and negative values keep the low bits."""


def compute_type(dtype: ir.DataType) -> str:
    """The C type that computes values of ``dtype``."""
    if dtype in HALVES or dtype in SMALL:
        return "float"
    return "bool" if dtype == ir.DataType.BOOL else "int" if dtype in BITS else STORAGE[dtype]


def stored_bytes(dtype: ir.DataType) -> int:
    """Bytes of an element in memory."""
    return max(1, int(dtype.itemsize))


def load(dtype: ir.DataType, place: str) -> str:
    """C text that loads the value at ``place``."""
    if dtype in HALVES:
        return f"{HALVES[dtype]}_load({place})"
    if dtype in SMALL:
        return f"{SMALL[dtype]}::load({place})"
    if dtype in BITS:
        return wrapped(dtype, f"(int){place}")
    return f"({place} != 0)" if dtype == ir.DataType.BOOL else place


def stored(dtype: ir.DataType, value: str) -> str:
    """``value`` converted to its storage type."""
    if dtype in HALVES:
        return f"{HALVES[dtype]}_store({value})"
    return f"{SMALL[dtype]}::store({value}, false)" if dtype in SMALL else f"({STORAGE[dtype]}){value}"


def wrapped(dtype: ir.DataType, value: str) -> str:
    """The low bits of ``value``, as many as ``dtype`` has."""
    shift = 32 - BITS[dtype]
    if STORAGE[dtype] == "signed char":
        return f"((int)((unsigned int)({value}) << {shift}) >> {shift})"
    return f"(({value}) & {(1 << BITS[dtype]) - 1})"


def store(dtype: ir.DataType, place: str, value: str) -> str:
    """The statement that writes ``value``."""
    return f"{place} = {stored(dtype, value) if dtype in HALVES or dtype in SMALL else value};"


def literal(dtype: ir.DataType, value: Any) -> str:
    """A number as a C literal of the compute type."""
    if dtype == ir.DataType.BOOL:
        return "true" if value else "false"
    if not dtype.is_floating_point():
        whole = int(value)
        suffix = {"long long": "LL", "unsigned long long": "ULL", "unsigned int": "U"}.get(compute_type(dtype), "")
        return f"({whole + 1}{suffix} - 1)" if whole == np.iinfo(np.int64).min else f"({whole}{suffix})"
    number, single = float(value), compute_type(dtype) == "float"
    if math.isnan(number):
        return "NAN_VALUE" if single else "((double)NAN_VALUE)"
    if math.isinf(number):
        sign = "-" if number < 0 else ""
        return f"({sign}INFINITY_VALUE)" if single else f"({sign}(double)INFINITY_VALUE)"
    return f"({float(np.float32(number))!r}f)" if single else f"({number!r})"


def cast(source: ir.DataType, target: ir.DataType, value: str, node: ir.Node) -> str:
    """``value`` converted between the compute types of ``source`` and ``target``; ``node``: the Cast, which gives the
    rounding.
    """
    if source == target:
        return value
    if target == ir.DataType.BOOL:
        return f"({value} != 0)"
    if target in HALVES:
        return f"{HALVES[target]}_round((float){value})"
    saturate = "true" if node.attributes.get_int("saturate", 1) else "false"
    if target == ir.DataType.FLOAT8E8M0:
        way = ("up", "down", "nearest").index(node.attributes.get_string("round_mode", "up"))
        return f"e8m0::load(e8m0::rounded((float){value}, {saturate}, {way}))"
    if target in SMALL:
        return f"{SMALL[target]}::round((float){value}, {saturate})"
    if target in BITS:
        return wrapped(target, f"(int){value}")
    if source.is_floating_point() and target in NARROW:  # wraps as on CPUs; CUDA's own conversion saturates
        value = f"({NARROW[target]}){value}"
    return f"(({compute_type(target)}){value})"
