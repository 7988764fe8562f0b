"""Synchronous training: every rank holds the model and computes its share of each global batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphc.compiler import Program
from graphc.data import Batch, Shards
from graphc.device import Array, Run
from graphc.errors import DeviceError, ExecutionError, FeedError, NonFiniteError, UsageError, WorldError, counted
from graphc.ir.names import STEP
from graphc.mesh import REPLICAS
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.input_staging import Ahead
from graphc.runtime.nonfinite_report import explain, explain_lost
from graphc.training.feeds import check_feed_names
from graphc.training.microbatch import MicroBatch, until_all_end
from graphc.training.progress import EpochProgress
from graphc.training.strategy import Batches, Strategy


class Replica(Strategy):
    """One data-parallel replica: every rank takes part in every step and its collectives."""

    _prepared: tuple[Mapping[str, Array], list[tuple[Executor, MicroBatch]]] | None = None  # feeds of the next step
    _meanwhile: Run | None = None  # called while a device works on a step

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
        prepared, self._prepared = self._prepared, None
        parts = prepared[1] if prepared is not None and prepared[0] is feeds else self._parts(feeds, offset)
        trainer.follow_schedule()
        trainer.comm.step = trainer.steps_done
        try:
            if trainer.trace is None:
                self._run(parts)
            else:
                trainer.trace.step(trainer.steps_done, functools.partial(self._run, parts))
        except NonFiniteStepError:
            raise self._explain_nonfinite(parts) from None
        except DeviceError as error:
            reason = explain_lost(error, trainer.comm, trainer.steps_done, trainer.last_checkpoint)
            trainer.comm.abort(reason)
            raise DeviceError(reason) from error
        except ExecutionError as error:
            error.args = (f"step {trainer.steps_done}: {error}",)
            raise
        trainer.steps_done += 1
        kept = trainer.outputs.collected()
        return {n: float(array) for n, array in parts[-1][0].outputs.items() if n not in kept} | kept

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
        for epoch in range(epochs):
            number = batches.position[0] if isinstance(batches, Shards) else epoch
            for batch in self._walk(batches):
                skipped = trainer.skipped_steps
                metrics = trainer.step(batch.feeds, offset=batch.offset)
                if trainer.skipped_steps > skipped:
                    progress.skip(trainer.steps_done, trainer.skipped_steps)
                else:
                    progress.step(trainer.steps_done, trainer.outputs.without(metrics), batch.global_size)
            if not progress.steps:
                raise FeedError("fit got no batches; an iterator can be walked only once, give a list or graphc.data.shard(…)")
            progress.end_epoch(number + 1)

    def _walk(self, batches: Batches) -> Iterator[Batch]:
        """Run one epoch; on a device each batch is fetched and copied while the previous step runs."""

        def ahead(items: Iterator[Batch]) -> Iterator[Batch]:
            if self.trainer.backend.memory.on_host:
                return items
            found = Ahead(items, self._prepare)
            self._meanwhile = found.look
            return found

        try:
            if isinstance(batches, Shards):
                yield from batches.walk(ahead)
            else:
                yield from ahead(until_all_end(batches, self.trainer.micro_batches, self.trainer.groups.of(REPLICAS)))
        finally:
            self._meanwhile = self._prepared = None

    def _prepare(self, batch: Batch) -> None:
        """Copy the next step's feeds to the device while this step runs."""
        parts = self._parts(batch.feeds, batch.offset)
        executor, first = parts[0]
        executor.places.feeds.stage(first.feeds)
        self._prepared = (batch.feeds, parts)
