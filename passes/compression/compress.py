"""compress: send less than the full gradients.

    before   dW ─► AllReduce ─► Adam(W, ·)
    fp16     dW ─► RoundTo(float16) ─► AllReduce ─► Widen ─► Adam(W, ·)                and bf16 alike
    topk     dW + residual ─► KeepLargest ─► AllReduce(nonzero=k) ─► Adam(W, ·);  Residual(…)
    powersgd dW, residual ─► AllReduce of two thin factors ─► their product ─► Adam(W, ·);  Residual(…)

Low types halve the bytes. Sums over the ranks are computed in float32 and rounded once. Gradients here are sums over samples,
not means, so large batches can overflow float16 (65504), which the finite check reports; bfloat16 does not overflow.
PowerSGD (:mod:`graphc.passes.compression.powersgd`) sends r·(n + m) numbers for a gradient of n × m; vectors, and matrices for
which that saves nothing, are sent whole. Top-k (:mod:`graphc.passes.compression.topk`) sends the largest elements.

The pass runs after ``allreduce`` (and ``accumulate``: micro-batches are summed in float32) and before ``bucket``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted, nearest
from graphc.ir.builder import Builder
from graphc.ir.updates import gradient_of, state_of
from graphc.passes.compression.powersgd import low_rank
from graphc.passes.compression.topk import keep_largest
from graphc.pipeline import Context, graph_pass

LOW: Mapping[str, ir.DataType] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
METHODS = (*LOW, "powersgd", "topk")


@graph_pass("compress", requires=("optimizer", "allreduce"), changes="training")
def compress(
    model: ir.Model,
    ctx: Context,
    *,
    method: str = "bf16",
    rank: int | None = None,
    start: int = 0,
    ratio: float | None = None,
    mb: float = 25.0,
) -> bool:
    """Compress the gradients that are summed over the ranks.

    Args:
        method: ``fp16`` or ``bf16``: float32 gradients travel in that type; ``powersgd``; ``topk``.
        rank: powersgd: columns of the factors (default 2).
        start: powersgd: number of initial steps with uncompressed gradients.
        ratio: topk: the part of a gradient's elements that each rank sends (default 0.01).
        mb: powersgd: megabytes of gradients (10⁶ bytes, uncompressed) whose factors travel together.

    Raises:
        UsageError: an unknown method, or an option that the method lacks.
    """
    if method not in METHODS:
        raise UsageError(f"compress: unknown method {method!r}{nearest(method, METHODS)}; it is {', '.join(METHODS)}")
    if rank is not None and (method != "powersgd" or rank < 1):
        raise UsageError(f"compress: rank={rank} belongs to method=powersgd and is at least 1")
    if start < 0 or (start and method != "powersgd"):
        raise UsageError(f"compress: start={start} belongs to method=powersgd and is at least 0")
    if ratio is not None and (method != "topk" or not 0 < ratio <= 1):
        raise UsageError(f"compress: ratio={ratio} belongs to method=topk, above 0 and at most 1")
    graph = model.graph
    found = reductions(graph)
    if method in LOW:
        _narrow(graph, found, LOW[method])
        ctx.note(f"compress: {counted(len(found), 'gradient')} travel in {method}")
        return bool(found)
    if method == "topk":
        number = keep_largest(graph, found, _parameters(graph, found), ratio or 0.01)
        ctx.note(
            f"compress: of {number} of {counted(len(found), 'gradient')} {100 * (ratio or 0.01):.3g} % of the elements travel"
        )
        return number > 0
    number, part = low_rank(graph, found, _parameters(graph, found), rank or 2, start, mb)
    ctx.note(f"compress: {number} of {counted(len(found), 'gradient')} travel as factors, {100 * part:.3g} % of all elements")
    return number > 0


def _parameters(graph: ir.Graph, nodes: Sequence[ir.Node]) -> list[str]:
    """The parameter of each AllReduce's gradient."""
    owner = {gradient: state_of(n) for n in graph if (gradient := gradient_of(n)) is not None}
    return [owner[node.outputs[0]].name or "" for node in nodes]


def reductions(graph: ir.Graph) -> list[ir.Node]:
    """The AllReduces of single float32 gradients, summed, in node order."""
    wanted = {gradient.producer() for n in graph if (gradient := gradient_of(n)) is not None}
    return [node for node in graph if node in wanted and _sums_float32(node)]


def _sums_float32(node: ir.Node) -> bool:
    if node.op_type != "AllReduce" or node.domain != "graphc" or len(node.inputs) != 1:
        return False
    return node.attributes.get_string("reduce", "sum") == "sum" and node.outputs[0].dtype == ir.DataType.FLOAT


def _narrow(graph: ir.Graph, nodes: list[ir.Node], low: ir.DataType) -> None:
    op = Builder(graph)
    for node in nodes:
        (gradient,) = node.inputs
        op.before, op.scope = node, f"compress/{gradient.name if gradient is not None else ''}"
        narrowed = op.graphc.RoundTo(gradient, to=int(low))
        reduced = op.emit("AllReduce", [narrowed], dict(node.attributes), domain="graphc", name=node.name)
        widened = op.graphc.Widen(*reduced)
        node.outputs[0].replace_all_uses_with(widened)
        graph.remove(node, safe=True)
