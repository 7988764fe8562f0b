"""Reads what PyTorch's exporter records in a file about its initializers and nodes.

The exporter of ``torch.export`` programs writes which initializer is a parameter and which a buffer, from what a folded
one was computed, and which operator a node stands for. Other files hold no such record.
"""

from __future__ import annotations

import re

import onnx_ir as ir

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_FX_NODE = "pkg.torch.onnx.fx_node"
_PADDING = re.compile(r"torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+, (\d+)")
_SPEC = re.compile(r": (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'")


def recorded_kinds(graph: ir.Graph) -> dict[str, str]:
    """Name → ``PARAMETER``, ``BUFFER`` or ``CONSTANT_TENSOR``; empty where nothing is recorded."""
    return {name: kind for kind, name in _SPEC.findall(graph.metadata_props.get(_SIGNATURE, ""))}


def folded_from(value: ir.Value) -> list[str] | None:
    """Names of the values from which the exporter computed an initializer; None where it did not."""
    text = value.metadata_props.get(_FOLDED)
    return re.findall(r"'([^']+)'", text) if text is not None else None


def stands_for(node: ir.Node, operator: str) -> bool:
    """Whether the exporter wrote the node for this operator of PyTorch (``detach``)."""
    return f"torch.ops.aten.{operator}." in node.metadata_props.get(_FX_NODE, "")


def is_detached(node: ir.Node) -> bool:
    """Whether an ``Identity`` stands for PyTorch's ``detach``, through which no gradient goes."""
    return node.op_type == "Identity" and stands_for(node, "detach")


def padding_row(node: ir.Node) -> int | None:
    """The row of a table that an embedding reads for padding and does not train (``padding_idx``); None without one."""
    found = _PADDING.search(node.metadata_props.get(_FX_NODE, "")) if node.op_type == "Gather" else None
    return int(found[1]) if found is not None else None
