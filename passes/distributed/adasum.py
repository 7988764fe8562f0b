"""adasum: combine the gradients of the ranks by adaptive summation instead of the mean.

    before   dW ─► AllReduce(sum) ─► Adam(W, ·, divisor=Σ weight)
    after    dW/weight ─► AllReduce(adasum) ─► Adam(W, ·, divisor=1)

Each rank divides by its own weight, so that the combined values are mean gradients over the ranks' shares; the reported loss
stays the mean over the global batch. Per tensor, orthogonal gradients are added and parallel ones averaged (S. Maleki et al.,
"Scaling Distributed Training with Adaptive Summation", MLSys 2021). The result therefore depends on the number of workers; on
one worker it is the mean gradient. The pass runs after ``bucket``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of, inputs_of
from graphc.passes.distributed.reductions import gradient_reductions, operand_of, reduced_weight
from graphc.pipeline import Context, graph_pass


@graph_pass("adasum", requires=("optimizer", "allreduce", "bucket"), changes="training")
def adasum(model: ir.Model, ctx: Context) -> bool:
    """Reduce every gradient by adasum.

    Raises:
        UsageError: a gradient that is compressed before its reduction.
    """
    graph = model.graph
    reductions = gradient_reductions(graph, "adasum")
    weight = divide_by_own_weight(graph, reductions)
    for node in reductions:
        node.attributes["reduce"] = ir.AttrString("reduce", "adasum")
    ctx.note(f"adasum: {counted(len(reductions), 'bucket')}" + ("" if weight else ", of sums: the loss is no mean"))
    return bool(reductions)


def divide_by_own_weight(graph: ir.Graph, reductions: list[ir.Node]) -> bool:
    """Turn the operands of ``reductions`` into mean gradients over this rank's samples, and the updates' divisors into 1."""
    total = reduced_weight(graph)
    if total is None:
        return False
    own = operand_of(total)
    order = list(graph)
    position, following = {n: k for k, n in enumerate(order)}, dict(itertools.pairwise(order))
    op = Builder(graph, scope="mean")
    for node in reductions:
        for index, gradient in enumerate(inputs_of(node)):
            op.before = _after(node, (gradient, own), position, following)
            count = op.cast_like(own, gradient)
            # a rank without samples has a zero gradient
            divisor = op.Where(op.Equal(count, 0.0), op.ones_like(count), count)
            node.replace_input_with(index, op.Div(gradient, divisor))
    one = op.const(np.ones((), dtype=dtype_of(total).numpy()))
    for user, index in list(total.uses()):
        if user.op_type != "Mean":
            user.replace_input_with(index, one)
    return True


def _after(
    node: ir.Node, values: tuple[ir.Value, ...], position: Mapping[ir.Node, int], following: Mapping[ir.Node, ir.Node]
) -> ir.Node:
    """The first node before which all ``values`` exist; ``node`` if no node computes them."""
    producers = [p for p in (v.producer() for v in values) if p is not None and p in position]
    return following.get(max(producers, key=lambda p: position[p]), node) if producers else node
