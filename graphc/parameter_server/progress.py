"""How far the training of parameter servers has come, told to callbacks on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphc.parameter_server.server import Server

Callback = Callable[[dict[str, Any]], None]


class EpochProgress:
    """Means of an epoch, and the calls of callbacks, on rank 0.

    Args:
        length: steps of an epoch; 0 where it is not known.
        behind: steps of the data that lie behind the first one here.
    """

    def __init__(self, callbacks: Sequence[Callback], log_every: int, length: int, behind: int) -> None:
        self.means: dict[str, float] = {}
        self.position = behind
        self._callbacks, self._every, self._length = callbacks, log_every, length
        self._sums: dict[str, float] = {}
        self._count = 0
        self._told: set[int] = set()

    def step(self, server: Server) -> bool:
        """Note a step; whether an epoch ends with it."""
        self.position += 1
        results = server.results
        for name, value in results.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * server.samples
        self._count += server.samples
        for worker, step in server.lost.items():
            if worker not in self._told:
                self._told.add(worker)
                self._call({"event": "lost", "worker": worker, "step": step})
        if self._every and server.steps % self._every == 0:
            self._call({"event": "step", "step": server.steps, **results})
        return bool(self._length) and self.position % self._length == 0

    def epoch(self) -> None:
        """Report the epoch that ends here."""
        self.means = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        number = -(-self.position // self._length) if self._length else 1
        self._call({"event": "epoch", "epoch": number, **self.means})

    def close(self) -> None:
        """Report an epoch that lost workers have left short, or whose length is not known."""
        if self._count:
            self.epoch()

    def _call(self, event: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback(event)
