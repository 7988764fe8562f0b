"""Binding a plan to memory, a backend and a communicator, and running it.

Everything is looked up, allocated and checked when the plan is bound; a step is a walk over a list of closures. On a device
these only queue work, and what follows each other without the host is recorded as one (:meth:`Backend.record`); the host
waits once, for the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Choice, Run, Variants, Waits, only_queues
from graphc.ir.declare import SHARD
from graphc.ir.names import LOSS_SCALE
from graphc.layout import RESULTS
from graphc.plan import Plan
from graphc.runtime.communicator import Communicator
from graphc.runtime.finite import Check, NonFiniteStepError
from graphc.runtime.nodes import segment_model
from graphc.runtime.places import Places
from graphc.runtime.state import State
from graphc.runtime.sums import Turn, bind_sums
from graphc.runtime.transfers import Transfers
from graphc.runtime.updates import Updates, owns_nothing
from graphc.steps import Step

__all__ = ["Executor", "NonFiniteStepError"]

Wrap = Callable[[str, str, Run], Run]


class Executor:
    """A bound plan.

    Args:
        plan: what to run.
        state: where parameters and other state live; shared by all plans of a trainer.
        backend: runs segments and kernels.
        comm: starts and finishes collectives; unused on one rank.
        host: runs updates whose state lies in the host's memory, where the backend works elsewhere.
        check: whether gradients and loss are tested for NaN and infinity before the updates.
        wrap: called as ``wait(kind, name, run)`` around every step, for tracing; None adds nothing.

    Attributes:
        inputs: the arrays that feeds are copied to, by name.
        outputs: what the last step gave, in the host's memory.
    """

    def __init__(
        self,
        plan: Plan,
        state: State,
        backend: Backend,
        comm: Communicator | None = None,
        *,
        host: Backend | None = None,
        check: bool = True,
        wrap: Wrap | None = None,
    ) -> None:
        self.plan = plan
        self.places = places = Places(plan, state, backend.memory)
        self._backend, self._comm = backend, comm
        self._on_host = backend.memory.on_host
        self._turn, self._scale = Turn(), 0.0
        self._updates = Updates(places, backend, host)
        self._transfers = Transfers(places, comm)
        self._check = Check(places, backend, comm) if check else None
        self.inputs = places.inputs
        self.outputs = places.outputs
        bound: list[tuple[Run, bool]] = []
        for k, step in enumerate(plan.steps):
            if step.group is not None and owns_nothing(step.group):
                continue
            run = self._transfers.bind(step, k) if step.transfer is not None else self._bind(step)
            if isinstance(run, Waits) and self._on_host:
                run = run.run  # nothing is recorded there
            if run is not None:
                bound.append((wrap(step.kind, step.name, run) if wrap else run, step.once))
        begin = [run for run in (self._transfers.bind_count(), self._bind_scale(), places.bind_lent()) if run is not None]
        backend.settle()
        copies: list[Run] = []
        self._finish: Run | None = None
        if not self._on_host:
            copies, self._finish = self._bind_results()
        self.runs = self._joined([*begin, *(run for run, _ in bound), *copies], wrap)
        self._within = self._joined([*begin, *(run for run, once in bound if not once)], wrap)

    def run(self, feeds: Mapping[str, Array], *, index: int = 0, last: bool = True, meanwhile: Run | None = None) -> None:
        """Copy the feeds in and execute one step, or one micro-batch of it; results are in :attr:`outputs` after the last.

        Args:
            feeds: one array per graph input; on a device they may be under way already (:attr:`Places.feeds`).
            index, last: number of the micro-batch, and whether it ends the step.
            meanwhile: called while a device works on the step; on the host there is no such time.

        Raises:
            NonFiniteStepError: a NaN or an infinity; no update has changed anything.
        """
        self.places.feeds.bring(feeds)
        self._turn.index, self._turn.last = index, last
        for run in self.runs if last else self._within:
            run()
        if last and self._finish is not None:
            if meanwhile is not None:
                meanwhile()
            self._finish()

    def _bind(self, step: Step) -> Run | None:
        array = self.places.array
        if step.kind == "segment":
            return self._backend.bind_segment(
                segment_model(step),
                {v.name or "": self.places.within_reach(v) for v in step.inputs},
                {v.name or "": array(v) for v in step.outputs},
            )
        if step.kind == "kernel":
            (node,) = step.nodes
            if node.attributes.get_string(SHARD, "") and self.plan.world_size > 1:
                return self._updates.bind_over_parts(node)
            inputs = [None if v is None else array(v) for v in node.inputs]
            return self._backend.bind_kernel(node, inputs, [array(v) for v in node.outputs], {})
        if step.kind == "update":
            assert step.group is not None
            return self._updates.bind(step.group)
        if step.kind == "accumulate":
            return bind_sums(step.nodes, self.places, self._backend, self._turn)
        return self._check.bind() if self._check is not None else None

    # On a device ------------------------------------------------------------------------------------------------------

    def _joined(self, runs: Iterable[Run], wrap: Wrap | None) -> list[Run]:
        """``runs``, with each row of those that only queue work as one."""
        if self._on_host or wrap is not None:
            return list(runs)
        found: list[Run] = []
        for queues, group in itertools.groupby(runs, lambda run: only_queues(run) or isinstance(run, Choice)):
            row = list(group)
            found += [self._record(row)] if queues else row
        return found

    def _record(self, row: list[Run]) -> Run:
        record = self._backend.record
        return Variants(row, record) if any(isinstance(run, Choice) for run in row) else record(row)

    def _bind_results(self) -> tuple[list[Run], Run]:
        """Copies of what the step gives to the host, and what waits for them."""
        memory, places, comm = self._backend.memory, self.places, self._comm
        copies: list[Run] = []

        def mirror(array: Array) -> Array:
            held: Array = memory.pinned(array.nbytes).view(array.dtype).reshape(array.shape)
            copies.append(memory.bind_copy(held, array))
            return held

        together = mirror(places.buffers[RESULTS]) if RESULTS in places.buffers else None

        def held(value: ir.Value) -> Array:
            place = self.plan.places.get(value)
            if place is None or place.buffer != RESULTS or together is None:
                return mirror(places.array(value))
            return together[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)

        self.outputs = {value.name or "": held(value) for value in self.plan.model.graph.outputs}
        stop = self._bind_stop(held, mirror)
        scalars = places.state.scalars

        def wait() -> None:
            memory.synchronize()
            scalars.stale = True
            if comm is not None:
                comm.check()
            if stop is not None and stop():
                raise NonFiniteStepError

        return copies, wait

    def _bind_stop(self, held: Callable[[ir.Value], Array], mirror: Callable[[Array], Array]) -> Callable[[], bool] | None:
        """Whether the step that has ended met a NaN or an infinity that must stop the run."""
        if self.plan.stop is not None and self._check is not None:
            flag = held(self.plan.stop)
            return lambda: bool(flag)
        if self._check is None or self._check.scaled is None:
            return None
        overflow, least = mirror(self._check.scaled[0]), self._check.scaled[2]
        return lambda: bool(overflow) and self._scale <= least

    def _bind_scale(self) -> Run | None:
        """What notes the loss scale before a step changes it; None: it is not asked for."""
        if self._check is None or self._check.scaled is None or self._on_host:
            return None
        scalars = self.places.state.scalars

        def note() -> None:
            self._scale = scalars.read(LOSS_SCALE)

        return Waits(note)
