"""early_pools: pool before a Relu and a Concat, which then pass over fewer elements.

    before   y = MaxPool(Relu(x));                         y = MaxPool(Concat(a, b))
    after    y = Relu(MaxPool(x));                         y = Concat(MaxPool(a), MaxPool(b))

The maximum of a window is the same, and so are gradients: where it is not positive, the Relu stops them on either side of
the pool, and where it is, the same element is the first that has it. What another node reads, or a user, stays as it is.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import dims, input_of, required
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass


@graph_pass("early_pools", requires=("legalize",), changes="form")
def early_pools(model: ir.Model, ctx: Context) -> bool:
    """Move every MaxPool in front of the Relu and the Concat that only it reads."""
    graph, count = model.graph, 0
    op = Builder(graph)
    for node in [node for node in graph if node.domain == "" and node.op_type == "MaxPool"]:
        if len(node.outputs) > 1 or not _may_follow(input_of(node)):
            continue
        op.before, op.scope = node, node.name or node.op_type
        count += replace(graph, op, node.outputs[0], _pooled(op, node, input_of(node)))
    if not count:
        return False
    dead_code_elimination(graph)
    ctx.note(f"early_pools: {counted(count, 'pool')} in front of a Relu or Concat")
    return True


def _may_follow(value: ir.Value) -> bool:
    """Whether the node that makes a value may come after the pool that reads it."""
    node = value.producer()
    if node is None or node.domain != "" or value.is_graph_output() or len(list(value.uses())) != 1:
        return False
    if node.op_type == "Concat":
        sizes = dims(value)
        return sizes is not None and node.attributes["axis"].as_int() % len(sizes) < 2
    return node.op_type == "Relu"


def _pooled(op: Builder, pool: ir.Node, value: ir.Value) -> ir.Value:
    if not _may_follow(value):
        return op.repeat(pool, [value], pool.attributes)[0]
    node = required(value.producer())
    return op.repeat(node, [_pooled(op, pool, required(part)) for part in node.inputs], node.attributes)[0]
