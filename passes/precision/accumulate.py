"""accumulate: sum gradients over several micro-batches before they are reduced.

    before   dW ─► AllReduce ─► Adam(W, ·)
    after    dW ─► Accumulate(steps=4) ─► AllReduce ─► Adam(W, ·)

Nodes before an Accumulate run for every micro-batch; reductions, clipping and updates run once per step. The reduction of a
bucket starts in the last micro-batch as soon as its last gradient is ready. The loss, its weight and the statistics of
BatchNormalization are sums too, so the result is that of the whole batch: exactly, unless an op mixes the samples of a batch
(BatchNormalization normalises each micro-batch by itself).
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import inputs_of
from graphc.ir.ops.accumulation import is_accumulation
from graphc.passes.precision.update_graph import computed_for_gradients
from graphc.pipeline import Context, graph_pass


@graph_pass("accumulate", requires=("allreduce",), changes="training")
def accumulate(model: ir.Model, ctx: Context, *, steps: int) -> bool:
    """Sum all values that are reduced after the backward pass over ``steps`` micro-batches.

    Args:
        steps: micro-batches into which a trainer splits a worker's share of the batch.

    Raises:
        UsageError: a number below 1, or a graph that accumulates already.
    """
    if steps < 1:
        raise UsageError(f"steps={steps} must be at least 1")
    _, sums = sum_micro_batches(model.graph, steps)
    ctx.note(f"accumulate: sums of {counted(sums, 'value')} over {counted(steps, 'micro-batch', 'micro-batches')}")
    return bool(sums)


def sum_micro_batches(graph: ir.Graph, steps: int, *, tree: bool = False) -> tuple[list[ir.Node], int]:
    """Put an ``Accumulate`` before every reduction that follows the backward pass.

    Returns:
        The AllReduces, and the number of sums.

    Raises:
        UsageError: the graph accumulates already.
    """
    if any(is_accumulation(n) for n in graph):
        raise UsageError("the graph accumulates micro-batches already")
    inner = computed_for_gradients(graph)
    reductions = [n for n in graph if n.op_type == "AllReduce" and n.domain == DOMAIN and n not in inner]
    nodes = list(graph)
    following = dict(zip(nodes, [*nodes[1:], None], strict=True))
    op = Builder(graph)
    sums: dict[ir.Value, ir.Value] = {}
    for reduction in reductions:
        for index, value in enumerate(inputs_of(reduction)):
            if value not in sums:
                producer = value.producer()
                op.before = following[producer] if producer is not None else nodes[0]
                op.scope = f"accumulate/{value.name}"
                sums[value] = op.graphc.Accumulate(value, steps=steps, tree=int(tree))
            reduction.replace_input_with(index, sums[value])
    return reductions, len(sums)
