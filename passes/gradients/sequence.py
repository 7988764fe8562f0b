"""Gradients of ops on sequences and optionals. The adjoint of a sequence is a sequence, of an optional its content's adjoint.

``legalize`` has already replaced sequences by plain tensors where positions are known at compile time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.gradient import gradient, operands, zero_gradient
from graphc.ir.builder import Builder
from graphc.ir.facts import is_float
from graphc.ir.subgraphs import captured, finish_body, inline, new_body
from graphc.passes.gradients.reverse_mode import backpropagate, zeros

zero_gradient("SequenceEmpty", "SequenceLength", "OptionalHasElement", origin=__name__)


@gradient("Optional", "OptionalGetElement")
def optional(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = x, wrapped or unwrapped;  ∂x = dy"""
    return dy


@gradient("SequenceConstruct")
def sequence_construct(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = (a, b, …);  ∂a = dy[0], ∂b = dy[1], …"""
    return tuple((lambda k=k: op.SequenceAt(dy, np.int64(k))) for k in range(len(node.inputs)))


@gradient("SequenceAt")
def sequence_at(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = s[k];  ∂s = zeros with dy at k"""
    s, position = operands(node, 2)
    place = _from_front(op, s, position)
    return op.SequenceInsert(op.SequenceErase(zeros(op, s), place), dy, place)


@gradient("SequenceInsert")
def sequence_insert(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = s with x at k;  ∂s = dy without k,  ∂x = dy[k]"""
    s, position = operands(node, 1)[0], (*node.inputs, None)[2]
    place = _from_front(op, s, position) if position is not None else op.SequenceLength(s)
    return lambda: op.SequenceErase(dy, place), lambda: op.SequenceAt(dy, place)


@gradient("SequenceErase")
def sequence_erase(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = s without k;  ∂s = dy with zeros at k"""
    s, position = operands(node, 1)[0], (*node.inputs, None)[1]
    place = _from_front(op, s, position if position is not None else op.const(np.int64(-1)))
    return op.SequenceInsert(dy, zeros(op, op.SequenceAt(s, place)), place)


def _from_front(op: Builder, s: ir.Value, position: ir.Value) -> ir.Value:
    """Convert a position to one counted from the front; negative ones count from the end of ``s``."""
    place = op.Cast(position, to=int(ir.DataType.INT64))
    return op.Where(op.Less(place, np.int64(0)), op.Add(place, op.SequenceLength(s)), place)  # type: ignore[no-any-return]


@gradient("SplitToSequence")
def split_to_sequence(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = the parts of x along an axis;  ∂x = dy, joined"""
    single = len(node.inputs) < 2 and not node.attributes.get_int("keepdims", 1)
    return op.ConcatFromSequence(dy, axis=node.attributes.get_int("axis", 0), new_axis=int(single))


@gradient("ConcatFromSequence")
def concat_from_sequence(op: Builder, node: ir.Node, dy: ir.Value) -> Any:
    """y = the tensors of s along one axis;  ∂s = dy, split as they were"""
    (s,), axis = operands(node, 1), node.attributes["axis"].as_int()
    if node.attributes.get_int("new_axis", 0):
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    assert isinstance(s.type, ir.SequenceType)
    body, inner, (x,) = new_body(op, [("x", s.type.elem_type, None)])
    finish_body(inner, [inner.Shape(x, start=axis, end=axis + 1 if axis != -1 else None)])
    sizes = op.ConcatFromSequence(op.SequenceMap(s, body=body), axis=0)
    return op.SplitToSequence(dy, sizes, axis=axis)


@gradient("SequenceMap", selective=True)
def sequence_map(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """y[k] = f(s[k], a; w);  ∂s[k] = fᵀ(dy[k]),  ∂a and ∂w = Σ fᵀ(dy[k])"""
    body, outer = node.attributes["body"].as_graph(), captured(node)
    weights = [v for v in outer if v in needs and is_float(v)]
    flowing = [(k, dy) for k, dy in enumerate(dys) if dy is not None]
    given = operands(node, len(node.inputs))
    typed = [(f"{formal.name}", formal.type, None) for formal in body.inputs]
    graph, inner, values = new_body(op, [*typed, *(("dy", body.outputs[k].type, None) for k, _ in flowing)])
    known = dict(zip(body.inputs, values, strict=False))
    outputs = inline(inner, body, known)
    seeds = [(outputs[k], dy) for (k, _), dy in zip(flowing, values[len(known) :], strict=True)]
    sources = [value for operand, value in zip(given, values, strict=False) if operand in needs and is_float(operand)]
    found = backpropagate(inner, list(graph), seeds, [*sources, *weights])
    wanted = [*sources, *weights]
    if not wanted:
        return ()
    finish_body(inner, [found[v] if v in found else inner.zeros_like(v) for v in wanted])
    made = op.emit("SequenceMap", [*given, *(dy for _, dy in flowing)], {"body": graph}, outputs=len(wanted))
    by_value = dict(zip(wanted, made, strict=True))
    results: list[ir.Value | None] = []
    for operand, value in zip(given, values, strict=False):
        part = by_value.get(value)
        whole = isinstance(operand.type, ir.SequenceType)
        results.append(part if part is None or whole else _total(op, part))
    return (*results, *(_total(op, by_value[v]) if v in by_value else None for v in outer))


def _total(op: Builder, parts: ir.Value) -> ir.Value:
    """The sum of the tensors of a sequence."""
    return op.ReduceSum(op.ConcatFromSequence(parts, axis=0, new_axis=1), [0], keepdims=0)  # type: ignore[no-any-return]
