"""Sums over the micro-batches of a step: ``Accumulate`` runs per micro-batch, its users once per step."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare, same_as


@declare("Accumulate", inputs="x", outputs="y", attributes={"steps": REQUIRED, "tree": 0}, infer=same_as(0))
def accumulate(op: Builder, x: ir.Value, *, steps: int, tree: int) -> ir.Value:
    """y = Σ x over the ``steps`` micro-batches of a training step; with one micro-batch y = x, the decomposition.

    With ``tree``, ``steps`` counts the micro-batches of all ranks together, and the sum is taken pairwise over neighbours,
    level
    by level: it has the same bits for every number of ranks.
    """
    return op.Identity(x)  # type: ignore[no-any-return]
