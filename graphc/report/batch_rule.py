"""States which batches a model file takes: any, those of one size, or any after a rewrite."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import batch_dim
from graphc.pipeline import PassCall, run


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Which batches a model takes.

    Attributes:
        size: the fixed batch of the file; None: it takes any.
        obstacle: why the batch of the file cannot change, with the node that prevents it; None: it can.
    """

    size: int | None
    obstacle: str | None = None

    def __str__(self) -> str:
        if self.size is None:
            return "dynamic: any batch"
        if self.obstacle is None:
            return f"fixed at {self.size}: other batches rewrite the model (rebatch)"
        return f"fixed at {self.size} and cannot be changed, {how_to_keep(self.size)}; {self.obstacle}"


def how_to_keep(size: int) -> str:
    """Say which options train a file at the batch it is fixed at."""
    return f"so it trains at --per-worker-batch {size}, or at {size} × K with --accumulate K"


def batch_rule(model: ir.Model) -> BatchRule:
    """Find out which batches ``model``, as a file holds it, takes.

    Raises:
        GraphcError: the model cannot be legalised.
    """
    copy = model.clone()
    size = batch_dim(copy.graph)
    if not isinstance(size, int):
        return BatchRule(None)
    ctx = run(copy, [PassCall("legalize")])
    try:
        run(copy, [PassCall("rebatch")], ctx)
    except ModelError as error:
        return BatchRule(size, str(error).splitlines()[0])
    return BatchRule(size)
