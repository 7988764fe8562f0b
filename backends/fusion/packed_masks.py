"""Masks packed into bits: eight elements a byte."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN

PACKED, UNPACKED = "PackedMask", "UnpackedMask"
"""Segment ops that pack a mask into bits and unpack it."""

BITS = 8
"""Mask elements in a byte, the first in the lowest bit; kernels that write a mask use vectors of this length."""


def packs(value: ir.Value) -> bool:
    """Whether ``value`` holds a packed mask."""
    producer = value.producer()
    return producer is not None and producer.op_type == PACKED and producer.domain == DOMAIN
