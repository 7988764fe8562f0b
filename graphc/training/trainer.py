"""The trainer: joins the world, places the state, runs steps."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import graphc
from graphc.backend import make_backend
from graphc.compiler import Program, collection_paused
from graphc.data import Shards
from graphc.device import Array
from graphc.distributed.choose import open_communicator
from graphc.distributed.communicator import Communicator
from graphc.distributed.cores import cores_of
from graphc.distributed.groups import Groups, workers_of_a_machine
from graphc.distributed.health.deadline import check_deadline
from graphc.distributed.nccl.device_transport import for_memory
from graphc.distributed.world import find_world
from graphc.errors import GraphcError, UsageError, describe_error, leaves_well
from graphc.ir.names import DETERMINISTIC, LEARNING_RATE, SEED, SKIPPED, kept_outputs
from graphc.ir.ops.accumulation import sums_by_tree
from graphc.ir.ops.collectives import collective_groups
from graphc.ir.ops.parameter_server import server_options
from graphc.mesh import REPLICAS, Mesh
from graphc.optim import checked_rate
from graphc.parallel import workers_per_node
from graphc.plan.state_rewrites import adapted
from graphc.report.trace import Summary, Trace
from graphc.runtime import checkpoint
from graphc.runtime.state import State
from graphc.training import export
from graphc.training.divergence import LossWatch
from graphc.training.evaluation import evaluate
from graphc.training.microbatch import micro_batches
from graphc.training.outputs import KeptOutputs
from graphc.training.pipe import Pipeline, StagePlans
from graphc.training.plan_cache import PlanCache, Wrap
from graphc.training.program_check import check_programs
from graphc.training.progress import Callback, EpochProgress
from graphc.training.replica import Replica
from graphc.training.strategy import Batches, Strategy

if TYPE_CHECKING:
    import torch


class Trainer:
    """Runs a :class:`~graphc.compiler.Program` on this worker.

    Args:
        program: the result of ``graphc.compile``.
        comm: the communicator of this worker; None finds the world (see :func:`graphc.distributed.world.find_world`).
        threads: threads of this worker; None takes its share of the cores.
        seed: seed of random ops (Dropout); None keeps the program's.
        check_finite: test loss and gradients before each update, so that a bad step changes nothing.
        schedule: finished steps → learning rate of the next step, such as :class:`graphc.optim.Schedule`.
        wrap: hook around every plan step, for measuring.
        trace: file for a timeline of the first training steps of all workers, written at the end of the ``with`` block; see
            :class:`~graphc.report.trace.Trace`. Not with parameter servers.
        deadline: seconds in which all workers must have joined, and after which an unfinished collective ends the run;
            None: GRAPHC_DEADLINE, or 300.
        transport: one of :data:`graphc.distributed.world.TRANSPORTS`; None: GRAPHC_TRANSPORT, or the best that fits.

    Attributes:
        rank, size: this worker's rank, and the number of ranks.
        cores: the cores that it computes on: those of its process, shared with the workers beside it that may use them.
        groups: the communicators of the mesh.
        data_rank, data_size: which share of a batch is this worker's, and the number of shares: the place among the mesh's
            replicas, and their number.
        servers: number of parameter servers, ranks 0 … servers - 1; 0 if every rank is a replica.
        steps_done: finished steps of the training. With parameter servers: on a server the steps applied to the state,
            which are pushes, or rounds of all workers when synchronous; on an asynchronous worker its own steps.
        lost: on parameter server 0: worker → last step before it was lost.
        loss_watch: compares the loss with that of the first steps.

    Raises:
        WorldError: mesh and world disagree, or the workers' programs do.
    """

    def __init__(
        self,
        program: Program,
        *,
        comm: Communicator | None = None,
        threads: int | None = None,
        seed: int | None = None,
        check_finite: bool = True,
        schedule: Callable[[int], float] | None = None,
        wrap: Wrap | None = None,
        trace: str | Path | Trace | None = None,
        deadline: float | None = None,
        transport: str | None = None,
    ) -> None:
        if not isinstance(program, Program):
            raise UsageError(f"program={program!r} is not a compiled program; pass the result of graphc.compile")
        graph = program.model.graph
        world = find_world(transport=transport) if comm is None else None
        self.comm = open_communicator(world, deadline=deadline) if comm is None else comm
        if deadline is not None:
            self.comm.deadline = check_deadline(deadline)
        self.rank, self.size = self.comm.rank, self.comm.size
        options = server_options(graph)
        self.servers = options.servers if options is not None else 0
        mesh = program.mesh if program.mesh is not None and not self.servers else Mesh(data=self.size)
        strategy: type[Strategy] = Replica if mesh.pipe == 1 else Pipeline
        if self.servers:  # imported late: the package imports this module, and most programs do not need it
            strategy = importlib.import_module("graphc.parameter_server.strategy").ParameterServer
        try:
            strategy.check_world(program, self.size)
        except GraphcError:
            self.comm.close()
            raise
        self.cores = cores_of(self.comm)
        if threads is None:
            threads = len(self.cores)
        if sums_by_tree(graph):
            threads = 1  # the number of threads changes the order of summation
        same = DETERMINISTIC in program.model.metadata_props or sums_by_tree(graph)
        with collection_paused():  # modules and graphs that stay, which the collector would traverse
            self.backend = make_backend(program.backend, threads=threads, spin=self.size == 1, deterministic=same)
            self.backend.use_cores(self.cores)
            self.program = program = replace(program, model=adapted(program.model, self.backend))
        if self.rank == 0 and (program.arguments.precision or "").partition(":")[0] == "bf16" and self.backend.faster_bfloat16:
            warnings.warn(
                f"the {self.backend.name} backend emulates bfloat16 and takes longer than in float32; without precision='bf16',"
                f" backend={self.backend.faster_bfloat16!r} multiplies bfloat16 on this processor",
                stacklevel=2,
            )
        per_node = workers_per_node(program.arguments) if not self.servers and mesh.node == 1 else None
        if per_node is not None:
            mesh = mesh.split(workers_of_a_machine(self.comm) if isinstance(per_node, str) else per_node)
        self.comm = for_memory(self.comm, self.backend.memory, transport=transport)
        self.groups = Groups(self.comm, mesh)
        kept = ["pipe"] if mesh.pipe > 1 and kept_outputs(program.model) else []
        self.groups.open(collective_groups(program.model.graph) | {"data", REPLICAS, f"{REPLICAS}+pipe", *kept})
        self.data_rank, self.data_size = mesh.coordinate(REPLICAS, self.rank), mesh.replicas
        self.micro_batches = micro_batches(program.model.graph, self.data_size)
        self.outputs = KeptOutputs(program.model, self.micro_batches, self.backend.memory)
        batched = self.micro_batches.batched
        cache = PlanCache if mesh.pipe == 1 else StagePlans
        self.plans = cache(program, self.backend, self.groups, threads=threads, check=check_finite, batched=batched)
        self._wrap, self._schedule = wrap, schedule
        self.trace = Trace(trace) if isinstance(trace, str | Path) else trace
        self.plans.wrap = self._hook()
        self.steps_done = 0
        self.lost: dict[int, int] = {}
        self.loss_watch = LossWatch()
        self.last_checkpoint: tuple[Path, int] | None = None  # with the number of steps applied to it
        self._tracked: Shards | None = None
        self._restored_position: dict[str, Any] | None = None  # kept until the shards that it belongs to are known
        self._in_use = threading.Lock()
        self.strategy: Strategy = strategy(self)
        if seed is not None and SEED in self.state.scalars:
            self.state.scalars.set(SEED, seed)
        check_programs(self.comm, program, self.backend.name)
        self.strategy.spread(None)
        if self.trace is not None:
            self.trace.watch(self.comm)

    @property
    def state(self) -> State:
        """The parameters, optimizer state and counters that this rank holds."""
        return self.plans.state

    @property
    def workers(self) -> int:
        """Number of ranks that computed gradients at the start of the run."""
        return self.size - self.servers

    @property
    def is_server(self) -> bool:
        """Whether this rank is a parameter server."""
        return self.rank < self.servers

    # Training ---------------------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The learning rate; assign to it between steps. With parameter servers assign to it on rank 0."""
        return float(self.state.scalars.read(LEARNING_RATE))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.strategy.set_learning_rate(checked_rate(value))

    def follow_schedule(self, step: int | None = None) -> None:
        """Set the learning rate of ``step``, by default the next, from the schedule, if there is one."""
        if self._schedule is not None:
            self.learning_rate = self._schedule(self.steps_done if step is None else step)

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because of a NaN or an infinity (``nonfinite="skip"``)."""
        return int(self.state.scalars.read(SKIPPED)) if SKIPPED in self.state.scalars else 0

    def step(self, feeds: Mapping[str, Array], *, offset: int | None = None) -> dict[str, Any]:
        """Run one training step on this worker's share of the global batch.

        Args:
            feeds: one array per graph input, with zero samples if this worker's share is empty. A program that accumulates
                cuts them into micro-batches.
            offset: index of the share's first sample in the global batch, which random ops use; None: rank × share.

        Returns:
            The loss (and metrics) over the global batch, as floats; on an asynchronous worker over its own share. With
            ``keep_outputs`` of the loss also the model's outputs for this worker's samples, as arrays.

        Raises:
            FeedError: a feed with a wrong name, shape, dtype or label; the state is unchanged.
            NonFiniteError: a NaN or infinity; the state is that of the last good step. With ``nonfinite="skip"`` the step
                counts in :attr:`skipped_steps` instead.
            UsageError: a schedule without a learning rate, a call from a second thread, or this rank is a server.
            WorldError: a parameter server is lost, or slower workers miss the deadline.
        """
        with self._exclusive_use():
            metrics = self.strategy.step(feeds, offset)
        self.watch(metrics)
        return metrics

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Warn once if the loss of the step that just ended has grown a thousandfold over the first steps."""
        loss = metrics.get("loss", 0.0)
        if self.loss_watch.see(loss) and self.rank == 0:
            rate = self.learning_rate if self._schedule is None else self._schedule(self.steps_done - 1)
            self.loss_watch.warn(self.steps_done, loss, rate)

    def fit(
        self, batches: Batches, *, epochs: int = 1, callbacks: Sequence[Callback] = (), log_every: int = 0
    ) -> dict[str, float]:
        """Train for ``epochs`` passes over ``batches``; every rank calls it.

        Args:
            batches: :class:`~graphc.data.Shards` of this worker, which continue from their position (or from that of a restored
                checkpoint), or an iterable that is iterated once per epoch. If the workers' iterables differ in length,
                workers that have run out take part without samples.
                With parameter servers ``shard(…, rank=0, size=trainer.workers)``, the same on all ranks: each worker takes
                the next free share, so the live workers also train on the shares of a lost one; or an iterable per worker.
            epochs: passes over the data; the rest of a started epoch counts as one.
            callbacks: called with event dictionaries: ``{"event": "step", …}`` every ``log_every`` steps,
                ``{"event": "skipped", …}`` for a step that was skipped, and ``{"event": "epoch", "epoch": e, "loss": …}``
                with sample-weighted means at the end of each epoch. With parameter servers rank 0 alone calls them, also
                with ``{"event": "lost", "worker": w, "step": s}``. A callback that only reads its events is best wrapped in
                :class:`graphc.training.progress.Log`: on a GPU no step waits for it.

        Returns:
            The last epoch's means, the same on every rank.

        Raises:
            UsageError: shards of another rank, or, with parameter servers, shares that may be empty: a push needs a sample.
            FeedError, NonFiniteError, WorldError: as for :meth:`step`.
        """
        progress = EpochProgress(callbacks, log_every)
        if isinstance(batches, Shards):
            self.attach(batches)
        self.strategy.fit(batches, epochs, progress)
        return progress.means

    def serve(self, batches: object = None, *, callbacks: Sequence[Callback] = (), log_every: int = 0) -> dict[str, float]:
        """On a parameter server: apply the workers' pushes until all live workers have finished.

        Args:
            batches: as for :meth:`fit`; gives the length of an epoch.
            callbacks, log_every: as for :meth:`fit`.

        Returns:
            The last epoch's means, the same on every rank.

        Raises:
            NonFiniteError: on every rank, when one meets a NaN or an infinity.
            UsageError: this rank is not a parameter server.
            WorldError: all workers are lost.
        """
        progress = EpochProgress(callbacks, log_every)
        self.strategy.serve(batches, progress)
        return progress.means

    def finish(self) -> dict[str, float]:
        """On a worker of parameter servers: stop training, and wait until all live workers have finished.

        Returns:
            The last epoch's means, as the servers counted them; empty without parameter servers.
        """
        return self.strategy.finish()

    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Compute loss and metrics in inference mode over all workers' batches; each sample counts exactly once.

        With parameter servers every rank evaluates alone with its own parameters: rank 0 has current ones in callbacks,
        workers only after :meth:`fit`.

        Raises:
            FeedError: a wrong feed, or nothing to count: no samples, or only ignored labels.
            UsageError: with parameter servers, shards that are cut for more than one rank.
        """
        if self.servers and isinstance(batches, Shards) and batches.size != 1:
            raise UsageError("with parameter servers a rank evaluates alone; give shard(…, rank=0, size=1)")
        with self._exclusive_use():
            return evaluate(self, batches)

    # State ------------------------------------------------------------------------------------------------------------

    def state_sha256(self) -> str:
        """SHA-256 over parameters and optimizer state; checks that it is equal on every rank.

        Raises:
            UsageError: with parameter servers, on another rank than 0 while workers train.
            WorldError: the ranks' states differ.
        """
        return self.strategy.state_sha256()

    def attach(self, shards: Shards) -> None:
        """Save the position of ``shards`` in checkpoints; after a restore, move them to the restored position.

        :meth:`fit` does this itself; a custom loop calls it before its first batch.

        Raises:
            UsageError: shards of another worker, or a position in other data or in another order.
        """
        self.strategy.check_shards(shards)
        if self._restored_position is not None:
            shards.load_state_dict(self._restored_position)
        self._tracked, self._restored_position = shards, None

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: all state by name, independent of the number of workers.

        All ranks call this; rank 0 writes atomically. With parameter servers rank 0 may call it alone in a callback of fit.
        """
        self.strategy.collect()
        arrays = self.strategy.snapshot()
        if self.rank == 0:
            meta = {"graphc": graphc.__version__, "steps": self.steps_done, "pipeline": self.program.pipeline}
            if self._tracked is not None:
                meta["data"] = self._tracked.state_dict()
            export.check_finite(self, arrays, f"{folder} was not written")
            checkpoint.save(folder, arrays, meta)
        self.strategy.wait_for_file()
        self.last_checkpoint = Path(folder), self.steps_done

    def restore(self, folder: str | Path) -> None:
        """Read a checkpoint on rank 0 and broadcast it to every worker.

        Raises:
            CheckpointError: the file is missing or damaged.
            UsageError: the checkpoint is of another program (model, optimizer, trained parameters), or servers have started.
        """
        self.strategy.check_restore()
        arrays: dict[str, Array] = {}
        if self.rank == 0:
            arrays, meta = checkpoint.load(folder)
            self.strategy.load(arrays)
            self.steps_done, self._restored_position = int(meta.get("steps", 0)), meta.get("data")
        self.strategy.spread(arrays)
        place = self.steps_done, self._restored_position
        self.steps_done, self._restored_position = self.comm.allgather_object(place)[0]
        self.last_checkpoint = Path(folder), self.steps_done
        if self._tracked is not None:
            self.attach(self._tracked)

    def trained_values(self) -> dict[str, Array]:
        """Return the model's current initializers under the file's names; if any are sharded, every rank calls it."""
        return export.trained_values(self)

    def export(self, path: str | Path) -> None:
        """Write the user's model with trained values, original names and in inference mode; rank 0 writes atomically.

        If a pass changed what the model computes, that is the legalised model with the change.

        Raises:
            NonFiniteError: training has made weights NaN or infinite; a file at ``path`` stays as it is.
        """
        export.export(self, path)

    def load_into(self, module: torch.nn.Module) -> None:
        """Give the PyTorch module that was compiled its trained parameters and buffers, in place; all ranks call it.

        Parameters that ``forward`` does not read, and counters of batches, keep what they have. With parameter servers only
        rank 0 is sure to have the last values.

        Raises:
            NonFiniteError: training has made weights NaN or infinite; the module stays as it is.
            ModelError: the module lacks a parameter that was trained, or has it in another shape.
        """
        export.load_into(self, module)

    def write_trace(self) -> Summary | None:
        """Write the trace on rank 0 and return how much communication was hidden; None without a trace.

        Every worker calls it at the same point; leaving the ``with`` block calls it if it has not been called.
        """
        trace, self.trace = self.trace, None
        self.plans.wrap = self._hook()
        return trace.write(self.comm) if trace is not None else None

    def close(self) -> None:
        """Leave the world and release threads."""
        self.comm.close()
        self.backend.close()
        self.plans.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.write_trace()
        elif not leaves_well(error):
            self.comm.abort(describe_error(error)[0])
        self.close()

    # Inner workings ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive_use(self) -> Iterator[None]:
        """Refuse a second thread: two runs would overwrite each other's buffers in the plan."""
        if not self._in_use.acquire(blocking=False):
            raise UsageError("another thread is using this trainer; give each thread its own")
        try:
            yield
        finally:
            self._in_use.release()

    def _hook(self) -> Wrap | None:
        """Combine the hooks around every plan step: the caller's hook inside the trace's."""
        trace, wrap = self.trace, self._wrap
        if trace is None or wrap is None:
            return trace.wrap if trace is not None else wrap
        return lambda kind, name, run: trace.wrap(kind, name, wrap(kind, name, run))


Trainer.__signature__ = inspect.signature(Trainer, eval_str=True)  # type: ignore[attr-defined]  # types, not their names
