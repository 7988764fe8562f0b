"""The trainer of a program with parameter servers: some ranks are servers, the others workers.

Ranks 0 … servers-1 are servers. All ranks make a trainer and call the same methods:

    with graphc.Trainer(program) as trainer:
        trainer.fit(batches, epochs=3)          # workers train; servers apply what they push, and return with them
        trainer.export("trained.onnx")

or, with steps of one's own: ``trainer.serve()`` on servers, ``trainer.step(feeds)`` … ``trainer.finish()`` on workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import graphc
from graphc import frontends
from graphc.data import Batch, Shards
from graphc.device import Array
from graphc.errors import FeedError, NonFiniteError, UsageError
from graphc.ir.names import LEARNING_RATE, LOSS_SCALE, SAMPLE_OFFSET, SKIPPED
from graphc.ir.ops.parameter_server import ServerOptions, server_options
from graphc.parameter_server.layout import ServerLayout, check_world
from graphc.parameter_server.member import plan_part
from graphc.parameter_server.progress import Callback, EpochProgress
from graphc.parameter_server.server import Server
from graphc.parameter_server.split import worker_part
from graphc.parameter_server.worker import ParameterWorker
from graphc.runtime import checkpoint
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.nonfinite_report import first_nonfinite, nonfinite_error
from graphc.runtime.state import State
from graphc.training.feeds import check_feed_names, key_of_shapes
from graphc.training.trainer import Batches, Trainer


class ServedTrainer(Trainer):
    """A :class:`~graphc.training.trainer.Trainer` of one rank among parameter servers and workers.

    Attributes:
        steps_done: on servers, the steps that the state contains: pushes, or rounds of all workers when synchronous;
            on an asynchronous worker, its own steps.
    """

    _server: Server | None = None
    _worker: ParameterWorker | None = None
    _over = False
    _fresh = False
    _written = 0

    def _check_world(self) -> None:
        mesh = self.program.mesh
        check_world(self.options, self.size, mesh.size if mesh is not None else None)

    @property
    def options(self) -> ServerOptions:
        """Number of servers, and the staleness."""
        found = server_options(self.program.model.graph)
        assert found is not None
        return found

    @property
    def is_server(self) -> bool:
        return self.rank < self.options.servers

    @property
    def workers(self) -> int:
        """Number of workers at the start."""
        return self.size - self.options.servers

    @property
    def pushes_per_batch(self) -> int:
        """Steps for one global batch: one for each worker's share, or one together when synchronous."""
        return 1 if self.options.staleness == 0 else self.workers

    @property
    def lost(self) -> dict[int, int]:
        """On server 0: worker → step after which it was gone."""
        return dict(self._server.lost) if self._server is not None else {}

    @property
    def learning_rate(self) -> float:
        """The learning rate; the servers hold it, so assign to it on rank 0."""
        return float(self.state.scalars.read(LEARNING_RATE))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._worker is not None or self.rank > 0:
            raise UsageError("the servers hold the learning rate; set it on rank 0, in a callback of fit")
        for state in (self.state, self._server.state if self._server is not None else self.state):
            state.scalars.set(LEARNING_RATE, value)

    def fit(
        self, batches: Batches, *, epochs: int = 1, callbacks: Sequence[Callback] = (), log_every: int = 0
    ) -> dict[str, float]:
        """Train for ``epochs`` passes over ``batches``, on all ranks at once; returns when every live worker has finished.

        Args:
            batches: ``shard(…, rank=0, size=trainer.workers)``, the same on all ranks: each worker takes the next share that
                nobody has taken, so that the shares of a dead one fall to the others. Any other iterable is this worker's
                own.
            callbacks: called on rank 0, as by :meth:`Trainer.fit`, and with ``{"event": "lost", "worker": w, "step": s}``.

        Returns:
            On rank 0 the means of the last epoch; nothing on other ranks.

        Raises:
            UsageError: shards for another number of workers, or that may be empty: a push needs a sample.
        """
        if isinstance(batches, Shards):
            self.attach(batches)
        if self.is_server:
            return self.serve(batches, callbacks=callbacks, log_every=log_every)
        if isinstance(batches, Shards):
            self._work(batches, epochs)
        else:
            for _ in range(epochs):
                for item in batches:
                    feeds, offset = (item.feeds, item.offset) if isinstance(item, Batch) else (item, None)
                    self.step(feeds, offset=offset)
        self.finish()
        return {}

    # Servers ----------------------------------------------------------------------------------------------------------

    def serve(self, batches: object = None, *, callbacks: Sequence[Callback] = (), log_every: int = 0) -> dict[str, float]:
        """Apply what the workers push until all live ones have finished.

        Args:
            batches: as given to :meth:`fit`, for the length of an epoch.
            callbacks, log_every: as for :meth:`fit`.

        Raises:
            NonFiniteError: on every rank, when one meets a NaN or an infinity.
            WorldError: all workers are gone.
        """
        server = self._begin_server()
        shards = batches if isinstance(batches, Shards) else None
        report = EpochProgress(callbacks if self.rank == 0 else (), log_every, self._epoch_steps(shards), self._behind(shards))
        try:
            while self._next(server):
                self.steps_done = server.steps
                ends = report.step(server)
                if ends and self.rank == 0:
                    self._move(shards, report.position)
                    if callbacks:
                        server.collect(self.state)
                    report.epoch()
        except NonFiniteError:
            self._end(server)
            raise
        self._end(server)
        report.close()
        server.end(checkpoint.state_sha256(self.state.snapshot()) if self.rank == 0 else None)
        return report.means

    def _next(self, server: Server) -> bool:
        if self._schedule is not None and self.rank == 0:  # which notes it in the log for the others
            self.learning_rate = self._schedule(server.steps)
        return server.next()

    def _epoch_steps(self, shards: Shards | None) -> int:
        """Steps of an epoch; 0 where that is not known."""
        return len(shards) * self.pushes_per_batch if shards is not None else 0

    def _behind(self, shards: Shards | None) -> int:
        """Steps that lie behind the position of the data, which a checkpoint may have moved."""
        if shards is None:
            return 0
        epoch, samples = shards.position
        return epoch * self._epoch_steps(shards) + samples // shards.global_batch * self.pushes_per_batch

    def _move(self, shards: Shards | None, steps: int) -> None:
        """Let checkpoints hold the position after ``steps``."""
        if shards is not None:
            epoch, left = divmod(steps, self._epoch_steps(shards))
            samples = left // self.pushes_per_batch * shards.global_batch
            shards.load_state_dict({**shards.state_dict(), "epoch": epoch, "samples": samples})

    def _refuse_trace(self) -> None:
        if self._trace is not None:
            raise UsageError("a trace is put together from all ranks, of which workers may die; parameter servers write none")

    def _begin_server(self) -> Server:
        self._refuse_trace()
        if not self.is_server:
            raise UsageError(f"rank {self.rank} is a worker; only ranks below {self.options.servers} serve")
        if self._server is not None:
            raise UsageError("the servers have ended; make a new Trainer and restore a checkpoint to go on")
        layout = ServerLayout(self.program.model, self.size)
        windows = self.comm.open_windows(layout.nbytes(self.rank))
        check = self.plans.check
        engine = self.backend if self.backend.memory.on_host else self.plans.on_host()
        self._server = Server(layout, windows, self.comm, self.state, engine, steps=self.steps_done, check=check)
        if self.rank > 0:
            self.state = self.plans.state = self._server.state
        self.comm.barrier()
        self.comm.introduce(f"server {self.rank}", spare=False)
        return self._server

    def _end(self, server: Server) -> None:
        if self.rank == 0:
            server.collect(self.state)
            server.stop()
        self._over = True

    # Workers ----------------------------------------------------------------------------------------------------------

    def step(self, feeds: Mapping[str, Array], *, offset: int | None = None) -> dict[str, float]:
        """One step of this worker: pull, compute, push.

        Returns:
            The loss (and metrics) over this worker's feeds; when synchronous, over those of all workers.

        Raises:
            FeedError: as for :meth:`Trainer.step`.
            NonFiniteError: on every rank, when one meets a NaN or an infinity.
            WorldError: a server is gone, or the workers behind do not come within the deadline.
        """
        worker = self._begin_worker()
        executor = self.plans.training.get(key_of_shapes(feeds)) or self._plan_worker(feeds, worker)
        arrays = self.plans.checked(executor, feeds)
        share = len(next(iter(arrays.values()))) if arrays else 0
        if not self._fresh:
            self._pull(worker)
        if SAMPLE_OFFSET in self.state.scalars:
            self.state.scalars.set(SAMPLE_OFFSET, worker.index * share if offset is None else offset)
        worker.begin(share)
        try:
            executor.run(arrays)
        except NonFiniteStepError:
            error = self._explain_push(executor, arrays)
            worker.fail(error)
            self._over = True
            raise (worker.failure() or error) from None
        worker.commit()
        self._fresh = False
        if self.options.staleness == 0:
            self._pull(worker)
            self.steps_done = self._first + worker.version
            return worker.results
        self.steps_done = self._first + worker.count
        return {name: float(array) for name, array in executor.outputs.items()}

    def finish(self) -> None:
        """Take part no longer; returns when all live workers have finished, with the final parameters."""
        worker = self._begin_worker()
        try:
            worker.finish()
            self.state.receive()
        finally:
            self._over = True

    def _work(self, shards: Shards, epochs: int) -> None:
        """Train on shares until there are none left."""
        worker, behind = self._begin_worker(), self._behind(shards)
        synchronous, end = self.options.staleness == 0, shards.position[0] + epochs
        while True:
            if synchronous:
                if not self._fresh:
                    self._pull(worker)
                live = worker.live
                number, place, size = behind + worker.version, live.index(worker.index), len(live)
            else:
                size = self.workers
                number, place = divmod(behind + worker.claim(), size)
            epoch, index = divmod(number, len(shards))
            if epoch >= end:
                return
            batch = shards.part(epoch, index, place, size)
            self.step(batch.feeds, offset=batch.offset)

    def _pull(self, worker: ParameterWorker) -> None:
        try:
            worker.pull()
        except NonFiniteError:
            self._over = True
            raise
        self.state.receive()
        self._fresh = True

    def _begin_worker(self) -> ParameterWorker:
        self._refuse_trace()
        if self.is_server:
            raise UsageError(f"rank {self.rank} is a parameter server: it calls trainer.serve() (or fit), and makes no steps")
        if self._over:
            raise UsageError("this worker has finished; make a new Trainer and restore a checkpoint to go on")
        if self._worker is None:
            layout = ServerLayout(self.program.model, self.size)
            windows = self.comm.open_windows(0)
            check = self.plans.check and not self._skips()
            self._worker = ParameterWorker(layout, windows, self.comm, self.backend, check=check)
            self._part, self._first = worker_part(self.program.model), self.steps_done
            own = State(self._part, memory=self.backend.memory)
            own.load({name: self.state.fetch(name) for name in own.arrays})
            own.adopt(self._worker.arrays)
            for name, array in self.state.arrays.items():
                if name in self.program.inference.graph.initializers:
                    own.arrays.setdefault(name, array)
            self.state = self.plans.state = own
            self.comm.barrier()
            self.comm.introduce(f"worker {self._worker.index}", spare=True)
        return self._worker

    def _skips(self) -> bool:
        """Whether the servers skip steps that are not finite, so that no worker may stop the run for one."""
        return not {LOSS_SCALE, SKIPPED}.isdisjoint(self.program.model.graph.initializers)

    def _plan_worker(self, feeds: Mapping[str, Array], worker: ParameterWorker) -> Executor:
        shapes = check_feed_names(feeds, self._part.graph)
        for name, shape in shapes.items():
            if shape[:1] == (0,):
                raise FeedError(f"feed {name!r} has no samples; a push needs at least one")
        plan = plan_part(self._part, shapes, worker.backend)
        executor = Executor(plan, self.state, worker.backend, check=False, wrap=self._hook())
        self.plans.training[key_of_shapes(feeds)] = executor
        return executor

    def _explain_push(self, executor: Executor, feeds: Mapping[str, Array]) -> NonFiniteError:
        tensor = first_nonfinite(self._part, executor, feeds, self.state, self.backend)
        assert self._worker is not None
        name = f"worker {self._worker.index} (rank {self.rank})"
        return nonfinite_error(self.steps_done, tensor, name, f"in the gradients of {name}")

    # State ------------------------------------------------------------------------------------------------------------

    def _check_shards(self, shards: Shards) -> None:
        if shards.size != self.workers:
            raise UsageError(
                f"the data is cut for {shards.size} workers, there are {self.workers} beside the servers;"
                " give shard(…, rank=0, size=trainer.workers): each takes the next share that nobody has taken"
            )
        if shards.tail == "weight-zero":
            raise UsageError("a push needs a sample: with parameter servers tail is keep, drop or pad")

    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Loss and metrics in inference mode over ``batches``, with the parameters that this rank holds.

        While workers train, these are current on rank 0 in callbacks; after :meth:`fit`, on rank 0 and on workers.

        Raises:
            UsageError: shards of which other ranks would have to take their part.
        """
        if isinstance(batches, Shards) and batches.size != 1:
            raise UsageError("with parameter servers a rank evaluates alone; give shard(…, rank=0, size=1)")
        return super().evaluate(batches)

    def _sum_over_workers(self, total: Array) -> None:
        """No collective may wait for a worker that is gone."""

    @property
    def _begun(self) -> bool:
        return self._server is not None or self._worker is not None

    def state_sha256(self) -> str:
        """SHA-256 over the servers' parameters and optimizer state; the same on every rank after :meth:`fit`.

        Raises:
            UsageError: in the middle of training, on another rank than 0.
        """
        if not self._begun:
            return super().state_sha256()
        member = self._server or self._worker
        if self._over and self.rank > 0 and member is not None:
            return member.digest
        if self.rank > 0:
            raise UsageError("while workers train, only rank 0 can collect the state; ask after fit")
        return checkpoint.state_sha256(self._collected().snapshot())

    def _collected(self) -> State:
        """On rank 0: the state of all servers."""
        if self._server is not None and not self._over:
            self._server.collect(self.state)
        return self.state

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint on rank 0; other ranks return at once while workers train, else when it is there."""
        if not self._begun:
            super().save(folder)
            return
        if self.rank == 0:
            meta = {"graphc": graphc.__version__, "steps": self.steps_done, "pipeline": self.program.pipeline}
            if self._shards is not None:
                meta["data"] = self._shards.state_dict()
            checkpoint.save(folder, self._collected().snapshot(), meta)
        self._meet()

    def restore(self, folder: str | Path) -> None:
        """Read a checkpoint on rank 0 and give it to every rank, before the first step.

        Raises:
            UsageError: training has begun.
        """
        if self._begun:
            raise UsageError("the servers hold the state already; restore before the first step")
        super().restore(folder)

    def export(self, path: str | Path) -> None:
        """Write the user's own model with trained values on rank 0; all ranks return when it is there."""
        if not self._begun:
            super().export(path)
            return
        if self.rank == 0:
            self._collected()
            frontends.save(frontends.write_back(self.program.original, self.trained_values()), path)
        self._meet()

    def _meet(self) -> None:
        """After training: wait until rank 0 has written what it writes."""
        member = self._server or self._worker
        if self._over and member is not None:
            self._written += 1
            member.exported(self._written)
