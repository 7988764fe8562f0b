"""Plans and memory of the ranks of a pipeline.

The stash of activations counts once for every micro-batch that the schedule has in flight, and so do feeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from graphc.backend import BACKENDS, PLANNERS, Capabilities, Planner, make_backend, name_of
from graphc.distributed.groups import Groups
from graphc.ir.facts import known_nbytes, nbytes_of
from graphc.ir.names import MESH, SCHEDULE
from graphc.ir.ops.accumulation import accumulation_steps
from graphc.ir.ops.collectives import collective_groups
from graphc.mesh import Mesh
from graphc.pipe.clock import in_flight
from graphc.pipe.split import MICRO, Pipe
from graphc.pipe.state import state_of_rank
from graphc.pipe.tables import Action, PipeSchedule, Table
from graphc.pipe.tasks import Task, is_placed
from graphc.plan.buffers import STASH, SUMS
from graphc.plan.group_places import PLACES
from graphc.plan.partition import Plan, make_plan
from graphc.plan.specialise import prepare
from graphc.plan.state_rewrites import adapted
from graphc.report.memory import DeviceSide, MemoryReport, Unconnected, measured, memory_of_plan
from graphc.runtime.pipe import PipeStep
from graphc.runtime.stage_plan import PipeLinks, StagePlan
from graphc.runtime.state import State


def has_stages(model: ir.Model) -> bool:
    """Whether the model was compiled for a pipeline."""
    return SCHEDULE in model.metadata_props


def mesh_of(model: ir.Model) -> Mesh:
    """The mesh that a training graph was compiled for."""
    return Mesh.parse(model.metadata_props.get(MESH, "data=1"))


def table_of(model: ir.Model) -> Table:
    """The schedule of a training graph with stages."""
    if is_placed(model):
        return [[Action("U", rank)] for rank in range(mesh_of(model).pipe)]
    schedule = PipeSchedule.parse(model.metadata_props[SCHEDULE])
    return schedule.table(mesh_of(model).pipe, accumulation_steps(model.graph))


def stage_plans(model: ir.Model, shapes: Mapping[str, Sequence[int]], capabilities: Capabilities) -> list[Plan]:
    """The plan of each rank along the pipe axis, for feeds of one micro-batch."""
    mesh = mesh_of(model)
    ready = None if _differs(model) else prepare(model, shapes, capabilities, mesh=mesh, regions=True)
    found = []
    for place, rank in enumerate(mesh.members("pipe", 0)):
        pipe, own = Pipe.of(model, place, mesh.pipe), None if ready is None else ready.clone()
        found.append(make_plan(model, shapes, capabilities, rank=rank, mesh=mesh, pipe=pipe, prepared=own))
    return found


def _differs(model: ir.Model) -> bool:
    """Whether nodes compute with the place of a rank on the pipe axis, so that graphs differ before they are split."""
    return any("pipe" in node.attributes.get_string("group", "") for node in model.graph if node.op_type in PLACES)


def memory_of_stages(model: ir.Model, shapes: Mapping[str, Sequence[int]], *, backend: str = "auto") -> list[MemoryReport]:
    """Report the memory of each rank along the pipe axis, for feeds of one micro-batch."""
    return memory_of_tables(model, shapes, [table_of(model)], backend=backend)[0]


def memory_of_tables(
    model: ir.Model, shapes: Mapping[str, Sequence[int]], tables: Sequence[Table], *, backend: str = "auto"
) -> list[list[MemoryReport]]:
    """The same for each of several schedules with the stages of the graph's."""
    BACKENDS.load()
    if name_of(backend) in PLANNERS:
        return [predicted_stages(model, shapes, PLANNERS[name_of(backend)], table) for table in tables]
    engine = make_backend(backend, threads=1)
    try:
        plans = stage_plans(adapted(model, engine), shapes, engine)
        return [[_memory(plan, place, table) for place, plan in enumerate(plans)] for table in tables]
    finally:
        engine.close()


def predicted_stages(
    model: ir.Model, shapes: Mapping[str, Sequence[int]], planner: Callable[[], Planner], table: Table
) -> list[MemoryReport]:
    """Measure a device backend's allocations by binding each rank's step to a planning device, as a trainer binds it."""
    mesh, found = mesh_of(model), list[MemoryReport]()
    for place, rank in enumerate(mesh.members("pipe", 0)):
        engine = planner()
        own = adapted(model, engine)
        pipe = Pipe.of(own, place, mesh.pipe)
        plan = make_plan(own, shapes, engine, rank=rank, guarded=True, mesh=mesh, pipe=pipe)
        groups = Groups(Unconnected(rank, mesh.size), mesh)
        groups.open(collective_groups(own.graph) | {"data", "pipe"})
        groups.open_channels(("pipe", e.sender, e.receiver) for e in plan.edges if e.sender != e.receiver)
        state = State(state_of_rank(own, pipe).model, mesh.coordinate("data", rank), mesh.data, engine.memory, groups)
        bound = StagePlan(plan, state, engine, PipeLinks(place, groups))
        micro = 1 + max(action.micro for row in table for action in row)
        PipeStep([bound] * micro, table, lambda number: None, lambda *kept: None, placed=pipe.placed)
        known = _memory(plan, place, table, DeviceSide)
        found.append(measured(known, engine))
    return found


def _memory(plan: Plan, place: int, table: Table, result: type[MemoryReport] = MemoryReport) -> MemoryReport:
    own = {action.stage for action in table[place] if action.kind in MICRO}
    return memory_in_flight(plan, place, {stage: in_flight(table[place], stage) for stage in own}, result)


def memory_in_flight(
    plan: Plan, place: int, slots: Mapping[int, int], result: type[MemoryReport] = MemoryReport
) -> MemoryReport:
    """Report the memory of the rank at ``place`` with ``slots`` micro-batches of each of its stages in flight."""
    stashes = {name: size for name, size in plan.buffers.items() if name.startswith(STASH)}
    once = memory_of_plan(plan, result)
    stash = sum(size * slots[int(name.removeprefix(STASH))] for name, size in stashes.items())
    sums = plan.buffers.get(SUMS, 0)
    feeds = 0
    for stage, count in slots.items():
        tasks = {Task("F", stage), Task("B", stage), Task("W", stage)}
        read = {v for step in plan.steps if step.task in tasks for v in step.inputs}
        sources = {plan.views.get(v, v) for v in read}
        feeds += count * sum(known_nbytes(v) for v in plan.model.graph.inputs if v in sources)
    boxes = 0
    for edge in plan.edges:
        nbytes = sum(nbytes_of(v) for v in edge.values)
        boxes += nbytes * slots.get(edge.source.stage, 1) if edge.sender == place else 0
        boxes += 2 * nbytes if edge.receiver == place else 0  # of the task, and of the next one
    collectives = once.collectives - sum(stashes.values()) - sums + boxes
    return replace(once, feeds=feeds, activations=once.activations + stash + sums, collectives=collectives)
