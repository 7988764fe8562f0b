"""Epoch means, and the events that callbacks receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Callback = Callable[[dict[str, Any]], None]


class Log:
    """A callback of :meth:`graphc.Trainer.fit` that reads its events and asks nothing of the trainer.

    On a GPU the next step is queued before ``step`` events reach it, so that the GPU does not wait; any other callback finds
    the trainer in the state after the step of its event.

    Args:
        callback: called with every event.
    """

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def __call__(self, event: dict[str, Any]) -> None:
        self._callback(event)


class EpochProgress:
    """Sums up the steps of an epoch and calls the callbacks; the events are those of :meth:`graphc.Trainer.fit`.

    Args:
        log_every: steps between two ``step`` events; 0: no such events.

    Attributes:
        means: sample-weighted means of the last finished epoch.
        steps: steps of the current epoch, skipped ones included.
    """

    def __init__(self, callbacks: Sequence[Callback], log_every: int) -> None:
        self.means: dict[str, float] = {}
        self.steps = 0
        self.callbacks, self._log_every = callbacks, log_every
        self._sums: dict[str, float] = {}
        self._samples = 0

    @property
    def stops(self) -> int:
        """Steps between two after which a callback may look at the trainer; 0: none does."""
        return self._log_every if any(not isinstance(callback, Log) for callback in self.callbacks) else 0

    def step(self, number: int, metrics: Mapping[str, float], samples: int) -> None:
        """Count step ``number`` over ``samples`` samples."""
        self.steps += 1
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * samples
        self._samples += samples
        if self._log_every and number % self._log_every == 0:
            self.call({"event": "step", "step": number, **metrics})

    def skip(self, number: int, skipped: int) -> None:
        """Report that step ``number`` was skipped; ``skipped`` counts all skipped steps so far."""
        self.steps += 1
        self.call({"event": "skipped", "step": number, "skipped": skipped})

    def end_epoch(self, number: int) -> None:
        """Report epoch ``number``, counted from 1, and begin the next."""
        self.means = {name: total / max(self._samples, 1) for name, total in self._sums.items()}
        self._sums, self._samples, self.steps = {}, 0, 0
        self.call({"event": "epoch", "epoch": number, **self.means})

    def call(self, event: dict[str, Any]) -> None:
        """Call every callback with ``event``."""
        for callback in self.callbacks:
            callback(event)
