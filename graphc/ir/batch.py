"""Which axis of a graph's inputs is the batch."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.facts import dims


def batched_input(graph: ir.Graph) -> ir.Value | None:
    """The input whose first axis is the batch: the first input that has axes; None if there is none."""
    return next((value for value in graph.inputs if dims(value)), None)
