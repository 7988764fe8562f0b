"""Pipeline parallelism: each rank of the pipe axis holds some stages of the model, and micro-batches pass through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphc.compiler import Program, collection_paused
from graphc.device import Array
from graphc.errors import InternalError, NonFiniteError, WorldError
from graphc.ir.facts import array_of
from graphc.ir.names import BY_RANK
from graphc.mesh import Mesh
from graphc.pipe.split import Pipe
from graphc.pipe.state import StateShare, state_of_rank
from graphc.pipe.tables import Action, Table
from graphc.plan.group_places import CollectiveEvent
from graphc.plan.partition import Plan, make_plan
from graphc.plan.pipe_events import pipe_events
from graphc.report.pipe_memory import table_of
from graphc.runtime import checkpoint
from graphc.runtime.parts import Parts
from graphc.runtime.pipe import PipeStep
from graphc.runtime.stage_plan import PipeLinks, StagePlan
from graphc.runtime.state import State, updated_states
from graphc.training.feeds import check_feed_names, key_of_shapes
from graphc.training.microbatch import MicroBatch
from graphc.training.plan_cache import PlanCache
from graphc.training.replica import Replica

if TYPE_CHECKING:
    from graphc.training.trainer import Trainer


class StagePlans(PlanCache):
    """Plans of the stages of one rank.

    Attributes:
        pipe: the rank's place.
        share: the state that it holds.
        links: how it reaches the others.
        table: the schedule.
    """

    pipe: Pipe
    share: StateShare
    links: PipeLinks
    table: Table

    finds_sizes = False  # a rank has only its stages' feeds

    def _make_state(self) -> State:
        """Find the rank's place in the pipeline, and make the state that belongs there."""
        program, mesh = self._program, self._groups.mesh
        rank = mesh.coordinate("pipe", self._comm.rank)
        self.pipe = Pipe.of(program.model, rank, mesh.pipe)
        self.share = state_of_rank(program.model, self.pipe)
        self.links = PipeLinks(rank, self._groups)
        self.table = table_of(program.model)
        place = mesh.coordinate("data", self._comm.rank)
        return State(self.share.model, place, mesh.data, self._backend.memory, self._groups)

    @collection_paused()
    def _bind(self, feeds: Mapping[str, Array], model: ir.Model, *, trains: bool) -> Any:
        shapes, rank, mesh = check_feed_names(feeds, model.graph), self._comm.rank, self._groups.mesh
        owners = None if trains else self.share.stages
        guarded = self.check and trains and not self._backend.memory.on_host
        plan = make_plan(model, shapes, self._backend, rank=rank, guarded=guarded, mesh=mesh, pipe=self.pipe, owners=owners)
        elsewhere = [g.name for g in plan.groups if not {g.buffer(k) for k in g.states()} <= self.state.flat.keys()]
        if elsewhere:
            raise InternalError(f"rank {rank} would update {', '.join(elsewhere)}, whose state is on another stage")
        if trains:
            self._compare_collectives(plan)
        self._groups.open_channels(("pipe", e.sender, e.receiver) for e in plan.edges if e.sender != e.receiver)
        return StagePlan(plan, self.state, self._backend, self.links, check=self.check and trains, wrap=self.wrap)

    def _events(self, plan: Plan) -> list[CollectiveEvent]:
        """The collectives of the rank's row of the schedule, and its transfers, each of which has both its ends then."""
        return pipe_events(plan, self.pipe, self.table)


class Pipeline(Replica):
    """Ranks that hold stages of the model; ranks along the data axis are replicas."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._steps: dict[tuple[int, ...], PipeStep] = {}
        self._evaluations: dict[tuple[Any, ...], PipeStep] = {}
        self._micro: Sequence[MicroBatch] = ()  # of the step that runs
        self._kept: list[dict[str, Array]] = []  # the model's own outputs, by micro-batch
        graph = trainer.program.model.graph  # of all stages: no memory for their state is taken here
        self._updated, self._divided = updated_states(graph), Parts(graph, None)

    @staticmethod
    def check_world(program: Program, size: int) -> None:
        mesh = program.mesh
        if mesh is None or mesh.size != size:
            raise WorldError(
                f"the mesh {mesh} wants {mesh.size if mesh else 1} workers, the world has {size};"
                f" start with 'graphc launch -n {mesh.size if mesh else 1} …' or compile for another mesh"
            )

    @property
    def _plans(self) -> StagePlans:
        plans = self.trainer.plans
        assert isinstance(plans, StagePlans)
        return plans

    def _run(self, parts: Sequence[tuple[Any, MicroBatch]]) -> None:
        key = tuple(id(plan) for plan, _ in parts)
        self._micro = [part for _, part in parts]
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = PipeStep(
                [plan for plan, _ in parts], self._plans.table, self._prepare_micro, self._keep, placed=self._plans.pipe.placed
            )
        self._kept = [{} for _ in parts]
        found.run([part.feeds for part in self._micro])
        if self.trainer.outputs.names:
            self._collect(parts[-1][0])

    def _keep(self, number: int, names: Sequence[str], plan: StagePlan) -> None:
        """Copy the model's own outputs that this rank has just computed for a micro-batch."""
        fetch = self.trainer.backend.memory.fetch
        self._kept[number] |= {name: np.array(fetch(plan.places.outputs[name])) for name in names}

    def _collect(self, plan: StagePlan) -> None:
        """Give every rank of the pipeline the kept outputs of all its stages."""
        outputs = self.trainer.outputs
        if self._plans.pipe.placed:
            self._kept = [{name: np.array(plan.outputs[name]) for name in outputs.names}]
        everyone = self.trainer.groups.of("pipe").allgather_object(self._kept)
        for k, part in enumerate(self._micro):
            outputs.add({name: array for one in everyone for name, array in one[k].items()}, part, index=k)

    def _prepare_micro(self, number: int) -> None:
        self._micro[number].set_scalars(self.trainer.state.scalars)

    def _explain_nonfinite(self, parts: Sequence[tuple[Any, MicroBatch]]) -> NonFiniteError:
        plans, trainer = self._plans, self.trainer
        plan, fetch = parts[-1][0], trainer.backend.memory.fetch
        results = {value.name or "": fetch(plan.places.array(value)) for value in plan.plan.model.graph.outputs}
        wrong = sorted(name for name, array in results.items() if not np.isfinite(array).all())
        broken = [stage for stage in plans.pipe.own if self._has_nonfinite(plan)]
        everyone = trainer.comm.allgather_object((broken, wrong))
        stages = sorted({stage for found, _ in everyone for stage in found})
        names = sorted({name for _, found in everyone for name in found})
        where = f"the gradients of stage {', '.join(map(str, stages))}" if stages else "a result"
        what = f" and in {', '.join(names)}" if names else ""
        message = f"step {trainer.steps_done}: a NaN or an infinity in {where}{what}; the state is that of the last good step"
        return NonFiniteError(message, step=trainer.steps_done, tensor=names[0] if names else None)

    def _has_nonfinite(self, plan: StagePlan) -> bool:
        arrays = [
            plan.places.part(g, k)
            for g in plan.plan.groups
            if (k := g.source) is not None and g.buffer(k) not in plan.places.state.flat
        ]
        fetch = self.trainer.backend.memory.fetch
        return any(a.dtype.kind == "f" and not np.isfinite(fetch(a)).all() for a in arrays)

    # State ------------------------------------------------------------------------------------------------------------

    def spread(self, values: Mapping[str, Array] | None) -> None:
        """Give every rank its part of the state of rank 0."""
        trainer, state, comm = self.trainer, self.trainer.state, self.trainer.comm
        for name in sorted(trainer.program.model.graph.initializers):
            if name in BY_RANK:
                continue
            array = self._initial(name)
            if comm.rank == 0 and values is not None and name in values:
                array[...] = values[name]
            elif comm.rank == 0 and name in state.scalars and values is None:
                array[...] = state.scalars.read(name)
            comm.broadcast(array.reshape(-1), 0)
            if name in state.names:
                state.load({name: array})

    def _initial(self, name: str) -> Array:
        """A copy of the initial value of a state, whole; one at a time, since a rank need not have room for all stages."""
        found = array_of(self.trainer.program.model.graph.initializers[name])
        return np.array(self._divided.initial(name, found) if name in self._divided else found)

    def load(self, arrays: Mapping[str, Array]) -> None:
        checkpoint.check_state_names(arrays, needed=self._updated, known=set(self.trainer.program.model.graph.initializers))

    def snapshot(self) -> dict[str, Array]:
        return self._whole(sorted(self._updated))

    def _whole(self, names: Sequence[str]) -> dict[str, Array]:
        """State of all ranks; every rank calls it with the same names."""
        plans, comm, state = self._plans, self.trainer.comm, self.trainer.state
        mesh: Mesh = self.trainer.groups.mesh
        found: dict[str, Array] = {}
        first = mesh.members("pipe", 0)
        state.gather(comm, [name for name in names if name in state.names])
        for name in names:
            owner = plans.share.owners.get(name)
            if owner is None and name in state.names:
                found[name] = state.fetch(name).copy()
                continue
            array = self._initial(name)
            root = first[owner or 0]
            if comm.rank == root:
                array[...] = state.fetch(name)
            comm.broadcast(array.reshape(-1), root)
            found[name] = array
        return found

    def values(self, names: Sequence[str]) -> dict[str, Array]:
        return self._whole([n for n in names if n in self.trainer.program.model.graph.initializers])

    def state_sha256(self) -> str:
        digest = checkpoint.state_sha256(self.snapshot())
        trainer, state, mesh = self.trainer, self.trainer.state, self.trainer.groups.mesh
        alike = {name: array for name, array in state.replicated().items() if name in state.updated}
        parts = {name: state.arrays[name] for name in state.parts.cuts if name not in state.shards}
        fetch = trainer.backend.memory.fetch
        own = [checkpoint.state_sha256({name: fetch(a) for name, a in arrays.items()}) for arrays in (alike, parts)]
        hashes: dict[tuple[int, ...], set[str]] = {}  # by the places that should have the same state
        everyone = trainer.comm.allgather_object((digest, own))
        for rank, (whole, (replicated, divided)) in enumerate(everyone):
            stage, shard = mesh.coordinate("pipe", rank), mesh.coordinate("tensor", rank)
            hashes.setdefault((), set()).add(whole)
            hashes.setdefault((stage,), set()).add(replicated)
            hashes.setdefault((stage, shard), set()).add(divided)
        if any(len(found) > 1 for found in hashes.values()):
            raise WorldError(f"the replicas have drifted apart: state hashes by rank are {[d[:12] for d, _ in everyone]}")
        return digest

    # Evaluation -------------------------------------------------------------------------------------------------------

    def evaluate_batch(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        plans = self._plans
        plan: StagePlan = plans.for_evaluation(feeds)  # type: ignore[assignment]
        arrays = plans.checked(plan, feeds)  # type: ignore[arg-type]
        key = key_of_shapes(feeds)
        if key not in self._evaluations:
            pipe = plans.pipe
            table: Table = [
                [Action("F", stage) for stage in range(rank, pipe.stages, pipe.ranks)] for rank in range(pipe.ranks)
            ]
            if pipe.placed:
                table = plans.table
            self._evaluations[key] = PipeStep([plan], table, lambda number: None, lambda *kept: None, placed=pipe.placed)
        self._evaluations[key].run([arrays])
        return plan.outputs
