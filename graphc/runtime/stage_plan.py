"""A plan of a pipeline's rank, bound to memory: a closure list for each task and each micro-batch that may be in flight.

A plan is bound once for every such micro-batch (a **slot**): the slots of a stage differ in the stash of activations and in the
feeds, and share everything else, since the tasks of a rank run one after the other. On a device the work of a task between two
collectives is recorded (:meth:`~graphc.backend.Backend.record`), once for each slot.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Choice, HostSync, Run, Variants, only_queues
from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.ir.facts import dtype_of, required, shape_of
from graphc.ir.index_operands import index_ranges
from graphc.ir.names import LOSS_SCALE, kept_outputs
from graphc.pipe.split import Edge
from graphc.pipe.tasks import Task
from graphc.plan.buffers import STASH
from graphc.plan.partition import Plan
from graphc.plan.pipe_events import micro_tag
from graphc.plan.steps import PlanStep
from graphc.runtime.accumulators import MicroBatchCursor
from graphc.runtime.bind import StepBinder
from graphc.runtime.buffers import BufferMap
from graphc.runtime.collectives import Transfers
from graphc.runtime.input_staging import Feeds
from graphc.runtime.nonfinite import Check, NonFiniteStepError
from graphc.runtime.results import Results, bind_results
from graphc.runtime.state import State
from graphc.runtime.updates import Updates, owns_nothing

Wrap = Callable[[str, str, Run], Run]


@dataclass(frozen=True, slots=True)
class PipeLinks:
    """How a rank of a pipeline reaches the others.

    Attributes:
        rank: place on the pipe axis.
        groups: the communicators of the mesh.
    """

    rank: int
    groups: Groups

    def channel(self, sender: int, receiver: int) -> Communicator:
        """The channel between two places of the pipe axis."""
        return self.groups.channel("pipe", sender, receiver)


class _SlotMap(BufferMap):
    """The arrays of a stage for one micro-batch in flight."""

    def __init__(self, base: BufferMap, stage: int, inputs: Sequence[ir.Value]) -> None:
        self.plan, self.state, self.memory = base.plan, base.state, base.memory
        self._base = base
        name = f"{STASH}{stage}"
        own = {name: base.memory.zeros(base.plan.buffers[name])} if name in base.plan.buffers else {}
        self.buffers = {**base.buffers, **own}
        self.reusable_buffers = base.reusable_buffers
        specs = {v.name or "": (shape_of(v), np.dtype(dtype_of(v).numpy())) for v in inputs}
        self.feeds = Feeds(base.memory, specs)
        self.inputs = self.feeds.inputs
        self._views = {v: self.inputs[v.name or ""] for v in inputs}
        self._lent = {}
        self.outputs = {}

    def _constant(self, value: ir.Value) -> Array:
        return self._base.array(value)  # one for all slots


class StagePlan:
    """A plan of a pipeline's rank, bound to memory.

    Attributes:
        inputs: the arrays of the feeds, by name, of one micro-batch.
        outputs: results of a step, in the host's memory.
        runs_ahead: a step is queued when the results of the last one are read.
        index_ranges: graph input → the ranges that its elements must lie in, for those that are read as indices.
    """

    runs_ahead = False

    def __init__(
        self,
        plan: Plan,
        state: State,
        backend: Backend,
        links: PipeLinks,
        *,
        check: bool = True,
        wrap: Wrap | None = None,
    ) -> None:
        self.plan, self.backend, self.links = plan, backend, links
        self.places = BufferMap(plan, state, backend.memory)
        self.turn = MicroBatchCursor()
        self._updates = Updates(self.places, backend, None)
        self._transfers = Transfers(self.places, links.groups)
        world = links.groups.world
        self._check = Check(self.places, backend, world, world) if check else None
        self._wrap = wrap
        self._slots: dict[tuple[int, int], _SlotMap] = {}
        self._bound: dict[tuple[Task, int], list[PlanStep | Run]] = {}
        self._results: Results | None = None
        self._scale = 0.0
        self.inputs, self.outputs = self.places.inputs, self.places.outputs
        self.index_ranges = index_ranges(plan.model.graph)
        self.steps: dict[Task, list[PlanStep]] = {}
        self._index = {id(step): k for k, step in enumerate(plan.steps)}
        for step in plan.steps:
            if step.task is not None:
                self.steps.setdefault(step.task, []).append(step)

    def slot(self, stage: int, number: int) -> _SlotMap:
        """The arrays of slot ``number`` of ``stage``."""
        found = self._slots.get((stage, number))
        if found is None:
            read = {
                v
                for task, steps in self.steps.items()
                if task.stage == stage and task.kind in "FBW"
                for s in steps
                for v in s.inputs
            }
            sources = {self.plan.views.get(v, v) for v in read}
            inputs = [v for v in self.plan.model.graph.inputs if v in sources]
            found = self._slots[stage, number] = _SlotMap(self.places, stage, inputs)
        return found

    def runs(self, task: Task, number: int, micro: int) -> list[Run]:
        """The closures of a task for micro-batch ``micro`` in slot ``number``."""
        places = self.slot(task.stage, number)
        found = self._bound.get((task, number))
        if found is None:
            binder = StepBinder(places, self.backend, self._updates, self.turn, None)
            pieces: list[PlanStep | Run] = []
            for step in self.steps.get(task, ()):
                if step.kind not in ("send", "recv"):
                    run = step if step.transfer is not None else self._wrapped(step, binder.bind(step))
                    pieces += [run] if run is not None else []
            found = self._bound[task, number] = self._joined(pieces)
        transfers = Transfers(places, self.links.groups, functools.partial(micro_tag, task, micro))
        return [self._moved(piece, transfers) if isinstance(piece, PlanStep) else piece for piece in found]

    def _moved(self, step: PlanStep, transfers: Transfers) -> Run:
        return required(self._wrapped(step, self._transfer(transfers, step)))

    def _joined(self, pieces: Sequence[PlanStep | Run]) -> list[PlanStep | Run]:
        """On a device, record what only queues work between two pieces that do not; transfers are queued one by one."""
        if self.backend.memory.on_host or self._wrap is not None:
            return list(pieces)
        found: list[PlanStep | Run] = []
        for queues, group in itertools.groupby(pieces, _queues):
            row = list(group)
            if not queues:
                found += row
                continue
            runs = [piece for piece in row if not isinstance(piece, PlanStep)]
            record = self.backend.record
            found.append(Variants(runs, record) if any(isinstance(run, Choice) for run in runs) else record(runs))
        return found

    def _transfer(self, transfers: Transfers, step: PlanStep) -> Run:
        run = transfers.bind(step, self._index[id(step)])
        return run.run if isinstance(run, HostSync) else run

    def once(self, task: Task, move: Callable[[PlanStep], Run]) -> list[Run]:
        """The closures of what runs once a step; ``move`` binds its transfers."""
        binder = StepBinder(self.places, self.backend, self._updates, self.turn, self._check)
        found: list[PlanStep | Run] = []
        for step in self.steps.get(task, ()):
            if step.group is not None and owns_nothing(step.group):
                continue
            if step.kind in ("send", "recv"):
                run: Run | None = move(step)
            elif step.transfer is not None:
                run = self._transfer(self._transfers, step)
            else:
                run = binder.bind(step)
            if isinstance(run, HostSync) and self.backend.memory.on_host:
                run = run.run
            wrapped = self._wrapped(step, run)
            if wrapped is not None:
                found.append(HostSync(wrapped) if step.kind in ("send", "recv") or step.transfer is not None else wrapped)
        return [piece for piece in self._joined(found) if not isinstance(piece, PlanStep)]

    # Results on a device ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Allocate and compile what is bound, before a step runs."""
        self.backend.settle()
        if self._results is None and not self.backend.memory.on_host:
            self._results = bind_results(self.places, self._check, lambda: self._scale)
            self.outputs = self._results.outputs

    def note_scale(self) -> None:
        """Remember the loss scale before a step changes it, where the check needs it."""
        if self._results is not None and self._check is not None and self._check.scaled is not None:
            self._scale = self.places.state.scalars.read(LOSS_SCALE)

    def finish(self) -> None:
        """Wait for a queued step; its results are in :attr:`outputs` then.

        Raises:
            NonFiniteStepError: a NaN or an infinity; no update has changed anything.
        """
        results = self._results
        if results is None:
            return
        memory = self.backend.memory
        for copy in results.copies:
            copy()
        memory.synchronize()
        self.places.state.scalars.stale = True
        self.links.groups.world.check()
        if results.stops is not None and results.stops():
            if self.plan.stop is not None:
                memory.bind_fill(self.places.stop, 0)()
            raise NonFiniteStepError

    def _wrapped(self, step: PlanStep, run: Run | None) -> Run | None:
        return self._wrap(step.kind, f"{step.task} {step.name}", run) if self._wrap is not None and run is not None else run

    def kept(self, task: Task) -> list[str]:
        """The outputs to keep that a task of every micro-batch makes."""
        names = kept_outputs(self.plan.model) if task.kind == "F" else []
        made = {v.name for step in self.steps.get(task, ()) for node in step.nodes for v in node.outputs}
        return [name for name in names if name in made]

    def values(self, edge: Edge, *, sends: bool) -> list[ir.Value]:
        """The values of a transfer in this rank's graph."""
        kind = "send" if sends else "recv"
        name = f"{kind} {edge.tag}"
        step = next(s for s in self.plan.steps if s.kind == kind and s.name == name)
        return step.inputs if sends else step.outputs


def _queues(piece: PlanStep | Run) -> bool:
    return not isinstance(piece, PlanStep) and (only_queues(piece) or isinstance(piece, Choice))
