"""parameter_server: workers pull parameters and push gradients; servers run the updates.

    before   W ─► forward, backward ─► dW ─► AllReduce ─► Adam(W, ·)
    after    W ─► Pull ─► forward, backward ─► dW ─► Push ─► Adam(W, ·)

Nodes after a ``Push`` belong to the servers, nodes before it to the workers (:mod:`graphc.parameter_server.split` cuts the
graph). Each update goes whole to one server: the largest first, to the server with the fewest bytes so far. A value that
updates on several servers need, such as the weight of the loss, goes to every server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.facts import describe, is_state, nbytes_of
from graphc.ir.names import LOSS_SCALE
from graphc.ir.ops.collectives import collective_of
from graphc.ir.ops.parameter_server import EVERY, UNBOUNDED
from graphc.ir.subgraphs import bodies, captured
from graphc.ir.updates import is_reduced, state_of
from graphc.pipeline import Context, graph_pass


@graph_pass("parameter_server", requires=("allreduce",), changes="training")
def parameter_server(model: ir.Model, ctx: Context, *, servers: int = 1, staleness: int | None = None) -> bool:
    """Replace every AllReduce by a Push, and read parameters through a Pull.

    Args:
        servers: processes besides the workers that hold and update the parameters.
        staleness: how many steps a worker may run ahead of the slowest live one; None: no bound; 0: synchronous, with the
            results of the mirrored strategy.

    Raises:
        UsageError: an option out of range, more servers than parameters, a loss scale without ``staleness=0``, or a feature
            that needs all workers within a step: micro-batches, ``sync_batchnorm``, PowerSGD, top-k.
    """
    if servers < 1 or (staleness is not None and staleness < 0):
        raise UsageError(f"servers must be at least 1 and staleness at least 0, not servers={servers}, staleness={staleness}")
    graph = model.graph
    if LOSS_SCALE in graph.initializers and staleness != 0:
        raise UsageError(
            "the loss scale of fp16 changes between the pull and the push of an asynchronous worker; "
            "take precision bf16, or staleness=0"
        )
    _refuse_meetings(graph)
    common = {"servers": servers, "staleness": UNBOUNDED if staleness is None else staleness}
    owner = _deal([node for node in graph if is_reduced(node)], servers)
    reductions = [node for node in graph if node.op_type == "AllReduce" and node.domain == "graphc"]
    wanted = {node: _wanted(node, owner) for node in reductions}
    for node in graph:
        if is_update(node) and node not in owner:
            _follow(node, owner)
    for node in reductions:
        _push(graph, node, wanted[node], common)
    _pull(graph, owner, common)
    ctx.note(f"parameter_server: {counted(len(owner), 'update')} on {counted(servers, 'server')}")
    return True


def _refuse_meetings(graph: ir.Graph) -> None:
    """Reject graphs in which workers exchange values before the push, or keep state of their own."""
    reductions = [node for node in graph if node.op_type == "AllReduce" and node.domain == "graphc"]
    reduced = _descendants(value for node in reductions for value in node.outputs)
    for node in graph:
        foreign = collective_of(node) not in (None, "AllReduce") or (node.op_type == "Accumulate" and node.domain == "graphc")
        own = is_update(node) and node not in reduced and any(set(n.inputs) & set(graph.inputs) for n in _ancestors([node]))
        if foreign or own or (node in reduced and node in reductions):
            raise UsageError(
                "parameter servers exclude micro-batches, sync_batchnorm, and compression that keeps state or needs "
                f"several reductions; remove these, or choose another strategy: {node.name} ({node.op_type})"
            )


def _deal(updates: list[ir.Node], servers: int) -> dict[ir.Node, int]:
    """Update → server, balanced by bytes of updated state."""
    if servers > len(updates):
        raise UsageError(f"{servers} servers are more than the {counted(len(updates), 'parameter')} to divide among them")
    held = [0] * servers
    owner: dict[ir.Node, int] = {}
    for node in sorted(updates, key=lambda n: nbytes_of(state_of(n)), reverse=True):
        owner[node] = server = held.index(min(held))
        held[server] += nbytes_of(state_of(node))
    return owner


def _wanted(reduction: ir.Node, owner: Mapping[ir.Node, int]) -> list[int]:
    """The server that needs each operand, or all servers; graph outputs belong to the first one."""
    found = []
    for value in reduction.outputs:
        reached = _descendants([value])
        servers = {owner.get(node, EVERY) for node in reached if is_update(node)}
        if value.is_graph_output() or any(out.is_graph_output() for node in reached for out in node.outputs):
            servers.add(0)
        found.append(servers.pop() if len(servers) == 1 else EVERY)
    return found


def _follow(node: ir.Node, owner: dict[ir.Node, int]) -> None:
    """Place state that is computed from a parameter's next value on the parameter's server."""
    servers = {owner[n] for n in _ancestors([node]) if n in owner}
    if len(servers) > 1:
        raise UsageError(f"with several servers, one update may not need the results of two of them: {describe(node)}")
    if servers:
        owner[node] = servers.pop()


def _push(graph: ir.Graph, reduction: ir.Node, wanted: list[int], common: Mapping[str, int]) -> None:
    """Replace an AllReduce by one Push for each server that needs some of its operands."""
    attributes = {name: reduction.attributes[name].value for name in ("reduce", "bucket") if name in reduction.attributes}
    tag = reduction.attributes["tag"].as_string()
    op = Builder(graph, before=reduction)
    for server in sorted(set(wanted)):
        places = [k for k, s in enumerate(wanted) if s == server]
        name = f"push/{tag}/{'every' if server == EVERY else server}"
        values = op.emit(
            "Push",
            [reduction.inputs[k] for k in places],
            {"tag": name, "server": server, **common, **attributes},
            domain="graphc",
            name=name,
        )
        for k, value in zip(places, values, strict=True):
            reduction.outputs[k].replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(reduction, safe=True)


def _pull(graph: ir.Graph, owner: Mapping[ir.Node, int], common: Mapping[str, int]) -> None:
    """Put the Pulls of each server's state, and of other values that workers read, before all other nodes."""
    workers = _ancestors([node for node in graph if node.op_type == "Push" and node.domain == "graphc"])
    held: dict[int, list[ir.Value]] = {}
    for node, server in sorted(owner.items(), key=lambda item: item[0].name or ""):
        held.setdefault(server, []).append(state_of(node))
    dealt = {v for values in held.values() for v in values}
    home = {inner: node for node in graph for body in bodies(node) for inner in body.all_nodes()}
    readers = {v: {home.get(user, user) for user, _ in v.uses()} for v in graph.initializers.values()}
    for value in graph.initializers.values():
        if value not in dealt and is_state(value) and not workers.isdisjoint(readers[value]):
            held.setdefault(EVERY, []).append(value)
    op = Builder(graph, before=next(iter(graph)))
    for server, values in sorted(held.items()):
        name = f"pull/{'every' if server == EVERY else server}"
        pulled = op.emit("Pull", values, {"tag": name, "server": server, **common}, domain="graphc", name=name)
        for value, new in zip(values, pulled, strict=True):
            for user, index in list(value.uses()):
                if home.get(user, user) in workers:
                    user.replace_input_with(index, new)


def _ancestors(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes that ``nodes`` depend on, excluding themselves."""
    found: set[ir.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        for value in (*node.inputs, *captured(node)):
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in found:
                found.add(producer)
                waiting.append(producer)
    return found


def _descendants(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that depend on ``values``; none of them is in a subgraph."""
    found: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        for node in waiting.pop().consumers():
            if node not in found:
                found.add(node)
                waiting.extend(node.outputs)
    return found
