"""Predicts the time of a step on a machine that is not at hand.

A prediction is a sum over the calls of a plan of what their bytes and operations take at rates that were measured once. It
finds what a plan does twice or not at all well; it is no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphc.registry import Registry

if TYPE_CHECKING:
    from graphc.backend import Backend
    from graphc.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class Cost:
    """One call of a plan.

    Attributes:
        centre: what kind of work it is, for the sums.
        name: what it is called.
        seconds: what it takes.
        nbytes: moved to and from memory.
        flops: of matrix products, convolutions and attention.
        note: why it takes more than its bytes and operations.
    """

    centre: str
    name: str
    seconds: float
    nbytes: int = 0
    flops: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one training step takes.

    Attributes:
        machine: whose rates were taken.
        costs: the calls of the plan in order.
        scratch: bytes of the largest segment's intermediate values.
    """

    machine: str
    costs: Sequence[Cost]
    scratch: int

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)

    def centres(self) -> list[Cost]:
        """Sums by cost centre, the most expensive first; ``name`` is the number of calls."""
        found: dict[str, list[Cost]] = {}
        for cost in self.costs:
            found.setdefault(cost.centre, []).append(cost)
        sums = [
            Cost(
                centre,
                str(len(costs)),
                sum(c.seconds for c in costs),
                sum(c.nbytes for c in costs),
                sum(c.flops for c in costs),
            )
            for centre, costs in found.items()
        ]
        return sorted(sums, key=lambda cost: -cost.seconds)


@dataclass(frozen=True, slots=True)
class Timed:
    """One call of a plan.

    Attributes:
        cost: what it should take.
        seconds: what it took.
    """

    cost: Cost
    seconds: float


Predict = Callable[[ir.Model, Mapping[str, Sequence[int]]], Prediction]

PREDICTIONS: Registry[Predict] = Registry("prediction", "graphc.predictions")
"""Backend → prediction of a training graph as a pipeline leaves it, for feeds of these shapes."""

Timer = Callable[["Backend", "Executor", Callable[[], Any]], list[Timed]]

TIMERS: Registry[Timer] = Registry("timer", "graphc.timers", apart=True)
"""Backend → (itself, executor, what runs a step and waits) → the calls of the step, each measured; none where it cannot."""
