"""deterministic_shards: the same bits for any number of workers.

    before   dW ─► AllReduce(sum) ─► Adam(W, ·)
    after    dW ─► Accumulate(steps=4, tree) ─► AllReduce(tree) ─► Adam(W, ·)

The global batch is cut into a fixed number of shards, whoever computes them. A worker runs its shards one by one, so that every
kernel sees the same shapes on any number of workers; sums over shards are made by one binary tree, whose lower levels are
inside a worker and whose upper ones are the reduction over the workers. BatchNormalization normalises each shard by itself.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.passes.precision.accumulate import sum_micro_batches
from graphc.pipeline import Context, graph_pass


@graph_pass("deterministic_shards", requires=("allreduce",), aliases=("micro_shards",))
def deterministic_shards(model: ir.Model, ctx: Context, *, shards: int = 4) -> bool:
    """Let results not depend on the number of workers, which may be 1, 2, 4 … up to ``shards``.

    Args:
        shards: into how many parts a global batch is cut; a power of two.

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
