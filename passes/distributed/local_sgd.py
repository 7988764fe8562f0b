"""local_sgd: every rank updates with its own gradients; parameters are averaged every few steps.

    before   dW ─► AllReduce(sum) ─► SGD(W, ·, divisor=Σ weight) ─► W::next
    after    dW ─► SGD(W, ·, divisor=weight) ─► AllReduce(mean, every=k) ─► W::next

S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; with ``start`` the post-local SGD of T. Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020. The average is the plain mean over the ranks, regardless of the sizes
of their shares, and includes the optimizer's state unless ``states`` is off. With every=1, plain SGD and equal shares it equals
``mirrored``.

The reported loss covers all ranks, each with its own parameters. A rank with non-finite gradients makes that loss NaN, and
with it the step of all ranks, which therefore stop or skip together. The pass runs after ``bucket``.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.declare import Role, required_declaration
from graphc.ir.facts import inputs_of, producer_of
from graphc.ir.names import BUCKET
from graphc.ir.updates import role_of, trains, updates_of
from graphc.passes.distributed.reductions import gradient_reductions, operand_of, reduced_total, reduced_weight
from graphc.passes.precision.update_graph import move_to_end
from graphc.pipeline import Context, graph_pass


@graph_pass("local_sgd", requires=("optimizer", "allreduce", "bucket"), changes="training")
def local_sgd(model: ir.Model, ctx: Context, *, every: int = 8, start: int = 0, states: bool = True) -> bool:
    """Average parameters instead of gradients.

    Args:
        every: steps between two averages.
        start: number of initial steps that are each followed by an average.
        states: whether the optimizer's state (momentum and the like) is averaged too.

    Raises:
        UsageError: a number out of range, or compressed gradients.
    """
    if every < 1 or start < 0:
        raise UsageError(f"local_sgd: every={every} must be at least 1 and start={start} at least 0")
    graph = model.graph
    reductions = gradient_reductions(graph, "local_sgd")
    group = reductions[0].attributes.get_string("group", "data") if reductions else "data"
    gradients = [v for node in reductions for v in inputs_of(node)]
    for node in reductions:
        for own, reduced in zip(inputs_of(node), node.outputs, strict=True):
            reduced.replace_all_uses_with(own)
        graph.remove(node, safe=True)
    _divide_by_own_weight(graph)
    _stop_together(graph, gradients)
    count = _average(graph, group, every, start, states)
    ctx.note(f"local_sgd: {counted(count, 'average')} of a bucket's parameters or state every {counted(every, 'step')}")
    return bool(reductions)


def _divide_by_own_weight(graph: ir.Graph) -> None:
    total = reduced_weight(graph)
    users = [(user, index) for user, index in total.uses() if user.op_type != "Mean"] if total is not None else []
    if total is None or not users:
        return
    own = operand_of(total)
    reduction = total.producer()
    op = Builder(graph, before=reduction, scope="local")
    divisor = op.Where(op.Equal(own, 0.0), op.ones_like(own), own)  # a rank without samples has a zero gradient
    for user, index in users:
        user.replace_input_with(index, divisor)


def _stop_together(graph: ir.Graph, gradients: list[ir.Value]) -> None:
    """Turn a NaN in any rank's gradients into a NaN in the loss of all ranks, and into every skip flag."""
    total = reduced_total(graph)
    if total is None or not gradients:
        return
    flags = [node.outputs[0] for node in graph if node.op_type == "AnyNonFinite" and node.domain == "graphc"]
    reduction, own = producer_of(total), operand_of(total)
    move_to_end(graph, [reduction, *updates_of(graph)])
    op = Builder(graph, before=reduction, scope="local")
    kinds: dict[ir.DataType | None, list[ir.Value]] = {}
    for value in gradients:
        kinds.setdefault(value.dtype, []).append(value)
    for values in kinds.values():
        own = op.Where(op.graphc.AnyNonFinite(*values), op.scalar(float("nan"), own), own)
    reduction.replace_input_with(total.index() or 0, own)
    for flag in flags:
        users, producer = list(flag.uses()), producer_of(flag)
        move_to_end(graph, [producer])
        following = list(graph)
        op.before = following[following.index(producer) + 1]
        both = op.Or(flag, op.graphc.AnyNonFinite(total))
        for user, index in users:
            user.replace_input_with(index, both)


def _average(graph: ir.Graph, group: str, every: int, start: int, states: bool) -> int:
    """Average the next values of every bucket (parameters and each kind of state); returns the number of AllReduces."""
    buckets: dict[tuple[str, int], list[ir.Value]] = {}
    for node in (n for n in graph if trains(n)):
        for output, index in required_declaration(node).next_value.items():
            kept = index < len(node.inputs) and node.inputs[index] is not None and output < len(node.outputs)
            if kept and (states or role_of(node, index) is Role.PARAMETER):
                buckets.setdefault((node.attributes.get_string(BUCKET, ""), output), []).append(node.outputs[output])
    op = Builder(graph)
    for (bucket, output), values in buckets.items():
        readers = [(value, list(value.uses())) for value in values]
        name = f"{bucket}.average{output}"
        attributes = {"tag": f"{group}/{name}", "group": group, BUCKET: name, "reduce": "mean", "every": every, "since": start}
        results = op.emit("AllReduce", values, attributes, domain="graphc", name=f"allreduce/{name}")
        for (_, uses), result in zip(readers, results, strict=True):
            for user, index in uses:
                user.replace_input_with(index, result)
    return len(buckets)
