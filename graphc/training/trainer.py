"""The trainer: joins the world, places the state, runs steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

import graphc
from graphc import frontends
from graphc.backend import make_backend
from graphc.compiler import Program
from graphc.data import Batch, Shards
from graphc.device import Array, Run
from graphc.distributed.choose import for_memory, open_communicator
from graphc.distributed.communicator import Communicator
from graphc.distributed.health.deadline import check_deadline
from graphc.distributed.world import find_world, threads_for
from graphc.errors import DeviceError, FeedError, GraphcError, NonFiniteError, UsageError, WorldError, describe_error
from graphc.ir.facts import is_float
from graphc.ir.names import DETERMINISTIC, LEARNING_RATE, LIVE, RESERVED, SAMPLE_OFFSET, SEED, SKIPPED, STEP
from graphc.ir.ops.parameter_server import server_options
from graphc.optim import checked_rate
from graphc.parameter_server.progress import Callback
from graphc.plan.accumulation import sums_by_tree
from graphc.plan.state_rewrites import adapted
from graphc.report.trace import Summary, Trace
from graphc.runtime import checkpoint
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.input_staging import Ahead
from graphc.runtime.nonfinite_report import again, explain, explain_lost
from graphc.runtime.turn import ExclusiveUse
from graphc.training.feeds import averages, batches_of, check_feed_names, feed_shape
from graphc.training.microbatch import MicroBatch, micro_batches, until_all_end
from graphc.training.plan_cache import Bindings
from graphc.training.program_check import check_programs

Batches: TypeAlias = "Shards | Iterable[Mapping[str, Array] | Batch]"


class Trainer:
    """Runs a :class:`~graphc.compiler.Program` on this worker.

    Args:
        program: what ``graphc.compile`` returned.
        comm: the communicator of this worker; None finds the world (see :func:`graphc.distributed.world.find_world`).
        threads: threads of this worker; None takes its share of the cores.
        seed: of random ops (Dropout); None keeps the program's.
        check_finite: test loss and gradients before each update, so that a bad step changes nothing.
        schedule: finished steps → learning rate of the next one, such as :class:`graphc.optim.Schedule`.
        wrap: hook around every plan step, for measuring.
        trace: file for a timeline of the first training steps of all workers, written at the end of the ``with`` block; see
            :class:`~graphc.report.trace.Trace`.
        deadline: seconds after which a collective that has not ended ends the run; None: GRAPHC_DEADLINE, or 300.
        transport: how workers talk, one of :data:`graphc.distributed.world.TRANSPORTS`; None: GRAPHC_TRANSPORT, or what fits.

    Raises:
        WorldError: mesh and world disagree, or the workers' programs do.

    A program with parameter servers makes a :class:`graphc.parameter_server.trainer.ServedTrainer`.
    """

    def __new__(cls, program: Program, **options: Any) -> Self:
        if cls is Trainer and server_options(program.model.graph) is not None:
            from graphc.parameter_server.trainer import ServedTrainer

            return super().__new__(ServedTrainer)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        program: Program,
        *,
        comm: Communicator | None = None,
        threads: int | None = None,
        seed: int | None = None,
        check_finite: bool = True,
        schedule: Callable[[int], float] | None = None,
        wrap: Callable[[str, str, Run], Run] | None = None,
        trace: str | Path | Trace | None = None,
        deadline: float | None = None,
        transport: str | None = None,
    ) -> None:
        self.program = program
        world = find_world(transport=transport) if comm is None else None
        self.comm = open_communicator(world) if comm is None else comm
        if deadline is not None:
            self.comm.deadline = check_deadline(deadline)
        self.rank, self.size = self.comm.rank, self.comm.size
        try:
            self._check_world()
        except GraphcError:
            self.comm.close()
            raise
        if threads is None:
            threads = threads_for(world) if world is not None else max(1, len(os.sched_getaffinity(0)) // self.size)
        if sums_by_tree(program.model.graph):
            threads = 1  # kernels add up the parts of several threads in another order
        same = DETERMINISTIC in program.model.metadata_props or sums_by_tree(program.model.graph)
        self.backend = make_backend(program.backend, threads=threads, spin=self.size == 1, deterministic=same)
        self.program = program = replace(program, model=adapted(program.model, self.backend))
        self.comm = for_memory(self.comm, self.backend.memory, transport=transport)
        self._micro = micro_batches(program.model.graph, self.size)
        self.plans = Bindings(
            program, self.backend, self.comm, threads=threads, check=check_finite, batched=self._micro.batched
        )
        self.state = self.plans.state
        self._wrap = wrap
        self._schedule = schedule
        self._trace = Trace(trace) if isinstance(trace, str | Path) else trace
        self.steps_done = 0
        self._meanwhile: Run | None = None
        self._early: tuple[Mapping[str, Array], list[tuple[Executor, MicroBatch]]] | None = None
        self._shards: Shards | None = None
        self._turn = ExclusiveUse("trainer")
        self._saved: tuple[Path, int] | None = None  # the last checkpoint, and the steps that it contains
        self._position: dict[str, Any] | None = None  # of a checkpoint, until somebody has the data that it belongs to
        if seed is not None and SEED in self.state.scalars:
            self.state.scalars.set(SEED, seed)
        check_programs(self.comm, program, self.backend.name)
        self._broadcast()
        if self._trace is not None:
            self._trace.watch(self.comm)

    # Training ---------------------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The learning rate; assign to it between steps for a schedule."""
        return float(self.state.scalars.read(LEARNING_RATE))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.state.scalars.set(LEARNING_RATE, checked_rate(value))

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing because of a NaN or an infinity (``nonfinite="skip"``)."""
        return int(self.state.scalars.read(SKIPPED)) if SKIPPED in self.state.scalars else 0

    def step(self, feeds: Mapping[str, Array], *, offset: int | None = None) -> dict[str, float]:
        """One training step on this worker's share of the global batch.

        Args:
            feeds: one array per graph input, with no samples where this worker's share is empty. A program that accumulates
                cuts them into micro-batches.
            offset: index of the share's first sample in the global batch, which random ops use; None: rank × share.

        Returns:
            The loss (and metrics) over the global batch.

        Raises:
            FeedError: a feed with a wrong name, shape, dtype or label; nothing was changed.
            NonFiniteError: a NaN or infinity; the state is that of the last good step. With ``nonfinite="skip"`` the step
                counts in :attr:`skipped_steps` instead.
            UsageError: a schedule that gives no learning rate, or another thread is in a step of this trainer.
        """
        with self._turn:
            return self._step(feeds, offset)

    def _step(self, feeds: Mapping[str, Array], offset: int | None) -> dict[str, float]:
        early, self._early = self._early, None
        parts = early[1] if early is not None and early[0] is feeds else self._parts(feeds, offset)
        if self._schedule is not None:
            self.learning_rate = self._schedule(self.steps_done)
        self.comm.step = self.steps_done
        try:
            if self._trace is None:
                self._run(parts)
            else:
                self._trace.step(self.steps_done, functools.partial(self._run, parts))
        except NonFiniteStepError:
            raise self._explain_nonfinite(parts) from None
        except DeviceError as error:
            reason = explain_lost(error, self.comm, self.steps_done, self._saved)
            self.comm.abort(reason)
            raise DeviceError(reason) from error
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(feed_shape(array))}" for name, array in feeds.items())
            raise GraphcError(f"step {self.steps_done} failed in the runtime, with the feeds {shapes}: {error}") from error
        self.steps_done += 1
        return {name: float(array) for name, array in parts[-1][0].outputs.items()}

    def _parts(self, feeds: Mapping[str, Array], offset: int | None) -> list[tuple[Executor, MicroBatch]]:
        """The micro-batches of a step, checked, each with its plan."""
        check_feed_names(feeds, self.program.model.graph)
        rows = self._micro.rows(feeds)
        if rows == 0 and self.size == 1:
            raise FeedError(f"feed {self._micro.first!r} has no samples")
        start = self.rank * rows if offset is None else offset
        return [self._bound(part) for part in self._micro.split(feeds, start)]

    def _look(self, batch: Batch) -> None:
        """Send the feeds of the next step on their way to the device while this one runs there."""
        parts = self._parts(batch.feeds, batch.offset)
        executor, first = parts[0]
        executor.places.feeds.stage(first.feeds)
        self._early = (batch.feeds, parts)

    def _bound(self, part: MicroBatch) -> tuple[Executor, MicroBatch]:
        """The plan for the shapes of a micro-batch, and its checked feeds."""
        executor = self.plans.for_training(part.feeds, self._hook())
        return executor, replace(part, feeds=self.plans.checked(executor, part.feeds))

    def _run(self, parts: Sequence[tuple[Executor, MicroBatch]]) -> None:
        last = len(parts) - 1
        for k, (executor, part) in enumerate(parts):
            self._place(part)
            executor.run(part.feeds, index=k, last=k == last, meanwhile=self._meanwhile)

    def _place(self, part: MicroBatch) -> None:
        """Tell the graph which samples of the global batch these are, and whether they count."""
        for name, value in ((SAMPLE_OFFSET, part.offset), (LIVE, float(part.live))):
            if name in self.state.scalars:
                self.state.scalars.set(name, value)

    def fit(
        self,
        batches: Batches,
        *,
        epochs: int = 1,
        callbacks: Sequence[Callback] = (),
        log_every: int = 0,
    ) -> dict[str, float]:
        """Train for ``epochs`` passes over ``batches`` (this worker's shares).

        Args:
            batches: :class:`~graphc.data.Shards`, which go on from their position (and from that of a checkpoint restored
                before), or an iterable that can be walked once per epoch. Where the iterables of the workers differ in
                length, those that have ended take part without samples.
            epochs: passes; the rest of an epoch counts as one.
            callbacks: called with event dictionaries: ``{"event": "step", …}`` every ``log_every`` steps,
                ``{"event": "skipped", …}`` for a step that was skipped, and ``{"event": "epoch", "epoch": e, "loss": …}``
                with sample-weighted means at the end of each epoch.

        Returns:
            The last epoch's means.
        """
        if isinstance(batches, Shards):
            self._micro.check_divides(batches.global_batch, self.size)
            self.attach(batches)
        means: dict[str, float] = {}
        for epoch in range(epochs):
            number = batches.position[0] if isinstance(batches, Shards) else epoch
            sums: dict[str, float] = {}
            count, at_start = 0, self.skipped_steps
            for batch in self._walk(batches):
                skipped = self.skipped_steps
                metrics = self.step(batch.feeds, offset=batch.offset)
                if self.skipped_steps > skipped:
                    for callback in callbacks:
                        callback({"event": "skipped", "step": self.steps_done, "skipped": self.skipped_steps})
                    continue
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value * batch.global_size
                count += batch.global_size
                if log_every and self.steps_done % log_every == 0:
                    for callback in callbacks:
                        callback({"event": "step", "step": self.steps_done, **metrics})
            if count == 0 and self.skipped_steps == at_start:
                raise FeedError("fit got no batches; an iterator can be walked only once, give a list or graphc.data.shard(…)")
            means = {name: total / max(count, 1) for name, total in sums.items()}
            for callback in callbacks:
                callback({"event": "epoch", "epoch": number + 1, **means})
        return means

    def _walk(self, batches: Batches) -> Iterator[Batch]:
        """One epoch; on a device each batch is fetched and sent there while the step before runs."""

        def ahead(items: Iterator[Batch]) -> Iterator[Batch]:
            if self.backend.memory.on_host:
                return items
            found = Ahead(items, self._look)
            self._meanwhile = found.look
            return found

        try:
            if isinstance(batches, Shards):
                yield from batches.walk(ahead)
            else:
                yield from ahead(until_all_end(batches, self._micro, self.comm))
        finally:
            self._meanwhile = self._early = None

    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Loss and metrics in inference mode over all workers' batches, each sample counted exactly once.

        Raises:
            FeedError: a wrong feed, or no sample that counts: none at all, or labels that are all ignored.
        """
        names = [v.name or "" for v in self.program.inference.graph.outputs]
        sums = dict.fromkeys(names, 0.0)
        with self._turn:
            self.state.gather(self.comm, self.program.inference.graph.initializers)
            self._place(MicroBatch({}, 0, live=True))
            for item in batches_of(batches.epoch(0) if isinstance(batches, Shards) else batches):
                feeds = item.feeds if isinstance(item, Batch) else item
                if all(feed_shape(array)[:1] == (0,) for array in feeds.values()):
                    continue  # this worker has no sample of the last batch
                executor = self.plans.for_evaluation(feeds, self._hook())
                executor.run(self.plans.checked(executor, feeds))
                for name in names:
                    sums[name] += float(executor.outputs[name])
            total = np.array([sums[name] for name in names], dtype=np.float64)
            self._sum_over_workers(total)
        return averages(dict(zip(names, total.tolist(), strict=True)))

    # State ------------------------------------------------------------------------------------------------------------

    def state_sha256(self) -> str:
        """SHA-256 over parameters and optimizer state; equal on every rank, which is checked.

        Raises:
            WorldError: ranks whose state differs.
        """
        digest = checkpoint.state_sha256(self.state.snapshot(self.comm))
        everyone = self.comm.allgather_object(digest)
        if len(set(everyone)) > 1:
            raise WorldError(f"the replicas have drifted apart: state hashes by rank are {[d[:12] for d in everyone]}")
        return digest

    def attach(self, shards: Shards) -> None:
        """Let checkpoints hold the position of ``shards``; after a restore, move them to the position that it found.

        :meth:`fit` does this with what it trains on; a loop of one's own calls it before the first batch.

        Raises:
            UsageError: these are another worker's shards, or the position is one in other data or in another order.
        """
        self._check_shards(shards)
        if self._position is not None:
            shards.load_state_dict(self._position)
        self._shards, self._position = shards, None

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint (all state, by name, independent of the number of workers); atomic, by rank 0."""
        state = (
            self.state.snapshot(self.comm)
            if self.rank == 0 or self.state.shards or self.state.local or self.state.apart()
            else {}
        )
        if self.rank == 0:
            meta = {"graphc": graphc.__version__, "steps": self.steps_done, "pipeline": self.program.pipeline}
            if self._shards is not None:
                meta["data"] = self._shards.state_dict()
            checkpoint.save(folder, state, meta)
        self.comm.barrier()
        self._saved = Path(folder), self.steps_done

    def restore(self, folder: str | Path) -> None:
        """Read a checkpoint on rank 0 and give it to every worker.

        Raises:
            CheckpointError: there is none, or it is damaged.
            UsageError: it is not one of this program's: another model, optimizer or choice of parameters that train.
        """
        arrays: dict[str, Array] = {}
        if self.rank == 0:
            arrays, meta = checkpoint.load(folder)
            checkpoint.check_state_names(arrays, needed=self.state.updated, known=self.state.names)
            self.state.load(arrays)
            self.steps_done, self._position = int(meta.get("steps", 0)), meta.get("data")
        self._broadcast(arrays)
        self.steps_done, self._position = self.comm.allgather_object((self.steps_done, self._position))[0]
        self._saved = Path(folder), self.steps_done
        if self._shards is not None:
            self.attach(self._shards)

    def trained_values(self) -> dict[str, Array]:
        """The model's own initializers as they stand now, under the file's names; sharded ones make every rank call it."""
        graph = self.program.inference.graph
        known = self.state.arrays.keys() | self.state.gather(self.comm, graph.initializers).keys()
        names = [n for n, v in graph.initializers.items() if n in known and n not in RESERVED and is_float(v)]
        found = {name: self.state.fetch(name) for name in names}
        for name in self.state.apart() if self.size > 1 else ():
            if name in found:  # ranks that train on their own: their mean
                found[name] = found[name].copy()
                self.comm.allreduce(found[name].reshape(-1), "mean", f"state/{name}")
        return found

    def export(self, path: str | Path) -> None:
        """Write the user's own model with trained values, in inference mode, under its own names; by rank 0, atomic."""
        values = self.trained_values()
        if self.rank == 0:
            frontends.save(frontends.write_back(self.program.original, values), path)
        self.comm.barrier()

    def write_trace(self) -> Summary | None:
        """End the recording, write its file on rank 0, and say how much of the communication was hidden; None: no trace.

        Every worker calls it at the same point; leaving the ``with`` block does when nobody has.
        """
        trace, self._trace = self._trace, None
        return trace.write(self.comm) if trace is not None else None

    def close(self) -> None:
        """Leave the world and release threads."""
        self.comm.close()
        self.backend.close()
        self.plans.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.comm.abort(describe_error(error)[0])
        else:
            self.write_trace()
        self.close()

    # Inner workings ---------------------------------------------------------------------------------------------------

    def _check_world(self) -> None:
        mesh = self.program.mesh
        if mesh is not None and mesh.size != self.size:
            raise WorldError(
                f"the mesh {mesh} wants {mesh.size} worker(s), the world has {self.size};"
                f" start with 'graphc launch -n {mesh.size} …' or compile for Mesh(data={self.size})"
            )

    def _check_shards(self, shards: Shards) -> None:
        if (shards.rank, shards.size) != (self.rank, self.size):
            raise UsageError(
                f"the data is that of rank {shards.rank} of {shards.size}, this worker is rank {self.rank} of {self.size};"
                " give shard(…, rank=trainer.rank, size=trainer.size)"
            )

    def _sum_over_workers(self, total: Array) -> None:
        if self.size > 1:
            self.comm.allreduce(total, "sum")

    def _broadcast(self, values: Mapping[str, Array] | None = None) -> None:
        if self.size > 1:
            self.state.broadcast(self.comm, values)

    def _hook(self) -> Callable[[str, str, Run], Run] | None:
        """What goes around every plan step: the caller's hook, inside the trace's."""
        trace, wrap = self._trace, self._wrap
        if trace is None or wrap is None:
            return trace.wrap if trace is not None else wrap
        return lambda kind, name, run: trace.wrap(kind, name, wrap(kind, name, run))

    def _explain_nonfinite(self, parts: Sequence[tuple[Executor, MicroBatch]]) -> NonFiniteError:
        self.state.gather(self.comm, self.program.model.graph.initializers)
        done = int(self.state.scalars.read(STEP)) if STEP in self.state.scalars else self.steps_done
        runs = again(parts, self._place, self.backend.memory)
        return explain(self.program.model, runs, self.state, self.backend, self.comm, done)
