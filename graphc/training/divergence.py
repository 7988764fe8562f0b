"""Notices training that diverges before a NaN or an infinity stops it."""

from __future__ import annotations

import math
import statistics
import warnings

FACTOR = 1000.0
"""Growth of the loss, against the first steps, from which on training diverges."""

EARLY = 10
"""Number of first steps whose losses give the level."""


class DivergenceWarning(UserWarning):
    """The loss has grown a thousandfold over its first steps."""


class LossWatch:
    """Compares the loss of every step with the losses of the first ones.

    Attributes:
        diverging: whether the last finite loss was :data:`FACTOR` times the level.
        level: the median size of the first losses; 0 before the first.
    """

    def __init__(self) -> None:
        self.diverging = False
        self.level = 0.0
        self._first: list[float] = []
        self._told = False

    def see(self, loss: float) -> bool:
        """Count the loss of a step; True when the run is found to diverge for the first time.

        A step that is not finite has changed nothing, so it does not count.
        """
        if not math.isfinite(loss):
            return False
        self.diverging = 0.0 < self.level * FACTOR < loss
        if len(self._first) < EARLY and not self.diverging:
            self._first.append(abs(loss))
            self.level = statistics.median_low(self._first)
        new = self.diverging and not self._told
        self._told |= new
        return new

    def warn(self, step: int, loss: float, rate: float) -> None:
        """Warn of a loss that :meth:`see` found."""
        warnings.warn(
            f"training diverges: in step {step} the loss is {loss:.4g}, more than {FACTOR:g} times that of the first steps,"
            f" {self.level:.4g}, at a learning rate of {rate:g}; a smaller one or gradient clipping (clip_norm) may help",
            DivergenceWarning,
            stacklevel=4,
        )
