"""What a trainer leaves to its strategy: steps, epochs, and where the state is."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

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


class Strategy(abc.ABC):
    """How the ranks of a world divide the training among them; :class:`~graphc.training.trainer.Trainer` owns one.

    The methods that are not abstract are those of ranks that all hold the same state and call the same methods.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @staticmethod
    @abc.abstractmethod
    def check_world(program: Program, size: int) -> None:
        """Refuse a world of ``size`` ranks that does not fit the program's mesh.

        Raises:
            WorldError, UsageError: too many ranks, or too few.
        """

    @abc.abstractmethod
    def check_shards(self, shards: Shards) -> None:
        """Refuse shards that are not this rank's.

        Raises:
            UsageError: they are cut for another rank or another number of them.
        """

    @abc.abstractmethod
    def step(self, feeds: Mapping[str, Array], offset: int | None) -> dict[str, float]:
        """See :meth:`Trainer.step`."""

    @abc.abstractmethod
    def fit(self, batches: Batches, epochs: int, progress: EpochProgress) -> None:
        """See :meth:`Trainer.fit`; ``progress`` then holds the means of the last epoch."""

    def serve(self, batches: object, progress: EpochProgress) -> None:
        """See :meth:`Trainer.serve`."""
        raise UsageError("this program has no parameter servers: every rank trains; call fit or step")

    def finish(self) -> dict[str, float]:
        """See :meth:`Trainer.finish`."""
        return {}

    @property
    def steps_per_batch(self) -> int:
        """See :attr:`Trainer.steps_per_batch`."""
        return 1

    @property
    def lost(self) -> dict[int, int]:
        """See :attr:`Trainer.lost`."""
        return {}

    def set_learning_rate(self, value: float) -> None:
        """Let the next step have this learning rate."""
        self.trainer.state.scalars.set(LEARNING_RATE, value)

    @abc.abstractmethod
    def check_evaluation(self, batches: Batches) -> None:
        """Refuse batches that this rank cannot evaluate."""

    def sum_evaluation(self, totals: Array) -> None:
        """Sum the totals of an evaluation over the ranks that take part in it, in place."""
        if self.trainer.size > 1:
            self.trainer.comm.allreduce(totals, "sum")

    @abc.abstractmethod
    def check_restore(self) -> None:
        """Refuse to replace the state where it is too late for that."""

    @abc.abstractmethod
    def collect(self) -> None:
        """Bring the state of rank 0 up to date."""

    def wait_for_file(self) -> None:
        """Return when rank 0 has written its file."""
        self.trainer.comm.barrier()

    def state_sha256(self) -> str:
        """See :meth:`Trainer.state_sha256`."""
        comm = self.trainer.comm
        digest = checkpoint.state_sha256(self.trainer.state.snapshot(comm))
        everyone = comm.allgather_object(digest)
        if len(set(everyone)) > 1:
            raise WorldError(f"the replicas have drifted apart: state hashes by rank are {[d[:12] for d in everyone]}")
        return digest
