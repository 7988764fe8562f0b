"""zero: divide optimizer state, gradients and parameters among the ranks.

    before    dW ─► AllReduce ─► Adam(W, …)
    stage 1   dW ─► ReduceScatter ─► Adam(W, …, shard=even) ─► W::next ─► AllGather
    stage 2   the same with transient gradients: a rank keeps only its shard of the sum
    stage 3   W ─► AllGather ─► forward;   W ─► AllGather ─► backward;   and no AllGather after the update

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020. Each bucket is
one flat buffer. Rank r owns the r-th of N equal shards, updates only that, and keeps optimizer state (and float32 masters)
only for that. In stage 3 it keeps only its shard of the parameters too: a bucket of parameters is whole from shortly before its
first use to its last use in the forward pass, and again in the backward pass. ``schedule`` starts each AllGather one bucket
ahead.

With micro-batches, and so in a pipeline, each micro-batch gathers anew. Gathered once a step, the parameters of a stage would
be whole in all of it, which takes the memory of stage 2. A parameter that several pipeline stages read, such as tied
embeddings, is sent to them whole once a step, so it stays whole on its own stage: its bucket is as in stage 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.names import BUCKET, LOSS_TOTAL, marks_of
from graphc.ir.subgraphs import reads, replace_reads, sources
from graphc.ir.updates import state_of
from graphc.passes.distributed.sharding import Bucket, buckets_note, gather_next, shard_updates
from graphc.pipeline import Context, graph_pass


@graph_pass("zero", requires=("optimizer", "allreduce", "bucket"), changes="training")
def zero(model: ir.Model, ctx: Context, *, stage: int = 1, offload: bool = False) -> bool:
    """Shard training state over the ranks of the data axis.

    Args:
        stage: 1 optimizer state, 2 gradients as well, 3 parameters as well.
        offload: optimizer state lies in host memory, and updates run there.

    Raises:
        UsageError: another stage, or an optimizer that cannot be sharded.
    """
    if stage not in (1, 2, 3):
        raise UsageError(f"zero: stage={stage}; the stages are 1, 2 and 3")
    graph = model.graph
    buckets = shard_updates(graph, "zero", owner="even", transient=stage >= 2, offload=offload)
    forward = _forward(graph) if stage == 3 else set()
    for bucket in buckets:
        if stage < 3 or bucket.is_read_elsewhere():
            gather_next(graph, bucket, "even")
        else:
            _gather_before_use(graph, bucket, forward)
    ctx.note(f"zero: stage {stage}, {buckets_note(buckets)}")
    return True


def _forward(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that compute the loss."""
    found: set[ir.Node] = set()
    for node in reversed(graph):
        if node in found or any(LOSS_TOTAL in v.metadata_props for v in node.outputs):
            found.add(node)
            found.update(sources(node))
    return found


def _gather_before_use(graph: ir.Graph, bucket: Bucket, forward: set[ir.Node]) -> None:
    """Put an AllGather of the bucket before its first use in the forward pass, and another for the backward pass."""
    for k, updates in enumerate(bucket.read()):
        states = [state_of(node) for node in updates]
        wanted = set(states)
        readers = [n for n in graph if not is_update(n) and not wanted.isdisjoint(reads(n))]
        phases = (("forward", [n for n in readers if n in forward]), ("backward", [n for n in readers if n not in forward]))
        for phase, nodes in phases:
            if nodes:
                _gather(graph, bucket, f"{phase}{k or ''}", states, nodes)


def _gather(graph: ir.Graph, bucket: Bucket, phase: str, states: Sequence[ir.Value], readers: Sequence[ir.Node]) -> None:
    op = Builder(graph, before=readers[0], scope=f"gather/{bucket.name}/{phase}")
    op.marks = marks_of(readers[0])
    attributes = {"tag": f"{bucket.group}/{bucket.name}/{phase}", "group": bucket.group, BUCKET: bucket.name, "owner": "even"}
    results = op.emit("AllGather", list(states), attributes, domain="graphc", name=f"gather/{bucket.name}/{phase}")
    whole = dict(zip(states, results, strict=True))
    for node in readers:
        replace_reads(node, whole)
