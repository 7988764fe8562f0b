"""Splits a training graph with parameter servers into worker and server parts.

    whole     W ─► Pull ─► forward, backward ─► dW ─► Push ─► Adam(W, ·) ─► W::next
    worker    W ─► forward, backward ─► dW ─► Push
    server    (dW) ─► Push ─► Adam(W, ·) ─► W::next

Each part is a separate graph with its own plan. A worker's outputs (the loss) cover its own share.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from graphc.backend import Capabilities
from graphc.errors import ModelError
from graphc.ir.declare import is_update
from graphc.ir.facts import inputs_of, static_dims
from graphc.ir.ops.parameter_server import EVERY, exchanges, server_options
from graphc.ir.subgraphs import captured, release_bodies
from graphc.ir.updates import state_of
from graphc.pipeline import PASSES, Context
from graphc.plan.partition import Plan, make_plan

B = TypeVar("B", bound=Capabilities)

PUSHED = "pushed/"
"""Prefix of a server part's input that stands for a pushed value."""


def pushes(graph: ir.Graph, server: int) -> list[ir.Node]:
    """The Push nodes whose operands go to ``server``, in order."""
    return [node for node in exchanges(graph, "Push") if _server(node) in (server, EVERY)]


def pulled(graph: ir.Graph, server: int) -> list[ir.Value]:
    """The state that workers read from ``server``, in order."""
    nodes = [n for n in exchanges(graph, "Pull") if _server(n) == server or (_server(n) == EVERY and server == 0)]
    return [value for node in nodes for value in inputs_of(node)]


def worker_part(model: ir.Model) -> ir.Model:
    """Cut out the worker part: everything up to the pushes, and this share's outputs. Its parameters are not state."""
    part = model.clone()
    graph = part.graph
    for node in list(exchanges(graph, "Pull")):
        for value, old in zip(inputs_of(node), node.outputs, strict=True):
            old.replace_all_uses_with(value)
        graph.remove(node, safe=True)
    for node in exchanges(graph, "Push"):
        for value, old in zip(inputs_of(node), node.outputs, strict=True):
            old.replace_all_uses_with(value, replace_graph_outputs=True)
    _keep(graph, list(exchanges(graph, "Push")), list(graph.outputs))
    PASSES["simplify"].function(part, Context())
    return part


def server_part(model: ir.Model, server: int) -> ir.Model:
    """Cut out the part of ``server``: the updates of its state; server 0 also computes the graph's outputs."""
    part = model.clone()
    graph = part.graph
    owner = {v: _server(node) for node in exchanges(graph, "Pull") for v in node.inputs}
    updates = [n for n in graph if is_update(n) and owner.get(state_of(n), EVERY) in (server, EVERY)]
    arrived = pushes(graph, server)
    own = set(graph.inputs)
    graph.inputs.clear()
    for node in arrived:
        for index, value in enumerate(inputs_of(node)):
            shape, _ = static_spec(value)
            entry = ir.Value(name=f"{PUSHED}{value.name}", type=value.type, shape=ir.Shape(list(shape)))
            graph.inputs.append(entry)
            node.replace_input_with(index, entry)
    if server != 0:
        graph.outputs.clear()
    _keep(graph, [*arrived, *updates], list(graph.outputs))
    missing = next((v for node in graph for v in (*node.inputs, *captured(node)) if v in own), None)
    foreign = next((node for node in exchanges(graph, "Push") if node not in arrived), None)
    if missing is not None or foreign is not None:
        what = f"the input {missing.name!r}" if missing is not None else f"what {foreign.name if foreign else ''!r} carries"
        raise ModelError(f"an update on server {server} needs {what}, which is not pushed to it")
    return part


def is_push(node: ir.Node) -> bool:
    return node.op_type == "Push" and node.domain == "graphc"


def exchanging(backend: B) -> B:
    """A copy of ``backend`` whose plans have a step for each Push."""
    own = copy.copy(backend)
    own.prefers_native = lambda node: is_push(node) or backend.prefers_native(node)  # type: ignore[method-assign]
    return own


def role_plans(model: ir.Model, shapes: Mapping[str, Sequence[int]], backend: Capabilities) -> dict[str, Plan]:
    """Plan every part: ``worker`` (for inputs of ``shapes``), ``server 0``, ``server 1`` and so on."""
    own = exchanging(backend)
    found = {"worker": make_plan(worker_part(model), shapes, own, world_size=2)}
    options = server_options(model.graph)
    for server in range(options.servers if options is not None else 0):
        part = server_part(model, server)
        arrived = {v.name or "": static_spec(v)[0] for v in part.graph.inputs}
        found[f"server {server}"] = make_plan(part, arrived, own, world_size=2)
    return found


def static_spec(value: ir.Value) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a value that servers and workers exchange.

    Raises:
        ModelError: its shape is not static.
    """
    shape = static_dims(value)
    if shape is None or value.dtype is None:
        raise ModelError(f"servers and workers exchange values of static shape, {value.name!r} has none")
    return tuple(shape), value.dtype.numpy()


def _server(node: ir.Node) -> int:
    return node.attributes["server"].as_int() if "server" in node.attributes else 0


def _keep(graph: ir.Graph, nodes: list[ir.Node], outputs: list[ir.Value]) -> None:
    """Keep only ``nodes``, the producers of ``outputs``, their dependencies and the initializers in use."""
    kept = set(nodes)
    waiting = [*nodes, *(p for v in outputs if (p := v.producer()) is not None)]
    kept.update(waiting)
    while waiting:
        node = waiting.pop()
        for value in (*node.inputs, *captured(node)):
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in kept:
                kept.add(producer)
                waiting.append(producer)
    removed = [node for node in graph if node not in kept]
    for node in removed:
        release_bodies(node)
    graph.remove(removed, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
