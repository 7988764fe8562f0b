"""Finds the reductions of a graph, for strategies that replace them."""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.facts import input_of, producer_of
from graphc.ir.updates import gradient_of


def gradient_reductions(graph: ir.Graph, strategy: str) -> list[ir.Node]:
    """The AllReduces of the optimizer's gradients, in node order.

    Raises:
        UsageError: a gradient that another op computes.
    """
    wanted: set[ir.Node] = set()
    for node in graph:
        gradient = gradient_of(node)
        if gradient is None:
            continue
        producer = gradient.producer()
        if producer is None or not _is_plain_sum(producer):
            raise UsageError(f"strategy {strategy!r} needs plain reduced gradients; remove compress and other strategies")
        wanted.add(producer)
    return [node for node in graph if node in wanted]


def _is_plain_sum(node: ir.Node) -> bool:
    attributes = node.attributes
    plain = attributes.get_string("reduce", "sum") == "sum" and not attributes.get_int("nonzero", 0)
    return node.op_type == "AllReduce" and node.domain == "graphc" and plain


def reduced_weight(graph: ir.Graph) -> ir.Value | None:
    """The summed weight that divides the reported loss, if it is a mean."""
    return _reduced_operand(graph, 1)


def reduced_total(graph: ir.Graph) -> ir.Value | None:
    """The summed total of the reported loss."""
    return _reduced_operand(graph, 0)


def operand_of(reduced: ir.Value) -> ir.Value:
    """This rank's own value: the operand of the AllReduce that computes ``value``."""
    return input_of(producer_of(reduced), reduced.index() or 0)


def _reduced_operand(graph: ir.Graph, index: int) -> ir.Value | None:
    for node in graph:
        if node.op_type == "Mean" and node.domain == "graphc" and len(node.inputs) > index:
            value = node.inputs[index]
            producer = value.producer() if value is not None else None
            if producer is not None and producer.op_type == "AllReduce":
                return value
    return None
