"""The op that no gradient goes through."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import declare, same_as


@declare("StopGradient", inputs="x", outputs="y", infer=same_as(0))
def stop_gradient(op: Builder, x: ir.Value) -> ir.Value:
    """y = x, a constant for the backward pass: PyTorch's ``detach``."""
    return op.Identity(x)  # type: ignore[no-any-return]
