"""Emulates half precision on a backend that has no half-precision arithmetic.

    before   y:bf16 = Gemm(x:bf16, w:bf16)
    after    y:bf16 = Cast(Gemm(Cast(x), Cast(w)))         with the Gemm in float32

Values are stored in the low type and rounded to it after every op, as on hardware; only the arithmetic inside an op is float32
(tensor cores add up products in float32 too). So the numbers are those of mixed precision, but not its speed. The backend
decides what is emulated (``Backend.computes_halves``) when a plan is made; the graph does not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of, has_effect
from graphc.ir.facts import dtype_of
from graphc.ir.updates import converts

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

AS_THEY_ARE = frozenset(
    {"Cast", "CastLike", "BitCast", "Constant", "ConstantOfShape", "Identity", "Shape", "Size", "Reshape", "Flatten"}
    | {"Squeeze", "Unsqueeze", "Transpose", "QuantizeLinear", "DequantizeLinear"}
)
"""Ops without arithmetic on their operand, or that convert it themselves."""


def emulate_halves(graph: ir.Graph, computes: Callable[[ir.Node], bool]) -> bool:
    """Compute every half-precision node for which ``computes(node)`` is false in float32, between two casts."""
    op = Builder(graph)
    nodes = list(graph)
    changed = False
    for node, following in itertools.zip_longest(nodes, nodes[1:]):
        if _is_plain(node) and any(_is_half(v) for v in node.inputs) and not computes(node):
            op.scope = f"{node.name or node.op_type}/float32"
            _widen(op, node, following)
            changed = True
    return changed


def narrow_storage(graph: ir.Graph) -> None:
    """Give every reader of a widened value its own cast, so that only the half-precision value is kept in memory."""
    op = Builder(graph)
    for node in list(graph):
        if node.op_type != "Cast" or node.domain or not _is_half(node.inputs[0]) or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        wide, to = node.outputs[0], int(ir.DataType.FLOAT)
        if any(has_effect(user) for user in wide.consumers()):
            continue  # a gradient: its bucket holds it in float32 anyway
        made: dict[ir.Node, ir.Value] = {}
        for user, index in list(wide.uses())[1:]:
            if user.graph is not graph:
                continue
            if user not in made:
                op.before, op.scope = user, node.name or "Cast"
                made[user] = op.Cast(node.inputs[0], to=to)
            user.replace_input_with(index, made[user])


def _is_half(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype in HALVES


def _is_plain(node: ir.Node) -> bool:
    """Whether the node computes tensors from tensors, without subgraph or effect."""
    declaration = declaration_of(node)
    measures = declaration is not None and bool(declaration.combine)  # which reads a bucket where it lies
    if has_effect(node) or measures or converts(node) or node.op_type == "Recompute":
        return False
    if not node.domain and node.op_type in AS_THEY_ARE:
        return False
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return False
    return all(v is None or v.type is None or isinstance(v.type, ir.TensorType) for v in (*node.inputs, *node.outputs))


def _widen(op: Builder, node: ir.Node, following: ir.Node | None) -> None:
    op.before = node
    wide: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(node.inputs):
        if value is not None and _is_half(value):
            if value not in wide:
                wide[value] = op.Cast(value, to=int(ir.DataType.FLOAT))
            node.replace_input_with(index, wide[value])
    if "dtype" in node.attributes and node.attributes["dtype"].value in HALVES:
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(ir.DataType.FLOAT))
    op.before = following
    for out in node.outputs:
        if _is_half(out):
            _round(op, out)


def _round(op: Builder, out: ir.Value) -> None:
    """Make ``out`` float32 and replace its uses by a cast of it."""
    low, name, users = dtype_of(out), out.name, list(out.uses())
    out.type = ir.TensorType(ir.DataType.FLOAT)
    rounded = op.Cast(out, to=int(low))
    if out.is_graph_output():
        out.name = op.unique(f"{name}.float32", value=True)
        rounded.name = name
        outputs = op.graph.outputs
        for k, value in enumerate(list(outputs)):
            if value is out:
                outputs[k] = rounded
    for user, index in users:
        user.replace_input_with(index, rounded)
