"""Reads what PyTorch's exporter records in a file about its initializers.

The exporter of ``torch.export`` programs writes which initializer is a parameter and which a buffer, and from what a folded
one was computed. Other files hold no such record.
"""

from __future__ import annotations

import re

import onnx_ir as ir

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_SPEC = re.compile(r": (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'")


def recorded_kinds(graph: ir.Graph) -> dict[str, str]:
    """Name → ``PARAMETER``, ``BUFFER`` or ``CONSTANT_TENSOR``; empty where nothing is recorded."""
    return {name: kind for kind, name in _SPEC.findall(graph.metadata_props.get(_SIGNATURE, ""))}


def folded_from(value: ir.Value) -> list[str] | None:
    """Names of the values from which the exporter computed an initializer; None where it did not."""
    text = value.metadata_props.get(_FOLDED)
    return re.findall(r"'([^']+)'", text) if text is not None else None
