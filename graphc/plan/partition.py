"""Partitions a scheduled training graph into the steps that one rank executes.

    specialise   symbolic dimensions get sizes, shape arithmetic folds away
    decompose    graphc ops for which the backend has no kernel become standard ops
    partition    nodes, in order, become steps: segment | kernel | start | wait | check | update
    layout       every value that crosses steps gets a place: a slice of a flat bucket, or of the activation arena

A plan holds no arrays: :mod:`graphc.runtime.executor` allocates and binds it. It prints as text with :meth:`Plan.text`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graphc.backend import STANDARD, Capabilities, SegmentPart
from graphc.errors import ModelError, counted
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import SHARD, declaration_of, is_update, required_declaration
from graphc.ir.facts import constant, describe, input_of, inputs_of, is_state, static_dims
from graphc.ir.names import BUCKET
from graphc.ir.ops.accumulation import is_accumulation, run_once
from graphc.ir.ops.collectives import COLLECTIVES, VARIADIC, collective_of
from graphc.ir.ops.pipe import SEND, is_transfer
from graphc.ir.subgraphs import bodies, captured
from graphc.ir.updates import converts
from graphc.mesh import Mesh
from graphc.pipe.split import Edge, Pipe, Split
from graphc.pipe.tasks import Task
from graphc.plan.apart import apart
from graphc.plan.buffers import lay_out
from graphc.plan.dynamic_shapes import join_unknown_sizes, refuse_unknown_sizes
from graphc.plan.group_places import collective_events, join_group
from graphc.plan.rematerialise import rematerialise
from graphc.plan.skip_flag import guard
from graphc.plan.specialise import VIEWS, prepare
from graphc.plan.steps import PlanStep, Slice, Transfer, UpdateGroup
from graphc.plan.update_groups import find_homes, update_groups


@dataclass(slots=True)
class Plan:
    """The steps of one rank for one set of feed shapes.

    Attributes:
        model: the specialised graph the steps refer to.
        places: the place in a buffer of each value that crosses steps.
        buffers: name → bytes of every flat buffer and of the ``arena``.
        groups: the update groups, which own the flat state buffers.
        views: value → the value whose memory it shares under another shape.
        mesh, rank: the axes of the world, and whose plan it is.
        homes: state, next value or reduced gradient → its group and the index of the flat input that it is.
        stop: the flag by which the check step skips the updates; None: the check stops the step itself.
        edges: in a pipeline, the transfers between all its ranks.
        collectives: one text line per collective in order. Those between replicas are equal on all of them, and for all
            batches; of others, which ranks with the same samples run, the shapes are left out.
    """

    model: ir.Model
    steps: list[PlanStep]
    places: dict[ir.Value, Slice]
    buffers: dict[str, int]
    groups: list[UpdateGroup]
    views: dict[ir.Value, ir.Value]
    mesh: Mesh
    rank: int
    homes: dict[ir.Value, tuple[UpdateGroup, int]]
    stop: ir.Value | None = None
    edges: list[Edge] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def collectives(self) -> list[str]:
        begun = [event for event in collective_events(self.steps) if event.begins]
        return [f"{e.tag} over {e.group}" if {"pipe", "tensor"} & {*e.group.split("+")} else e.text for e in begun]

    def text(self, parts: Callable[[PlanStep], Sequence[SegmentPart]] | None = None) -> str:
        """Print one line a step, with sizes, in the order of execution on this rank.

        Args:
            parts: what runs the nodes of a segment, for lines below it.
        """
        lines = [f"plan for {counted(self.world_size, 'worker')}: {counted(len(self.steps), 'step')}"]
        for k, step in enumerate(self.steps):
            written = sum(self.places[v].nbytes for v in step.outputs if v in self.places)
            name = f"{step.task}  {step.name}" if step.task is not None else step.name
            detail = f"{len(step.nodes)} nodes" if len(step.nodes) != 1 else step.nodes[0].op_type
            lines.append(f"{k:4d}  {step.kind:<8} {name:<40} {detail:<24} {written / 1e6:9.3f} MB")
            for part in parts(step) if parts is not None and step.kind == "segment" else ():
                lines.append(f"      {part.runs:<12} {', '.join(part.nodes)}")
        lines.extend(f"      buffer {name:<40} {size / 1e6:9.3f} MB" for name, size in self.buffers.items())
        return "\n".join(lines)


def make_plan(
    model: ir.Model,
    shapes: Mapping[str, Sequence[int]],
    capabilities: Capabilities = STANDARD,
    *,
    world_size: int = 1,
    rank: int = 0,
    guarded: bool = False,
    mesh: Mesh | None = None,
    pipe: Pipe | None = None,
    owners: Mapping[str, int] | None = None,
    prepared: ir.Model | None = None,
) -> Plan:
    """Plan the steps of one rank.

    Args:
        model: a training (or inference) graph as the pipeline leaves it.
        shapes: concrete shape of every graph input.
        capabilities: those of the backend that will run it.
        world_size: ranks, all on the data axis unless there is a ``mesh``; on one rank there are no collectives.
        rank: whose plan it is; plans differ in the parts of sharded state that a rank owns.
        guarded: the check for NaN skips the updates by a flag on the device (:mod:`graphc.plan.skip_flag`).
        mesh: the axes of the world.
        pipe: the rank's place in a pipeline, of which it runs its stages only.
        owners: of a pipeline in inference: parameter → stage.
        prepared: the result of :func:`prepare` for these arguments, which the plan takes over; None: it is made.
    """
    mesh = Mesh(data=world_size) if mesh is None else mesh
    ready = prepared
    if ready is None:
        ready = prepare(model, shapes, capabilities, mesh=mesh, rank=rank, regions=True)
    split = Split(ready.graph, pipe, owners) if pipe is not None else None
    tasks = split.take() if split is not None else {}
    _privatise(ready.graph)
    stop = guard(node for node in ready.graph if is_update(node)) if guarded else None
    groups = update_groups(ready.graph, mesh.data, mesh.coordinate("data", rank))
    steps = list(_steps(ready.graph, capabilities, groups, tasks))
    for step in steps:
        if step.transfer is not None and step.kind == "start":
            join_group(step, mesh, rank)
    _dissolve_regions(ready.graph)
    if capabilities.unknown_sizes:
        steps = join_unknown_sizes(steps, _homes(steps))
    _add_check(steps, stop)
    steps, views = _take_out_views(steps, groups)
    steps = rematerialise(ready.graph, steps, views, capabilities.repeats)
    _connect(ready.graph, steps, views)
    refuse_unknown_sizes(steps)
    homes = find_homes(groups)
    places, buffers = lay_out(ready.graph, steps, groups, views, homes, capabilities)
    edges = split.edges if split is not None else []
    return Plan(ready, steps, places, buffers, groups, views, mesh, rank, homes, stop, edges)


def _privatise(graph: ir.Graph) -> None:
    """Copy every value that will be overwritten in a flat buffer but has other uses.

    A collective works in place and a gradient lies in its bucket: an operand that occurs twice, is read elsewhere, or is
    not the result of a node (an input, a constant) is copied first. State is meant to be overwritten. What a collective
    between shards of a layer makes is copied for the bucket of another one, unless that takes all of it.
    """
    operands: list[tuple[ir.Node, int]] = []
    reads_only = {"SendStart", "BarrierStart"}
    for node in graph:
        begins = collective_of(node) is not None and node.op_type.endswith("Start")
        if begins or converts(node):
            operands.extend((node, k) for k in range(len(node.inputs)))
        elif is_update(node) and (source := required_declaration(node).source) is not None:
            operands.append((node, source))
    op, follower, taken = Builder(graph), _followers(graph), _taken_together(operands)
    for node, index in operands:
        value = input_of(node, index)
        producer = value.producer()
        if producer is not None and _is_of_shards(producer) and set(producer.outputs) != taken[node]:
            op.before, op.scope = follower[value], f"copy/{value.name}"
            node.replace_input_with(index, op.Identity(value))
            continue
        if producer is not None and (is_update(producer) or (is_update(node) and _is_wait(producer))):
            continue
        if producer is None and is_state(value) and collective_of(node) in VARIADIC:
            continue
        fixed = producer is None or producer.op_type == "Constant"
        uses = sum(not _only_measures(user) for user, _ in value.uses()) if node.op_type not in reads_only else 1
        if fixed or uses > 1 or value.is_graph_output():
            op.before, op.scope = node if fixed else follower[value], f"copy/{value.name}"
            node.replace_input_with(index, op.Identity(value))


def _is_of_shards(node: ir.Node) -> bool:
    """Whether the node waits for a collective whose results lie outside of buckets of gradients."""
    return _is_wait(node) and (
        collective_of(node) not in VARIADIC or node.attributes.get_string("adjoint", "partial") == "whole"
    )


def _taken_together(operands: Sequence[tuple[ir.Node, int]]) -> dict[ir.Node, set[ir.Value]]:
    """Node → the operands in its flat buffer; updates of a bucket have one together.

    A ReduceScatter may keep its results elsewhere, and has none.
    """
    together: dict[ir.Node | str, set[ir.Value]] = {}
    key = {node: node.attributes.get_string(BUCKET, "") or node if is_update(node) else node for node, _ in operands}
    for node, index in operands:
        found = together.setdefault(key[node], set())
        if collective_of(node) != "ReduceScatter":
            found.add(input_of(node, index))
    return {node: together[key[node]] for node, _ in operands}


def _followers(graph: ir.Graph) -> dict[ir.Value, ir.Node | None]:
    """Value → the node after its producer: a copy placed there shares its segment, and mostly its kernel."""
    nodes = list(graph)
    return {out: after for node, after in itertools.zip_longest(nodes, nodes[1:]) for out in node.outputs}


def _is_wait(node: ir.Node) -> bool:
    return collective_of(node) is not None and node.op_type.endswith("Wait")


def _only_measures(node: ir.Node) -> bool:
    """Whether the node reduces a bucket in place to a scalar: a sum of squares, a test for NaN."""
    declaration = declaration_of(node)
    return declaration is not None and bool(declaration.combine)


def _steps(
    graph: ir.Graph,
    capabilities: Capabilities,
    groups: Sequence[UpdateGroup],
    tasks: Mapping[ir.Node, Task],
) -> Iterator[PlanStep]:
    native, separate = capabilities.prefers_native, capabilities.separate
    group_of = {node: group for group in groups for node in group.nodes}
    segment: list[ir.Node] = []
    sums: list[ir.Node] = []
    pending = {id(group): len(group.nodes) for group in groups}
    transfers: dict[str, Transfer] = {}
    once = {n for n, task in tasks.items() if task.kind == "U"} if tasks else run_once(graph)
    task: Task | None = None
    late = False  # whether the steps now run once

    def step(kind: str, name: str, nodes: list[ir.Node], **more: Any) -> PlanStep:
        return PlanStep(kind, name, nodes, once=late, task=task, **more)

    def close() -> Iterator[PlanStep]:
        for part in apart(segment, separate) if separate is not None else [list(segment)]:
            if part:
                yield step("segment", part[-1].name or "segment", part)
        segment.clear()
        if sums:  # after the segment: a segment that is cut at every gradient runs slower
            yield step("accumulate", sums[-1].name or "accumulate", list(sums))
            sums.clear()

    for node in graph:
        if node.op_type == "Constant" and node.domain == "":
            continue
        declaration = declaration_of(node)
        if (node in once) != late or tasks.get(node, task) != task:
            yield from close()
            late, task = node in once, tasks.get(node, task)
        if is_accumulation(node):
            sums.append(node)
        elif node in group_of:
            yield from close()
            group = group_of[node]
            pending[id(group)] -= 1
            if pending[id(group)] == 0:
                yield step("update", f"{node.op_type} {group.name}", list(group.nodes), group=group)
        elif is_transfer(node):
            yield from close()
            kind = "send" if node.op_type == SEND else "recv"
            name = f"{kind} {node.attributes['tag'].as_string()}"
            yield step(kind, name, [node], inputs=inputs_of(node), outputs=list(node.outputs))
        elif declaration is not None and declaration.effect and not native(node):
            yield from close()
            if collective_of(node) is None or not node.op_type.endswith(("Start", "Wait")):
                raise ModelError(f"{describe(node)} is not scheduled: run the 'schedule' pass")
            kind = "wait" if _is_wait(node) else "start"
            tag = node.attributes["tag"].as_string()
            if kind == "start":
                transfers[tag] = _transfer(node)
            inputs = [v for v in node.inputs if v is not None]
            yield step(kind, f"{kind} {tag}", [node], inputs=inputs, outputs=list(node.outputs), transfer=transfers[tag])
        elif declaration is not None and declaration.combine and node.attributes.get_string(SHARD, ""):
            yield from close()
            yield step("kernel", node.name or node.op_type, [node])
        elif node.op_type == "Recompute" and node.domain == DOMAIN:
            yield from close()  # a runtime may reorder and merge the nodes of one segment
        elif native(node):
            yield from close()
            yield step("kernel", node.name or node.op_type, [node])
        else:
            segment.append(node)
    yield from close()


def _transfer(node: ir.Node) -> Transfer:
    """Describe a started collective; the placement of buffers adds its memory."""
    name = node.op_type.removesuffix("Start")
    values = required_declaration(node).attribute_values(node)
    own = {
        k: values[k]
        for k in ("tag", "group", "reduce", "within", "owner", "root", "peer", "every", "since", "first", "last", "nonzero")
        if k in values
    }
    return Transfer(name, COLLECTIVES[name][0], transient=bool(values.get("transient", 0)), **own)


def _dissolve_regions(graph: ir.Graph) -> None:
    """Remove the marks before recomputed regions, whose place in the order of steps is fixed by now."""
    for node in list(graph):
        if node.op_type == "Recompute" and node.domain == DOMAIN:
            for saved, again in zip(inputs_of(node), node.outputs, strict=True):
                again.replace_all_uses_with(saved)
            graph.remove(node, safe=True)


def _add_check(steps: list[PlanStep], stop: ir.Value | None) -> None:
    first = next((k for k, s in enumerate(steps) if s.kind == "update"), None)
    if first is not None:
        task = steps[first].task
        steps.insert(first, PlanStep("check", "finite?", [], outputs=[] if stop is None else [stop], once=True, task=task))


def _take_out_views(
    steps: Sequence[PlanStep], groups: Sequence[UpdateGroup]
) -> tuple[list[PlanStep], dict[ir.Value, ir.Value]]:
    """Alias values that only change shape between steps, where a runtime would copy from buffer to buffer.

    Returns the steps without those nodes, and value → the value whose memory it shares. A view stays in its segment where
    other nodes of the segment read it (inside one run it costs nothing), and where it is a result of the graph.
    """
    home = _homes(steps)
    operands = {v for step in steps if step.kind == "start" for v in step.inputs}
    operands |= {v for group in groups for node in group.nodes for i in group.flat if (v := node.inputs[i]) is not None}
    views: dict[ir.Value, ir.Value] = {}
    for k, step in enumerate(steps):
        if step.kind != "segment":
            continue
        for node in list(step.nodes):
            source, view = node.inputs[0] if node.inputs else None, node.outputs[0]
            if node.op_type not in VIEWS or node.domain or source is None or view.is_graph_output() or _inlined(source):
                continue
            if static_dims(view) is None:
                continue  # its shape depends on data, and is known inside a segment only
            producer = source.producer()
            if view in operands and producer is not None and _is_of_shards(producer):
                continue  # it has a place of its own
            if view in operands and (producer is None or source in views or len(list(source.uses())) > 1):
                continue  # the reduction overwrites its bucket: other readers need the source intact
            users = [home.get(user) for user in view.consumers()]
            if producer is not None and home.get(producer) == k and k in users:
                if any(user != k for user in users):
                    views[view] = views.get(source, source)
                continue
            views[view] = views.get(source, source)
            step.nodes.remove(node)
            del home[node]
    return [step for step in steps if step.nodes or step.kind == "check"], views


def _connect(graph: ir.Graph, steps: Sequence[PlanStep], views: Mapping[ir.Value, ir.Value]) -> None:
    """Fill in which values segments and kernels read from and write to buffers."""
    home = _homes(steps)
    outputs = set(graph.outputs)
    for k, step in enumerate(steps):
        if step.kind not in ("segment", "kernel", "update", "accumulate"):
            continue
        reads: dict[ir.Value, None] = {}
        for node in step.nodes:
            for value in [*node.inputs, *captured(node)]:
                if value is None or _inlined(value):
                    continue
                producer = value.producer()
                if producer is None or home.get(producer) != k:
                    reads.setdefault(value)
        step.inputs = list(reads)
        for node in step.nodes:
            for out in node.outputs:
                users = [u for u in out.consumers() if home.get(u) != k]
                if users or out in outputs or step.kind != "segment":
                    written = views.get(out, out)
                    if written not in step.outputs:
                        step.outputs.append(written)


def _homes(steps: Sequence[PlanStep]) -> dict[ir.Node, int]:
    """The step in which each node runs; nodes of a subgraph run in their owner's step."""
    home: dict[ir.Node, int] = {}
    for k, step in enumerate(steps):
        for node in step.nodes:
            home[node] = k
            home.update((inner, k) for body in bodies(node) for inner in body.all_nodes())
    return home


def _inlined(value: ir.Value) -> bool:
    """Whether the value is a constant; each step that reads one has its own copy."""
    return constant(value) is not None
