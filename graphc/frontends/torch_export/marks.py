"""Nodes of graphc's own in captured programs, and functions that define them in the file for who runs it without graphc.

z = graphc.TakeAdjoint(y, adjoint, through)          function TakeAdjoint(y, adjoint, through) { z = Identity(y) }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops  # defines the operator

from graphc.ir import DOMAIN

OPERATOR = torch.ops.onnx_symbolic._symbolic.default
"""PyTorch's stand-in for any node of ONNX, whose operands and attributes are arguments of it."""

_FUNCTIONS = {
    "BufferValue": ("Identity", "stored current", "updates"),
    "AdjointOf": ("Sub", "y", "call"),
    "AddAdjoint": ("Identity", "through x dx", None),
    "TakeAdjoint": ("Identity", "y adjoint through", None),
    "StopGradient": ("Identity", "x", None),
}
"""Kind of node → what it computes of its first operand outside graphc, its operands, its attribute."""


def arguments(kind: str, inputs: Sequence[Any], like: torch.Tensor, attributes: Mapping[str, int | str]) -> tuple[Any, Any]:
    """Arguments of :data:`OPERATOR`, by place and by name, for a node whose result has the type and shape of ``like``."""
    numbers = {name: value for name, value in attributes.items() if isinstance(value, int)}
    texts = {name: value for name, value in attributes.items() if isinstance(value, str)}
    places = [(k, k + 1) for group in (numbers, texts) for k in range(len(group))]
    named = {
        "shape": list(like.shape),
        "attr_keys": [*numbers, *texts],
        "attr_types": ["i"] * len(numbers) + ["s"] * len(texts),
        "attr_pos": places,
        "attr_ints": list(numbers.values()),
        "attr_floats": [],
        "attr_strs": list(texts.values()),
        "metadata_props_keys": [],
        "metadata_props_values": [],
        "domain": DOMAIN,
        "version": 1,
    }
    return (list(inputs), kind, int(ir.tensor_adapters.from_torch_dtype(like.dtype))), named


def define(model: ir.Model) -> None:
    """Give the file a function for each kind of node of graphc's own in it."""
    for kind in dict.fromkeys(node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN):
        if kind not in _FUNCTIONS:
            continue
        model.opset_imports[DOMAIN] = 1
        model.functions[DOMAIN, kind, ""] = _function(kind, model.opset_imports[""])


def _function(kind: str, version: int) -> ir.Function:
    op_type, names, attribute = _FUNCTIONS[kind]
    inputs = [ir.Value(name=name) for name in names.split()]
    operands = inputs[:1] if op_type == "Identity" else [inputs[0], inputs[0]]
    body = ir.node(op_type, operands, outputs=[ir.Value(name="result")])
    graph = ir.Graph(inputs, body.outputs, nodes=[body], opset_imports={"": version}, name=kind)
    attributes = [ir.Attr(attribute, ir.AttributeType.INT, None)] if attribute else []
    return ir.Function(DOMAIN, kind, graph=graph, attributes=attributes)
