"""Gradients of collectives; see :mod:`graphc.ir.ops.collectives` for what ``adjoint`` says about a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, operands
from graphc.ir.builder import Builder
from graphc.ir.declare import required_declaration
from graphc.ir.facts import describe, dtype_of, static_dims

Adjoints = Sequence["ir.Value | None"]


@gradient("graphc::AllReduce")
def all_reduce(op: Builder, node: ir.Node, *dys: ir.Value | None) -> Any:
    """y = Σx over the ranks;  ∂x = Σ∂y over the ranks (mean alike);  with adjoint=whole  ∂x = ∂y"""
    values = _values(node)
    if values["reduce"] not in ("sum", "mean"):
        raise UnsupportedOpError(f"no gradient for AllReduce with reduce={values['reduce']!r}: {describe(node)}")
    if values["adjoint"] == "whole" and values["reduce"] == "sum":
        return dys
    return _emit(op, node, "AllReduce", dys, reduce=values["reduce"])


@gradient("graphc::Broadcast")
def broadcast(op: Builder, node: ir.Node, *dys: ir.Value | None) -> Any:
    """y = x of the root;  ∂x = Σ∂y over the ranks at the root, else 0"""
    return _emit(op, node, "Reduce", dys, root=_values(node)["root"])


@gradient("graphc::Reduce")
def reduce(op: Builder, node: ir.Node, *dys: ir.Value | None) -> Any:
    """y = Σx over the ranks at the root, else 0;  ∂x = ∂y of the root"""
    values = _values(node)
    if values["reduce"] != "sum":
        raise UnsupportedOpError(f"no gradient for Reduce with reduce={values['reduce']!r}: {describe(node)}")
    return _emit(op, node, "Broadcast", dys, root=values["root"])


@gradient("graphc::Barrier")
def barrier(op: Builder, node: ir.Node, *dys: ir.Value | None) -> Any:
    """y = x;  ∂x = ∂y"""
    return dys


@gradient("graphc::AllGatherStack")
def all_gather_stack(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y[r] = x of rank r;  ∂x = Σ∂y[own rank] over the ranks;  with adjoint=whole  ∂x = ∂y[own rank]"""
    size = _values(node)["size"]
    return _one(op, node, "OwnPart" if _values(node)["adjoint"] == "whole" else "ReduceScatterStack", dy, size=size)


@gradient("graphc::ReduceScatterStack")
def reduce_scatter_stack(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = Σx[own rank] over the ranks;  ∂x[r] = ∂y of rank r"""
    values = _values(node)
    if values["reduce"] != "sum":
        raise UnsupportedOpError(f"no gradient for ReduceScatterStack with reduce={values['reduce']!r}: {describe(node)}")
    return _one(op, node, "AllGatherStack", dy, size=values["size"])


@gradient("graphc::AllToAll")
def all_to_all(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y[k] = x[own rank] of rank k;  ∂x[k] = ∂y[own rank] of rank k"""
    return _one(op, node, "AllToAll", dy, size=_values(node)["size"])


@gradient("graphc::OwnPart")
def own_part(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x[own rank] of an x that all ranks hold;  ∂x[r] = ∂y of rank r"""
    return _one(op, node, "AllGatherStack", dy, size=_values(node)["size"], adjoint="whole")


@gradient("graphc::Fork")
def fork(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x, which all ranks hold;  ∂x = Σ∂y over the ranks, which all ranks hold"""
    return _one(op, node, "AllReduce", dy, adjoint="whole")


@gradient("graphc::Send")
def send(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x, sent to the peer;  ∂x = ∂y here + ∂y of the peer, received"""
    (x,) = operands(node, 1)
    tag = fresh_tag(op.graph, f"{_values(node)['tag']}::grad")
    shape = static_dims(x)
    if shape is None:
        raise UnsupportedOpError(f"the gradient of a Send needs a static shape; fix those of the inputs: {describe(node)}")
    common = {"group": _values(node)["group"], "peer": _values(node)["peer"], "tag": tag}
    received = op.graphc.Recv(shape=list(shape), dtype=int(dtype_of(x)), **common)
    return (op.Add(dy, received),)


@gradient("graphc::Recv")
def recv(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y of the peer;  ∂y is sent to the peer"""
    _one(op, node, "Send", dy, peer=_values(node)["peer"])
    return ()


def _values(node: ir.Node) -> dict[str, Any]:
    return required_declaration(node).attribute_values(node)


def _emit(op: Builder, node: ir.Node, op_type: str, dys: Adjoints, **attributes: Any) -> tuple[ir.Value | None, ...]:
    """One collective over the adjoints that are there, in the group of ``node``."""
    present = [dy for dy in dys if dy is not None]
    tag = fresh_tag(op.graph, f"{_values(node)['tag']}::grad")
    given = {"tag": tag, "group": _values(node)["group"], **attributes}
    results = iter(op.emit(op_type, present, given, domain="graphc"))
    return tuple(None if dy is None else next(results) for dy in dys)


def _one(op: Builder, node: ir.Node, op_type: str, dy: ir.Value, **attributes: Any) -> tuple[ir.Value | None, ...]:
    return _emit(op, node, op_type, [dy], **attributes)


def fresh_tag(graph: ir.Graph, tag: str) -> str:
    """``tag``, or the first of ``tag.1``, ``tag.2`` … that no collective of the graph uses."""
    taken = {n.attributes["tag"].as_string() for n in graph if n.domain == "graphc" and "tag" in n.attributes}
    k = 1
    fresh = tag
    while fresh in taken:
        fresh, k = f"{tag}.{k}", k + 1
    return fresh
