"""Sums over the micro-batches of a step: what stands in front of an ``Accumulate`` runs for each, what follows it once."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare, same_as


@declare("Accumulate", inputs="x", outputs="y", attributes={"steps": REQUIRED}, infer=same_as(0))
def accumulate(op: Builder, x: ir.Value, *, steps: int) -> ir.Value:
    """y = Σ x over the ``steps`` micro-batches of a training step; with a single one it is x, which is the decomposition."""
    return op.Identity(x)  # type: ignore[no-any-return]
