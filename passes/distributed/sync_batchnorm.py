"""sync_batchnorm: BatchNormalization normalises with the statistics of the global batch, not of each worker's share.

    before   y, m, v, r = BatchNormalizationTraining(x, scale, bias)
    after    n, s, q = BatchMoments(x, graphc.live) ─► AllReduce(sum) ─► m, v, r = BatchStatistics(n, s, q)
             y = SharedNormalization(x, scale, bias, m, r, n, graphc.live)

Counts are summed with the sums, so shares may be uneven or empty. The gradient reduces two sums per layer in the same way;
its rule is in :mod:`graphc.passes.gradients.normalization`. Results are those of one worker on the global batch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of, input_of
from graphc.ir.names import BUCKET, LIVE
from graphc.ir.state import scalar
from graphc.passes.optimize.simplify import replace
from graphc.pipeline import Context, graph_pass


@graph_pass("sync_batchnorm", requires=("train_mode",), changes="training")
def sync_batchnorm(model: ir.Model, ctx: Context, *, group: str = "data") -> bool:
    """Put an AllReduce into the statistics of every BatchNormalization that trains.

    Args:
        group: the mesh axis whose ranks share the batch.

    Raises:
        UsageError: the graph has its gradients already.
    """
    if "autodiff" in ctx.done:
        raise UsageError("the graph has its gradients already; sync_batchnorm belongs between 'train_mode' and 'loss'")
    graph = model.graph
    nodes = [n for n in graph if n.op_type == "BatchNormalizationTraining" and n.domain == DOMAIN]
    op = Builder(graph)
    for node in nodes:
        _share(graph, op, node, group)
    ctx.note(f"sync_batchnorm: {len(nodes)} BatchNormalization nodes share their statistics over axis {group!r}")
    return bool(nodes)


def _share(graph: ir.Graph, op: Builder, node: ir.Node, group: str) -> None:
    x, scale, bias = (input_of(node, index) for index in range(3))
    op.before, op.scope = node, node.name or node.op_type
    tag = f"{group}/{op.scope}"
    live = scalar(graph, LIVE, 1, np.float32)
    moments = op.graphc.BatchMoments(x, live)
    attributes = {"tag": tag, "group": group, "reduce": "sum", BUCKET: op.scope}
    count, total, squares = op.emit("AllReduce", moments, attributes, domain=DOMAIN)
    epsilon = node.attributes.get_float("epsilon")
    mean, var, inv_std = op.graphc.BatchStatistics(count, total, squares, epsilon=epsilon, dtype=int(dtype_of(scale)))
    y = op.graphc.SharedNormalization(x, scale, bias, mean, inv_std, count, live, tag=tag, group=group)
    for old, new in zip(node.outputs, (y, mean, var, inv_std), strict=True):
        replace(graph, op, old, new)
    graph.remove(node, safe=True)
