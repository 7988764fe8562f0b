"""Pipeline parallelism: each rank of the pipe axis holds some stages of the model, and micro-batches pass through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphc.compiler import Program, collection_paused
from graphc.device import Array
from graphc.distributed.consistency import agree
from graphc.errors import NonFiniteError, UsageError, WorldError
from graphc.ir.facts import array_of, dtype_of, shape_of
from graphc.ir.names import BY_RANK, SCHEDULE
from graphc.ir.ops.accumulation import accumulation_steps
from graphc.mesh import REPLICAS, Mesh
from graphc.pipe.split import Edge, Pipe
from graphc.pipe.state import StateShare, state_of_rank
from graphc.pipe.tables import Action, PipeSchedule, Table
from graphc.plan.partition import Plan, make_plan
from graphc.runtime import checkpoint
from graphc.runtime.pipe import PipeLinks, PipeStep, StagePlan
from graphc.runtime.state import State
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
    """

    pipe: Pipe
    share: StateShare
    links: PipeLinks

    def _make_state(self) -> State:
        """Find the rank's place in the pipeline, and make the state that belongs there."""
        program, mesh = self._program, self._groups.mesh
        refuse_device(self._backend)
        rank = mesh.coordinate("pipe", self._comm.rank)
        self.pipe = Pipe.of(program.model, rank, mesh.pipe)
        self.share = state_of_rank(program.model, self.pipe)
        self.links = PipeLinks(rank, self._groups)
        place = mesh.coordinate("data", self._comm.rank)
        return State(self.share.model, place, mesh.data, self._backend.memory)

    @collection_paused()
    def _bind(self, feeds: Mapping[str, Array], model: ir.Model) -> Any:
        shapes, rank, mesh = check_feed_names(feeds, model.graph), self._comm.rank, self._groups.mesh
        trains = model is self._program.model
        owners = None if trains else self.share.stages
        plan = make_plan(model, shapes, self._backend, rank=rank, mesh=mesh, pipe=self.pipe, owners=owners)
        if trains:
            self._compare_collectives(plan)
        self._groups.open_channels(("pipe", e.sender, e.receiver) for e in plan.edges if e.sender != e.receiver)
        return StagePlan(plan, self.state, self._backend, self.links, check=self.check and trains, wrap=self.wrap)

    def _compare_collectives(self, plan: Plan) -> None:
        """Check that the ranks agree on every transfer, which has both its ends then, and on the collectives of each group."""
        if self._collectives is None:
            agree(self._comm, [_line(edge) for edge in plan.edges], "transfer between stages")
        super()._compare_collectives(plan)


def _line(edge: Edge) -> str:
    values = ", ".join(f"{dtype_of(v).name}{list(shape_of(v))}" for v in edge.values)
    return f"{edge.tag} from {edge.sender} to {edge.receiver}: {values}"


class Pipeline(Replica):
    """Ranks that hold stages of the model; ranks along the data axis are replicas."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._steps: dict[tuple[int, ...], PipeStep] = {}
        self._evaluations: dict[tuple[Any, ...], PipeStep] = {}
        self._micro: Sequence[MicroBatch] = ()  # of the step that runs
        self._kept: list[dict[str, Array]] = []  # the model's own outputs, by micro-batch
        self._updated = State(trainer.program.model).updated

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

    def _table(self) -> Table:
        program, pipe = self.trainer.program, self._plans.pipe
        if pipe.placed:
            return [[Action("U", rank)] for rank in range(pipe.ranks)]
        schedule = PipeSchedule.parse(program.model.metadata_props[SCHEDULE])
        return schedule.table(pipe.ranks, accumulation_steps(program.model.graph))

    def _run(self, parts: Sequence[tuple[Any, MicroBatch]]) -> None:
        key = tuple(id(plan) for plan, _ in parts)
        self._micro = [part for _, part in parts]
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = PipeStep(
                [plan for plan, _ in parts], self._table(), self._prepare_micro, self._keep, placed=self._plans.pipe.placed
            )
        self._kept = [{} for _ in parts]
        found.run([part.feeds for part in self._micro])
        if self.trainer.outputs.names:
            self._collect(parts[-1][0])

    def _keep(self, number: int, names: Sequence[str], plan: StagePlan) -> None:
        """Copy the model's own outputs that this rank has just computed for a micro-batch."""
        self._kept[number] |= {name: np.array(plan.places.outputs[name]) for name in names}

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
        plan = parts[-1][0]
        wrong = sorted(
            {value.name or "" for value in plan.plan.model.graph.outputs if not np.isfinite(plan.places.array(value)).all()}
        )
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
        return any(a.dtype.kind == "f" and not np.isfinite(a).all() for a in arrays)

    # State ------------------------------------------------------------------------------------------------------------

    def spread(self, values: Mapping[str, Array] | None) -> None:
        """Give every rank its part of the state of rank 0."""
        trainer, state, comm = self.trainer, self.trainer.state, self.trainer.comm
        for name, value in sorted(trainer.program.model.graph.initializers.items()):
            if name in BY_RANK:
                continue
            array = np.array(array_of(value))
            if comm.rank == 0 and values is not None and name in values:
                array[...] = values[name]
            elif comm.rank == 0 and name in state.names and values is None:
                array[...] = state.fetch(name)
            comm.broadcast(array.reshape(-1), 0)
            if name in state.names:
                state.load({name: array})

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
        for name in names:
            owner = plans.share.owners.get(name)
            if owner is None and name in state.names:
                found[name] = state.fetch(name).copy()
                continue
            array = np.array(array_of(self.trainer.program.model.graph.initializers[name]))
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
        everyone = self.trainer.comm.allgather_object(digest)
        state = self.trainer.state
        own = checkpoint.state_sha256({n: state.fetch(n) for n in sorted(state.updated)})
        replicas = self.trainer.groups.of(REPLICAS).allgather_object(own)
        if len(set(everyone)) > 1 or len(set(replicas)) > 1:
            raise WorldError(f"the replicas have drifted apart: state hashes by rank are {[d[:12] for d in everyone]}")
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
                table = self._table()
            self._evaluations[key] = PipeStep([plan], table, lambda number: None, lambda *kept: None, placed=pipe.placed)
        self._evaluations[key].run([arrays])
        return plan.outputs


def refuse_device(backend: Any) -> None:
    """Raise UsageError for a backend whose memory is a device's."""
    if not backend.memory.on_host:
        raise UsageError(
            f"mesh axis pipe: pipelines run on host backends so far, not on {backend.name!r}; take backend='onnxruntime'"
        )
