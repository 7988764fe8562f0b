"""Reports the memory of a training step on one worker, from its plan.

The figures are sizes of buffers in the plan: exact for what graphc allocates. Memory that a runtime allocates inside one
segment (values that no other step reads) is not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Unpack

import onnx_ir as ir

from graphc.backend import BACKENDS, PLANNERS, Planner, host_backend, make_backend, name_of
from graphc.device import Array
from graphc.distributed.communicator import CommunicatorOptions, Handle
from graphc.distributed.groups import Groups
from graphc.distributed.host_queue import NullCommunicator
from graphc.errors import UsageError
from graphc.ir import DOMAIN
from graphc.ir.declare import Role, is_update, required_declaration
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import dims, is_parameter, known_nbytes, state_updates
from graphc.ir.ops.collectives import collective_groups
from graphc.ir.ops.random import RANDOM_OPS
from graphc.ir.shards import cuts_of
from graphc.ir.updates import role_of, state_of, trains
from graphc.mesh import Mesh
from graphc.pipeline import PASSES, Context
from graphc.plan.buffers import ARENA, RESULTS
from graphc.plan.partition import Plan, make_plan
from graphc.plan.state_rewrites import adapted
from graphc.plan.steps import UpdateGroup
from graphc.plan.update_groups import copied_buffers, offloaded_buffers
from graphc.runtime.executor import Executor
from graphc.runtime.state import State

OTHER = (Role.STATISTIC, Role.COUNTER, Role.SCALE)
"""Roles of state other than parameters and optimizer state."""

BESIDE = ("host", "pinned", "context", "evaluation")
"""Fields of :class:`MemoryReport` that are not summands of the total."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of one worker, in bytes.

    Attributes:
        parameters: trained and frozen parameters, as the computation reads them.
        masters: float32 parameters whose low-precision copies the computation reads.
        gradients: the flat buffers of the buckets.
        optimizer: optimizer state (such as momenta).
        other_state: running statistics with their batch values, counters.
        feeds: inputs of a step.
        activations: peak of the arena for values that pass between plan steps.
        collectives: other buffers of collectives.
        scratch: values inside segments, if the backend plans them.
        workspace: memory that libraries request.
        bound: other memory that the backend allocates when it binds the plan: constants of segments, temporaries of updates,
            staging of feeds, rounding of sizes.
        host: the part of all this in host memory (offloaded masters and optimizer state).
        pinned: host memory for transfers; not in the total.
        context: estimated memory of the driver and its libraries on a device; not in the total.
        evaluation: whole float32 copies of parameters made by the first evaluation or export if a worker, or the device,
            holds only a part of them; not in the total.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    other_state: int
    feeds: int
    activations: int
    collectives: int
    scratch: int = 0
    workspace: int = 0
    bound: int = 0
    host: int = 0
    pinned: int = 0
    context: int = 0
    evaluation: int = 0

    @property
    def total(self) -> int:
        """Bytes where the backend computes."""
        everything: dict[str, int] = asdict(self)
        return sum(n for name, n in everything.items() if name not in BESIDE)


@dataclass(frozen=True, slots=True)
class DeviceSide(MemoryReport):
    """Report of a backend with device memory; its total excludes offloaded state."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return MemoryReport.total.fget(self) - self.host  # type: ignore[attr-defined,no-any-return]


def memory_of(
    model: ir.Model,
    shapes: Mapping[str, Sequence[int]],
    *,
    backend: str = "auto",
    world_size: int = 1,
    rank: int = 0,
    mesh: Mesh | None = None,
) -> MemoryReport:
    """Report the memory of a training graph (or of a model in inference) for feeds of these shapes.

    Args:
        model: the result of a pipeline.
        shapes: concrete shape of every graph input.
        backend: backend of the plan; backends cut a graph into different segments.
        world_size: ranks, all on the data axis unless there is a ``mesh``.
        rank: the worker; ranks differ if a strategy shards its state unevenly.
        mesh: the axes of the workers.

    Raises:
        FeedError: the shapes do not match the graph.
    """
    BACKENDS.load()
    mesh = Mesh(data=world_size) if mesh is None else mesh
    if name_of(backend) in PLANNERS:
        return predicted(model, shapes, PLANNERS[name_of(backend)](), mesh=mesh, rank=rank)
    engine = make_backend(backend, threads=1)
    try:
        return memory_of_plan(make_plan(adapted(model, engine), shapes, engine, mesh=mesh, rank=rank))
    finally:
        engine.close()


def predicted(
    model: ir.Model,
    shapes: Mapping[str, Sequence[int]],
    planner: Planner,
    *,
    world_size: int = 1,
    rank: int = 0,
    mesh: Mesh | None = None,
) -> MemoryReport:
    """Measure a device backend's allocations by binding the plan to a planning device, as a trainer binds it.

    Args:
        planner: a new one.
        world_size, rank, mesh: as for :func:`memory_of`.
    """
    mesh = Mesh(data=world_size) if mesh is None else mesh
    model = adapted(model, planner)
    guarded = any(is_update(node) for node in model.graph)
    plan = make_plan(model, shapes, planner, rank=rank, guarded=guarded, mesh=mesh)
    known = memory_of_plan(plan, DeviceSide)
    comm = Unconnected(rank, mesh.size)
    groups = Groups(comm, mesh)
    groups.open({"data", *collective_groups(model.graph)})
    state = State(model, mesh.coordinate("data", rank), mesh.data, planner.memory, groups)
    host = host_backend(threads=1) if state.offloaded else None
    peers = (comm, groups) if mesh.size > 1 else (None, None)
    Executor(plan, state, planner, peers[0], groups=peers[1], host=host)
    return measured(known, planner)


def measured(known: MemoryReport, planner: Planner) -> MemoryReport:
    """``known``, with what else the planning device was asked for since it was made."""
    device = planner.memory
    workspace = sum(device.workspaces.values())
    return replace(
        known,
        scratch=planner.scratch,
        workspace=workspace,
        bound=device.allocated - known.total - planner.scratch - workspace,
        pinned=device.host,
        context=device.context,
    )


class Unconnected(NullCommunicator):
    """Communicator without peers: binds collectives, but cannot run them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = rank, size, range(size)

    def _subgroup(self, members: Sequence[int], index: int) -> Unconnected:
        return Unconnected(members.index(self.rank), len(members))

    def prepare(self, array: Array, op: str = "sum", tag: str = "", **options: Unpack[CommunicatorOptions]) -> Handle:
        handle = Handle(lambda: None, options.get("kind", "allreduce"), op, tag, array.nbytes)
        handle.queued = True
        return handle


def memory_of_plan(plan: Plan, result: type[MemoryReport] = MemoryReport) -> MemoryReport:
    """Report the memory of an existing plan; :class:`DeviceSide` if its backend computes on a device."""
    sizes = {"parameters": 0, "masters": 0, "gradients": 0, "optimizer": 0, "other_state": 0, "host": 0}
    copied = copied_buffers(plan.groups)
    counted: set[str] = set()
    for group in plan.groups:
        for index in group.flat:
            name = group.buffer(index)
            if name in counted:
                continue
            counted.add(name)
            kind = _kind(group, index, copied)
            sizes[kind] += plan.buffers[name]
            sizes["host"] += plan.buffers[name] if group.offload and kind in ("masters", "optimizer") else 0
    updated = _updated(plan.model.graph)
    for name, value in plan.model.graph.initializers.items():
        if name not in updated:
            sizes["parameters" if is_parameter(value) else "other_state"] += known_nbytes(value)
    rest = {name: size for name, size in plan.buffers.items() if name not in counted}
    arena = rest.pop(ARENA, 0) + rest.pop(RESULTS, 0)
    feeds = sum(known_nbytes(v) for v in plan.model.graph.inputs)
    copies = _copies_for_evaluation(plan, on_device=result is DeviceSide)
    return result(**sizes, feeds=feeds, activations=arena, collectives=sum(rest.values()), evaluation=copies)


def _copies_for_evaluation(plan: Plan, *, on_device: bool) -> int:
    """Bytes of the parameters that are sharded or divided in a float32 graph."""
    cuts = cuts_of(plan.model.graph) if plan.mesh.tensor > 1 else {}
    offloaded, found = offloaded_buffers(plan.groups) if on_device else frozenset(), 0
    for group in plan.groups:
        main = group.declaration.main
        scattered = main in group.scattered or group.buffer(main) in offloaded
        for state in (state_of(node) for node in group.nodes if trains(group.nodes[0])):
            cut = cuts.get(state.name or "")
            if scattered or cut is not None:
                found += known_nbytes(state) * (cut.ranks if cut is not None else 1)
    return found


def _kind(group: UpdateGroup, index: int, copied: set[str]) -> str:
    if role_of(group.nodes[0]) in OTHER:
        return "other_state"
    if index == group.source:
        return "gradients"
    if role_of(group.nodes[0], index) is Role.OPTIMIZER:
        return "optimizer"
    return "masters" if group.buffer(index) in copied else "parameters"


def feed_shapes(model: ir.Model, batch: int) -> dict[str, list[int]]:
    """Return the shapes of the graph inputs, with ``batch`` for every symbolic dimension."""
    return {v.name or "": [d if isinstance(d, int) else batch for d in dims(v) or ()] for v in model.graph.inputs}


def has_recomputation(model: ir.Model) -> bool:
    """Whether the ``recompute`` pass has changed the graph."""
    return any(n.op_type == "Recompute" and n.domain == "graphc" for n in model.graph)


def without_recomputation(model: ir.Model) -> ir.Model:
    """Return a copy that keeps every activation, as if the ``recompute`` pass had not run.

    Raises:
        UsageError: the graph recomputes nothing.
    """
    if not has_recomputation(model):
        raise UsageError("the graph recomputes nothing: compile it with --recompute")
    copy = model.clone()
    graph = copy.graph
    decompose_graph(graph, lambda node: node.op_type != "Recompute")
    PASSES["simplify"].function(copy, Context())
    masks: dict[tuple[object, ...], ir.Node] = {}
    for node in list(graph):
        if node.op_type in RANDOM_OPS and node.domain == DOMAIN:
            key = (*node.inputs, repr(sorted(required_declaration(node).attribute_values(node).items())))
            first = masks.setdefault(key, node)
            if first is not node:
                node.outputs[0].replace_all_uses_with(first.outputs[0])
    PASSES["simplify"].function(copy, Context())
    return copy


def _updated(graph: ir.Graph) -> set[str]:
    return {state.name or "" for _, state, _ in state_updates(graph)}
