"""central_storage: rank 0 keeps the optimizer's state and updates the parameters; every rank computes.

    before   dW ─► AllReduce ─► Adam(W, …)
    after    dW ─► ReduceScatter(owner=root) ─► Adam(W, …, shard=root) ─► W::next ─► AllGather(owner=root)

Gradients are reduced to rank 0, in host memory, and only rank 0 updates; the new parameters are broadcast.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.passes.distributed.sharding import buckets_note, gather_next, shard_updates
from graphc.pipeline import Context, graph_pass


@graph_pass("central_storage", requires=("optimizer", "allreduce", "bucket"), changes="training")
def central_storage(model: ir.Model, ctx: Context) -> bool:
    """Keep optimizer state on rank 0, in host memory, and update there for all ranks.

    Raises:
        UsageError: an optimizer that cannot run over flat buffers, or another strategy in the graph already.
    """
    buckets = shard_updates(model.graph, "central_storage", owner="root", transient=True, offload=True)
    for bucket in buckets:
        gather_next(model.graph, bucket, "root")
    ctx.note(f"central_storage: {buckets_note(buckets)}, by rank 0")
    return True
