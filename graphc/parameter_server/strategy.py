"""Training with parameter servers: ranks 0 … servers-1 are servers, the others workers.

All ranks make a trainer and call the same methods:

    with graphc.Trainer(program) as trainer:
        trainer.fit(batches, epochs=3)          # workers train; servers apply their pushes and return with them
        trainer.export("trained.onnx")

or, in a custom loop: ``trainer.serve()`` on servers, ``trainer.step(feeds)`` … ``trainer.finish()`` on workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphc.compiler import Program
from graphc.data import Batch, Shards
from graphc.device import Array
from graphc.errors import FeedError, NonFiniteError, UsageError
from graphc.ir.names import LEARNING_RATE, LOSS_SCALE, SAMPLE_OFFSET, SKIPPED, kept_outputs
from graphc.parameter_server.layout import ServerLayout, check_world
from graphc.parameter_server.member import plan_part
from graphc.parameter_server.server import Server
from graphc.parameter_server.split import worker_part
from graphc.parameter_server.worker import ParameterWorker
from graphc.runtime import checkpoint
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.nonfinite_report import first_nonfinite, nonfinite_error
from graphc.runtime.state import State
from graphc.training.feeds import batches_of, check_feed_names, key_of_shapes
from graphc.training.progress import EpochProgress
from graphc.training.strategy import Batches, Strategy

if TYPE_CHECKING:
    from graphc.training.trainer import Trainer


class ParameterServer(Strategy):
    """Strategy of one rank, a parameter server or a worker.

    Until the first step every rank holds the whole state, equal on all ranks; from then on the servers hold it.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        if trainer.trace is not None:
            raise UsageError("parameter servers cannot write a trace: it needs all ranks, and workers may die")
        self._layout = ServerLayout(trainer.program.model, trainer.size)
        self._synchronous = self._layout.options.staleness == 0
        self.steps_per_batch = 1 if self._synchronous else self._layout.workers
        self._server: Server | None = None
        self._worker: ParameterWorker | None = None
        self._ended = False
        self._pulled = False  # whether the worker's parameters contain its last push
        self._files = 0  # written since the end
        self._lost_told: set[int] = set()
        self._skipped = 0  # steps, as last reported

    @staticmethod
    def check_world(program: Program, size: int) -> None:
        mesh, kept = program.mesh, kept_outputs(program.model)
        if kept:
            raise UsageError(
                f"parameter servers report the loss alone: keep_outputs would return {', '.join(kept)}; leave it out"
            )
        check_world(program.model.graph, size, mesh.size if mesh is not None else None)

    def check_shards(self, shards: Shards) -> None:
        if shards.size != self._layout.workers:
            raise UsageError(
                f"the data is cut for {shards.size} workers, there are {self._layout.workers} beside the servers;"
                " give shard(…, rank=0, size=trainer.workers): each worker takes the next free share"
            )
        if shards.tail == "weight-zero":
            raise UsageError("a push needs a sample: with parameter servers tail is keep, drop or pad")

    def set_learning_rate(self, value: float) -> None:
        if self._worker is not None or self.trainer.rank > 0:
            raise UsageError("the servers hold the learning rate; set it on rank 0, in a callback of fit")
        super().set_learning_rate(value)
        if self._server is not None:
            self._server.state.scalars.set(LEARNING_RATE, value)

    def fit(self, batches: Batches, epochs: int, progress: EpochProgress) -> None:
        if self.trainer.is_server:
            self.serve(batches, progress)
            return
        if isinstance(batches, Shards):
            self._train_on_shares(batches, epochs)
        else:
            for _ in range(epochs):
                for item in batches_of(batches):
                    feeds, offset = (item.feeds, item.offset) if isinstance(item, Batch) else (item, None)
                    self.trainer.step(feeds, offset=offset)
        progress.means = self.finish()

    # Servers ----------------------------------------------------------------------------------------------------------

    def serve(self, batches: object, progress: EpochProgress) -> None:
        trainer, server = self.trainer, self._begin_server()
        self._skipped = server.skipped_steps
        if trainer.rank > 0:
            progress.callbacks = ()
        shards = batches if isinstance(batches, Shards) else None
        length, position = self._epoch_steps(shards), self._first_step(shards)
        try:
            while True:
                if trainer.rank == 0:  # server 0 writes the learning rate into the log
                    trainer.follow_schedule()
                if not server.next():
                    break
                trainer.steps_done = server.steps
                position += 1
                self._report(server, progress)
                if length and position % length == 0 and trainer.rank == 0:
                    self._move(shards, position)
                    if progress.callbacks:
                        server.collect(trainer.state)
                    progress.end_epoch(position // length)
        except NonFiniteError:
            self._end(server)
            raise
        self._end(server)
        if progress.steps:  # lost workers made the epoch shorter, or its length is unknown
            progress.end_epoch(-(-position // length) if length else 1)
        if trainer.rank == 0:
            server.publish_end(checkpoint.state_sha256(trainer.state.snapshot()), progress.means)
        progress.means = server.end()

    def _report(self, server: Server, progress: EpochProgress) -> None:
        for worker, step in server.lost.items():
            if worker not in self._lost_told:
                self._lost_told.add(worker)
                progress.call({"event": "lost", "worker": worker, "step": step})
        skipped, self._skipped = self._skipped, server.skipped_steps
        if self._skipped > skipped:
            progress.skip(server.steps, self._skipped)
        else:
            self.trainer.watch(server.results)
            progress.step(server.steps, server.results, server.samples)

    def _epoch_steps(self, shards: Shards | None) -> int:
        """Steps of an epoch; 0 if unknown."""
        return len(shards) * self.steps_per_batch if shards is not None else 0

    def _first_step(self, shards: Shards | None) -> int:
        """Steps before the data's position, which a checkpoint may have moved."""
        if shards is None:
            return 0
        epoch, samples = shards.position
        return epoch * self._epoch_steps(shards) + samples // shards.global_batch * self.steps_per_batch

    def _move(self, shards: Shards | None, steps: int) -> None:
        """Move the position that checkpoints save to the one after ``steps``."""
        if shards is not None:
            epoch, left = divmod(steps, self._epoch_steps(shards))
            samples = left // self.steps_per_batch * shards.global_batch
            shards.load_state_dict({**shards.state_dict(), "epoch": epoch, "samples": samples})

    def _begin_server(self) -> Server:
        trainer = self.trainer
        if not trainer.is_server:
            raise UsageError(f"rank {trainer.rank} is a worker; only ranks below {trainer.servers} serve")
        if self._server is not None:
            raise UsageError("the servers have ended; make a new Trainer and restore a checkpoint to go on")
        windows = trainer.comm.open_windows(self._layout.nbytes(trainer.rank))
        backend = trainer.backend if trainer.backend.memory.on_host else trainer.plans.on_host()
        self._server = server = Server(
            self._layout, windows, trainer.comm, trainer.state, backend, steps=trainer.steps_done, check=trainer.plans.check
        )
        trainer.lost = server.lost
        if trainer.rank > 0:
            trainer.plans.state = server.state
        trainer.comm.barrier()
        trainer.comm.introduce(f"server {trainer.rank}", spare=False)
        return server

    def _end(self, server: Server) -> None:
        if self.trainer.rank == 0:
            server.collect(self.trainer.state)
            server.stop()
        self._ended = True

    # Workers ----------------------------------------------------------------------------------------------------------

    def step(self, feeds: Mapping[str, Array], offset: int | None) -> dict[str, float]:
        """Run one step of this worker: pull, compute, push."""
        trainer, worker = self.trainer, self._begin_worker()
        executor = trainer.plans.training.get(key_of_shapes(feeds)) or self._plan_worker(feeds, worker)
        arrays = trainer.plans.checked(executor, feeds)
        share = len(next(iter(arrays.values()))) if arrays else 0
        if not self._pulled:
            self._pull(worker)
        if SAMPLE_OFFSET in trainer.state.scalars:
            trainer.state.scalars.set(SAMPLE_OFFSET, worker.index * share if offset is None else offset)
        worker.begin(share)
        try:
            executor.run(arrays)
        except NonFiniteStepError:
            error = self._explain_nonfinite(worker, executor, arrays)
            worker.fail(error)
            self._ended = True
            raise (worker.failure() or error) from None
        worker.commit()
        self._pulled = False
        if self._synchronous:
            self._pull(worker)
            trainer.steps_done = self._first + worker.version
            return worker.results
        trainer.steps_done = self._first + worker.count
        return {name: float(array) for name, array in executor.outputs.items()}

    def finish(self) -> dict[str, float]:
        worker = self._begin_worker()
        try:
            means = worker.finish()
            self.trainer.state.receive()
        finally:
            self._ended = True
        return means

    def _train_on_shares(self, shards: Shards, epochs: int) -> None:
        """Train on shares until none are left."""
        worker, first, end = self._begin_worker(), self._first_step(shards), shards.position[0] + epochs
        while True:
            if self._synchronous:
                if not self._pulled:
                    self._pull(worker)
                live = worker.live
                number, place, size = first + worker.version, live.index(worker.index), len(live)
            else:
                size = self._layout.workers
                number, place = divmod(first + worker.claim(), size)
            epoch, index = divmod(number, len(shards))
            if epoch >= end:
                return
            batch = shards.part(epoch, index, place, size)
            self.trainer.step(batch.feeds, offset=batch.offset)

    def _pull(self, worker: ParameterWorker) -> None:
        try:
            worker.pull()
        except NonFiniteError:
            self._ended = True
            raise
        self.trainer.state.receive()
        self._pulled = True

    def _begin_worker(self) -> ParameterWorker:
        trainer = self.trainer
        if trainer.is_server:
            raise UsageError(
                f"rank {trainer.rank} is a parameter server: it calls trainer.serve() (or fit), and makes no steps"
            )
        if self._ended:
            raise UsageError("this worker has finished; make a new Trainer and restore a checkpoint to go on")
        if self._worker is not None:
            return self._worker
        windows = trainer.comm.open_windows(0)
        check = trainer.plans.check and not self._servers_skip()
        self._worker = worker = ParameterWorker(self._layout, windows, trainer.comm, trainer.backend, check=check)
        self._part, self._first = worker_part(trainer.program.model), trainer.steps_done
        own = State(self._part, memory=trainer.backend.memory)
        own.load({name: trainer.state.fetch(name) for name in own.arrays})
        own.adopt(worker.arrays)
        for name, array in trainer.state.arrays.items():
            if name in trainer.program.inference.graph.initializers:
                own.arrays.setdefault(name, array)
        trainer.plans.state = own
        trainer.comm.barrier()
        trainer.comm.introduce(f"worker {worker.index}", spare=True)
        return worker

    def _servers_skip(self) -> bool:
        """Whether the servers skip non-finite steps; workers then must not stop the run for one."""
        return not {LOSS_SCALE, SKIPPED}.isdisjoint(self.trainer.program.model.graph.initializers)

    def _plan_worker(self, feeds: Mapping[str, Array], worker: ParameterWorker) -> Executor:
        shapes, plans = check_feed_names(feeds, self._part.graph), self.trainer.plans
        for name, shape in shapes.items():
            if shape[:1] == (0,):
                raise FeedError(f"feed {name!r} has no samples; a push needs at least one")
        plan = plan_part(self._part, shapes, worker.backend)
        executor = Executor(plan, plans.state, worker.backend, check=False, wrap=plans.wrap)
        plans.training[key_of_shapes(feeds)] = executor
        return executor

    def _explain_nonfinite(self, worker: ParameterWorker, executor: Executor, feeds: Mapping[str, Array]) -> NonFiniteError:
        trainer = self.trainer
        tensor = first_nonfinite(self._part, executor, feeds, trainer.state, trainer.backend)
        name = f"worker {worker.index} (rank {trainer.rank})"
        return nonfinite_error(trainer.steps_done, tensor, name, f"in the gradients of {name}")

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def _member(self) -> Server | ParameterWorker | None:
        """This rank's side of the exchange; None before its first step."""
        return self._server or self._worker

    def check_restore(self) -> None:
        if self._member is not None:
            raise UsageError("the servers hold the state already; restore before the first step")

    def collect(self) -> None:
        if self._server is not None and not self._ended and self.trainer.rank == 0:
            self._server.collect(self.trainer.state)

    def wait_for_file(self) -> None:
        if self._member is None:
            super().wait_for_file()
        elif self._ended:
            self._files += 1
            self._member.exported(self._files)

    def state_sha256(self) -> str:
        if self._member is None:
            return super().state_sha256()
        if self.trainer.rank == 0:
            self.collect()
            return checkpoint.state_sha256(self.trainer.state.snapshot())
        if not self._ended:
            raise UsageError("while workers train, only rank 0 can collect the state; ask after fit")
        return self._member.digest
