"""Ops that no gradient goes through, or none in places."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import declare, same_as


@declare("StopGradient", inputs="x", outputs="y", infer=same_as(0))
def stop_gradient(op: Builder, x: ir.Value) -> ir.Value:
    """y = x, a constant for the backward pass: PyTorch's ``detach``."""
    return op.Identity(x)  # type: ignore[no-any-return]


@declare("MaskGradient", inputs="x hidden", outputs="y", infer=same_as(0))
def mask_gradient(op: Builder, x: ir.Value, hidden: ir.Value) -> ir.Value:
    """y = x, a constant for the backward pass where ``hidden`` (bool, broadcast): the row of PyTorch's ``padding_idx``."""
    return op.Identity(x)  # type: ignore[no-any-return]
