"""Synchronous training: every rank holds the model and computes its share of each global batch.

On a device ``fit`` queues step k + 1 while step k runs, and reads the results of step k afterwards:

    device   … step k ────────────────────── step k + 1 ──────────────────
    host       fetch and queue k + 1 │ read k, callbacks │ fetch and queue k + 2 │ …

A NaN in step k sets a flag on the device by which step k + 1 changes nothing either. Where somebody may look at the trainer
between two steps, the second is queued after that: callbacks that are no :class:`~graphc.training.progress.Log`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphc.compiler import Program
from graphc.data import Batch, Shards
from graphc.device import Array, Run
from graphc.errors import DeviceError, ExecutionError, FeedError, NonFiniteError, UsageError, WorldError, counted
from graphc.ir.facts import required
from graphc.ir.names import SKIPPED, STEP
from graphc.mesh import REPLICAS
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.input_staging import Ahead
from graphc.runtime.nonfinite_report import explain, explain_lost
from graphc.runtime.results import Results
from graphc.training.feeds import check_feed_names
from graphc.training.microbatch import MicroBatch, until_all_end
from graphc.training.progress import EpochProgress
from graphc.training.strategy import Batches, Strategy


@dataclass(slots=True, eq=False)
class _Step:
    """A step whose feeds are checked.

    Attributes:
        feeds: as the caller gave them.
        parts: its micro-batches, each with its plan.
        turn: the staging buffer that holds the feeds; None: they are not staged.
        results: on their way, once the step is queued early; None: it is not.
        error: of queueing it, or of running it, as far as that is known already.
    """

    feeds: Mapping[str, Array]
    parts: list[tuple[Executor, MicroBatch]]
    turn: int | None = None
    results: Results | None = None
    error: Exception | None = None


class Replica(Strategy):
    """One data-parallel replica: every rank takes part in every step and its collectives."""

    _next: _Step | None = None  # prepared while a device works on the step before, and queued where that may be
    _running: _Step | None = None  # queued early, and its results are not read
    _meanwhile: Run | None = None  # called while a device works on a step
    _ahead: bool | None = None  # whether ``fit`` queues steps early; None: not decided yet
    _stops: frozenset[int] = frozenset()  # after every so many steps somebody may look at the trainer

    @staticmethod
    def check_world(program: Program, size: int) -> None:
        mesh = program.mesh
        if mesh is not None and mesh.size != size:
            raise WorldError(
                f"the mesh {mesh} wants {counted(mesh.size, 'worker')}, the world has {size};"
                f" start with 'graphc launch -n {mesh.size} …' or compile for Mesh(data={size})"
            )

    def check_shards(self, shards: Shards) -> None:
        rank, size = self.trainer.data_rank, self.trainer.data_size
        if (shards.rank, shards.size) != (rank, size):
            raise UsageError(
                f"the data is that of rank {shards.rank} of {shards.size}, this worker is rank {rank} of {size};"
                " give shard(…, rank=trainer.data_rank, size=trainer.data_size)"
            )

    def step(self, feeds: Mapping[str, Array], offset: int | None) -> dict[str, Any]:
        trainer = self.trainer
        step, self._next = self._next, None
        if step is None or step.feeds is not feeds:
            if step is not None and step.results is not None:
                self._next = step
                raise UsageError("fit has queued its next step already: a callback that trains must not be wrapped in Log")
            step = _Step(feeds, self._parts(feeds, offset))
        if not self._ahead:
            trainer.follow_schedule()
        trainer.comm.step = trainer.steps_done
        try:
            if step.error is not None:
                raise step.error
            if self._ahead:
                self._run_ahead(step)
            elif trainer.trace is None:
                self._run(step.parts)
            else:
                trainer.trace.step(trainer.steps_done, functools.partial(self._run, step.parts))
        except NonFiniteStepError:
            self._take_back(step)
            raise self._explain_nonfinite(step.parts) from None
        except DeviceError as error:
            reason = explain_lost(error, trainer.comm, trainer.steps_done, trainer.last_checkpoint)
            trainer.comm.abort(reason)
            raise DeviceError(reason) from error
        except ExecutionError as error:
            error.args = (f"step {trainer.steps_done}: {error}",)
            raise
        trainer.steps_done += 1
        kept = trainer.outputs.collected()
        outputs = step.parts[-1][0].outputs
        return {n: float(array) for n, array in outputs.items() if n not in kept} | kept

    def _parts(self, feeds: Mapping[str, Array], offset: int | None) -> list[tuple[Executor, MicroBatch]]:
        """Cut and check the micro-batches of a step, each with its plan."""
        trainer = self.trainer
        check_feed_names(feeds, trainer.program.model.graph)
        rows = trainer.micro_batches.rows(feeds)
        if rows == 0 and trainer.data_size == 1:
            raise FeedError(f"feed {trainer.micro_batches.first!r} has no samples")
        start = trainer.data_rank * rows if offset is None else offset
        parts = []
        for part in trainer.micro_batches.split(feeds, start):
            executor = trainer.plans.for_training(part.feeds)
            parts.append((executor, replace(part, feeds=trainer.plans.checked(executor, part.feeds))))
        return parts

    def _run(self, parts: Sequence[tuple[Executor, MicroBatch]]) -> None:
        last = len(parts) - 1
        for k, (executor, part) in enumerate(parts):
            part.set_scalars(self.trainer.state.scalars)
            executor.run(part.feeds, index=k, last=k == last, meanwhile=self._meanwhile)
            self.trainer.outputs.collect(executor, part, index=k, last=k == last)

    # Ahead of the results ---------------------------------------------------------------------------------------------

    def _decide(self, batch: Batch, progress: EpochProgress) -> None:
        """Agree with the other ranks whether steps are queued early, and after which steps not: a collective needs all."""
        trainer = self.trainer
        self._ahead = False
        if trainer.backend.memory.on_host:
            return
        self._next = _Step(batch.feeds, self._parts(batch.feeds, batch.offset))
        able = trainer.micro_batches.steps == 1 and self._next.parts[0][0].runs_ahead and trainer.trace is None
        able = able and not trainer.outputs.names and SKIPPED not in trainer.state.names and not trainer.state.averaged
        everyone = trainer.comm.allgather_object([able, progress.stops]) if trainer.size > 1 else [[able, progress.stops]]
        self._ahead = all(able for able, _ in everyone)
        self._stops = frozenset(every for _, every in everyone if every)

    def _queue(self, step: _Step, number: int) -> None:
        """Queue ``step``, which is step ``number``; the one before may still run."""
        ((executor, part),) = step.parts
        self.trainer.follow_schedule(number)
        part.set_scalars(self.trainer.state.scalars)
        if step.turn is None:
            step.turn = executor.places.feeds.stage(part.feeds)
        step.results = executor.queue(part.feeds, ahead=True)

    def _run_ahead(self, step: _Step) -> None:
        """Run ``step``, unless it runs already, and meanwhile queue the next one."""
        if step.results is None:
            self._queue(step, self.trainer.steps_done)
        self._running = step
        if self._meanwhile is not None:
            self._meanwhile()
        executor, behind = step.parts[0][0], self._next
        queued = behind is not None and (behind.results is not None or behind.error is not None)
        try:
            error = executor.finish(required(step.results), behind=queued)
        except NonFiniteStepError:
            self._running = None
            raise
        except Exception:
            self._running = self._next = None
            raise
        self._running = None
        if behind is not None and behind.error is None:
            behind.error = error

    def _take_back(self, step: _Step) -> None:
        """After a NaN in ``step``: drop the next one, which has changed nothing, and bring back feeds and learning rate."""
        behind, self._next = self._next, None
        if behind is not None and (behind.results is not None or behind.error is not None) and step.turn is not None:
            self.trainer.follow_schedule()
            step.parts[0][0].places.feeds.bring_again(step.turn)
            self.trainer.backend.memory.synchronize()

    def _settle(self, walk: Iterator[Batch], batch: Batch, progress: EpochProgress) -> None:
        """After an interrupt, or the error of a callback: finish what is queued, so that the state is that of ``steps_done``.

        Errors are ignored: one is on its way.
        """
        self._meanwhile = None
        behind, self._next, self._running = self._next, self._running, None
        with contextlib.suppress(Exception):
            if self._next is not None:
                self._train(batch, progress)
            if behind is not None and behind.results is not None:
                batch, self._next = next(walk), behind
                self._train(batch, progress)

    def collect(self) -> None:
        if self._next is not None and self._next.results is not None:
            raise UsageError(
                "fit has queued its next step already: a callback that saves or exports must not be wrapped in Log"
            )

    # Failures ---------------------------------------------------------------------------------------------------------

    def _explain_nonfinite(self, parts: Sequence[tuple[Executor, MicroBatch]]) -> NonFiniteError:
        program, state, comm = self.trainer.program, self.trainer.state, self.trainer.comm
        if state.parts.cuts:
            step = self.trainer.steps_done
            return NonFiniteError(
                f"a NaN or infinity appeared in step {step}; the state is that of the last good step (train with tensor=1 to"
                " learn which value was the first)",
                step=step,
                tensor=None,
            )
        state.gather(comm, program.model.graph.initializers)
        done = int(state.scalars.read(STEP)) if STEP in state.scalars else self.trainer.steps_done
        return explain(program.model, self._runs(parts), state, self.trainer.backend, comm, done)

    def _runs(self, parts: Sequence[tuple[Executor, MicroBatch]]) -> Iterator[tuple[Executor, Mapping[str, Array]]]:
        """Yield the plans and feeds of a step; before each, the state's scalars are set for it."""
        memory = self.trainer.backend.memory
        for k, (executor, part) in enumerate(parts):
            part.set_scalars(self.trainer.state.scalars)
            feeds = part.feeds
            if k == len(parts) - 1 and not memory.on_host:  # they lie there still; the arrays may hold the next ones
                feeds = {name: memory.fetch(array) for name, array in executor.inputs.items()}
            yield executor, feeds

    def fit(self, batches: Batches, epochs: int, progress: EpochProgress) -> None:
        trainer = self.trainer
        if isinstance(batches, Shards):
            trainer.micro_batches.check_divides(batches.global_batch, trainer.data_size)
        try:
            for epoch in range(epochs):
                number = batches.position[0] if isinstance(batches, Shards) else epoch
                self._train_epoch(batches, progress)
                if not progress.steps:
                    raise FeedError(
                        "fit got no batches; an iterator can be walked only once, give a list or graphc.data.shard(…)"
                    )
                progress.end_epoch(number + 1)
        finally:
            self._ahead = None

    def _train_epoch(self, batches: Batches, progress: EpochProgress) -> None:
        with contextlib.closing(self._walk(batches)) as walk:
            for batch in walk:
                try:
                    if self._ahead is None:
                        self._decide(batch, progress)
                    self._train(batch, progress)
                except BaseException:
                    self._settle(walk, batch, progress)
                    raise

    def _train(self, batch: Batch, progress: EpochProgress) -> None:
        """Run one step of ``fit`` and report it."""
        trainer = self.trainer
        skipped = trainer.skipped_steps
        metrics = trainer.step(batch.feeds, offset=batch.offset)
        if trainer.skipped_steps > skipped:
            progress.skip(trainer.steps_done, trainer.skipped_steps)
        else:
            progress.step(trainer.steps_done, trainer.outputs.without(metrics), batch.global_size)

    def _walk(self, batches: Batches) -> Generator[Batch, None, None]:
        """Run one epoch; on a device each batch is fetched and copied while the previous step runs."""

        def ahead(items: Iterator[Batch]) -> Iterator[Batch]:
            if self.trainer.backend.memory.on_host:
                return items
            found = Ahead(items, self._prepare)
            self._meanwhile = functools.partial(self._look, found)
            return found

        try:
            if isinstance(batches, Shards):
                yield from batches.walk(ahead)
            else:
                yield from ahead(until_all_end(batches, self.trainer.micro_batches, self.trainer.groups.of(REPLICAS)))
        finally:
            self._meanwhile = self._next = None

    def _look(self, batches: Ahead[Batch]) -> None:
        """Fetch and prepare the next batch; the one of this step may lie in arrays that are filled anew now."""
        if self._running is not None:
            self._running.parts[0][0].places.feeds.wait_copied()
        batches.look()

    def _prepare(self, batch: Batch) -> None:
        """Copy the next step's feeds to the device while this step runs, and queue it where nobody looks in between."""
        step = _Step(batch.feeds, self._parts(batch.feeds, batch.offset))
        executor, first = step.parts[0]
        done = self.trainer.steps_done + 1
        self._next = step
        try:
            step.turn = executor.places.feeds.stage(first.feeds)
            if self._running is not None and not any(done % every == 0 for every in self._stops):
                self._queue(step, done)
        except DeviceError as error:  # raised when the step has its turn
            error.during = error.during or "while it took the feeds"
            step.error = error
        except Exception as error:
            step.error = error
