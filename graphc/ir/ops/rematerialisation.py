"""Op in front of a recomputed region (see the ``recompute`` pass)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of


def _same(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [spec_of(v) for v in inputs]


@declare("Recompute", inputs="*saved", outputs="*again", attributes={"tag": REQUIRED}, infer=_same)
def recompute(op: Builder, *saved: ir.Value, tag: str) -> tuple[ir.Value, ...]:
    """The saved values under new names, from which a region of the forward pass is recomputed.

    ``tag`` is unique in the graph, so that the region is never merged with the first computation. A plan copies nothing
    here; it
    begins a new segment. In a file of standard ops it is the identity, and the recomputation is merged away.
    """
    return saved
