"""deterministic_shards: the same bits for any number of workers.

    before   dW ─► AllReduce(sum) ─► Adam(W, ·)
    after    dW ─► Accumulate(steps=4, tree) ─► AllReduce(tree) ─► Adam(W, ·)

The global batch is split into a fixed number of shards, independent of the workers. A worker runs its shards one by one, so
every kernel sees the same shapes on any number of workers. One binary tree sums over shards: its lower levels are inside a
worker, its upper ones are the reduction over the workers. BatchNormalization normalises each shard by itself.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.passes.precision.accumulate import sum_micro_batches
from graphc.pipeline import Context, graph_pass


@graph_pass("deterministic_shards", requires=("allreduce",), aliases=("micro_shards",), changes="training")
def deterministic_shards(model: ir.Model, ctx: Context, *, shards: int = 4) -> bool:
    """Make results independent of the number of workers, which may be 1, 2, 4 … up to ``shards``.

    Args:
        shards: number of parts of a global batch; a power of two.

    Raises:
        UsageError: another number, or a graph that accumulates already.
    """
    if shards < 1 or shards & (shards - 1):
        raise UsageError(f"shards={shards} must be a power of two: partial sums are added by a binary tree")
    reductions, sums = sum_micro_batches(model.graph, shards, tree=True)
    for node in reductions:
        if node.attributes.get_string("reduce", "sum") != "sum":
            raise UsageError(f"{node.name!r} reduces by {node.attributes['reduce'].as_string()}, which depends on the workers")
        node.attributes["reduce"] = ir.AttrString("reduce", "tree")
    ctx.note(f"deterministic_shards: sums of {counted(sums, 'value')} over {counted(shards, 'shard')} by a tree")
    return bool(sums)
