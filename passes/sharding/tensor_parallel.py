"""tensor_parallel: divide weights and the work on them among the ranks of the tensor axis.

    before   x ─► MatMul(W1) ─► Gelu ─► MatMul(W2) ─► y
    after    x ─► Fork ─► MatMul(W1 columns) ─► Gelu ─► MatMul(W2 rows) ─► AllReduce ─► y

Works on the forward pass: the gradients of Fork and AllReduce come from ``autodiff``. Each rank holds its shards of the sharded
parameters (:mod:`graphc.ir.shards`); checkpoints and exported models hold whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.facts import is_parameter, known_nbytes
from graphc.passes.optimize.simplify import simplify_graph
from graphc.passes.sharding.choice import AUTO, SEQUENCE, choose
from graphc.passes.sharding.rewrite import Rewriter
from graphc.passes.sharding.sequence_parallel import SequenceRewriter
from graphc.pipeline import Context, graph_pass


@graph_pass("tensor_parallel", requires=("loss",), changes="training")
def tensor_parallel(
    model: ir.Model, ctx: Context, *, ranks: int, shard: Sequence[str] | None = None, group: str = "tensor"
) -> bool:
    """Shard the graph.

    Args:
        ranks: of the group.
        shard: ``auto`` (the default): MLPs by columns and rows, attention by heads, embeddings by rows; ``auto:sequence``: also
            what lies between them, along the sequence; or texts ``GLOB=AXIS`` that name axes of parameters.
        group: the mesh axis.

    Raises:
        UsageError: the graph has its gradients already, an axis that cannot be sharded, or nothing that can.
    """
    if "autodiff" in ctx.done:
        raise UsageError("the graph has its gradients already; tensor_parallel belongs between 'loss' and 'autodiff'")
    if ranks == 1:
        return False
    graph, wanted = model.graph, [shard] if isinstance(shard, str) else list(shard or [AUTO])
    simplify_graph(graph)  # sizes and axes that exporters compute become constants
    shards = choose(graph, ranks, wanted)
    parameters = [value for value in graph.initializers.values() if value in shards and is_parameter(value)]
    if not parameters:
        raise UsageError(
            f"no weight can be divided among {ranks} ranks of the {group} axis; name one with --shard GLOB=AXIS to learn why,"
            " or use the data axis"
        )
    total = sum(known_nbytes(value) for value in graph.initializers.values() if is_parameter(value))
    divided = sum(known_nbytes(value) for value in parameters)
    rewriter = Rewriter(graph, shards, group, ranks)
    rewriter.run()
    ctx.note(
        f"tensor_parallel: {counted(len(parameters), 'parameter')} with {divided / max(total, 1):.0%} of the bytes divided"
        f" among {ranks} ranks; {counted(rewriter.sums, 'AllReduce')} forward, {len(rewriter.forks)} backward"
    )
    if wanted == [SEQUENCE]:
        _divide_sequence(graph, ctx, group, ranks)
    return True


def _divide_sequence(graph: ir.Graph, ctx: Context, group: str, ranks: int) -> None:
    """Divide what lies between the divided products along the sequence."""
    simplify_graph(graph)  # sizes of parts become constants
    rewriter = SequenceRewriter(graph, group, ranks)
    rewriter.run()
    for line in rewriter.summary():
        ctx.note(f"tensor_parallel: along the sequence: {line}")
