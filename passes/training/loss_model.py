"""Uses an ONNX model as a loss: its nodes are copied into the training graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphc.errors import ModelError, UnsupportedOpError, UsageError
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import array_of, describe, describe_value, rank
from graphc.ir.names import find_value
from graphc.pipeline import PASSES, Context

_SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def inline_model(graph: ir.Graph, ctx: Context, op: Builder, path: str) -> dict[str, ir.Value]:
    """Copy the nodes of the ONNX file ``path`` into ``graph``; returns the values of its outputs.

    Its inputs are values of ``graph`` where the names agree, and new graph inputs elsewhere. Its weights become constants:
    a loss does not train.

    Raises:
        ModelError: the file cannot be read.
        UsageError: an input whose type does not fit the value of its name.
        UnsupportedOpError: control flow in the loss model.
    """
    other = _load(path)
    PASSES["legalize"].function(other, ctx)
    source = other.graph
    known: dict[ir.Value, ir.Value] = {value: _matched(graph, value, path) for value in source.inputs}
    for value in source.initializers.values():
        if value not in known:
            known[value] = op.const(array_of(value))
    for node in source:
        if any(attr.type in _SUBGRAPHS for attr in node.attributes.values()):
            raise UnsupportedOpError(f"{path}: control flow in a loss model: {describe(node)}")
        inputs = [None if v is None else known[v] for v in node.inputs]
        attributes: dict[str, Any] = dict(node.attributes)
        if node.domain == DOMAIN:
            attributes = {k: attr.value for k, attr in node.attributes.items()}
        outputs = op.emit(
            node.op_type, inputs, attributes, domain=node.domain, outputs=len(node.outputs), name=f"{op.scope}/{node.name}"
        )
        known.update(zip(node.outputs, outputs, strict=True))
    return {value.name or "": known[value] for value in source.outputs}


def _load(path: str) -> ir.Model:
    if not Path(path).is_file():
        raise UsageError(f"the loss model {path} does not exist")
    try:
        return ir.load(path)
    except Exception as error:  # protobuf and onnx_ir raise many types for a broken file
        raise ModelError(f"the loss model {path} cannot be read: {error}") from error


def _matched(graph: ir.Graph, value: ir.Value, path: str) -> ir.Value:
    try:
        found = find_value(graph, value.name or "")
    except UsageError:
        new = ir.Value(name=value.name, type=value.type, shape=value.shape)
        graph.inputs.append(new)
        return new
    if found.dtype != value.dtype or (found.shape is not None and value.shape is not None and rank(found) != rank(value)):
        raise UsageError(f"{path} wants {describe_value(value)}, but the model has {describe_value(found)}")
    return found
