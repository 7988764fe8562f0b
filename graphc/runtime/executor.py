"""Binds a plan to memory, a backend and a communicator, and runs it.

Everything is looked up, allocated and checked when the plan is bound; a step is a walk over a list of closures, of which a
backend on the host may join neighbours. On a device closures only queue work, and consecutive ones that do not need the host
are recorded as one (:meth:`Backend.record`); the host waits once, for the results. A step may be queued before those of the
last one are read:

    device   … step k ── results k ── step k + 1 ── results k + 1 …
    host       queue k + 1 │ read k │ queue k + 2 │ read k + 1
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from graphc.backend import Backend
from graphc.device import Array, Choice, HostSync, Run, Variants, only_queues
from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.errors import DeviceError, ExecutionError
from graphc.ir.index_operands import index_ranges
from graphc.ir.names import LOSS_SCALE
from graphc.plan.partition import Plan
from graphc.runtime.accumulators import MicroBatchCursor
from graphc.runtime.bind import StepBinder
from graphc.runtime.buffers import Arenas, BufferMap
from graphc.runtime.collectives import Transfers
from graphc.runtime.failure import explain_failure
from graphc.runtime.nonfinite import Check, NonFiniteStepError
from graphc.runtime.results import PENDING, Results, bind_results
from graphc.runtime.state import State
from graphc.runtime.updates import Updates, owns_nothing

__all__ = ["Executor", "NonFiniteStepError"]

Wrap = Callable[[str, str, Run], Run]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A bound step of a plan; ``tag``: of its collective, ``once``: in the last micro-batch only."""

    run: Run
    name: str
    tag: str = ""
    once: bool = False


class Executor:
    """A bound plan.

    Args:
        plan: what to run.
        state: where parameters and other state live; shared by all plans of a trainer.
        backend: runs segments and kernels.
        comm: of the world; unused on one rank.
        groups: the communicators of the plan's mesh; None: those of a mesh that has the data axis only.
        host: runs updates whose state lies in the host's memory, where the backend works elsewhere.
        check: whether gradients and loss are tested for NaN and infinity before the updates.
        wrap: called as ``wrap(kind, name, run)`` for each step when it is bound, for tracing; its result runs in
            place of ``run``.
        arenas: of the plans that run by turns with this one; None: its arena is its own.
        varying: whether there are plans of the same graph for other shapes, so that more may follow.

    Attributes:
        inputs: the arrays that feeds are copied to, by name.
        outputs: what the last step gave, in the host's memory.
        runs_ahead: whether a step may be queued before the results of the last one are read: a flag on the device stops it if
            there was a NaN, and the host takes no part in a step.
        index_ranges: graph input → the ranges that its elements must lie in, for those that are read as indices.
    """

    def __init__(
        self,
        plan: Plan,
        state: State,
        backend: Backend,
        comm: Communicator | None = None,
        *,
        groups: Groups | None = None,
        host: Backend | None = None,
        check: bool = True,
        wrap: Wrap | None = None,
        arenas: Arenas | None = None,
        varying: bool = False,
    ) -> None:
        self.plan = plan
        self.places = places = BufferMap(plan, state, backend.memory, arenas)
        self._backend, self._comm = backend, comm
        self._on_host = backend.memory.on_host
        self._turn, self._scale = MicroBatchCursor(), 0.0
        if groups is None and comm is not None:
            groups = Groups(comm, plan.mesh)
            groups.open({"data", *(s.transfer.group for s in plan.steps if s.transfer is not None)})
        self._transfers = Transfers(places, groups)
        self._check = Check(places, backend, comm) if check else None
        self._clear = backend.memory.bind_fill(places.stop, 0) if plan.stop is not None else None
        binder = StepBinder(places, backend, Updates(places, backend, host), self._turn, self._check)
        if self._on_host:
            backend.note_writers(*places.writers())
        self.index_ranges = index_ranges(plan.model.graph)
        self.inputs = places.inputs
        self.outputs = places.outputs
        binder.prepare(plan.steps, varying=varying)
        bound: list[_Bound] = []
        for k, step in enumerate(plan.steps):
            if step.group is not None and owns_nothing(step.group):
                continue
            run = self._transfers.bind(step, k) if step.transfer is not None else binder.bind(step)
            if isinstance(run, HostSync) and self._on_host:
                run = run.run  # nothing is recorded on the host
            if run is not None:
                tag = step.tag if step.transfer is not None else ""
                bound.append(_Bound(wrap(step.kind, step.name, run) if wrap else run, step.name, tag, step.once))
        first = (self._transfers.bind_count(), self._bind_scale(), places.bind_lent())
        begin = [_Bound(run, "the beginning") for run in first if run is not None]
        backend.settle()
        self._results: list[Results] = []
        self._place = 0
        if not self._on_host:
            self._results.append(bind_results(places, self._check, lambda: self._scale))
            self.outputs = self._results[0].outputs
        updates = {step.name for step in plan.steps if step.kind == "update"}
        rows = self._joined([*begin, *bound], wrap)
        self.runs, self._names = [run for run, _ in rows], [_span(names) for _, names in rows]
        self._first_update = next((k for k, (_, names) in enumerate(rows) if not updates.isdisjoint(names)), None)
        steps, apart = [*begin, *bound], _begun_elsewhere([*begin, *bound])
        self.runs_ahead = (
            not self._on_host and wrap is None and plan.stop is not None and all(_queues(one, apart) for one in steps)
        )
        rows = self._joined([*begin, *(one for one in bound if not one.once)], wrap)
        self._within, self._names_within = [run for run, _ in rows], [_span(names) for _, names in rows]

    def run(self, feeds: Mapping[str, Array], *, index: int = 0, last: bool = True, meanwhile: Run | None = None) -> None:
        """Copy the feeds in and execute one step, or one micro-batch of it; results are in :attr:`outputs` after the last.

        Args:
            feeds: one array per graph input; on a device they may be under way already (:attr:`BufferMap.feeds`).
            index, last: number of the micro-batch, and whether it ends the step.
            meanwhile: called while a device works on the step; on the host there is no such time.

        Raises:
            NonFiniteStepError: a NaN or an infinity; no update has changed anything.
            ExecutionError: a node failed; the message names it, and the feeds behind it.
            DeviceError: of the device; ``during`` says what was queued.
        """
        results = self.queue(feeds, index=index, last=last)
        if results is not None:
            if meanwhile is not None:
                meanwhile()
            self.finish(results)

    def queue(self, feeds: Mapping[str, Array], *, index: int = 0, last: bool = True, ahead: bool = False) -> Results | None:
        """Do what :meth:`run` does, but on a device do not wait for the results.

        Args:
            ahead: another step may be queued before :meth:`finish` is called.

        Returns:
            On a device the results after the last micro-batch, for :meth:`finish`.
        """
        runs = iter(self.runs if last else self._within)
        try:
            self.places.feeds.bring(feeds)
            self._turn.index, self._turn.last = index, last
            for run in runs:
                run()
            return self._fetch(ahead) if last and not self._on_host else None
        except ExecutionError as error:
            ran = len(self._names if last else self._names_within) - operator.length_hint(runs)
            updated = last and self._first_update is not None and ran > self._first_update + 1
            raise explain_failure(error, self.plan.model.graph, feeds, updated=updated) from error
        except (DeviceError, RuntimeError) as error:
            found = self._of_device(error)
            if found is None:
                raise
            found.during = _queueing(self._names if last else self._names_within, operator.length_hint(runs))
            raise found from (error if found is not error else error.__cause__)

    def _fetch(self, ahead: bool) -> Results:
        """Queue the copies of the results to the host, by turns to one of two places if another step may follow."""
        self._place = 1 - self._place if ahead else 0
        if self._place == len(self._results):
            self._results.append(bind_results(self.places, self._check, lambda: self._scale))
        results = self._results[self._place]
        if results.flag is not None:
            results.flag[0] = PENDING
        for copy in results.copies:
            copy()
        results.event = self._backend.memory.mark() if ahead else None
        return results

    def finish(self, results: Results, *, behind: bool = False) -> DeviceError | None:
        """Wait for a queued step; its results are in :attr:`outputs` then.

        Args:
            behind: whether something is queued behind it.

        Returns:
            An error of what is queued behind it: the results have arrived.

        Raises:
            NonFiniteStepError: a NaN or an infinity; neither the step nor what is queued behind it has changed anything.
            DeviceError: of the device; ``during`` says what was queued.
        """
        places, later = self.places, None
        try:
            if behind and results.event is not None:
                results.event.wait()
            else:
                self._backend.memory.synchronize()
            places.state.scalars.stale = True
            if self._comm is not None:
                self._comm.check()
        except (DeviceError, RuntimeError) as error:
            found = self._of_device(error)
            if found is None:
                raise
            found.during = f"while it waited for {_span([*self._names, 'the results'])}"
            if not behind or not results.arrived:
                raise found from (error if found is not error else error.__cause__)
            later = found
        self.outputs = results.outputs
        if results.stops is not None and results.stops():
            if self._clear is not None:
                self._clear()
            raise NonFiniteStepError
        return later

    def _of_device(self, error: DeviceError | RuntimeError) -> DeviceError | None:
        """``error`` as a :class:`DeviceError`; None: it does not come from the device."""
        if isinstance(error, DeviceError):
            return error
        if self._on_host:
            return None
        try:
            self._backend.memory.synchronize()  # is a device error already
        except DeviceError as found:
            return found
        return None

    def _joined(self, steps: Sequence[_Bound], wrap: Wrap | None) -> list[tuple[Run, list[str]]]:
        """The closures of a step, each with the steps of the plan in it: a device's queueing work in rows, native calls too."""
        apart = set() if self._on_host or wrap is not None else _begun_elsewhere(steps)

        def joins(one: _Bound) -> bool:
            if wrap is not None:
                return False
            return self._backend.joins(one.run) if self._on_host else _queues(one, apart)

        rows: list[tuple[Run, list[str]]] = []
        for joined, group in itertools.groupby(steps, joins):
            row = list(group)
            if joined:
                rows.append((self._record([one.run for one in row]), [one.name for one in row]))
            else:
                rows += [(one.run, [one.name]) for one in row]
        return rows

    # On a device ------------------------------------------------------------------------------------------------------

    def _record(self, row: list[Run]) -> Run:
        record = self._backend.record
        return Variants(row, record) if any(isinstance(run, Choice) for run in row) else record(row)

    def _bind_scale(self) -> Run | None:
        """A closure that records the loss scale before a step changes it; None: nothing needs it."""
        if self._check is None or self._check.scaled is None or self._on_host:
            return None
        scalars = self.places.state.scalars

        def note() -> None:
            self._scale = scalars.read(LOSS_SCALE)

        return HostSync(note)


def _queues(step: _Bound, apart: Container[str]) -> bool:
    """Whether a bound step can be recorded; ``apart``: tags of collectives that cannot."""
    return step.tag not in apart and (only_queues(step.run) or isinstance(step.run, Choice))


def _begun_elsewhere(steps: Sequence[_Bound]) -> set[str]:
    """Collectives that would start in one recording and end in another, because the host works in between.

    A CUDA graph must contain both the fork to another stream and the join, so these collectives are queued one by one.
    """
    apart: set[str] = set()
    while True:
        row, begun, found = 0, dict[str, int](), set[str]()
        for step in steps:
            if not _queues(step, apart):
                row += 1
            elif step.tag and begun.setdefault(step.tag, row) != row:
                found.add(step.tag)
        if not found:
            return apart
        apart |= found


def _span(names: Sequence[str]) -> str:
    """Describe some steps of a plan in words."""
    if len(names) == 1:
        return names[0]
    return f"{names[0].partition(' … ')[0]} … {names[-1].rpartition(' … ')[2]}"


def _queueing(names: Sequence[str], left: int) -> str:
    """Describe what was being queued when ``left`` rows remained; all of them: the feeds."""
    return "while it took the feeds" if left == len(names) else f"while it queued {names[len(names) - left - 1]}"
