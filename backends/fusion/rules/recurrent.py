"""Decomposes recurrences into loops over fused kernels and products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphc.backends.fusion.rules.table import rule
from graphc.ir.builder import Builder
from graphc.ir.facts import shape_of
from graphc.ir.ops.recurrent import recurrence
from graphc.ir.subgraphs import copy_body


@rule("RNN", "GRU", "LSTM")
def as_scan(op: Builder, node: ir.Node) -> Sequence[Any]:
    """One product with the whole input, then a Scan over time."""
    return list(recurrence(op, node))


@rule("Scan")
def over_the_first_axis(op: Builder, node: ir.Node) -> Sequence[Any] | None:
    """Scan along other axes: move slices to the front, and results back."""
    before, after = (_axes(node, f"scan_{way}_axes") for way in ("input", "output"))
    if not any(before) and not any(after):
        return None
    width = node.attributes["num_scan_inputs"].as_int()
    states = len(node.inputs) - width
    inputs = list(node.inputs)
    for k in range(width):
        inputs[states + k] = _moved(op, inputs[states + k], before[k] if before else 0, 0)
    kept = {n: a for n, a in node.attributes.items() if not n.endswith("_axes") and n != "body"}
    body = copy_body(op, node.attributes["body"].as_graph(), {})
    made = list(op.emit("Scan", inputs, {**kept, "body": ir.AttrGraph("body", body)}, outputs=len(node.outputs)))
    for k in range(states, len(made)):
        made[k] = _moved(op, made[k], 0, after[k - states] if after else 0)
    return made


def _axes(node: ir.Node, name: str) -> Sequence[int]:
    return node.attributes[name].as_ints() if name in node.attributes else ()


def _moved(op: Builder, value: Any, source: int, target: int) -> Any:
    rank = len(shape_of(value))
    order = [k for k in range(rank) if k != source % rank]
    order.insert(target % rank, source % rank)
    return value if order == list(range(rank)) else op.Transpose(value, perm=order)
