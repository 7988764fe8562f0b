"""Interface of training strategies: steps, epochs and ownership of the state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from graphc.compiler import Program
from graphc.data import Batch, Shards
from graphc.device import Array
from graphc.errors import UsageError, WorldError
from graphc.ir.names import LEARNING_RATE
from graphc.runtime import checkpoint
from graphc.training.progress import EpochProgress

if TYPE_CHECKING:
    from graphc.training.trainer import Trainer

Batches: TypeAlias = "Shards | Iterable[Mapping[str, Array] | Batch]"


class Strategy:
    """Divides training among the ranks of a world; :class:`~graphc.training.trainer.Trainer` owns one.

    The defaults fit ranks that all hold the state and call the same methods.

    Attributes:
        steps_per_batch: steps per global batch.
    """

    steps_per_batch = 1

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Trainer = weakref.proxy(trainer)  # no circle: its memory goes with the trainer

    @staticmethod
    def check_world(program: Program, size: int) -> None:
        """Raise WorldError (UsageError for too few ranks) if a world of ``size`` ranks does not fit the program."""

    def check_shards(self, shards: Shards) -> None:
        """Raise UsageError for shards cut for another rank or another number of ranks."""

    def step(self, feeds: Mapping[str, Array], offset: int | None) -> dict[str, Any]:
        """See :meth:`Trainer.step`."""
        raise NotImplementedError

    def fit(self, batches: Batches, epochs: int, progress: EpochProgress) -> None:
        """See :meth:`Trainer.fit`; afterwards ``progress`` holds the last epoch's means."""
        raise NotImplementedError

    def serve(self, batches: object, progress: EpochProgress) -> None:
        """See :meth:`Trainer.serve`."""
        raise UsageError("this program has no parameter servers: every rank trains; call fit or step")

    def finish(self) -> dict[str, float]:
        """See :meth:`Trainer.finish`."""
        return {}

    def snapshot(self) -> dict[str, Array]:
        """All state of a checkpoint on rank 0; empty on ranks that take no part in it."""
        state, comm = self.trainer.state, self.trainer.comm
        own = state.shards or state.parts.cuts or state.local or state.apart()
        return state.snapshot(comm) if self.trainer.rank == 0 or own else {}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """On rank 0: take the state of a checkpoint; UsageError if it is of another program."""
        state = self.trainer.state
        checkpoint.check_state_names(arrays, needed=state.updated, known=state.names)
        state.load(arrays)

    def spread(self, values: Mapping[str, Array] | None) -> None:
        """Give every rank the state of rank 0; ``values``: of sharded state on rank 0, whole."""
        if self.trainer.size > 1:
            self.trainer.state.broadcast(self.trainer.comm, values)

    def values(self, names: Sequence[str]) -> dict[str, Array]:
        """Those of the parameters and statistics that exist, in the host's memory; every rank calls it."""
        state = self.trainer.state
        known = state.arrays.keys() | state.gather(self.trainer.comm, names).keys()
        return {name: state.fetch(name) for name in names if name in known}

    def evaluate_batch(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Outputs of the evaluation graph that this rank has."""
        plans = self.trainer.plans
        executor = plans.for_evaluation(feeds)
        executor.run(plans.checked(executor, feeds))
        return executor.outputs

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next step."""
        self.trainer.state.scalars.set(LEARNING_RATE, value)

    def check_restore(self) -> None:
        """Raise UsageError if the state can no longer be replaced."""

    def collect(self) -> None:
        """Bring the state of rank 0 up to date."""

    def wait_for_file(self) -> None:
        """Wait until rank 0 has written its file."""
        self.trainer.comm.barrier()

    def state_sha256(self) -> str:
        """See :meth:`Trainer.state_sha256`."""
        comm = self.trainer.comm
        digest = checkpoint.state_sha256(self.trainer.state.snapshot(comm))
        everyone = comm.allgather_object(digest)
        if len(set(everyone)) > 1:
            raise WorldError(f"the replicas have drifted apart: state hashes by rank are {[d[:12] for d in everyone]}")
        return digest
