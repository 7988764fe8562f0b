"""bucket: gather gradients into flat buffers with one AllReduce and one update call each.

    before   dW2 ─► AllReduce ─► Adam(W2)      dW1 ─► AllReduce ─► Adam(W1)
    after    dW2, dW1 ─► AllReduce(bucket=b0) ─► Adam(W2, bucket=b0), Adam(W1, bucket=b0)

Buckets fill in the order in which the backward pass produces the gradients (the reverse of the forward order), so the first
bucket is complete, and its AllReduce runs, while earlier layers are still being differentiated. One bucket holds operands of
one element type, one reduction, one kind of update and, in a pipeline, one stage. Shards over a tensor axis and whole
parameters lie apart, since a norm counts each element once; so do parameters that several stages read, since ZeRO leaves them
whole. The scalars of the loss have a bucket of their own. Where gradients are sent in a low type (``compress``), the
conversions of a bucket are merged as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.declare import required_declaration
from graphc.ir.facts import input_of, inputs_of, nbytes_of, producer_of
from graphc.ir.names import BUCKET
from graphc.ir.ops.collectives import collective_of
from graphc.ir.shards import cuts_of
from graphc.ir.updates import converts, copies_of, is_reduced, on_its_way, source_of, stages_that_read, state_of
from graphc.passes.precision.update_graph import sink
from graphc.pipe.tasks import mark_updates
from graphc.pipeline import Context, graph_pass


@graph_pass("bucket", requires=("optimizer",), changes="training")
def bucket(model: ir.Model, ctx: Context, *, mb: float = 25.0, first_mb: float = 1.0) -> bool:
    """Assign every update node to a bucket and merge the AllReduces of a bucket into one.

    Args:
        mb: size of a bucket in megabytes (10⁶ bytes); a larger tensor has a bucket to itself.
        first_mb: size of the first bucket: small, so that communication starts early.
    """
    if not (mb > 0 and first_mb > 0):
        raise UsageError(f"bucket sizes must be positive, not mb={mb}, first_mb={first_mb}")
    graph = model.graph
    position = {node: k for k, node in enumerate(graph)}
    updates = sorted((n for n in graph if is_reduced(n)), key=lambda n: _produced(n, position))
    stage_of, cuts = mark_updates(model), cuts_of(graph)
    open_buckets: dict[tuple[str, ...], list[ir.Node]] = {}
    closed: list[tuple[tuple[str, ...], list[ir.Node]]] = []
    filled: dict[tuple[str, ...], int] = {}
    for node in updates:
        shared = len(stages_that_read(node)) > 1 if stage_of else False
        key = (*_key(node), stage_of.get(node, ""), str(cuts.get(state_of(node).name or "") is not None), str(shared))
        size = nbytes_of(state_of(node))
        limit = (min(first_mb, mb) if not any(k == key for k, _ in closed) else mb) * 1e6
        if key in open_buckets and filled[key] + size > limit:
            closed.append((key, open_buckets.pop(key)))
        open_buckets.setdefault(key, []).append(node)
        filled[key] = filled[key] + size if len(open_buckets[key]) > 1 else size
    closed.extend(open_buckets.items())
    closed.sort(key=lambda item: _produced(item[1][-1], position))
    op = Builder(graph)
    for k, (_, nodes) in enumerate(closed):
        for node in (*nodes, *(copy for n in nodes for copy in copies_of(n))):
            node.attributes[BUCKET] = ir.AttrString(BUCKET, f"b{k}")
        _merge(graph, op, [n for n in (_reduction_of(node) for node in nodes) if n is not None], f"b{k}")
    scalars = [n for n in graph if n.op_type == "AllReduce" and n.domain == "graphc" and not n.attributes.get(BUCKET)]
    scalars = [n for n in scalars if n.attributes.get_string("adjoint", "partial") == "partial"]  # others are of activations
    for k, group in enumerate(_alike(scalars)):
        _merge(graph, op, group, "metrics" if k == 0 else f"metrics{k}")
    ctx.note(f"bucket: {counted(len(updates), 'update')} in {counted(len(closed), 'bucket')}")
    return bool(updates)


def _reduction_of(node: ir.Node) -> ir.Node | None:
    """The AllReduce of an update's gradient, which may travel in a low type."""
    producers = (value.producer() for value in on_its_way(source_of(node)))
    return next((p for p in producers if p is not None and collective_of(p) == "AllReduce"), None)


def _produced(node: ir.Node, position: dict[ir.Node, int]) -> int:
    """The node that computes an update's gradient, before the reduction."""
    *_, value = on_its_way(source_of(node))
    return _position(value, position)


def _position(value: ir.Value | None, position: dict[ir.Node, int]) -> int:
    """Position of the node that computes the value; −1 without one."""
    producer = value.producer() if value is not None else None
    return position.get(producer, -1) if producer is not None else -1


def _key(node: ir.Node) -> tuple[str, ...]:
    reduction = _reduction_of(node)
    attributes = {k: v for k, v in required_declaration(node).attribute_values(node).items() if k != BUCKET}
    present = "".join("-" if v is None else "x" for v in node.inputs)
    how = ""
    if reduction is not None:
        dtype = reduction.outputs[0].dtype
        how = f"{reduction.attributes['group'].as_string()}/{reduction.attributes['reduce'].as_string()}/{dtype}"
        how += "/sparse" * (_nonzero(reduction) > 0)
    copies = " ".join(str(copy.outputs[0].dtype) for copy in copies_of(node))
    return (node.op_type, str(source_of(node).dtype), copies, how, present, repr(sorted(attributes.items())))


def _nonzero(reduction: ir.Node) -> int:
    return reduction.attributes.get_int("nonzero", 0)


def _alike(nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
    groups: dict[tuple[str, ...], list[ir.Node]] = {}
    for node in nodes:
        key = (str(input_of(node).dtype), node.attributes["group"].as_string(), node.attributes["reduce"].as_string())
        groups.setdefault(key, []).append(node)
    return list(groups.values())


def _merge(graph: ir.Graph, op: Builder, reductions: Sequence[ir.Node], name: str) -> None:
    """Replace single-operand AllReduces by one of all their operands, before the first consumer of any of them."""
    if not reductions:
        return
    position = {node: k for k, node in enumerate(graph)}
    consumers = [user for r in reductions for user in r.outputs[0].consumers()]
    last = max(reductions, key=lambda n: position[n])
    first_use = min(consumers, key=lambda n: position[n], default=None)
    if first_use is not None and position[first_use] < position[last]:
        sink(graph, reductions)
    op.before, op.scope = last, f"allreduce/{name}"
    attributes = {k: reductions[0].attributes[k].value for k in ("group", "reduce") if k in reductions[0].attributes}
    if _nonzero(reductions[0]):
        attributes["nonzero"] = sum(map(_nonzero, reductions))
    group = reductions[0].attributes["group"].as_string()
    results = op.emit(
        "AllReduce",
        [r.inputs[0] for r in reductions],
        {"tag": f"{group}/{name}", BUCKET: name, **attributes},
        domain="graphc",
        name=f"allreduce/{name}",
    )
    for reduction, result in zip(reductions, results, strict=True):
        reduction.outputs[0].replace_all_uses_with(result)
        graph.remove(reduction, safe=True)
    merged = producer_of(results[0])
    _merge_conversions(graph, op, [v.producer() for v in inputs_of(merged)], f"narrow/{name}")
    _merge_conversions(graph, op, [users[0] if len(users := v.consumers()) == 1 else None for v in results], f"widen/{name}")


def _merge_conversions(graph: ir.Graph, op: Builder, nodes: Sequence[ir.Node | None], name: str) -> None:
    """Replace single-operand conversions to or from a low type by one, as soon as all operands exist."""
    found = [n for n in nodes if n is not None and converts(n)]
    if not found or len(found) < len(nodes):
        return
    order = list(graph)
    position = {node: k for k, node in enumerate(order)}
    first = found[0]
    op.before, op.scope = order[max(_position(n.inputs[0], position) for n in found) + 1], ""
    attributes = {k: a.value for k, a in first.attributes.items()}
    results = op.emit(first.op_type, [n.inputs[0] for n in found], attributes, domain="graphc", name=name)
    for node, result in zip(found, results, strict=True):
        node.outputs[0].replace_all_uses_with(result)
    graph.remove(found, safe=True)
