"""Keeps the last good state of a training run that diverges or breaks its weights.

A state is good at the end of an epoch whose last loss was not a thousand times that of the first steps. Of such a state

* ``--checkpoint`` moves to ``DIR.last-good`` before a state that is not good replaces it;
* ``-o OUT.onnx`` gets the weights at the end of the run all the same, and ``OUT.last-good.onnx`` the last good ones beside it.
  Weights with a NaN or infinity, or that give a loss of NaN, are not written: a file of that name stays as it is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from graphc import frontends
from graphc.cli.terminal import output
from graphc.device import Array
from graphc.errors import GraphcError, NonFiniteError
from graphc.runtime import checkpoint

if TYPE_CHECKING:
    from graphc.cli.training.job import Job
    from graphc.data import Shards
    from graphc.training.trainer import Trainer


class LastGood:
    """The last good state of one run; every rank has one and calls its methods."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._job, self._trainer = job, trainer
        self._weights: dict[str, Array] = {}
        self._folder = job.checkpoint if job.checkpoint == job.resume else None  # of the last good checkpoint
        self._good = True
        self._copied = False  # whether rank 0 holds weights of a good epoch
        self._epoch = 0  # the last good one

    def end_epoch(self, epoch: int) -> None:
        """Save the checkpoint; keep a copy of the weights if there is none, and the last good checkpoint if this one is bad."""
        job, trainer = self._job, self._trainer
        good = not trainer.loss_watch.diverging
        if job.checkpoint is not None:
            if self._good and not good and self._folder is not None:
                self._folder = f"{job.checkpoint}.last-good"
                if trainer.rank == 0:
                    checkpoint.move(job.checkpoint, self._folder)
                    output.note(f"{self._folder} keeps the last checkpoint before the training diverged")
            trainer.save(job.checkpoint)
            if good:
                self._folder = job.checkpoint
        elif good and job.output is not None and epoch < job.epochs:
            values = trainer.trained_values()
            self._copied = True
            if trainer.rank == 0:
                self._weights = {name: array.copy() for name, array in values.items()}
        self._good = good
        self._epoch = epoch if good else self._epoch

    def export(self, batches: Shards) -> None:
        """Write the trained model to ``-o``.

        Args:
            batches: data for one evaluation, which shows what the last update did.

        Raises:
            NonFiniteError: the weights or the loss they give are NaN or infinite; the file is not written.
        """
        job, trainer = self._job, self._trainer
        if job.output is None:
            return
        self._check_loss(batches)
        trainer.export(job.output)
        if trainer.loss_watch.diverging:
            kept = self.write()
            output.note(f"the training diverged, and {job.output} holds its last weights; {kept}")

    def after_failure(self, error: NonFiniteError) -> NonFiniteError:
        """The error of a run, with what was kept of it."""
        job, trainer = self._job, self._trainer
        if job.output is None:
            return error
        if trainer.loss_watch.diverging:
            kept = self.write()
        else:
            try:
                trainer.export(self._place())
                kept = f"{self._place()} holds the last good state"
            except NonFiniteError:
                kept = self.write()
        untouched = "" if f"{job.output} was not written" in str(error) else f"{job.output} was not written, "
        return NonFiniteError(f"{error}; {untouched}{kept}", step=error.step, tensor=error.tensor)

    def write(self) -> str:
        """Write the last good weights beside ``-o`` on rank 0; says where they are."""
        job, trainer = self._job, self._trainer
        if trainer.servers and trainer.rank > 0:  # epochs end on rank 0 alone
            return f"if an epoch ended well, {self._place()} holds its weights"
        if self._folder is None and not self._copied:
            return f"no epoch ended well, so that the last good weights are those of {job.resume or job.model}"
        if trainer.rank == 0:
            values = self._weights
            if self._folder is not None:
                names = trainer.program.inference.graph.initializers
                arrays, _ = checkpoint.load(self._folder)
                values = {name: array for name, array in arrays.items() if name in names and array.dtype.kind not in "iub"}
                values = {name: array for name, array in values.items() if not name.startswith("graphc.")}
            frontends.save(trainer.program.trained(values), self._place())
        after = f" after epoch {self._epoch}" if self._epoch else ""
        return f"{self._place()} holds the last good ones{after}"

    def _place(self) -> Path:
        target = Path(self._job.output or "")
        return target.with_name(f"{target.stem}.last-good{target.suffix or '.onnx'}")

    def _check_loss(self, batches: Shards) -> None:
        """Compute the loss once more: no step has seen what the last update did."""
        trainer = self._trainer
        if trainer.servers:
            return  # a worker has no current weights before it exports
        try:
            first = next(iter(batches.epoch(0)))
            loss = trainer.evaluate([first]).get("loss", 0.0)
        except GraphcError:
            return  # a batch that evaluation cannot take shows nothing about the weights
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the trained model gives a loss of {loss} on a batch of the data: the last update, at a learning rate of"
                f" {trainer.learning_rate:g}, was too large; a smaller rate or gradient clipping may help",
                step=trainer.steps_done,
                tensor="loss",
            )
