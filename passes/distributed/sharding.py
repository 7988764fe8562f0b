"""Shards updates over the ranks: the rewrite shared by ``zero`` and ``central_storage``.

    before   dW ─► AllReduce(b) ─► Adam(W, …) ─► W::next
    after    dW ─► ReduceScatter(b, owner) ─► Adam(W, …, shard=owner) ─► W::next ─► AllGather(b, owner)
    nodes    dW ─► ReduceScatter(b, data) ─► AllReduce(b, node, within=data) ─► Adam(W, …, shard=owner) ─► …

With a mesh of nodes, the ranks of a node divide the state, and nodes are replicas of each other.

The plan decides which elements a rank owns, so the graph is the same for any number of ranks. Nodes that read all gradients
(a norm, a test for NaN) read this rank's shard of them, and their results are reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.declare import OFFLOAD, SHARD, declaration_of, is_update, required_declaration
from graphc.ir.facts import inputs_of, producer_of
from graphc.ir.names import BUCKET
from graphc.ir.ops.accumulation import is_accumulation
from graphc.ir.ops.collectives import collective_of
from graphc.ir.updates import copies_of, next_value_of, source_of, stages_that_read, state_of, trains


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Updates that are sharded together.

    Attributes:
        updates: the updates of the parameters.
        copies: updates of copies of the new parameters in a narrower type, in the same order.
        reduction: the ReduceScatter of the gradients, among the ranks that divide the state.
    """

    name: str
    updates: list[ir.Node]
    copies: list[ir.Node]
    reduction: ir.Node

    @property
    def group(self) -> str:
        return self.reduction.attributes["group"].as_string()

    def read(self) -> list[list[ir.Node]]:
        """The updates of the parameters and of their copies, restricted to states that the computation reads."""
        both = (self.updates, self.copies)
        return [nodes for nodes in both if any(not is_update(user) for n in nodes for user in state_of(n).consumers())]

    def is_read_elsewhere(self) -> bool:
        """Whether several pipeline stages read a parameter of the bucket."""
        return any(len(stages_that_read(node)) > 1 for node in self.updates)


def shard_updates(graph: ir.Graph, strategy: str, *, owner: str, transient: bool, offload: bool) -> list[Bucket]:
    """Let every rank reduce and update only its own elements of each bucket.

    Statistics stay whole: they are small, and evaluation reads all of them.

    Args:
        strategy: the name of the pass, for errors.
        owner: ``even`` or ``root``; see :mod:`graphc.ir.ops.collectives`.
        transient: whether gradients take memory only until they are reduced.
        offload: whether the optimizer's state lies in host memory.

    Raises:
        UsageError: an update that cannot run over a part of its bucket, or whole gradients that another node reads.
    """
    updates = [n for n in graph if trains(n)]
    if not updates:
        raise UsageError(f"{strategy}: there is nothing to shard; the graph has no optimizer")
    buckets: dict[ir.Node, list[ir.Node]] = {}
    for node in updates:
        buckets.setdefault(_reduction_of(node, strategy), []).append(node)
    op = Builder(graph)
    readers = _measures(buckets, strategy)
    found = []
    for reduction, nodes in buckets.items():
        narrow = [copy for n in nodes for copy in copies_of(n)]
        for node in (*nodes, *narrow):
            node.attributes[SHARD] = ir.AttrString(SHARD, owner)
        for node in nodes if offload else ():
            node.attributes[OFFLOAD] = ir.AttrInt64(OFFLOAD, 1)
        scatter = _scatter(graph, op, reduction, owner, transient)
        found.append(Bucket(nodes[0].attributes[BUCKET].as_string(), nodes, narrow, scatter))
    for node in readers:
        _measure_parts(graph, op, node, owner)
    return found


def gather_next(graph: ir.Graph, bucket: Bucket, owner: str) -> None:
    """Put an AllGather after the updates, so that every rank gets all new parameters."""
    op = Builder(graph, scope=f"gather/{bucket.name}")
    for k, nodes in enumerate(bucket.read()):
        tag = f"{bucket.group}/{bucket.name}/gather{k or ''}"
        attributes = {"tag": tag, "group": bucket.group, BUCKET: bucket.name, "owner": owner}
        op.emit(
            "AllGather", [next_value_of(n) for n in nodes], attributes, domain="graphc", name=f"gather/{bucket.name}{k or ''}"
        )


def _reduction_of(node: ir.Node, strategy: str) -> ir.Node:
    """The AllReduce of the update's gradient, whose whole bucket may be sharded."""
    state = state_of(node)
    if not required_declaration(node).elementwise:
        raise UsageError(
            f"{strategy} cannot shard the optimizer {node.op_type} of {state.name!r}: an element of its result depends on more"
            " than that element of the parameter and its gradient (its declaration does not say elementwise=True)"
        )
    if node.attributes.get_string(SHARD, ""):
        raise UsageError(f"{strategy}: the update of {state.name!r} is sharded already; a program has one strategy")
    reduction = source_of(node).producer()
    if reduction is None or collective_of(reduction) != "AllReduce" or reduction.attributes.get_int("nonzero", 0) > 0:
        between = f"{reduction.op_type} ({reduction.name!r})" if reduction is not None else "nothing"
        raise UsageError(
            f"{strategy} replaces the AllReduce in front of each update, but the gradient of {state.name!r} comes from"
            f" {between}; compression and other strategies exclude it"
        )
    values = reduction.attributes
    dense = values.get_int("every", 1) == 1 and values.get_int("nonzero", 0) == 0
    if values.get_string("reduce", "sum") not in ("sum", "mean") or not dense:
        how = values.get_string("reduce", "sum")
        raise UsageError(
            f"{strategy} needs gradients that are all summed in every step, unlike {reduction.name!r} (reduce={how});"
            " top-k compression, adasum and deterministic='any-world' exclude it"
        )
    if not node.attributes.get_string(BUCKET, ""):
        raise UsageError(f"{strategy} shards flat buffers: run 'bucket' before it")
    return reduction


def _measures(buckets: dict[ir.Node, list[ir.Node]], strategy: str) -> list[ir.Node]:
    """Other readers of the reduced gradients whose results over shards can be combined."""
    found: dict[ir.Node, None] = {}
    for reduction, nodes in buckets.items():
        for value in reduction.outputs:
            for user in value.consumers():
                declaration = declaration_of(user)
                if declaration is not None and declaration.combine:
                    found.setdefault(user)
                elif user not in nodes:
                    raise UsageError(
                        f"{strategy} leaves each rank a part of the gradients, but {user.op_type} ({user.name!r}) reads"
                        f" {value.name!r} whole"
                    )
    return list(found)


def _scatter(graph: ir.Graph, op: Builder, reduction: ir.Node, owner: str, transient: bool) -> ir.Node:
    """Replace the AllReduce by a ReduceScatter, and an AllReduce of the parts between nodes; sums over micro-batches stay
    whole.
    """
    op.before, op.scope = reduction, reduction.name or "scatter"
    attributes = {k: a.value for k, a in reduction.attributes.items() if k not in ("every", "nonzero")}
    attributes |= inside(reduction)
    accumulated = any((p := v.producer()) is not None and is_accumulation(p) for v in inputs_of(reduction))
    attributes.update({"owner": owner, "transient": int(transient and not accumulated)})
    name = (reduction.name or "").replace("allreduce/", "scatter/")
    scattered = op.emit("ReduceScatter", list(reduction.inputs), attributes, domain="graphc", name=name)
    results = between_nodes(op, reduction, scattered) if spans_nodes(reduction) else scattered
    for old, new in zip(reduction.outputs, results, strict=True):
        old.replace_all_uses_with(new)
    graph.remove(reduction, safe=True)
    return producer_of(scattered[0])


def spans_nodes(reduction: ir.Node) -> bool:
    """Whether a reduction is over the ranks of several nodes."""
    return "node" in reduction.attributes["group"].as_string().split("+")


def inside(reduction: ir.Node) -> dict[str, str]:
    """Group and tag of a reduction inside the node; those of ``reduction`` itself where it does not span nodes."""
    group, _, name = reduction.attributes["tag"].as_string().partition("/")
    axes = [axis for axis in group.split("+") if axis != "node"]
    return {"group": "+".join(axes), "tag": f"{'+'.join(axes)}/{name}"}


def between_nodes(op: Builder, reduction: ir.Node, scattered: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Emit the AllReduce between nodes of the part that each rank has of ``scattered``, as ``reduction`` reduces."""
    kept = {k: a.value for k, a in reduction.attributes.items() if k in ("reduce", BUCKET)}
    name = reduction.attributes["tag"].as_string().partition("/")[2]
    attributes = {**kept, "group": "node", "within": inside(reduction)["group"], "tag": f"node/{name}"}
    reduced: Sequence[ir.Value] = op.emit("AllReduce", scattered, attributes, domain="graphc", name=f"allreduce/{name}/node")
    return reduced


def _measure_parts(graph: ir.Graph, op: Builder, node: ir.Node, owner: str) -> None:
    """Run ``node`` over this rank's shards, and combine the results of all ranks."""
    combine = required_declaration(node).combine
    result, attributes = node.outputs[0], {k: a.value for k, a in node.attributes.items()}
    sharded = [v for v in inputs_of(node) if _is_scattered(v)]
    whole = [v for v in inputs_of(node) if not _is_scattered(v)]
    op.before, op.scope = node, node.name or node.op_type
    (part,) = op.emit(node.op_type, sharded, {**attributes, SHARD: owner}, domain=node.domain)
    producer = producer_of(sharded[0])
    group = (producer.attributes.get("within") or producer.attributes["group"]).as_string()
    flag = part.dtype == ir.DataType.BOOL
    number = op.Cast(part, to=int(ir.DataType.FLOAT)) if flag else part
    total = op.graphc.AllReduce(number, tag=f"{group}/{node.name}", group=group, reduce=combine)
    total = op.Cast(total, to=int(ir.DataType.BOOL)) if flag else total
    if whole:
        (other,) = op.emit(node.op_type, whole, attributes, domain=node.domain)
        join = {"max": op.Or if flag else op.Max, "sum": op.Add}[combine]
        total = join(total, other)
    result.replace_all_uses_with(total, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _is_scattered(value: ir.Value) -> bool:
    producer = value.producer()
    if producer is None:
        return False
    return collective_of(producer) == "ReduceScatter" or producer.attributes.get_string("within", "") != ""


def buckets_note(buckets: Sequence[Bucket]) -> str:
    """``"12 updates in 3 buckets"``."""
    return f"{counted(sum(len(b.updates) for b in buckets), 'update')} in {counted(len(buckets), 'bucket')}"
