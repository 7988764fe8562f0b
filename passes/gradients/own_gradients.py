"""Gradients that the model's author wrote: backward passes that lie in the forward graph (:mod:`graphc.ir.ops.own_gradients`).

forward    a = AdjointOf(y);  dx = Mul(a, mask);  t = AddAdjoint(a, x, dx);  z = TakeAdjoint(y, a, t)
backward   ∂x += Mul(∂z, mask)
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.gradient import gradient, zero_gradient
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, input_of
from graphc.ir.subgraphs import captured

zero_gradient("graphc::AdjointOf", origin=__name__)

_ADJOINT = "graphc.adjoint"
"""Key in ``meta`` of an ``AdjointOf``'s result: what takes its place in the graph that is being differentiated."""

_PLAIN = "graphc.plain"
"""Key in ``meta`` of a value that depends on no stand-in; each call of a Function would ask again, up to the inputs."""


@gradient("graphc::TakeAdjoint")
def take_adjoint(op: Builder, node: ir.Node, dz: ir.Value) -> Any:
    """z = y;  dz takes the place of the stand-in, and the nodes behind ``through``, visited later, read it"""
    input_of(node, 1).meta[_ADJOINT] = dz
    return None, None, op.zeros_like(input_of(node, 2))


@gradient("graphc::AddAdjoint")
def add_adjoint(op: Builder, node: ir.Node, dnext: ir.Value) -> Any:
    """next = through;  ∂x = dx, repeated with adjoints in the places of their stand-ins"""
    return dnext, lambda: _repeated(op, input_of(node, 2)), None


def _repeated(op: Builder, dx: ir.Value) -> ir.Value:
    nodes, stand_ins = _between(dx)
    known: dict[ir.Value | None, ir.Value] = {}
    for value in stand_ins:
        found = value.meta.get(_ADJOINT)
        known[value] = op.zeros_like(value) if found is None else found  # of an output that nothing reads
    for node in nodes:
        if not known.keys().isdisjoint(captured(node)):
            raise UnsupportedOpError(
                f"a gradient of a torch.autograd.Function is read inside a loop or branch: {describe(node)}"
            )
        results = op.repeat(node, [known.get(v, v) for v in node.inputs], node.attributes)
        known.update(zip(node.outputs, results, strict=True))
    return known.get(dx, dx)


def _between(value: ir.Value) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes that ``value`` is computed by from stand-ins, in topological order, and the stand-ins."""
    nodes: list[ir.Node] = []
    stand_ins: list[ir.Value] = []
    dependent: set[ir.Value] = set()
    seen: set[ir.Node] = set()
    stack = [(value.producer(), False)]
    while stack:
        node, done = stack.pop()
        if node is None or (not done and (node in seen or _PLAIN in node.outputs[0].meta)):
            continue
        operands = [v for v in (*node.inputs, *captured(node)) if v is not None]
        if node.op_type == "AdjointOf" and node.domain == DOMAIN:
            seen.add(node)
            stand_ins.append(node.outputs[0])
            dependent.add(node.outputs[0])
        elif done:
            if dependent.isdisjoint(operands):
                node.outputs[0].meta[_PLAIN] = True
            else:
                nodes.append(node)
                dependent.update(node.outputs)
        else:
            seen.add(node)
            stack.append((node, True))
            stack += [(v.producer(), False) for v in operands]
    return nodes, stand_ins
