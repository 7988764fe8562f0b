"""Sums over the micro-batches of a step: an ``Accumulate`` runs its operands once each, its users once a step."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare, same_as


@declare("Accumulate", inputs="x", outputs="y", attributes={"steps": REQUIRED, "tree": 0}, infer=same_as(0))
def accumulate(op: Builder, x: ir.Value, *, steps: int, tree: int) -> ir.Value:
    """y = Σ x over the ``steps`` micro-batches of a training step; with a single one it is x, which is the decomposition.

    With ``tree`` the ``steps`` are those of all ranks together, and neighbours are added pairwise, then neighbouring pairs, and
    so on: the sum has the same bits however many ranks share the micro-batches.
    """
    return op.Identity(x)  # type: ignore[no-any-return]
