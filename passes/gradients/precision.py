"""Gradients of the mixed precision ops."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder

zero_gradient("graphc::AnyNonFinite", "graphc::AnyNonFiniteOr", origin=__name__)


@gradient("graphc::ScaleLoss")
def scale_loss(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = total (the reported loss);  ∂total = scale·dy"""
    _, scale = operands(node, 2)
    return lambda: op.Mul(dy, op.cast_like(scale, dy)), None
