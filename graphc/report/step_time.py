"""Predicts step times for machines that are not available.

A prediction sums, over the calls of a plan, the time of their bytes and operations. It is a range, as its constants are known
only so well. It shows repeated or slow work in a plan; it does not replace a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphc.registry import Registry

if TYPE_CHECKING:
    from graphc.backend import Backend
    from graphc.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class Cost:
    """One call of a plan.

    Attributes:
        centre: cost centre, the kind of work, for the sums.
        name: name of the call.
        seconds: predicted time, in the middle of its range.
        nbytes: bytes moved to and from memory.
        flops: operations of matrix products, convolutions and attention.
        note: why it takes longer than its bytes and operations alone.
        margin: half the width of the range.
    """

    centre: str
    name: str
    seconds: float
    nbytes: int = 0
    flops: int = 0
    note: str = ""
    margin: float = 0.0

    @property
    def low(self) -> float:
        """Least predicted time."""
        return self.seconds - self.margin

    @property
    def high(self) -> float:
        """Most predicted time."""
        return self.seconds + self.margin


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of one training step.

    Attributes:
        machine: machine whose rates were used.
        costs: the calls of the plan in order.
        scratch: bytes of the largest segment's intermediate values.
    """

    machine: str
    costs: Sequence[Cost]
    scratch: int

    @property
    def seconds(self) -> float:
        """Time in the middle of the range."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def low(self) -> float:
        """Time if every call takes the least."""
        return sum(cost.low for cost in self.costs)

    @property
    def high(self) -> float:
        """Time if every call takes the most."""
        return sum(cost.high for cost in self.costs)

    def centres(self) -> list[Cost]:
        """Sum by cost centre, the most expensive first; ``name`` holds the number of calls."""
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
                margin=sum(c.margin for c in costs),
            )
            for centre, costs in found.items()
        ]
        return sorted(sums, key=lambda cost: -cost.seconds)


@dataclass(frozen=True, slots=True)
class Timed:
    """One call of a plan.

    Attributes:
        cost: predicted cost.
        seconds: measured time.
    """

    cost: Cost
    seconds: float


Predict = Callable[..., Prediction]

PREDICTIONS: Registry[Predict] = Registry("prediction", "graphc.predictions")
"""Backend → function (training graph, shapes of the feeds, name of a GPU if not the default) → predicted time of a step."""

Timer = Callable[["Backend", "Executor", Callable[[], Any]], list[Timed]]

TIMERS: Registry[Timer] = Registry("timer", "graphc.timers", apart=True)
"""Backend → function (backend, executor, run one step and wait) → measured calls of the step; empty if unsupported."""
