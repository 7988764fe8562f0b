"""Masks that are held as bits: a byte holds eight elements."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import DOMAIN

PACKED, UNPACKED = "PackedMask", "UnpackedMask"
"""Ops of segments: the bits of a mask, and the mask of bits."""

BITS = 8
"""Elements of a mask in one byte, the first in the lowest bit; kernels that write a mask take vectors of so many."""


def packs(value: ir.Value) -> bool:
    """Whether ``value`` holds the bits of a mask."""
    producer = value.producer()
    return producer is not None and producer.op_type == PACKED and producer.domain == DOMAIN
